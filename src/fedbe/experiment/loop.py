"""A run is a folder: what was asked, one line a round, checkpoints, and at the end the model.

    runs/NAME/recipe.toml        every setting, resolved
    runs/NAME/run.json           method, seed, precision, versions, commit, machine; later the final result
    runs/NAME/rounds.jsonl       one line a round
    runs/NAME/checkpoint-*.safetensors
    runs/NAME/trained/           the clients of the current round that are done
    runs/NAME/model.safetensors  the final weights under the module's own names

`create` makes the folder and `execute` trains until it is done: the same call starts, resumes and ends a run.
"""

import hashlib
import json
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import tomli_w
import torch

import fedbe
from fedbe import data
from fedbe.algorithms.ensemble import Member
from fedbe.core import plugins
from fedbe.core.compute import Plan, cores, server_threads
from fedbe.core.files import append_line, locked, make_folder, write_json, write_whole
from fedbe.core.model_runner import ModelRunner
from fedbe.data import Task
from fedbe.errors import BusyError, FedBEError, RunError
from fedbe.experiment import checkpoint, saved_model
from fedbe.experiment.client_cache import ClientCache
from fedbe.experiment.executors.process_pool import ProcessPool, Stopped
from fedbe.experiment.federation import Federation, initial_weights, prepare
from fedbe.experiment.memory_usage import keep_freed_memory
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import dump_recipe, load_recipe
from fedbe.experiment.round import Record, RunState, Simulation, play_round

# What shows, asks or sends, but computes nothing of a run: another version of it can go on with an old run.
WITHOUT_NUMBERS = ("cli/", "flower/", "report/", "reproduce/", "analysis/", "experiment/callbacks.py")


class Observer(Protocol):
    """Who watches a run."""

    def begin(self, title: str, rounds: int, done: int) -> None: ...

    def phase(self, round: int, phase: str, done: int, total: int) -> None: ...

    def round_ended(self, record: Record) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """The content of run.json."""

    method: str
    seed: int
    precision: str
    made_with: dict[str, str]
    created: str
    finished: str | None = None
    final: dict[str, Any] | None = None


def create(folder: Path, recipe: Recipe, method: str, seed: int, precision: str) -> Path:
    """Make the folder of a new run. Nothing is trained yet."""
    recipe.method_for(method)
    with new_folder(folder) as part:
        write_whole(part / "recipe.toml", tomli_w.dumps(dump_recipe(recipe)).encode())
        info = RunInfo(method, seed, precision, made_with(), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        write_json(part / "run.json", vars(info))
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is full: a run is there whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        again = f": resume it with `fedbe resume {shlex.quote(str(folder))}` or choose another name"
        raise RunError(f"{folder} exists already{again if folder.is_dir() else ' and is a file'}")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of one who was killed here
    make_folder(part)
    try:
        yield part
        part.replace(folder)
    except OSError as error:
        raise RunError(f"cannot create {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def or_nothing(folder: Path) -> Iterator[None]:
    """A new run or comparison that fails before it has anything leaves no folder that could only fail again."""
    try:
        yield
    except FedBEError:
        if not any(path.suffix == ".safetensors" or path.name == "rounds.jsonl" for path in folder.rglob("*")):
            with suppress(BusyError), locked(folder):  # or another process is in its first round there
                shutil.rmtree(folder, ignore_errors=True)
        raise


def read_info(folder: Path) -> RunInfo:
    path = folder / "run.json"
    try:
        info = RunInfo(**json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(info.made_with, dict):
            raise TypeError("made_with must be a table")
        return info
    except FileNotFoundError:
        raise RunError(f"{folder} is no run: it has no run.json") from None
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def read_recipe(folder: Path) -> Recipe:
    path = folder / "recipe.toml"
    if not path.is_file():
        raise RunError(f"{folder} has no recipe.toml: it is no run, or a damaged one")
    return load_recipe(path)


def read_rounds(folder: Path) -> list[Record]:
    """The lines of rounds.jsonl; a last line that a crash cut off is left out."""
    path = folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record["round"], int):
                raise TypeError("it has no round")
            records.append(record)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise RunError(f"line {number} of {path} is damaged: mend it from a copy, or start a new run") from error
    return records


def is_done(folder: Path) -> bool:
    """Is there nothing left to do? A finished run whose model was lost can make it anew from its last checkpoint."""
    lost = not (folder / saved_model.FILE).exists() and bool(checkpoint.found(folder))
    return read_info(folder).finished is not None and not lost


def read_task(folder: Path) -> Task:
    """The data of a run's recipe."""
    return data.load_task(read_recipe(folder).data.source)


def rounds_left(folder: Path) -> int:
    """Rounds that are still to be played."""
    info, recipe = read_info(folder), read_recipe(folder)
    total = recipe.rounds(recipe.method_for(info.method))
    return 0 if info.finished else max(0, total - len(read_rounds(folder)))


def execute(
    folder: Path,
    pool: ProcessPool,
    observer: Observer,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    task: Task | None = None,
    first_round: Path | None = None,
) -> bool:
    """Train until the last round; True if it was reached, False if `should_stop` said to stop before it.

    Runs that begin alike and are given one folder as `first_round` train the clients of that round once; who gives it
    removes it.
    """
    info, recipe = read_info(folder), read_recipe(folder)
    with locked(folder):
        federation = prepare(recipe, info.seed, task)
        sim = simulation(recipe, info, federation, pool)
        identity = identity_of(recipe, info, federation)
        state = checkpoint.latest(folder, identity) or _first(sim)
        _forget_after(folder, state.round)
        if 0 < state.round < sim.rounds:
            info = _went_on(folder, info, state.round + 1)
        made_with = f"{identity['code']}, {identity['model']}, torch {identity['torch']}"
        own = ClientCache(folder / "trained", federation, sim.runner.plan, made_with)
        first = replace(own, folder=first_round or own.folder)
        observer.begin(f"{sim.method.title}, seed {info.seed}", sim.rounds, state.round)
        try:
            while state.round < sim.rounds:
                number = state.round + 1
                phase = partial(observer.phase, number)
                state, record = play_round(sim, state, phase, first if number == 1 else own, should_stop)
                append_line(folder / "rounds.jsonl", record)
                checkpoint.save(folder, state, identity)
                own.clear()
                observer.round_ended(record)
        except Stopped:
            return False
        finally:
            observer.end()
        own.clear()
        _finish(folder, sim, state, info)
    return True


def simulation(recipe: Recipe, info: RunInfo, federation: Federation, pool: ProcessPool) -> Simulation:
    method, watched = recipe.method_for(info.method), recipe.evaluation.ensemble
    module = initial_weights(federation.model, info.seed)
    asks = method.needs_unlabeled(module) or (
        watched and recipe.teacher(method, members=watched).needs_unlabeled(module)
    )
    if asks and federation.server is None:
        raise RunError(f"{method.title} needs images at the server: set data.server or data.unlabeled in the recipe")
    plan = Plan(info.precision)
    pool.configure(federation, plan)
    torch.set_num_threads(server_threads(module))
    keep_freed_memory()
    return Simulation(recipe, method, info.seed, federation, ModelRunner(module, plan), pool)


def _first(sim: Simulation) -> RunState:
    return RunState(0, sim.runner.read())


def _went_on(folder: Path, info: RunInfo, round: int) -> RunInfo:
    """Say in run.json with what a run goes on, where that is not what it had: more cores, another commit."""
    told = dict(info.made_with)
    for what, now in made_with().items():
        if not (had := told.get(what, "unknown")).endswith(now):
            told[what] = f"{had}, from round {round} on {now}"
    if told != info.made_with:
        info = replace(info, made_with=told)
        write_json(folder / "run.json", vars(info))
    return info


def _forget_after(folder: Path, round: int) -> None:
    """Drop lines of rounds that no checkpoint holds: they will be played again."""
    path, records = folder / "rounds.jsonl", read_rounds(folder)
    if len(records) > round + checkpoint.KEPT:  # more than a crash, and a checkpoint that it spoilt, can leave
        raise RunError(
            f"{path} has {len(records)} rounds, but the last checkpoint is of round {round}: bring the checkpoints "
            "back, or start a new run"
        )
    kept = [r for r in records if r["round"] <= round]
    if [r["round"] for r in kept] != list(range(1, round + 1)):
        raise RunError(
            f"{path} has {len(kept)} of the {round} rounds that are played: mend it from a copy, or start a new run"
        )
    if path.exists():
        write_whole(path, "".join(json.dumps(r) + "\n" for r in kept).encode())


def _finish(folder: Path, sim: Simulation, state: RunState, info: RunInfo) -> None:
    members = state.members or (Member("model", state.model),)
    saved_model.save(folder, members, sim.runner.layout, sim.federation)
    final = read_rounds(folder)[-1]
    done = {**vars(info), "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "final": final["test"]}
    write_json(folder / "run.json", done)


def identity_of(recipe: Recipe, info: RunInfo, federation: Federation) -> dict[str, str]:
    """What a checkpoint belongs to: nothing of it may change while a run goes on."""
    settings = json.dumps(dump_recipe(recipe), sort_keys=True)
    return {
        "recipe": hashlib.sha256(settings.encode()).hexdigest()[:16],
        "method": info.method,
        "seed": str(info.seed),
        "precision": info.precision,
        "data": federation.digest[:16],
        "code": code_version(numbers_only=True),
        "model": plugins.source_digest(recipe.model.name) if ":" in recipe.model.name else recipe.model.name,
        "torch": torch.__version__,
    }


@cache
def code_version(*, numbers_only: bool = False) -> str:
    """The version, and a digest of the package's own source as it was loaded; or only of what makes numbers."""
    digest = hashlib.sha256()
    root = Path(fedbe.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not (numbers_only and name.startswith(WITHOUT_NUMBERS)):
            digest.update(name.encode() + path.read_bytes())
    return f"{fedbe.__version__}+{digest.hexdigest()[:12]}"


def made_with() -> dict[str, str]:
    """What a result was made with."""
    return {
        "fedbe": code_version(),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {cores()} cores, {torch.backends.cpu.get_cpu_capability()}",
    }


def _commit() -> str:
    """The commit of the source tree that this package was loaded from, if it is one."""
    here = Path(fedbe.__file__).parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        return head + (" and uncommitted changes" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
