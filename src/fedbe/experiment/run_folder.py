"""A run is a folder. This module is the only one that knows what is in it.

    runs/NAME/recipe.toml        every setting, resolved
    runs/NAME/run.json           method, seed, precision, device, versions, commit, machine; later the final result
    runs/NAME/rounds.jsonl       one line for each round
    runs/NAME/checkpoint-*.safetensors
    runs/NAME/trained/           the clients of the current round that have finished
    runs/NAME/model.safetensors  the final weights under the module's own names

The simulator writes all of it. A Flower run has no recipe.toml and no run.json, but writes rounds.jsonl, the
checkpoints and the model with the same functions.
"""

import json
import shlex
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from fedbe.core.files import append_line, locked, make_folder, sync_folder, write_atomic, write_json
from fedbe.errors import BusyError, FedBEError, RunError, RunWarning
from fedbe.experiment import checkpoint, provenance
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import dump_recipe, load_recipe
from fedbe.experiment.records import check_info, check_record
from fedbe.experiment.tensor_files import UNREADABLE, read_tensors, write_tensors

Record = dict[str, Any]  # one line of rounds.jsonl

INFO_FILE = "run.json"
MODEL_FILE = "model.safetensors"
RECIPE_FILE = "recipe.toml"
ROUNDS_FILE = "rounds.jsonl"


@dataclass(frozen=True)
class RunInfo:
    """The content of run.json.

    Args:
        method: The method's name in the catalogue.
        seed: The run's seed.
        precision: float32 or bfloat16.
        made_with: Versions, commit and machine; see `provenance.made_with`.
        created: When the folder was made, local time.
        finished: When the last round ended; None while the run is unfinished.
        final: The metrics of the final model on the test data; None while the run is unfinished.
        device: Where models are trained, such as cpu or cuda:0,1; `made_with` has its history.
        identity: What decides the run's numbers; see `provenance.identity`. None before it was first trained.
    """

    method: str
    seed: int
    precision: str
    made_with: dict[str, str]
    created: str
    finished: str | None = None
    final: dict[str, Any] | None = None
    device: str = "cpu"
    identity: dict[str, str] | None = None


def create(folder: Path, recipe: Recipe, method: str, seed: int, precision: str, device: str = "cpu") -> Path:
    """Create the folder of a new run. Nothing is trained yet.

    Args:
        folder: The folder; it must not exist, or be empty.
        recipe: The settings of the run.
        method: The method's name in the catalogue.
        seed: The seed of all random numbers.
        precision: float32 or bfloat16.
        device: Where the run trains.

    Returns:
        The folder.

    Raises:
        RunError: The folder exists and is not empty, or cannot be written.
        SettingError: The recipe's settings do not fit the method.
    """
    recipe.method_for(method)
    with new_folder(folder) as part:
        write_atomic(part / RECIPE_FILE, tomli_w.dumps(dump_recipe(recipe)).encode())
        info = RunInfo(method, seed, precision, provenance.made_with(device), _now(), device=device)
        write_json(part / INFO_FILE, vars(info))
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. It is renamed to `folder` at the end, so a run exists whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        advice = f": resume it with `fedbe resume {shlex.quote(str(folder))}` or choose another name"
        raise RunError(f"{folder} exists already{advice if folder.is_dir() else ' and is a file'}")
    part = folder.with_name(f".{folder.name}.part")
    make_folder(folder.parent)
    try:
        if part.is_symlink():
            part.unlink()
        shutil.rmtree(part, ignore_errors=True)  # a process that was killed here may have left one
        part.mkdir()  # fails if it exists: whatever is there is not ours to write into
        yield part
        part.replace(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise RunError(f"cannot create {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def discard_on_error(folder: Path) -> Iterator[None]:
    """Remove a new run or comparison that fails before it has any result: resuming it would only fail again."""
    try:
        yield
    except FedBEError:
        if not any(path.suffix == ".safetensors" or path.name == ROUNDS_FILE for path in folder.rglob("*")):
            with suppress(BusyError), locked(folder):  # another process may be in its first round there
                shutil.rmtree(folder, ignore_errors=True)
        raise


def exists(folder: Path) -> bool:
    """Whether a run was started in the folder."""
    return (folder / INFO_FILE).exists()


def read_info(folder: Path) -> RunInfo:
    """Read run.json.

    Args:
        folder: The run folder.

    Raises:
        RunError: The folder is not a run folder, or the file is damaged.
    """
    path = folder / INFO_FILE
    try:
        info = RunInfo(**json.loads(path.read_text(encoding="utf-8")))
        check_info(vars(info))
        return info
    except FileNotFoundError:
        raise RunError(f"{folder} is not a run folder: {INFO_FILE} is missing") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}"[:500]) from error


def read_recipe(folder: Path) -> Recipe:
    """Read the recipe that the run was started with.

    Args:
        folder: The run folder.

    Raises:
        RunError: The folder is not a run folder.
    """
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise RunError(f"{folder} is not a run folder, or a damaged one: {RECIPE_FILE} is missing")
    return load_recipe(path)


def read_rounds(folder: Path) -> list[Record]:
    """Read the lines of rounds.jsonl, in order.

    A last line that a crash cut off is left out; also one with zeros, where the disk had not yet written its beginning.

    Args:
        folder: The run folder.

    Returns:
        The record of each round, as nested dicts: accuracy, loss, bytes, seconds and so on.

    Raises:
        RunError: A line is damaged.
    """
    path = folder / ROUNDS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            check_record(record)
            records.append(record)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and (not line.endswith(b"\n") or b"\0" in line):
                break
            reason = f"{error}"[:200]
            raise RunError(
                f"line {number} of {path} is damaged ({reason}): restore the file, or start a new run"
            ) from error
    return records


def append_round(folder: Path, record: Mapping[str, Any]) -> None:
    """Append the line of a finished round. Write its checkpoint afterwards: it must never exist without the line."""
    append_line(folder / ROUNDS_FILE, record)


def drop_rounds_after(folder: Path, round: int) -> None:
    """Drop the lines of rounds after `round`, the last one with a checkpoint. These rounds will run again.

    Raises:
        RunError: Lines of earlier rounds are missing, or so many would be dropped that checkpoints must be missing.
    """
    path, records = folder / ROUNDS_FILE, read_rounds(folder)
    # A crash, together with a damaged checkpoint, costs no more rounds than this.
    if len(records) > round + checkpoint.KEPT:
        raise RunError(
            f"{path} has {len(records)} rounds, but the last checkpoint is of round {round}: restore the checkpoints, "
            "or start a new run"
        )
    remaining = [record for record in records if record["round"] <= round]
    if [record["round"] for record in remaining] != list(range(1, round + 1)):
        raise RunError(
            f"{path} has {len(remaining)} of the {round} finished rounds: restore the file, or start a new run"
        )
    if path.exists():
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in remaining).encode())


def write_model(folder: Path, header: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    """Write the final weights by name, with a JSON header that says what they are (None: no header)."""
    write_tensors(folder / MODEL_FILE, header, tensors)


def mark_identity(folder: Path, info: RunInfo, identity: Mapping[str, str]) -> RunInfo:
    """Note in run.json what decides the numbers of the run. Checkpoints have it, too, but may be deleted."""
    if info.identity != identity:
        info = replace(info, identity=dict(identity))
        write_json(folder / INFO_FILE, vars(info))
    return info


def mark_resumed(folder: Path, info: RunInfo, round: int) -> RunInfo:
    """Note in run.json what has changed since the run was last trained (cores, commit …), and from which round on."""
    history = dict(info.made_with)
    for what, now in provenance.made_with(info.device).items():
        before = history.get(what, "cpu" if what == "device" else "unknown")  # once there was only the CPU
        if not before.endswith(now):
            history[what] = f"{before}, from round {round} on {now}"
    if history != info.made_with:
        info = replace(info, made_with=history)
        write_json(folder / INFO_FILE, vars(info))
    return info


def move_to_device(folder: Path, device: str) -> None:
    """Let an unfinished run continue on another device.

    Raises:
        BusyError: Another process trains this run.
    """
    info = read_info(folder)
    if info.finished is None and info.device != device:
        with locked(folder):
            write_json(folder / INFO_FILE, vars(replace(info, device=device)))


def mark_finished(folder: Path, info: RunInfo) -> None:
    """Note in run.json that the run is finished, with the metrics of its last round."""
    finished = replace(info, finished=_now(), final=read_rounds(folder)[-1]["test"])
    write_json(folder / INFO_FILE, vars(finished))


def is_done(folder: Path) -> bool:
    """Whether nothing is left to do. A finished run with a lost or damaged model writes it again from a checkpoint."""
    finished = read_info(folder).finished is not None
    return finished and not (checkpoint.paths(folder) and _model_lost(folder / MODEL_FILE))


def _model_lost(path: Path) -> bool:
    if not path.exists():
        return True
    try:
        read_tensors(path)
    except UNREADABLE as error:
        warnings.warn(f"{path} is damaged and is written again: {error}", RunWarning, stacklevel=3)
        return True
    return False


def rounds_left(folder: Path) -> int:
    """The number of rounds that are still to run."""
    info, recipe = read_info(folder), read_recipe(folder)
    total = recipe.rounds(recipe.method_for(info.method))
    return 0 if info.finished else max(0, total - len(read_rounds(folder)))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
