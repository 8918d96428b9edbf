"""Submit an app to a deployment, follow it, and bring home what it made."""

import json
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import tomli_w

from fedbe.core.files import locked, make_folder
from fedbe.errors import BusyError, RunError, SettingError, nearest
from fedbe.flower.deployment import Deployment

POLL_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
Say = Callable[[dict[str, Any]], None]
Value = str | int | float | bool  # what Flower takes as a setting
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
    told = _told(settings)
    deployment.check_was_up()
    overrides = _overrides(deployment.folder, told)
    deployment.keep_out_of_bundle(say)
    folder = _old(runs / name, say) if name else _new(runs)
    with tempfile.TemporaryDirectory() as place:  # a file, because Flower reads no quotes within quotes from words
        config = Path(place) / "run.toml"
        config.write_bytes(tomli_w.dumps(overrides | {"folder": str(folder)}).encode())
        try:
            answer = deployment.flwr("run", str(deployment.folder.resolve()), "--run-config", str(config))
        except BaseException:  # Ctrl-C, too
            with suppress(OSError):
                folder.rmdir()  # unless there is something in it
            raise
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


def _old(folder: Path, say: Callable[[str], None]) -> Path:
    """The folder of a run with a name, which nobody else may be training.

    The server of a run that was stopped, or whose SuperLink was, needs some seconds to end.
    """
    end, told = time.monotonic() + PATIENCE_SECONDS, False
    while folder.exists():
        try:
            with locked(folder):
                (folder / "nodes.json").unlink(missing_ok=True)  # of a run that ended while it waited
            break
        except BusyError:
            if time.monotonic() > end:
                raise
        if not told:
            say(f"{folder} is still being trained; waiting up to {PATIENCE_SECONDS:.0f} s for that to end")
            told = True
        time.sleep(0.5)
    return folder


def _new(runs: Path) -> Path:
    """The next free folder, made at once: the run's server would make it much later, and others may ask meanwhile."""
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


def _told(settings: Sequence[str]) -> dict[str, str]:
    if wrong := [one for one in settings if "=" not in one]:
        raise SettingError(f"a setting must be KEY=VALUE, got '{wrong[0]}'")
    return dict(one.split("=", 1) for one in settings)


def _overrides(app: Path, told: Mapping[str, str]) -> dict[str, Value]:
    """The settings as values of the kind that the app's own configuration has them in.

    Flower would hand a mistyped name or a text in a number's place to the app's server, which would end with it.
    """
    known = _configuration(app)
    if "folder" not in known:
        raise RunError(
            f'{app / "pyproject.toml"} has no `folder = ""` in [tool.flwr.app.config]: an app needs it, to be told '
            "where its results go"
        )
    if strange := [key for key in told if key not in known]:
        raise SettingError(f"the app has no setting '{strange[0]}': {nearest(strange[0], known)}")
    return {key: _value(key, text, known[key]) for key, text in told.items()}


def _configuration(app: Path) -> dict[str, Value]:
    """The settings in an app's pyproject.toml, those of a table under table.name, as Flower calls them."""
    path = app / "pyproject.toml"
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"].get("config", {})
        return dict(_flat(config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not that of a Flower app: {error}") from error


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", v) for inner, v in _flat(value))
        else:
            yield key, value


def _value(key: str, text: str, default: Value) -> Value:
    """The text as what `default` is: true or false, a number (whole or not), or a text, with or without quotes.

    >>> _value("fraction", ".5", 1.0), _value("rounds", "5", 3), _value("tag", "007", ""), _value("tag", '"a b"', "")
    (0.5, 5, '007', 'a b')
    """
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text]
        if isinstance(default, int | float):
            return float(text) if isinstance(default, float) or not _whole(text) else int(text)
    except (KeyError, ValueError):
        expected = "true or false" if isinstance(default, bool) else "a number"
        raise SettingError(f"`{key}` must be {expected}, got '{text}'") from None
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    quoted = read["value"]
    return quoted if len(read) == 1 and isinstance(quoted, str) else text


def _whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()
