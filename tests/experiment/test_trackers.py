"""The trackers with the real packages: Weights & Biases offline, MLflow in a folder, TensorBoard's event files."""

import importlib.util
import sys

import pytest

from fedbe.errors import ExtraError, SettingError
from fedbe.experiment import run_folder
from fedbe.experiment.trackers import make_tracker

RECORDS = [
    {"round": 1, "test": {"accuracy": 0.5, "nll": 1.2}, "clients": [1, 2]},
    {"round": 2, "test": {"accuracy": 0.75, "nll": 0.8}, "clients": [0, 3]},
]


def needs(package):
    reason = f"needs {package}: pip install 'fedbe[{package}]'"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


@pytest.fixture
def folder(tmp_path, small):
    return run_folder.create(tmp_path / "runs" / "one", small, "fedbe", 3, "float32")


def track(name, folder):
    """Two rounds, with a resume between them."""
    for done, record in enumerate(RECORDS):
        tracker = make_tracker(name, folder)
        tracker.begin("FedBE", 2, done)
        tracker.round_ended(record)
        tracker.end()


@needs("mlflow")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_in_a_folder(folder, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    track("mlflow", folder)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("fedbe").experiment_id])
    history = client.get_metric_history(run.info.run_id, "test/accuracy")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.75)]
    assert run.data.params["method"] == "fedbe"
    assert run.data.params["training.rounds"] == "3"
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")


@needs("wandb")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # W&B's own
def test_wandb_offline(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    track("wandb", folder)
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    run_id = (folder / "wandb-run-id").read_text()
    assert runs
    assert all(run.name.endswith(run_id) for run in runs)
    content = b"".join(file.read_bytes() for run in runs for file in run.glob("*.wandb"))
    assert b"test/accuracy" in content
    assert b"training.rounds" in content


@needs("tensorboard")
def test_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", folder)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("test/accuracy")] == [(1, 0.5), (2, 0.75)]


def test_unknown_trackers_and_missing_packages(folder, monkeypatch):
    with pytest.raises(SettingError, match="did you mean 'mlflow'"):
        make_tracker("mlflo", folder)
    for name, module in (("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ExtraError, match=rf"fedbe\[{name}\]"):
            make_tracker(name, folder)
