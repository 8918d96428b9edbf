"""Whole runs as jobs: several runs at the same time, one process each, or one after the other with all workers.

A run that is a job trains its clients in its own process (`Serial`), so it has the same bits as a run whose clients
are spread over workers. The driver sees its progress in the run folder, and stops it with a file; both work for every
executor whose workers see the folder.
"""

import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

from fedbe import data
from fedbe.core.compute import Plan, one_thread
from fedbe.core.devices import device_of_worker
from fedbe.core.inputs import tensors_of
from fedbe.core.model_runner import ModelRunner, try_model
from fedbe.data import Task
from fedbe.errors import FedBEError, RunError, RunWarning, check_option
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback, CallbackList
from fedbe.experiment.executors.base import Done, Executor, Lost, Outcome, Stopped
from fedbe.experiment.executors.memory_usage import available_mb
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.simulation import needs_all_cores
from fedbe.experiment.trackers import make_tracker

SPREADS = ("auto", "runs", "clients")
POLL_SECONDS = 0.3
PROCESS_MB = 1000  # torch, fedbe and the activations of a batch


@dataclass(frozen=True)
class NewRun:
    """What a run folder is created with; see `run_folder.create`."""

    recipe: Recipe
    method: str
    seed: int
    precision: str
    device: str = "cpu"


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: finished, stopped, or with an error; and the warnings on the way."""

    finished: bool
    error: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunJob:
    """One whole run.

    Args:
        folder: The run folder.
        new: Create the folder with this, if it does not exist.
        first_round: A folder where runs with the same first round share its trained clients.
        trackers: Names of trackers; see `trackers.make_tracker`.
        stop_file: The run stops when this file exists.
        worker: The number of the worker, where runs share this machine: workers take the devices of a run in turn.
            None for a run that has all workers.
    """

    folder: Path
    new: NewRun | None = None
    first_round: Path | None = None
    trackers: tuple[str, ...] = ()
    stop_file: Path | None = None
    worker: int | None = None
    unlimited = True  # no other run says how long it takes; see `JobTimes`

    @property
    def name(self) -> str:
        """What the job does, for messages."""
        return f"the run {self.folder}"

    @property
    def recipe(self) -> Recipe:
        """The settings of the run."""
        return self.new.recipe if self.new is not None else run_folder.read_recipe(self.folder)

    @property
    def method(self) -> str:
        """The name of the run's method."""
        return self.new.method if self.new is not None else run_folder.read_info(self.folder).method

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.new.seed if self.new is not None else run_folder.read_info(self.folder).seed

    @property
    def rounds_left(self) -> int:
        """The number of rounds that are not finished."""
        if self.new is None or self._exists:
            return run_folder.rounds_left(self.folder)
        return self.recipe.rounds(self.recipe.method_for(self.new.method))

    def for_worker(self, number: int) -> "RunJob":
        """The run as one of several workers trains it."""
        return replace(self, worker=number)

    @property
    def _exists(self) -> bool:
        return run_folder.exists(self.folder)

    def run(self, federation: object = None, runner: object = None) -> RunEnd:  # noqa: ARG002 (a run makes its own)
        """Train the run in this process. An error that a user can meet is returned as a sentence."""
        with warnings.catch_warnings(record=True) as caught, one_thread():
            warnings.simplefilter("always", RunWarning)
            try:
                finished, error = self.execute(Serial(), Callback(), self._is_stopped), ""
            except FedBEError as problem:
                finished, error = False, str(problem)
        messages = tuple(str(w.message) for w in caught if issubclass(w.category, RunWarning))
        return RunEnd(finished, error, messages)

    def execute(self, executor: Executor, callback: Callback, should_stop: Callable[[], bool]) -> bool:
        """Train the run with an executor; see `loop.execute`."""
        if self.new is None:
            return self._execute(executor, callback, should_stop)
        if not self._exists:
            run_folder.create(self.folder, **vars(self.new))
        with run_folder.discard_on_error(self.folder):
            return self._execute(executor, callback, should_stop)

    def _execute(self, executor: Executor, callback: Callback, should_stop: Callable[[], bool]) -> bool:
        callbacks = CallbackList([callback, *(make_tracker(name, self.folder) for name in self.trackers)])
        device = run_folder.read_info(self.folder).device
        return loop.execute(
            self.folder,
            executor,
            callbacks,
            should_stop=should_stop,
            task=_load_task(self.recipe.data.source),
            first_round=self.first_round,
            device=device if self.worker is None else device_of_worker(device, self.worker),
            shares_cores=self.worker is not None,
        )

    def _is_stopped(self) -> bool:
        return self.stop_file is not None and self.stop_file.exists()


@lru_cache(maxsize=1)
def _load_task(source: str) -> Task:
    """The data set of the last run stays in memory: the next run of this process mostly has the same one."""
    return data.load_task(source)


def execute_runs(
    jobs: Sequence[RunJob],
    executor: Executor,
    callback: Callback,
    should_stop: Callable[[], bool],
    *,
    whole: bool = False,
    ended: Callable[[RunJob], None] = lambda _: None,
) -> bool:
    """Train runs to their end.

    Args:
        jobs: The runs that are not finished.
        executor: Runs whole runs, or the clients of one run after the other.
        callback: Follows one run at a time; for whole runs `callback.for_run()` follows each of them.
        should_stop: Called between clients and rounds; True stops all runs.
        whole: Whether the executor gets whole runs.
        ended: Called after each run that has finished.

    Returns:
        True if all runs are finished, False if `should_stop` ended them before.

    Raises:
        RunError: A run failed. Others that were training have stopped, and can be resumed.
    """
    if whole:
        return _execute_whole(jobs, executor, callback, should_stop, ended)
    for job in jobs:
        if not job.execute(executor, callback, should_stop):
            return False
        ended(job)
    return True


def _execute_whole(
    jobs: Sequence[RunJob],
    executor: Executor,
    callback: Callback,
    should_stop: Callable[[], bool],
    ended: Callable[[RunJob], None],
) -> bool:
    """Train whole runs in the workers of the executor. The first error stops all of them."""
    stop_file = jobs[0].folder.parent.absolute() / f".stop-{uuid4().hex}"
    stop_file.parent.mkdir(parents=True, exist_ok=True)
    ordered = [
        replace(job, folder=job.folder.absolute(), stop_file=stop_file, worker=0) for job in interleaved(jobs, executor)
    ]
    errors: list[str] = []
    stops = threading.Event()

    def done(number: int, outcome: Outcome) -> None:
        end = _end_of(ordered[number], outcome)
        for message in end.warnings:
            warnings.warn(message, RunWarning, stacklevel=2)
        if end.error:
            errors.append(end.error)
        if end.finished:
            ended(ordered[number])
        else:
            stops.set()

    with _Follower(ordered, callback, lambda: stops.is_set() or should_stop(), stop_file):
        try:
            for _ in executor.map(ordered, done=done, should_stop=lambda: stops.is_set() or should_stop()):
                pass
        except Stopped:
            stops.set()
        if errors:
            raise RunError(errors[0])
    return not stops.is_set()


def _end_of(job: RunJob, outcome: Outcome) -> RunEnd:
    if isinstance(outcome, Done):
        end: RunEnd = outcome.value
        return end
    advice = "; free some memory or use fewer workers, then resume" if isinstance(outcome, Lost) else ""
    return RunEnd(False, f"{job.name} failed: {outcome.reason}{advice}")


def interleaved(jobs: Sequence[RunJob], executor: Executor) -> list[RunJob]:
    """An order in which runs that start together have different first rounds, so that later ones find them trained.

    Runs with the same first round are mostly those of one seed. So with two workers: seeds 0 and 1, method by method.
    """
    groups: dict[Path, list[RunJob]] = {}
    for job in jobs:
        groups.setdefault(job.first_round or job.folder, []).append(job)
    lists, ordered = list(groups.values()), list[RunJob]()
    for i in range(0, len(lists), executor.workers):
        together = itertools.zip_longest(*lists[i : i + executor.workers])
        ordered += [job for runs in together for job in runs if job is not None]
    return ordered


class _Follower:
    """A thread that reads the new rounds of runs from their folders, and writes the file that stops the runs."""

    def __init__(
        self, jobs: Sequence[RunJob], callback: Callback, should_stop: Callable[[], bool], stop_file: Path
    ) -> None:
        self._jobs, self._callback = jobs, callback
        self._should_stop, self._stop_file = should_stop, stop_file
        self._sizes: dict[Path, int] = {}
        self._seen = {job.folder: len(_rounds(job.folder)) for job in jobs}
        self._callbacks: dict[Path, Callback] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fedbe-follower", daemon=True)

    def __enter__(self) -> None:
        self._callback.begin("all rounds", sum(job.rounds_left for job in self._jobs), 0)
        self._thread.start()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        if error is not None and not issubclass(error, KeyboardInterrupt):
            self._callback.end("failed")
        else:
            self._callback.end("stopped" if error is not None or self._should_stop() else "finished")
        self._stop_file.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            if self._should_stop():
                self._stop_file.touch()
            self._look()

    def _look(self) -> None:
        for job in self._jobs:
            path = job.folder / run_folder.ROUNDS_FILE
            size = path.stat().st_size if path.exists() else 0
            if size != self._sizes.get(job.folder, 0):
                self._sizes[job.folder] = size
                self._report(job)

    def _report(self, job: RunJob) -> None:
        for record in _rounds(job.folder):
            if record["round"] > self._seen[job.folder]:
                self._callback_of(job).round_ended(record)
                self._seen[job.folder] = record["round"]

    def _callback_of(self, job: RunJob) -> Callback:
        if job.folder not in self._callbacks:
            info, recipe = run_folder.read_info(job.folder), run_folder.read_recipe(job.folder)
            method = recipe.method_for(info.method)
            callback = self._callbacks[job.folder] = self._callback.for_run()
            callback.begin(f"{method.title}, seed {info.seed}", recipe.rounds(method), self._seen[job.folder])
        return self._callbacks[job.folder]


def _rounds(folder: Path) -> list[run_folder.Record]:
    """The rounds in a folder that another process may be writing just now."""
    try:
        return run_folder.read_rounds(folder)
    except RunError:
        return []


def spread_runs(spread: str, jobs: Sequence[RunJob], executor: Executor) -> bool:
    """Whether workers get whole runs, rather than the clients of one run after the other.

    Args:
        spread: "runs", "clients", or "auto": whole runs if the workers are two or more processes of this machine, there
            are at least as many runs, and memory for them, and each run can do with one core. (A distillation of whole
            batches has a thread for each core and suffers from others. Workers on other machines may not see the
            folders.)
        jobs: The runs that are not finished.
        executor: Where they will run.

    Raises:
        SettingError: `spread` is unknown.
        RecipeError, DataError: Whole runs are chosen, and the first of them cannot run.
    """
    check_option("spread", spread, SPREADS)
    enough = not executor.has_own_devices and 2 <= executor.workers <= len(jobs)
    if not jobs or spread == "clients" or (spread == "auto" and not enough):
        return False
    groups: dict[str, dict[str, RunJob]] = {}
    for job in jobs:
        recipe = job.recipe
        group = groups.setdefault(f"{recipe.data!r} {recipe.split!r} {recipe.model!r}", {})
        group.setdefault(f"{recipe.method_for(job.method)!r} {recipe.evaluation!r}", job)
    needed_mb, all_cores = map(
        max, zip(*(_check_group(list(group.values())) for group in groups.values()), strict=True)
    )
    return spread == "runs" or (not all_cores and executor.workers * needed_mb < available_mb())


def _check_group(jobs: Sequence[RunJob]) -> tuple[float, bool]:
    """Try data and model of the first run in this process, which checks what code it may run and shows warnings.

    Args:
        jobs: Runs with the same data, split and model, one for each method.

    Returns:
        About how much memory a run needs, in MB, and whether the server of one of them needs all cores.
    """
    recipe = jobs[0].recipe
    task = _load_task(recipe.data.source)
    federation = prepare(recipe, jobs[0].seed, task)  # not of another seed: a split may be impossible with that one
    runner = ModelRunner(federation.build_model(), Plan(), federation.model.output)
    try_model(runner, federation.test, "the data")
    cohort = recipe.training.clients_per_round or recipe.split.clients
    model = runner.layout.size * runner.layout.dtype.itemsize
    inputs = sum(tensor.nbytes for part in (task.train, task.test) for tensor in tensors_of(part.inputs))
    # Loading copies data; updates, members and a checkpoint are models.
    all_cores = any(needs_all_cores(j.recipe, j.recipe.method_for(j.method), runner, federation) for j in jobs)
    return PROCESS_MB + (2 * inputs + 3 * cohort * model) / 2**20, all_cores
