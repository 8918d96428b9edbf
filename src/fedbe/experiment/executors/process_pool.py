"""Single-threaded worker processes: one reused model each, data in shared memory, jobs over a pipe.

A worker that dies is replaced and its job done again, up to three times. Results come back in the order of the
jobs, whoever did them and whenever. Tensors travel as NumPy arrays: a pipe needs no shared memory of its own.
"""

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # teaches pipes to hand over tensors in shared memory
from torch import Tensor

from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.errors import FedBEError, RunError
from fedbe.experiment.executors.forkserver import start_method, warm_up
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import Job
from fedbe.experiment.memory_usage import keep_freed_memory

ATTEMPTS = 3


@dataclass(frozen=True, eq=False)
class Done:
    value: Any
    seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    reason: str


Outcome = Done | Failed


class Stopped(Exception):  # noqa: N818 (it is no error)
    """Somebody asked to stop, and not all jobs were done."""


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context(start_method())
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()
        self.job: int | None = None
        self.turn: object = None  # the call of `map` that the job is of
        self.since = 0.0

    def busy_for(self, turn: object) -> bool:
        return self.job is not None and self.turn is turn

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class ProcessPool:
    """`with ProcessPool(2) as pool: pool.configure(federation, plan); results = list(pool.map(jobs))`."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise RunError(f"`workers` must be >= 1, got {workers}")
        warm_up()
        self._setup: tuple[Federation, Plan] | None = None
        self._workers = [_Worker() for _ in range(workers)]

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers if w.process.pid is not None]

    def configure(self, federation: Federation, plan: Plan) -> None:
        """Tell every worker, and every one that may replace it, which federation it works for."""
        self._setup = (federation.share_(), plan)
        for i, worker in enumerate(self._workers):
            try:
                worker.pipe.send(("setup", self._setup))
            except (BrokenPipeError, ConnectionResetError):
                self._replace(i)

    def map(
        self,
        jobs: Iterable[Job],
        *,
        ahead: int | None = None,
        done: Callable[[int, Outcome], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Outcome]:
        """Outcomes in the order of the jobs; at most `ahead` jobs are drawn before their turn (default: all).

        `done` is called with the number of a job and its outcome, whenever one finishes. If `should_stop`, the workers
        end what they are at and begin nothing new; if jobs are left then, `Stopped` is raised.
        """
        source, turn = enumerate(jobs), object()
        waiting: dict[int, Job] = {}  # drawn and not finished
        attempts: dict[int, int] = {}
        queue: deque[int] = deque()
        finished: dict[int, Outcome] = {}
        next_out, drawn, exhausted = 0, 0, False
        while True:
            while not exhausted and (ahead is None or drawn - next_out < ahead):
                try:
                    number, job = next(source)
                except StopIteration:
                    exhausted = True
                    break
                waiting[number], attempts[number] = job, 0
                queue.append(number)
                drawn += 1
                if ahead is not None:
                    self._hand_out(queue, waiting, turn)
            if next_out in finished:
                yield finished.pop(next_out)
                next_out += 1
                continue
            if exhausted and next_out == drawn:
                return
            stopping = should_stop()
            if stopping and not any(worker.busy_for(turn) for worker in self._workers):
                raise Stopped
            if not stopping:
                self._hand_out(queue, waiting, turn)
            for number, outcome in self._collect(attempts, turn):
                if outcome is None:
                    queue.appendleft(number)
                    continue
                finished[number] = outcome
                del waiting[number]
                if done is not None:
                    if not should_stop():
                        self._hand_out(queue, waiting, turn)  # the worker need not wait for what `done` does
                    done(number, outcome)

    def _hand_out(self, queue: deque[int], waiting: dict[int, Job], turn: object) -> None:
        for i, worker in enumerate(self._workers):
            if not queue:
                return
            if worker.busy_for(turn):
                continue
            if worker.job is not None:  # of a call that was given up: its outcome must not be taken for another's
                self._replace(i)
                worker = self._workers[i]
            worker.job, worker.turn, worker.since = queue.popleft(), turn, time.perf_counter()
            try:
                worker.pipe.send(("job", _plain(waiting[worker.job])))
            except (BrokenPipeError, ConnectionResetError):
                queue.appendleft(worker.job)
                self._replace(i)

    def _collect(self, attempts: dict[int, int], turn: object) -> Iterator[tuple[int, Outcome | None]]:
        """Wait for something to happen; (number, None) means that the job must be done again."""
        busy = [w for w in self._workers if w.busy_for(turn)]
        if not busy:
            return
        ready = set(wait([w.pipe for w in busy]))
        for i, worker in enumerate(self._workers):
            if worker.job is None or worker.pipe not in ready:
                continue
            number = worker.job
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, ConnectionResetError, OSError):
                code = self._replace(i)
                attempts[number] += 1
                again = attempts[number] < ATTEMPTS
                reason = f"its worker process died {ATTEMPTS} times (exit code {code})"
                yield number, None if again else Failed(reason)
                continue
            worker.job = None
            seconds = time.perf_counter() - worker.since
            yield number, Done(_tensors(value), seconds) if kind == "done" else Failed(str(value))

    def _replace(self, i: int) -> int | None:
        old = self._workers[i]
        old.close()
        self._workers[i] = _Worker()
        if self._setup is not None:
            self._workers[i].pipe.send(("setup", self._setup))
        return old.process.exitcode


def _serve(pipe: Connection) -> None:
    """A worker's life: wait for a setup, then do one job after the other until the pipe closes."""
    # Ctrl-C goes to the whole terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    federation: Federation | None = None
    runner: ModelRunner | None = None
    problem = ""
    while True:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            return
        if kind == "setup":
            federation, plan = value
            try:
                # The weights do not matter: every job loads its own.
                runner, problem = ModelRunner(federation.model.build(generator(0)), plan), ""
            except FedBEError as error:
                runner, problem = None, str(error)
            continue
        if runner is None or federation is None:
            pipe.send(("failed", problem))
            continue
        try:
            answer = ("done", _plain(_tensors(value).run(federation, runner)))
        except Exception as error:
            answer = ("failed", f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:  # the pool was closed meanwhile
            return


def _mapped(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The same dataclasses, dicts and tuples with every tensor or array converted."""
    if isinstance(value, Tensor | np.ndarray):
        return convert(value)
    if isinstance(value, dict):
        return {k: _mapped(v, convert) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.init]
        changed = {n: _mapped(getattr(value, n), convert) for n in names}
        return replace(value, **{n: v for n, v in changed.items() if v is not getattr(value, n)})
    return value


def _plain(value: Any) -> Any:
    return _mapped(value, lambda t: t.numpy() if isinstance(t, Tensor) else t)


def _tensors(value: Any) -> Any:
    return _mapped(value, lambda a: torch.from_numpy(a) if isinstance(a, np.ndarray) else a)
