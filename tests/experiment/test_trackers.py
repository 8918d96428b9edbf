"""The trackers with the real packages: Weights & Biases offline, MLflow with SQLite, TensorBoard's event files."""

import importlib.util
import sys

import pytest
from typer.testing import CliRunner

from fedbe.cli.app import app
from fedbe.errors import ExtraError, SettingError
from fedbe.experiment import run_folder
from fedbe.experiment.trackers import make_tracker

RECORDS = [
    {"round": 1, "test": {"accuracy": 0.5, "nll": 1.2}, "clients": [1, 2]},
    {"round": 2, "test": {"accuracy": 0.75, "nll": 0.8}, "clients": [0, 3]},
]


def needs(package):
    reason = f"needs {package}: pip install -c constraints.txt -e '.[{package}]'"
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
        tracker.end("finished")


@pytest.fixture
def mlflow_runs(tmp_path, monkeypatch):
    """mlflow_runs(): the client of a new store, and the runs in it."""
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")  # MLflow keeps a store for each

    def read():
        client = MlflowClient()
        return client, client.search_runs([client.get_experiment_by_name("fedbe").experiment_id])

    return read


@needs("mlflow")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_on_the_command_line(mlflow_runs):
    quick = ["training.rounds=2", "training.epochs=1", "model.hidden=[8]"]
    words = ["run", "digits", "--method", "fedavg", "--name", "one", "--workers", "0", "-q", "--track", "mlflow"]
    done = CliRunner().invoke(app, [*words, *(word for change in quick for word in ("--set", change))])
    assert done.exit_code == 0, done.output
    client, (run,) = mlflow_runs()
    history = client.get_metric_history(run.info.run_id, "test/accuracy")
    assert [point.step for point in history] == [1, 2]
    assert run.data.params["method"] == "fedavg"
    assert run.data.params["training.rounds"] == "2"
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")


@needs("mlflow")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_a_run_and_shows_how_it_ended(folder, mlflow_runs):
    for done, (status, shown) in enumerate((("stopped", "KILLED"), ("failed", "FAILED"), ("finished", "FINISHED"))):
        tracker = make_tracker("mlflow", folder)
        tracker.begin("FedBE", 3, done)
        assert mlflow_runs()[1][0].info.status == "RUNNING"
        tracker.end(status)
        (run,) = mlflow_runs()[1]
        assert run.info.status == shown


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_with_a_folder_is_refused(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:mlruns")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(SettingError, match="name a server or a database"):
        make_tracker("mlflow", folder)


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
    assert all(run_id in run.name for run in runs)
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
        with pytest.raises(ExtraError, match=rf"pip install .*\[{name}\]"):
            make_tracker(name, folder)
