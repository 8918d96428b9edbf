"""Figure 1b from a real run: training the last round again gives the clients of the run."""

import json
from pathlib import Path

import pytest

from fedbe.algorithms.vote import predict
from fedbe.analysis import simplex
from fedbe.analysis.rerun import rerun_last_round
from fedbe.analysis.runs import read_run
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.recipe_files import load_recipe
from fedbe.report import build_sections, read_groups
from fedbe.report.chart import Chart

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def swissroll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "roll"
    run_folder.create(folder, load_recipe("swissroll", ("training.rounds=3",)), "fedavg", 0, "float32")
    with ProcessPool(1) as pool:
        assert loop.execute(folder, pool, Callback())
    return folder


def chart_of(folder: Path) -> tuple[Chart | None, tuple[str, ...]]:
    (section,) = build_sections(read_groups([folder]))
    return next((c for c in section.charts if c.id == "triangle"), None), section.missing


def test_corners_and_centre_equal_the_recorded_accuracies(swissroll: Path) -> None:
    chart, _ = chart_of(swissroll)
    assert chart is not None
    last = run_folder.read_rounds(swissroll)[-1]
    labels = {d.label for d in chart.panels[0].dots if d.role in ("corner", "centre")}
    expected = {f"client {c}: {100 * last['test_clients'][f'client {c}']['accuracy']:.1f} %" for c in range(3)}
    assert labels == expected | {f"FedAvg: {100 * last['test']['accuracy']:.1f} %"}
    assert "FedAvg, seed 0, round 3" in chart.caption
    assert "α = 0.5" in chart.caption


def test_samples_are_inside_and_their_colour_is_accuracy(swissroll: Path) -> None:
    chart, _ = chart_of(swissroll)
    assert chart is not None
    dots = chart.panels[0].dots
    assert len([d for d in dots if not d.role]) == 300
    assert all(-1e-9 <= d.y <= 0.8661 and d.y <= 1.7321 * min(d.x, 1 - d.x) + 1e-6 for d in dots)
    low, high = chart.panels[0].scale or (0, 0)
    for dot in dots:
        assert f"{low + (dot.colour or 0) * (high - low):.1f} %" in dot.label


def test_the_star_is_the_best_sample(swissroll: Path) -> None:
    chart, _ = chart_of(swissroll)
    assert chart is not None
    *_, best = chart.panels[0].dots
    assert best.role == "best"
    twin = max((d for d in chart.panels[0].dots if not d.role), key=lambda d: d.colour or 0)
    assert (best.x, best.y, best.colour) == (twin.x, twin.y, twin.colour)
    assert best.label.removeprefix("best: ") == twin.label.rpartition(": ")[2]


def test_votes_of_ten_use_mean_probabilities(swissroll: Path) -> None:
    """Eleven models make two votes, of the first ten and of the last one, which count half each."""
    rerun = rerun_last_round(read_run(swissroll))
    states = [u.state for u in rerun.round.updates] * 3 + [rerun.draft.state] * 2
    judged = simplex.judge(rerun, states)
    test, labels = rerun.sim.federation.test, rerun.sim.federation.test_labels
    each = [predict(rerun.sim.runner, s, test) for s in states]
    ten = float((sum(each[:10]).argmax(1) == labels).double().mean())
    alone = float((each[10].argmax(1) == labels).double().mean())
    assert judged.vote == pytest.approx(50 * (ten + alone))
    assert judged.accuracies[10] == pytest.approx(100 * alone)


def test_a_pool_reruns_the_same_clients(swissroll: Path) -> None:
    serial = rerun_last_round(read_run(swissroll))
    with ProcessPool(1) as pool:
        pooled = rerun_last_round(read_run(swissroll), pool)
    for a, b in zip(serial.round.updates, pooled.round.updates, strict=True):
        assert a.state.params.equal(b.state.params)


def test_a_rerun_with_another_loss_is_refused(swissroll: Path) -> None:
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


def test_a_missing_checkpoint_is_explained(swissroll: Path) -> None:
    path = swissroll / "checkpoint-000002.safetensors"
    path.rename(path.with_suffix(".away"))
    try:
        chart, missing = chart_of(swissroll)
    finally:
        path.with_suffix(".away").rename(path)
    assert chart is None
    assert any("checkpoint of the round before the last" in m for m in missing)
