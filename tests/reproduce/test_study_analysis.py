"""Analyses of finished runs: numbers that can be checked by hand, pictures from kept results, and resumption."""

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
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import ModelSpec
from fedbe.experiment.saved_model import TrainedModel
from fedbe.report.analysis_charts import features_chart
from fedbe.report.figures import draw
from fedbe.reproduce import study_analysis, study_runner, table
from fedbe.reproduce.study import Study, load_study
from fedbe.reproduce.study_runner import StudyRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(1) as workers:
        yield workers


def trained(name: str, pool: ProcessPool, root: Path) -> tuple[Study, list[StudyRun]]:
    study = load_study(name)
    study_runs = list(study_runner.study_runs(study, "smoke", 1, root))
    jobs, missing = study_runner.plan_jobs(study_runs, "float32")
    assert not missing
    assert study_runner.run_study(jobs, pool, Callback(), lambda: False)
    return study, study_runs


@pytest.fixture(scope="module")
def swissroll(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[StudyRun]]:
    return trained("fig-confidence", pool, tmp_path_factory.mktemp("confidence"))


@pytest.fixture(scope="module")
def digits(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[StudyRun]]:
    return trained("fig-tsne", pool, tmp_path_factory.mktemp("features"))


def analysed(study: Study, study_runs: list[StudyRun], pool: ProcessPool | None) -> Any:
    whole, missing, charts = study_analysis.analyse(study, study_runs, pool, lambda: False)
    assert whole
    return missing, charts


def test_metrics_of_clients_equal_the_recorded_ones(swissroll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, study_runs = swissroll
    analysed(study, study_runs, pool)
    folder = study_runs[0].folder
    recorded = run_folder.read_rounds(folder)[-1]["test_clients"].values()
    result = study_analysis.read(folder)["clients"]
    assert result["models"] == 3
    assert result["accuracy"] == pytest.approx(sum(q["accuracy"] for q in recorded) / 3)
    assert result["ECE"] == pytest.approx(sum(q["ece"] for q in recorded) / 3)
    right, wrong = result["bins"]
    assert sum(right) + sum(wrong) == pytest.approx(600)
    assert sum(right) / 600 == pytest.approx(result["accuracy"])


def test_samples_differ_from_the_clients(swissroll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, study_runs = swissroll
    analysed(study, study_runs, pool)
    result = study_analysis.read(study_runs[0].folder)
    assert result["samples"]["models"] == 3
    assert result["samples"]["bins"] != result["clients"]["bins"]


def test_the_histogram_shows_the_counts(swissroll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, study_runs = swissroll
    missing, (chart,) = analysed(study, study_runs, pool)
    assert missing == {}
    assert [p.title.split(",")[0] for p in chart.panels] == [
        "Swiss roll: 3 clients", "Swiss roll: 3 samples", "digits: 10 clients", "digits: 10 samples"
    ]  # fmt: skip
    result = study_analysis.read(study_runs[0].folder)["clients"]
    assert chart.panels[0].counts == tuple(map(tuple, result["bins"]))
    assert f"clients {100 * result['confidence when wrong']:.0f} %" in chart.title


def test_right_and_wrong_predictions_are_in_their_bins() -> None:
    probabilities = torch.tensor([[1.0, 0.0], [0.52, 0.48], [0.03, 0.97]])
    result = calibration.confidence_histogram(probabilities, torch.tensor([0, 1, 0]))
    assert result.shape == (2, 20)
    assert result.nonzero().tolist() == [[0, 19], [1, 10], [1, 19]]
    assert calibration.confidence_when_wrong(probabilities, torch.tensor([0, 1, 0])) == pytest.approx((0.52 + 0.97) / 2)
    assert calibration.confidence_when_wrong(probabilities, torch.tensor([0, 0, 1])) == 0.0


def test_kept_results_are_not_measured_again(
    swissroll: tuple[Study, list[StudyRun]], pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, study_runs = swissroll
    _, (before,) = analysed(study, study_runs, pool)
    monkeypatch.setattr(calibration, "rerun_last_round", lambda *_: pytest.fail("it was measured again"))
    _, (after,) = analysed(study, study_runs, pool)
    assert draw(before, "svg") == draw(after, "svg")


def test_a_part_is_analysed_and_all_kept_results_are_drawn(
    swissroll: tuple[Study, list[StudyRun]], pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, study_runs = swissroll
    _, (whole,) = analysed(study, study_runs, pool)
    monkeypatch.setattr(calibration, "rerun_last_round", lambda *_: pytest.fail("it was not requested"))
    part = [study_run for study_run in study_runs if study_run.cell[0] == study_runs[0].cell[0]]
    assert len({p.folder for p in part}) < len({p.folder for p in study_runs})
    _, missing, (chart,) = study_analysis.analyse(study, study_runs, pool, lambda: False, requested=part)
    assert missing == {}
    assert draw(chart, "svg") == draw(whole, "svg")
    (tmp_path / "reproduce-fig-confidence-smoke").symlink_to(study_runs[0].folder.parents[1])
    arguments = ["reproduce", "fig-confidence", "--scale", "smoke", "--seeds", "1", "--precision", "float32", "--quiet"]
    outcome = CliRunner().invoke(app, [*arguments, "--only", study_runs[0].cell[0], "--runs", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert next(tmp_path.glob("*/confidence.svg")).read_bytes() == draw(whole, "svg")
    other = next(study_run for study_run in study_runs if study_run not in part)
    (other.folder / study_analysis.FILE).unlink()
    _, missing, _ = study_analysis.analyse(study, study_runs, pool, lambda: False, requested=part)
    assert missing[other.cell] == "it has not been analysed yet"


def test_an_analysis_can_be_stopped(swissroll: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, study_runs = swissroll
    assert study_analysis.analyse(study, study_runs, pool, lambda: True) == (False, {}, [])


def test_the_inputs_of_the_last_layer_are_the_features() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).eval()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        module[2].weight.copy_(torch.eye(2))
    loaded = TrainedModel(module, ModelSpec("mlp", 2, (2,)), ("a", "b"), torch.zeros(2), torch.ones(2))
    result, predicted = features.penultimate(loaded, torch.tensor([[3.0, 2.0], [-1.0, -4.0]]))
    assert result.tolist() == [[3.0, 0.0], [0.0, 4.0]]
    assert predicted.tolist() == [0, 1]


def test_purity_counts_neighbours_of_the_same_class() -> None:
    line = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]])
    assert features.purity(line, torch.tensor([0, 0, 0, 1, 1, 1]), neighbours=2) == 1.0
    assert features.purity(line, torch.tensor([0, 1, 0, 1, 0, 1]), neighbours=2) == pytest.approx(4 / 12)


def test_the_picture_has_a_point_for_each_image(digits: tuple[Study, list[StudyRun]], pool: ProcessPool) -> None:
    study, study_runs = digits
    missing, (chart,) = analysed(study, study_runs, pool)
    assert missing == {}
    assert len(chart.panels) == 4
    assert chart.panels[0].rows == ("1", "3", "6")
    result = study_analysis.read(study_runs[0].folder)
    assert len(chart.panels[0].dots) == len(result["own"]["classes"]) == 109  # ones, threes and sixes of 359 digits
    assert set(result["foreign"]["classes"]) <= {"1", "3", "6"}
    assert 0 < result["own"]["purity"] <= 1
    assert result["own"]["accuracy"] == run_folder.read_rounds(study_runs[0].folder)[-1]["test"]["accuracy"]


def test_data_without_foreign_images_is_drawn_alone(
    digits: tuple[Study, list[StudyRun]], pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, study_runs = digits
    monkeypatch.setattr(features, "FOREIGN", {})
    run = read_run(study_runs[0].folder)
    result = features.measure(run, pool)
    assert result["foreign"] == "no images go with digits"
    assert len(features_chart([(run, result)], {}).panels) == 1


def test_missing_foreign_images_are_explained_and_measured_later(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, study_runs = trained("fig-tsne", pool, tmp_path)
    known = features.load_task

    def without(source: str) -> Any:
        if source.startswith("fedbe."):
            raise DataError("cifar100 is not here")
        return known(source)

    monkeypatch.setattr(features, "load_task", without)
    missing, (chart,) = analysed(study, study_runs, pool)
    assert missing[("fedavg", "foreign", "purity")] == "cifar100 is not here"
    assert ("fedavg", "own", "purity") not in missing
    assert len(chart.panels) == 2
    text = table.markdown(study, "smoke", table.collect(study, study_runs), missing, [chart])
    assert "fedbe / foreign / silhouette: cifar100 is not here" in text
    assert analysed(study, study_runs, None) == (missing, [chart])  # as with --no-train: kept results, and the reason
    monkeypatch.undo()
    missing, (chart,) = analysed(study, study_runs, pool)
    assert missing == {}
    assert len(chart.panels) == 4
