"""Submit an app to a deployment, follow it, and bring home what it made."""

import json
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import tomli_w

from fedbe.errors import RunError, SettingError
from fedbe.flower.deployment import Deployment

POLL_SECONDS = 2.0
Say = Callable[[dict[str, Any]], None]
Nodes = Callable[[int, int], None]  # how many are online, how many the app needs


@dataclass(frozen=True)
class Outcome:
    """A run that completed: its folder, the number of rounds it has, and the report."""

    folder: Path
    rounds: int
    report: dict[str, Any]


def submit(
    deployment: Deployment, name: str | None, settings: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> tuple[int, Path]:
    """Start the app in the deployment's folder. A name that was used before is resumed."""
    runs = (deployment.folder / "runs").resolve()
    folder = runs / (name or _next(runs))
    for one in settings:
        if "=" not in one:
            raise SettingError(f"a setting must be KEY=VALUE, got '{one}'")
    overrides = {key: _value(text) for key, text in (one.split("=", 1) for one in settings)} | {"folder": str(folder)}
    deployment.check_was_up()
    deployment.keep_out_of_bundle(say)
    (folder / "nodes.json").unlink(missing_ok=True)  # of a run that ended while it waited
    with tempfile.TemporaryDirectory() as place:  # a file, because Flower reads no quotes within quotes from words
        config = Path(place) / "run.toml"
        config.write_bytes(tomli_w.dumps(overrides).encode())
        answer = deployment.flwr("run", str(deployment.folder.resolve()), "--run-config", str(config))
    return int(answer["run-id"]), folder


def follow(deployment: Deployment, run: int, folder: Path, say: Say, nodes: Nodes = lambda *_: None) -> Outcome:
    """Wait for the end, telling every finished round, and what changes while it waits for nodes.

    RunError if the run failed or left no model.
    """
    told, waited = len(_lines(folder)), None
    while True:
        status = status_of(deployment, run)
        lines = _lines(folder)
        for line in lines[told:]:
            say(line)
        told = max(told, len(lines))
        if (found := _nodes(folder)) is not None and found != waited:
            nodes(*found)
            waited = found
        if status.startswith("finished"):
            break
        time.sleep(POLL_SECONDS)
    if status != "finished:completed":
        log = f"FLWR_HOME={deployment.state}/flwr flwr log {run} fedbe --show"
        raise RunError(f"run {run} {status.replace(':', ', ')}; read its log with: {log}")
    _check_model(folder / "model.safetensors", run)
    return Outcome(folder, len(lines), _report(folder / "report.json", run))


def status_of(deployment: Deployment, run: int) -> str:
    """What Flower says of a run: pending, starting, running, finished:completed, finished:failed …"""
    found = deployment.flwr("ls", "--run-id", str(run))["runs"]
    return str(found[0]["status"])


def _check_model(path: Path, run: int) -> None:
    """A run can "complete" with nothing in its hands."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if not list(file.keys()):
                raise RunError(f"run {run} completed with an empty model")
    except (OSError, safetensors.SafetensorError) as error:
        raise RunError(f"run {run} completed, but left no model in {path}: {error}") from error


def _report(path: Path, run: int) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"run {run} completed, but left no report in {path}: the app's server must hand `folder` to the strategy "
            f"and call `resume`, as the example does ({error})"
        ) from error
    return report


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rounds.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break  # it is being written
    return found


def _nodes(folder: Path) -> tuple[int, int] | None:
    """How many nodes are online and how many are needed, once the server had to wait for some."""
    path = folder / "nodes.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return found["online"], found["needed"]


def _next(runs: Path) -> str:
    return next(f"run-{i}" for i in range(1, 10_000) if not (runs / f"run-{i}").exists())


def _value(text: str) -> str | int | float | bool:
    """What TOML makes of it if that is a number, true, false or a quoted text; anything else is a text as it stands."""
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = read["value"]
    return value if len(read) == 1 and isinstance(value, str | int | float | bool) else text
