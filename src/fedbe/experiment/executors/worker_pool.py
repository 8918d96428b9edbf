"""What all executors with workers have in common: who runs which job, and what happens when a worker dies.

A worker that dies, hangs or cannot use its device any more is replaced and its job runs again, up to three times.
"""

import platform
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import torch

from fedbe.core import plugins
from fedbe.core.compute import Plan
from fedbe.core.devices import device_of_worker
from fedbe.errors import FedBEError, ModelWarning, RunError
from fedbe.experiment.executors.base import Broken, Done, Failed, Job, Lost, MemoryPeak, Outcome, Stopped, failure
from fedbe.experiment.executors.job_queue import ATTEMPTS, JobQueue
from fedbe.experiment.executors.memory_usage import keep_freed_memory
from fedbe.experiment.executors.watchdog import JobTimes
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import prepare_jobs


class Worker(ABC):
    """One worker, and the job that it runs."""

    def __init__(self) -> None:
        self.job: int | None = None
        self.queue: JobQueue | None = None  # the call of `map` that the job belongs to
        self.started = 0.0
        self.job_limit: float | None = None

    @property
    def seconds(self) -> float:
        """How long the current job has been running."""
        return time.perf_counter() - self.started

    @property
    def is_ready(self) -> bool:
        """Whether the worker can take a job."""
        return True

    def works_for(self, queue: JobQueue) -> bool:
        """Whether the worker runs a job of this call of `map`."""
        return self.job is not None and self.queue is queue

    @abstractmethod
    def set_up(self, setup: tuple[Any, ...]) -> bool:
        """Set data and arithmetic of the jobs that follow; False if the worker has died."""

    @abstractmethod
    def start(self, job: Job) -> bool:
        """Start a job; False if the worker has died."""

    @abstractmethod
    def receive(self) -> Any:
        """The answer of the job that has ended; None if the worker has died. `Broken` needs no `read`."""

    def read(self, answer: Any) -> Outcome:
        """The outcome in an answer. The worker may run its next job meanwhile."""
        outcome: Outcome = answer
        return outcome

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once; the pool then finds it dead."""

    @abstractmethod
    def close(self) -> str:
        """End the worker; returns how it ended, for messages."""


class JobRunner:
    """What a worker does in its own process: it prepares the process, and runs one job after the other."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", ModelWarning)  # the main process has tried the model and warned
        plugins.trust()  # the main process has checked what it sends
        keep_freed_memory()
        self._setup: tuple[Any, Any] = (None, None)  # the federation and the model, for jobs that use them
        self._problem: Failed | None = None

    def set_up(self, federation: Federation, plan: Plan, device: str | None = None, number: int = 0) -> None:
        """Set the data and the arithmetic of the jobs that follow.

        Args:
            federation: The data.
            plan: The arithmetic.
            device: If not None, the devices that the workers take in turn, as they are here, instead of the plan's.
            number: The position of this worker among the others.
        """
        self._setup, self._problem = (None, None), None
        try:
            if device is not None:
                plan = replace(plan, device=device_of_worker(device, number))
            self._setup = prepare_jobs(federation, plan)
        except FedBEError as error:  # the main process did the same, so it is not the job's fault
            self._problem = Lost(f"on {platform.node()}, {error}")
        except Exception as error:
            problem = failure(error)
            self._problem = problem if isinstance(problem, Lost) else Lost(f"on {platform.node()}, {problem.reason}")

    def run(self, job: Job) -> Outcome:
        """Run a job."""
        if self._problem is not None:
            return self._problem
        begin = time.perf_counter()
        try:
            value = job.run(*self._setup)
        except Exception as error:
            return failure(error)
        return Done(value, time.perf_counter() - begin)


W = TypeVar("W", bound=Worker)


class WorkerPool(ABC, Generic[W]):
    """An executor with a fixed number of workers; see `Executor`. A subclass makes workers and waits for them.

    Args:
        workers: The number of workers, at least 1.

    Raises:
        RunError: `workers` is below 1, or they cannot be made.
    """

    has_own_devices = False

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise RunError(f"`workers` must be >= 1, got {workers}")
        self._setup: tuple[Federation, Plan] | None = None
        self._workers: list[W] = []
        self._times = JobTimes()
        try:
            for _ in range(workers):
                self._workers.append(self._make_worker())
        except RunError:
            for worker in self._workers:
                worker.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    @abstractmethod
    def _make_worker(self) -> W:
        """Start a worker.

        Raises:
            RunError: The system does not allow it.
        """

    @abstractmethod
    def _wait(self, busy: Sequence[W]) -> Sequence[W]:
        """Wait until something happened; returns those of the workers whose job has ended, or that have died."""

    @abstractmethod
    def memory_peak(self) -> MemoryPeak:
        """Start to measure the memory of this process and of the workers."""

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self._workers)

    def configure(self, federation: Federation, plan: Plan) -> None:
        """Set the data and the arithmetic of the jobs that follow, for all workers and for replacements."""
        self._setup = (federation, plan)
        for i, worker in enumerate(self._workers):
            if not worker.set_up(self._setup_of(i)):
                self._replace(i)

    def _setup_of(self, i: int) -> tuple[Any, ...]:
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
        for number, outcome in self._collect(queue, should_stop):
            queue.finish(number, outcome)
            if done is not None:
                done(number, outcome)

    def _start_jobs(self, queue: JobQueue) -> None:
        """Give a job to each idle worker, while there are jobs."""
        for i, worker in enumerate(self._workers):
            if worker.works_for(queue) or not worker.is_ready:
                continue
            following = queue.start_next()
            if following is None:
                return
            if worker.job is not None:  # from a call of `map` that was abandoned: its outcome must not be mixed up
                self._replace(i)
                worker = self._workers[i]
                if not worker.is_ready:  # it may die before it is, and would lose a job that it has already
                    queue.put_back(following[0])
                    continue
            number, job = following
            worker.job, worker.queue, worker.started = number, queue, time.perf_counter()
            worker.job_limit = self._times.limit(job)
            if hasattr(job, "for_worker"):
                job = job.for_worker(i)
            if not worker.start(job):
                queue.put_back(number)
                self._replace(i)

    def _collect(self, queue: JobQueue, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Outcome]]:
        """Wait until at least one worker answers or dies, and yield the jobs that have ended."""
        for worker in self._wait([worker for worker in self._workers if worker.works_for(queue)]):
            number, answer = worker.job, worker.receive()
            assert number is not None, "a worker that is waited for has a job"
            worker.job = worker.job_limit = None
            if answer is None or isinstance(answer, Broken):
                end = self._replace(self._workers.index(worker))
                if queue.count_death(number):
                    queue.put_back(number)
                    continue
                reason = end if answer is None else answer.reason
                outcome: Outcome = Lost(f"its worker process died or hung {ATTEMPTS} times ({reason})")
            else:
                if not should_stop():
                    self._start_jobs(queue)  # first, so that the worker need not wait while its answer is read
                outcome = worker.read(answer)
            if isinstance(outcome, Done):
                self._times.note(queue.job(number), outcome.seconds)
            yield number, outcome

    def _replace(self, i: int) -> str:
        """Start a new worker in place of another one; returns how the old one ended."""
        end = self._workers[i].close()
        self._workers[i] = self._make_worker()
        if self._setup is not None:
            self._workers[i].set_up(self._setup_of(i))
        return end
