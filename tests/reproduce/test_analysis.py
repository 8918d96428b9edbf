"""What studies do with finished runs: numbers that can be worked out, pictures from what was found, and resumption."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedbe.analysis import calibration, features
from fedbe.analysis.runs import read_run
from fedbe.cli.app import app
from fedbe.errors import DataError
from fedbe.experiment import run_folder
from fedbe.experiment.callbacks import Nobody
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import ModelSpec
from fedbe.experiment.saved_model import Loaded
from fedbe.report.analysis_charts import features_chart
from fedbe.report.figures import draw
from fedbe.reproduce import analysis, study_runner, table
from fedbe.reproduce.study import Study, load_study
from fedbe.reproduce.study_runner import StudyRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(1) as workers:
        yield workers


def played(name: str, pool: ProcessPool, root: Path) -> tuple[Study, list[StudyRun]]:
    study = load_study(name)
    places = list(study_runner.study_runs(study, "smoke", 1, root))
    assert study_runner.run_study(places, pool, Nobody(), "float32", lambda: False) == (True, {})
    return study, places


@pytest.fixture(scope="module")
def roll(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[StudyRun]]:
    return played("fig-confidence", pool, tmp_path_factory.mktemp("confidence"))


@pytest.fixture(scope="module")
def seen(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[StudyRun]]:
    return played("fig-tsne", pool, tmp_path_factory.mktemp("features"))


def analysed(study: Study, places: list[StudyRun], pool: ProcessPool | None) -> Any:
    whole, missing, charts = analysis.analyse(study, places, pool, lambda: False)
    assert whole
    return missing, charts


def test_clients_are_judged_as_the_run_judged_them(roll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, places = roll
    analysed(study, places, pool)
    folder = places[0].folder
    told = run_folder.read_rounds(folder)[-1]["test_clients"].values()
    found = analysis.read(folder)["clients"]
    assert found["models"] == 3
    assert found["accuracy"] == pytest.approx(sum(q["accuracy"] for q in told) / 3)
    assert found["ECE"] == pytest.approx(sum(q["ece"] for q in told) / 3)
    right, wrong = found["bins"]
    assert sum(right) + sum(wrong) == pytest.approx(600)
    assert sum(right) / 600 == pytest.approx(found["accuracy"])


def test_samples_are_other_models_than_the_clients(roll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, places = roll
    analysed(study, places, pool)
    found = analysis.read(places[0].folder)
    assert found["samples"]["models"] == 3
    assert found["samples"]["bins"] != found["clients"]["bins"]


def test_the_histogram_shows_what_was_counted(roll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, places = roll
    missing, (chart,) = analysed(study, places, pool)
    assert missing == {}
    assert [p.title.split(",")[0] for p in chart.panels] == [
        "Swiss roll: 3 clients", "Swiss roll: 3 samples", "digits: 10 clients", "digits: 10 samples"
    ]  # fmt: skip
    found = analysis.read(places[0].folder)["clients"]
    assert chart.panels[0].counts == tuple(map(tuple, found["bins"]))
    assert f"clients {100 * found['confidence when wrong']:.0f} %" in chart.title


def test_right_and_wrong_fall_into_their_bins() -> None:
    probabilities = torch.tensor([[1.0, 0.0], [0.52, 0.48], [0.03, 0.97]])
    found = calibration.confidence_histogram(probabilities, torch.tensor([0, 1, 0]))
    assert found.shape == (2, 20)
    assert found.nonzero().tolist() == [[0, 19], [1, 10], [1, 19]]
    assert calibration.confidence_when_wrong(probabilities, torch.tensor([0, 1, 0])) == pytest.approx((0.52 + 0.97) / 2)
    assert calibration.confidence_when_wrong(probabilities, torch.tensor([0, 0, 1])) == 0.0


def test_what_was_found_is_not_sought_again(
    roll: tuple[Study, list[StudyRun]], pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, places = roll
    _, (before,) = analysed(study, places, pool)
    monkeypatch.setattr(calibration, "rerun_last_round", lambda *_: pytest.fail("it was played again"))
    _, (after,) = analysed(study, places, pool)
    assert draw(before, "svg") == draw(after, "svg")


def test_a_part_of_a_study_is_looked_at_and_all_that_was_found_is_drawn(
    roll: tuple[Study, list[StudyRun]], pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, places = roll
    _, (whole,) = analysed(study, places, pool)
    monkeypatch.setattr(calibration, "rerun_last_round", lambda *_: pytest.fail("nobody asked for it"))
    part = [place for place in places if place.cell[0] == places[0].cell[0]]
    assert len({p.folder for p in part}) < len({p.folder for p in places})
    _, missing, (chart,) = analysis.analyse(study, places, pool, lambda: False, asked=part)
    assert missing == {}
    assert draw(chart, "svg") == draw(whole, "svg")
    (tmp_path / "reproduce-fig-confidence-smoke").symlink_to(places[0].folder.parents[1])
    asked = ["reproduce", "fig-confidence", "--scale", "smoke", "--seeds", "1", "--precision", "float32", "--quiet"]
    told = CliRunner().invoke(app, [*asked, "--only", places[0].cell[0], "--runs", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert next(tmp_path.glob("*/confidence.svg")).read_bytes() == draw(whole, "svg")
    other = next(place for place in places if place not in part)
    (other.folder / analysis.FILE).unlink()
    _, missing, _ = analysis.analyse(study, places, pool, lambda: False, asked=part)
    assert missing[other.cell] == "it has not been analysed yet"


def test_an_analysis_can_be_stopped(roll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, places = roll
    assert analysis.analyse(study, places, pool, lambda: True) == (False, {}, [])


def test_the_inputs_of_the_last_layer_are_the_features() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).eval()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        module[2].weight.copy_(torch.eye(2))
    loaded = Loaded(module, ModelSpec("mlp", 2, (2,)), ("a", "b"), torch.zeros(2), torch.ones(2))
    found, predicted = features.penultimate(loaded, torch.tensor([[3.0, 2.0], [-1.0, -4.0]]))
    assert found.tolist() == [[3.0, 0.0], [0.0, 4.0]]
    assert predicted.tolist() == [0, 1]


def test_purity_counts_neighbours_of_the_same_class() -> None:
    line = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]])
    assert features.purity(line, torch.tensor([0, 0, 0, 1, 1, 1]), neighbours=2) == 1.0
    assert features.purity(line, torch.tensor([0, 1, 0, 1, 0, 1]), neighbours=2) == pytest.approx(4 / 12)


def test_the_picture_has_a_point_for_each_image(seen: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, places = seen
    missing, (chart,) = analysed(study, places, pool)
    assert missing == {}
    assert len(chart.panels) == 4
    assert chart.panels[0].rows == ("1", "3", "6")
    found = analysis.read(places[0].folder)
    assert len(chart.panels[0].dots) == len(found["own"]["classes"]) == 109  # ones, threes and sixes of 359 digits
    assert set(found["foreign"]["classes"]) <= {"1", "3", "6"}
    assert 0 < found["own"]["purity"] <= 1
    assert found["own"]["accuracy"] == run_folder.read_rounds(places[0].folder)[-1]["test"]["accuracy"]


def test_data_that_no_foreign_images_go_with_are_drawn_alone(
    seen: tuple[Study, list[StudyRun]], pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, places = seen
    monkeypatch.setattr(features, "FOREIGN", {})
    run = read_run(places[0].folder)
    found = features.measure(run, pool)
    assert found["foreign"] == "no images go with digits"
    assert len(features_chart([(run, found)], {}).panels) == 1


def test_missing_foreign_images_are_said_and_sought_again(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, places = played("fig-tsne", pool, tmp_path)
    known = features.load_task

    def without(source: str) -> Any:
        if source.startswith("fedbe."):
            raise DataError("cifar100 is not here")
        return known(source)

    monkeypatch.setattr(features, "load_task", without)
    missing, (chart,) = analysed(study, places, pool)
    assert missing[("fedavg", "foreign", "purity")] == "cifar100 is not here"
    assert ("fedavg", "own", "purity") not in missing
    assert len(chart.panels) == 2
    text = table.markdown(study, "smoke", table.collect(study, places), missing, [chart])
    assert "Not run: fedbe / foreign / silhouette: cifar100 is not here." in text
    assert analysed(study, places, None) == (missing, [chart])  # as with --no-train: what was found, and the reason
    monkeypatch.undo()
    missing, (chart,) = analysed(study, places, pool)
    assert missing == {}
    assert len(chart.panels) == 4
