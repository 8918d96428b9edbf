"""Figure 1b from a real run: the last round's clients, trained again, are those that the run had."""

import json
from pathlib import Path

import pytest

from fedbe.recipes import load
from fedbe.report import build, read_studies
from fedbe.report.spec import Chart
from fedbe.simulation import run
from fedbe.simulation.workers import Pool
from fedbe.watching import Nobody


@pytest.fixture(scope="module")
def swissroll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "roll"
    run.create(folder, load("swissroll", ("training.rounds=3",)), "fedavg", 0, "float32")
    with Pool(1) as pool:
        assert run.execute(folder, pool, Nobody())
    return folder


def chart_of(folder: Path) -> tuple[Chart | None, tuple[str, ...]]:
    (section,) = build(read_studies([folder]))
    return next((c for c in section.charts if c.id == "triangle"), None), section.missing


def test_corners_and_centre_are_what_the_run_measured(swissroll: Path) -> None:
    chart, _ = chart_of(swissroll)
    assert chart is not None
    last = run.read_rounds(swissroll)[-1]
    told = {d.label for d in chart.panels[0].dots if d.role}
    expected = {f"client {c}: {100 * last['test_clients'][f'client {c}']['accuracy']:.1f} %" for c in range(3)}
    assert told == expected | {f"FedAvg: {100 * last['test']['accuracy']:.1f} %"}
    assert "n = 1 run: FedAvg, seed 0, round 3" in chart.shown
    assert "α = 0.5" in chart.shown


def test_three_hundred_samples_lie_inside_and_the_colour_is_accuracy(swissroll: Path) -> None:
    chart, _ = chart_of(swissroll)
    assert chart is not None
    dots = chart.panels[0].dots
    assert len([d for d in dots if not d.role]) == 300
    assert all(-1e-9 <= d.y <= 0.8661 and d.y <= 1.7321 * min(d.x, 1 - d.x) + 1e-6 for d in dots)
    low, high = chart.panels[0].scale or (0, 0)
    for dot in dots:
        assert f"{low + (dot.colour or 0) * (high - low):.1f} %" in dot.label


def test_another_training_is_not_passed_off_as_the_run_s(swissroll: Path) -> None:
    path = swissroll / "rounds.jsonl"
    before = path.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    lines[-1]["train_loss"] *= 1.001
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        chart, missing = chart_of(swissroll)
    finally:
        path.write_text(before)
    assert chart is None
    assert any("has another loss" in m for m in missing)


def test_without_the_checkpoint_there_is_a_sentence(swissroll: Path) -> None:
    path = swissroll / "checkpoint-000002.safetensors"
    path.rename(path.with_suffix(".away"))
    try:
        chart, missing = chart_of(swissroll)
    finally:
        path.with_suffix(".away").rename(path)
    assert chart is None
    assert any("has no checkpoint of the round before the last" in m for m in missing)
