"""Single-threaded worker processes: one reused model each, data in shared memory, jobs over a pipe.

A worker process that dies or hangs is replaced and its job runs again, up to three times. Tensors travel as NumPy
arrays, because torch would open a shared-memory file for each of them.
"""

import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

import numpy as np
import torch
import torch.multiprocessing  # teaches pipes to hand over tensors in shared memory
from torch import Tensor

from fedbe.core import plugins
from fedbe.core.compute import Plan
from fedbe.errors import FedBEError, ModelWarning, RunError
from fedbe.experiment.executors.base import Done, Failed, Job, Lost, Outcome, Stopped, failure
from fedbe.experiment.executors.forkserver import start_method, warm_up
from fedbe.experiment.executors.job_queue import ATTEMPTS, JobQueue
from fedbe.experiment.executors.memory_usage import ProcessMemoryPeak, keep_freed_memory
from fedbe.experiment.executors.watchdog import HANG_SECONDS, JobTimes, Watchdog, start_beating
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import prepare_jobs


class _Worker:
    """One worker process, and the job that it runs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context(start_method())
        self.pipe, worker_pipe = context.Pipe()
        self.beat = context.RawValue("Q", 0)
        arguments = (worker_pipe, self.beat)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        worker_pipe.close()
        self.job: int | None = None
        self.queue: JobQueue | None = None  # the call of `map` that the job belongs to
        self.started = 0.0
        self.job_limit: float | None = None

    def kill(self) -> None:
        """End the process at once; the pool then finds it dead."""
        self.process.kill()

    def works_for(self, queue: JobQueue) -> bool:
        return self.job is not None and self.queue is queue

    def send(self, kind: str, value: Any) -> bool:
        """Send a message; False if the process has died."""
        try:
            self.pipe.send((kind, value))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Outcome | None:
        """The outcome of the job; None if the process has died."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.job = self.job_limit = None
        seconds = time.perf_counter() - self.started
        return Done(_to_tensors(value), seconds) if kind == "done" else value

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class ProcessPool:
    """An executor with a fixed number of worker processes; see `Executor`.

    Args:
        workers: The number of processes, at least 1.
        hang_seconds: A process that shows no sign of life for this long is replaced, like one that died.

    Raises:
        RunError: `workers` is below 1, or the system does not allow so many processes or open files.
    """

    def __init__(self, workers: int, hang_seconds: float = HANG_SECONDS) -> None:
        if workers < 1:
            raise RunError(f"`workers` must be >= 1, got {workers}")
        self._setup: tuple[Federation, Plan] | None = None
        self._workers: list[_Worker] = []
        self._times = JobTimes()
        try:
            with _system_limits():
                warm_up()
                for _ in range(workers):
                    self._workers.append(_Worker())
        except RunError:
            for worker in self._workers:
                worker.close()
            raise
        self._watchdog = Watchdog(lambda: self._workers, hang_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.close()
        for worker in self._workers:
            worker.close()

    @property
    def workers(self) -> int:
        """The number of worker processes."""
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [w.process.pid for w in self._workers if w.process.pid is not None]

    def memory_peak(self) -> ProcessMemoryPeak:
        """Start to measure the memory of this process and of the workers."""
        return ProcessMemoryPeak(self.pids)

    def configure(self, federation: Federation, plan: Plan) -> None:
        """Set the data and the arithmetic of the jobs that follow, for all workers and for replacements."""
        with _system_limits():
            self._setup = (federation.share_(), plan)
            for i, worker in enumerate(self._workers):
                if not worker.send("setup", self._setup_of(i)):
                    self._replace(i)

    def _setup_of(self, i: int) -> tuple[Federation, Plan]:
        """The data, and the plan with the device of worker i."""
        assert self._setup is not None, "`configure` is called first"
        federation, plan = self._setup
        return federation, plan.for_worker(i)

    def map(
        self,
        jobs: Iterable[Job],
        *,
        ahead: int | None = None,
        done: Callable[[int, Outcome], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Outcome]:
        """Run jobs in the workers; see `Executor.map`."""
        queue = JobQueue(jobs, ahead)
        while True:
            while queue.draw():
                if ahead is not None:  # drawing the next job may take long, so start this one first
                    self._start_jobs(queue)
            outcome = queue.take_outcome()
            if outcome is not None:
                yield outcome
            elif queue.is_complete:
                return
            else:
                self._advance(queue, done, should_stop)

    def _advance(
        self, queue: JobQueue, done: Callable[[int, Outcome], None] | None, should_stop: Callable[[], bool]
    ) -> None:
        """Start what can start, and wait until a job ends."""
        if not should_stop():
            self._start_jobs(queue)
        elif not any(worker.works_for(queue) for worker in self._workers):
            raise Stopped
        for number, outcome in self._collect(queue):
            queue.finish(number, outcome)
            if done is not None:
                if not should_stop():
                    self._start_jobs(queue)  # first, so that the worker need not wait while `done` runs
                done(number, outcome)

    def _start_jobs(self, queue: JobQueue) -> None:
        """Give a job to each idle worker, while there are jobs."""
        for i, worker in enumerate(self._workers):
            if worker.works_for(queue):
                continue
            following = queue.start_next()
            if following is None:
                return
            if worker.job is not None:  # from a call of `map` that was abandoned: its outcome must not be mixed up
                self._replace(i)
                worker = self._workers[i]
            number, job = following
            worker.job, worker.queue, worker.started = number, queue, time.perf_counter()
            worker.job_limit = self._times.limit(job)
            if not worker.send("job", _to_arrays(job)):
                queue.put_back(number)
                self._replace(i)

    def _collect(self, queue: JobQueue) -> Iterator[tuple[int, Outcome]]:
        """Wait until at least one worker answers or dies, and yield the jobs that have ended."""
        busy = [worker for worker in self._workers if worker.works_for(queue)]
        if not busy:
            return
        ready = set(wait([worker.pipe for worker in busy]))
        for i, worker in enumerate(self._workers):
            if worker.job is None or worker.pipe not in ready:
                continue
            number, outcome = worker.job, worker.receive()
            if isinstance(outcome, Done):
                self._times.note(queue.job(number), outcome.seconds)
            if outcome is None:
                exit_code = self._replace(i)
                if queue.count_death(number):
                    queue.put_back(number)
                    continue
                outcome = Lost(f"its worker process died or hung {ATTEMPTS} times (exit code {exit_code})")
            yield number, outcome

    def _replace(self, i: int) -> int | None:
        """Start a new process in place of a worker; returns the exit code of the old one."""
        old = self._workers[i]
        old.close()
        with _system_limits():
            self._workers[i] = _Worker()
            if self._setup is not None:
                self._workers[i].pipe.send(("setup", self._setup_of(i)))
        return old.process.exitcode


@contextmanager
def _system_limits() -> Iterator[None]:
    """Turn what the system refuses (processes, open files, shared memory) into one sentence."""
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        if isinstance(error, FedBEError):
            raise
        raise RunError(
            f"worker processes cannot be started ({error}): use fewer (--workers), or raise the system's limits "
            "(`ulimit -n` for open files)"
        ) from error


def _serve(pipe: Connection, beat: Any) -> None:
    """The main function of a worker process: run one job after the other until the pipe closes."""
    # Ctrl-C goes to every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_beating(beat)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ModelWarning)  # the main process has tried the model and warned
    plugins.trust()  # the parent has checked what it sends
    keep_freed_memory()
    federation = runner = None
    problem: Failed | None = None
    while True:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            return
        if kind == "setup":
            try:
                (federation, runner), problem = prepare_jobs(*value), None
            except FedBEError as error:
                problem = Failed(str(error))
            except torch.OutOfMemoryError as error:
                problem = failure(error)
            continue
        answer = ("failed", problem) if problem else _answer(_to_tensors(value), federation, runner)
        try:
            pipe.send(answer)
        except OSError:  # the pool was closed meanwhile
            return


def _answer(job: Job, federation: Any, runner: Any) -> tuple[str, Any]:
    try:
        return "done", _to_arrays(job.run(federation, runner))
    except Exception as error:
        return "failed", failure(error)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The same dataclasses and dicts with every tensor or array converted."""
    if isinstance(value, Tensor | np.ndarray):
        return convert(value)
    if isinstance(value, dict):
        return {k: _converted(v, convert) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _converted_fields(value, convert)
    return value


def _converted_fields(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The same dataclass with converted fields; fields that stay the same are not set again."""
    before = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    after = {name: _converted(field, convert) for name, field in before.items()}
    return replace(value, **{name: field for name, field in after.items() if field is not before[name]})


def _to_arrays(value: Any) -> Any:
    return _converted(value, lambda t: t.numpy() if isinstance(t, Tensor) else t)


def _to_tensors(value: Any) -> Any:
    return _converted(value, lambda a: torch.from_numpy(a) if isinstance(a, np.ndarray) else a)
