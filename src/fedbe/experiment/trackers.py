"""Callbacks that send every number of a run to an experiment tracker: TensorBoard, Weights & Biases, MLflow.

A tracker needs its package, and takes its own settings from its own environment variables (WANDB_MODE,
MLFLOW_TRACKING_URI …). The run folder stays the complete record; a tracker is a copy for looking at.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbe.core.files import write_atomic
from fedbe.errors import ExtraError, SettingError, check_option, missing_extra
from fedbe.experiment.callbacks import Callback, EndStatus
from fedbe.experiment.recipe_files import dump_recipe
from fedbe.experiment.run_folder import Record, read_info, read_recipe


class TensorBoardTracker(Callback):
    """Writes scalars into event files in RUN/tensorboard.

    Args:
        folder: The run folder.

    Raises:
        ExtraError: The package tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._folder, self._make_writer = folder, SummaryWriter
        self._writer: Any = None

    def begin(self, title: str, rounds: int, done: int) -> None:  # noqa: ARG002
        # Rounds that a crash left without a checkpoint run again; their old points must go.
        self._writer = self._make_writer(str(self._folder / "tensorboard"), purge_step=done + 1)

    def round_ended(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def end(self, status: EndStatus) -> None:  # noqa: ARG002
        self._writer.close()


class WandbTracker(Callback):
    """A run of Weights & Biases in the project "fedbe". A resumed run of ours continues the same run there.

    WANDB_MODE=offline writes into RUN/wandb without a network; WANDB_PROJECT names another project.

    Args:
        folder: The run folder.

    Raises:
        ExtraError: The package wandb is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        self._folder, self._wandb = folder, wandb
        self._run: Any = None

    def begin(self, title: str, rounds: int, done: int) -> None:  # noqa: ARG002
        id_file = self._folder / "wandb-run-id"
        run_id = id_file.read_text() if id_file.exists() else uuid.uuid4().hex[:12]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedbe"),
            name=self._folder.name,
            id=run_id,
            resume="allow",
            dir=str(self._folder),
            config=_settings(self._folder),
        )
        write_atomic(id_file, run_id.encode())

    def round_ended(self, record: Record) -> None:
        self._run.log(scalars(record), step=record["round"])

    def end(self, status: EndStatus) -> None:
        self._run.finish(exit_code=int(status != "finished"))


class MlflowTracker(Callback):
    """A run of MLflow in the experiment "fedbe". A resumed run of ours continues the same run there.

    MLFLOW_TRACKING_URI names the server or database (default: sqlite:///mlflow.db, a file in the current directory),
    MLFLOW_EXPERIMENT_NAME another experiment.

    Args:
        folder: The run folder.

    Raises:
        ExtraError: The package mlflow, or mlflow-skinny, is not installed.
        SettingError: MLflow does not accept MLFLOW_TRACKING_URI.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from mlflow import MlflowClient, MlflowException
        except ImportError:
            raise _missing("mlflow") from None
        try:
            self._folder, self._client = folder, MlflowClient()
        except MlflowException as error:
            problem = str(error).partition(". ")[0]
            raise SettingError(
                f"MLflow does not accept MLFLOW_TRACKING_URI ({problem}): name a server or a database, like "
                "sqlite:///mlflow.db"
            ) from error
        self._run_id = ""

    def begin(self, title: str, rounds: int, done: int) -> None:  # noqa: ARG002
        id_file = self._folder / "mlflow-run-id"
        if id_file.exists():
            self._run_id = id_file.read_text()
            self._client.update_run(self._run_id, "RUNNING")
            return
        self._run_id = self._client.create_run(self._experiment(), run_name=self._folder.name).info.run_id
        for name, value in _settings(self._folder).items():
            self._client.log_param(self._run_id, name, str(value)[:500])  # MLflow's limit for stores of any kind
        write_atomic(id_file, self._run_id.encode())

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedbe")
        existing = self._client.get_experiment_by_name(name)
        experiment: str = self._client.create_experiment(name) if existing is None else existing.experiment_id
        return experiment

    def round_ended(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._client.log_metric(self._run_id, name.replace(" ", "_"), value, step=record["round"])

    def end(self, status: EndStatus) -> None:
        words = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._run_id, words[status])


TRACKERS: Mapping[str, Callable[[Path], Callback]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def make_tracker(name: str, folder: Path) -> Callback:
    """A tracker by its name in `TRACKERS`, for the run in `folder`.

    Args:
        name: "tensorboard", "wandb" or "mlflow".
        folder: The run folder.

    Raises:
        SettingError: There is no such tracker.
        ExtraError: Its package is not installed.
    """
    check_option("tracker", name, TRACKERS)
    return TRACKERS[name](folder)


def scalars(record: Record, prefix: str = "") -> dict[str, float]:
    """All numbers of a nested record with their paths, without lists.

    Args:
        record: A line of rounds.jsonl.
        prefix: What every name begins with.

    Example:
        >>> scalars({"round": 3, "test": {"accuracy": 0.5}, "clients": [1, 2]})
        {'test/accuracy': 0.5}
    """
    numbers: dict[str, float] = {}
    for name, value in record.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            numbers |= scalars(value, f"{path}/")
        elif isinstance(value, int | float) and path != "round":
            numbers[path] = float(value)
    return numbers


def _settings(folder: Path) -> dict[str, Any]:
    """All settings of a run as one flat table: "training.rounds", …"""
    info = read_info(folder)
    settings: dict[str, Any] = {}

    def add(table: Mapping[str, Any], prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, Mapping):
                add(value, f"{prefix}{name}.")
            else:
                settings[f"{prefix}{name}"] = value

    add(dump_recipe(read_recipe(folder)), "")
    return settings | {"method": info.method, "seed": info.seed, "precision": info.precision}


def _missing(name: str) -> ExtraError:
    return missing_extra(f"--track {name} needs a package that is not installed", name)
