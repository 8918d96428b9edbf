"""Submit an app to a deployment, follow its run, and read its results."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import tomli_w

from fedbe.core.files import locked, make_folder
from fedbe.errors import BusyError, RunError
from fedbe.experiment.recorder import NODES_FILE, REPORT_FILE, read_node_count
from fedbe.experiment.run_folder import MODEL_FILE, read_rounds
from fedbe.flower.app_config import convert_overrides, parse_overrides
from fedbe.flower.deployment import Deployment, Print

POLL_SECONDS = 0.5  # between two looks into the folder, which cost nothing
STATUS_SECONDS = 15.0  # between two `flwr ls`, which take almost two seconds of CPU time each
BUSY_SECONDS = 60.0  # how long to wait for the server of a stopped run to end
OnRound = Callable[[dict[str, Any]], None]  # receives the line of a finished round
OnNodes = Callable[[int, int], None]  # receives how many nodes are online and how many are needed


@dataclass(frozen=True)
class CompletedRun:
    """A completed run: its folder, its number of rounds, and the content of report.json."""

    folder: Path
    rounds: int
    report: dict[str, Any]


def submit(
    deployment: Deployment, name: str | None, settings: Sequence[str] = (), show: Print = lambda _: None
) -> tuple[int, Path]:
    """Start the app in the deployment's folder.

    Args:
        deployment: a deployment that is up.
        name: the name of the run. A run of this name is resumed. None: the next free name, run-1, run-2 …
        settings: texts KEY=VALUE, for settings in the app's pyproject.toml.
        show: receives lines of progress. Default: none are shown.

    Returns:
        Flower's run id and the folder of the run.

    Raises:
        RunError: no deployment was started, the folder is not an app, or Flower refuses the app.
        SettingError: a setting is unknown or has a wrong value.
        BusyError: another process trains the run of this name.
    """
    runs = (deployment.folder / "runs").resolve()
    overrides = parse_overrides(settings)
    deployment.check_was_up()
    config = convert_overrides(deployment.folder, overrides)
    deployment.ignore_private_folders(show)
    folder = _named_folder(runs / name, show) if name else _new_folder(runs)
    with tempfile.TemporaryDirectory() as temporary:  # a file, because Flower cannot parse nested quotes in arguments
        config_file = Path(temporary) / "run.toml"
        config_file.write_bytes(tomli_w.dumps(config | {"folder": str(folder)}).encode())
        try:
            answer = deployment.flwr("run", str(deployment.folder.resolve()), "--run-config", str(config_file))
        except BaseException:  # also KeyboardInterrupt
            with suppress(OSError):
                folder.rmdir()  # only if it is empty
            raise
    return int(answer["run-id"]), folder


def follow(
    deployment: Deployment, run: int, folder: Path, on_round: OnRound, on_nodes: OnNodes = lambda *_: None
) -> CompletedRun:
    """Wait until a run ends.

    Args:
        deployment: the deployment that the run was submitted to.
        run: Flower's run id.
        folder: the folder of the run.
        on_round: called with the line of each round that finishes.
        on_nodes: called with (online, needed) when the run waits for nodes, and at each change.

    Raises:
        RunError: the run failed, or it left no model or no report.
    """
    shown, node_count = len(read_rounds(folder)), None
    status, asked = "", -STATUS_SECONDS
    before = _modified(folder / MODEL_FILE)
    while True:
        ends = _modified(folder / MODEL_FILE) != before  # the server has written the model: ask often now
        if time.monotonic() - asked >= (POLL_SECONDS if ends else STATUS_SECONDS):
            status, asked = run_status(deployment, run), time.monotonic()
        rounds = read_rounds(folder)
        for line in rounds[shown:]:
            on_round(line)
        shown = max(shown, len(rounds))
        current_count = read_node_count(folder)
        if current_count is not None and current_count != node_count:
            on_nodes(*current_count)
            node_count = current_count
        if status.startswith("finished"):
            break
        time.sleep(POLL_SECONDS)
    if status != "finished:completed":
        log = f"FLWR_HOME={deployment.state}/flwr flwr log {run} fedbe --show"
        raise RunError(f"run {run} {status.replace(':', ', ')}; read its log with: {log}")
    _check_model(folder / MODEL_FILE, run)
    return CompletedRun(folder, len(rounds), _read_report(folder / REPORT_FILE, run))


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def run_status(deployment: Deployment, run: int) -> str:
    """Flower's status of a run: pending, starting, running, finished:completed, finished:failed …"""
    runs = deployment.flwr("ls", "--run-id", str(run))["runs"]
    return str(runs[0]["status"])


def _check_model(path: Path, run: int) -> None:
    """RunError if there is no model: Flower marks a run as completed even then."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if not list(file.keys()):
                raise RunError(f"run {run} completed with an empty model")
    except (OSError, safetensors.SafetensorError) as error:
        raise RunError(f"run {run} completed without a model in {path}: {error}") from error


def _read_report(path: Path, run: int) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"run {run} completed without a report in {path}: the app's server must pass `folder` to the strategy "
            f"and call `resume`, as the example does ({error})"
        ) from error
    return report


def _named_folder(folder: Path, show: Print) -> Path:
    """The folder of a named run. BusyError if another process trains it.

    The server of a run needs some seconds to end after the run or its SuperLink was stopped.
    """
    deadline, shown = time.monotonic() + BUSY_SECONDS, False
    while folder.exists():
        try:
            with locked(folder):
                (folder / NODES_FILE).unlink(missing_ok=True)  # of a run that ended while it waited
            break
        except BusyError:
            if time.monotonic() > deadline:
                raise
        if not shown:
            show(f"{folder} is still being trained; waiting up to {BUSY_SECONDS:.0f} s for that to end")
            shown = True
        time.sleep(0.5)
    return folder


def _new_folder(runs: Path) -> Path:
    """The next free folder, created at once: the run's server would create it later, after others may have taken it."""
    make_folder(runs)
    number = 1
    while True:
        folder = runs / f"run-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RunError(f"cannot create {folder}: {error.strerror}") from error
        else:
            return folder
