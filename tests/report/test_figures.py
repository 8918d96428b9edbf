"""Pictures for papers: real files of each kind, drawn from the same charts as the page."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedbe.report import build_sections, read_groups
from fedbe.report.chart import Chart, Panel, Point, Series, Table
from fedbe.report.drawings import DRAW
from fedbe.report.figures import draw, wrap, write_figures
from fedbe.report.split_chart import split_chart

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def charts(comparison: Path) -> dict[str, Chart]:
    (section,) = build_sections(read_groups([comparison]))
    return {c.id: c for c in section.charts}


def test_bubbles_of_many_classes_do_not_overlap(charts: dict[str, Chart]) -> None:
    names = tuple(map(str, range(100)))
    panel = Panel(rows=names, columns=names, counts=((1000,) * 100,) * 100)
    pixels = np.asarray(Image.open(io.BytesIO(draw(replace(charts["split"], panels=(panel,)), "png"))).convert("L"))
    inside = pixels[pixels.shape[0] // 3 : -pixels.shape[0] // 3, pixels.shape[1] // 3 : -pixels.shape[1] // 3]
    assert 0.2 < (inside > 200).mean() < 0.9  # bubbles, and paper between them


def test_areas_of_bubbles_are_proportional_to_counts() -> None:
    drawn = draw(split_chart(((400, 100),), ("a", "b"), "title"), "png")
    image = np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB")).astype(int)
    inked = np.abs(image - [0x3F, 0x54, 0x68]).sum(2) < 20
    columns = inked.any(0).nonzero()[0]
    blobs = np.split(columns, (np.diff(columns) > 1).nonzero()[0] + 1)
    first, second = (area for blob in blobs if (area := inked[:, blob].sum()) > 50)  # less is the edge of a letter
    assert first / second == pytest.approx(4, rel=0.1)


def test_a_class_name_may_look_like_a_formula() -> None:
    """The first would lose its signs, and the second would raise an error."""
    prices = draw(split_chart(((4, 3, 2),), ("$0-$50", "$100^$200", "cat"), "from $1 to $2"), "svg").decode()
    assert all(f">{text}<" in prices for text in ("$0-$50", "$100^$200", "from $1 to $2"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_every_chart_becomes_a_file(comparison: Path, tmp_path: Path, kind: str) -> None:
    sections = build_sections(read_groups([comparison]))
    paths = write_figures(sections, tmp_path / "deep" / "er", kind)
    assert {p.stem for p in paths} == {c.id for c in sections[0].charts}
    assert all(p.read_bytes().startswith(STARTS[kind]) for p in paths)


def test_a_vector_picture_contains_its_text_and_is_reproducible(charts: dict[str, Chart]) -> None:
    drawn = draw(charts["accuracy"], "svg")
    text = drawn.decode()
    assert all(word in text for word in ("After", "FedBE", "FedAvg", "n = 2 seeds (0, 1)"))
    assert draw(charts["accuracy"], "svg") == drawn
    assert draw(charts["accuracy"], "pdf") == draw(charts["accuracy"], "pdf")


def test_a_picture_is_not_blank(charts: dict[str, Chart]) -> None:
    image = Image.open(io.BytesIO(draw(charts["accuracy"], "png"))).convert("RGB")
    blue = sum(count for count, pixel in image.getcolors(1 << 20) or () if pixel == (0x0B, 0x4F, 0x9C))
    assert blue > 500


def test_a_bar_is_in_the_row_of_its_method(charts: dict[str, Chart]) -> None:
    """FedAvg has no student: FedBE's bar must stay in FedBE's row."""
    chart = charts["seconds"]
    panel = next(p for p in chart.panels if p.title == "distillation")
    axes = Figure().add_subplot()
    DRAW["bars"](chart, panel, axes)
    (bar,) = axes.patches
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[round(bar.get_y() + bar.get_height() / 2)] == "FedBE"


def test_a_number_stays_with_its_unit() -> None:
    assert wrap("clients are 82 % sure, samples 69 %", 14) == "clients are\n82 % sure,\nsamples 69 %"


@pytest.mark.slow
@pytest.mark.parametrize(("panels", "inches"), [(1, (4.6, 3.0)), (3, (7.2, 3.0)), (4, (4.8, 5.3)), (10, (7.2, 9.9))])
def test_many_panels_fill_several_rows(panels: int, inches: tuple[float, float]) -> None:
    lines = (Series("a", "fedavg", tuple(Point(x, x, None, None, 1) for x in (1, 2))),)
    chart = Chart("x", "lines", "title", "shown", tuple(Panel(f"p{i}", lines) for i in range(panels)), Table((), ()))
    drawn = draw(chart, "png")
    assert Image.open(io.BytesIO(drawn)).size == tuple(round(200 * side) for side in inches)
    text = draw(chart, "svg").decode()
    assert all(f">p{i}<" in text for i in range(panels))
