"""The charts of a report for papers: PNG, SVG or PDF by matplotlib, from the same data as the page."""

import math
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from fedbe.core.files import make_folder, write_atomic
from fedbe.report.chart import Chart, ReportSection
from fedbe.report.drawings import DRAW, INK, SOFT, escape_formula

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIRED = ("histogram", "clouds", "heat")  # kinds whose panels are in pairs, two in a row


def write_figures(sections: Sequence[ReportSection], folder: Path, kind: str) -> list[Path]:
    """Write a file for each chart: SECTION-CHART.KIND, or CHART.KIND if there is only one section.

    Args:
        sections: What `build_sections` returns.
        folder: Created if it is missing.
        kind: "png", "svg" or "pdf".
    """
    make_folder(folder)
    paths = []
    for section in sections:
        prefix = f"{section.id}-" if len(sections) > 1 else ""
        for chart in section.charts:
            path = folder / f"{prefix}{chart.id}.{kind}"
            write_atomic(path, draw(chart, kind))
            paths.append(path)
    return paths


def draw(chart: Chart, kind: str) -> bytes:
    """One chart as the content of a "png", "svg" or "pdf" file. The same chart gives the same bytes."""
    from matplotlib import rc_context  # slow to import, and only pictures need it
    from matplotlib.figure import Figure

    style: Any = {
        "svg.hashsalt": "fedbe",
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "font.size": 8,
        "text.color": INK,
        "axes.edgecolor": SOFT,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
    }
    with rc_context(style):
        figure = Figure(_size(chart), dpi=200, layout="constrained")
        share: Any = _shared_axes(chart)
        grid = figure.subplots(_rows(chart), _columns(chart), squeeze=False, sharex=share, sharey=share)
        for unused in grid.flat[len(chart.panels) :]:
            unused.set_visible(False)
        for panel, axes in zip(chart.panels, grid.flat[: len(chart.panels)], strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(panel.title, loc="left", fontsize=8, fontweight="bold")
            DRAW[chart.kind](chart, panel, axes)
        _caption(figure, chart)
        content = BytesIO()
        no_date = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
        figure.savefig(content, format=kind, metadata=no_date)
    return content.getvalue()


def _size(chart: Chart) -> tuple[float, float]:
    """In inches: a text column for one panel, a page for several."""
    wide = min(7.2, 2.4 * _columns(chart))
    if chart.kind == "bars":
        return max(4.6, wide), 1.1 + 0.28 * max(len(p.bars) for p in chart.panels)
    if chart.kind == "bubbles":
        panel = chart.panels[0]
        return 4.6 if len(panel.columns) <= 20 else 7.2, min(9.0, 1.4 + 0.3 * len(panel.rows))
    if chart.kind == "heat":
        return 7.2, 0.8 + _rows(chart) * (0.6 + 0.19 * max(len(p.rows) for p in chart.panels))
    if chart.kind in PAIRED:
        return 5.4, 1.0 + (1.75 if chart.kind == "histogram" else 2.4) * _rows(chart)
    return max(4.6, wide), 4.2 if chart.kind in ("dots", "triangle") else 0.7 + 2.3 * _rows(chart)


def _columns(chart: Chart) -> int:
    """Panels in a row: two if they are in pairs or four in all, otherwise up to three; bars are all in one row."""
    count = len(chart.panels)
    if chart.kind == "bars":
        return count
    return min(count, 2 if chart.kind in PAIRED or count == 4 else 3)


def _rows(chart: Chart) -> int:
    return math.ceil(len(chart.panels) / _columns(chart))


def _shared_axes(chart: Chart) -> bool | str:
    """Panels that are compared share one scale: all of them, or the panels of a row."""
    return "row" if chart.kind == "histogram" else chart.kind in ("lines", "bars")


def _caption(figure: "Figure", chart: Chart) -> None:
    """The finding above the picture, the caption with n and seeds below it."""
    width = figure.get_figwidth()
    figure.suptitle(wrap(chart.title, int(width * 11)), x=0.01, ha="left", fontsize=9.5, fontweight="bold")
    figure.supxlabel(wrap(chart.caption, int(width * 20)), x=0.01, ha="left", fontsize=6, color=SOFT)


def wrap(text: str, letters: int) -> str:
    """Break text into lines. A number stays with its unit, and n with its seeds.

    >>> wrap("clients are 82 % sure, samples 69 %", 14).splitlines()
    ['clients are', '82 % sure,', 'samples 69 %']
    """
    units = r" %|n = \d+ seeds? \([\d, ]*\)"
    joined = re.sub(units, lambda match: match[0].replace(" ", "\xa0"), escape_formula(text))
    return fill(joined, letters).replace("\xa0", " ")
