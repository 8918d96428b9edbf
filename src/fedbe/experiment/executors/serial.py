"""Jobs run in this process, one after the other. Slow, but a debugger sees everything."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from fedbe.core.compute import Plan, one_thread
from fedbe.experiment.executors.base import Done, Job, Outcome, Stopped, failure
from fedbe.experiment.executors.memory_usage import ProcessMemoryPeak
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import prepare_jobs


class Serial:
    """An executor without worker processes. Jobs use one thread, as in a worker, so the results have the same bits."""

    workers = 1
    has_own_devices = False

    def __init__(self) -> None:
        self._setup: tuple[Any, Any] = (None, None)  # the federation, and the model that all jobs use

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._setup = (None, None)

    def configure(self, federation: Federation, plan: Plan) -> Federation:
        """Set the data and the arithmetic of the jobs that follow; returns the data on the plan's device."""
        self._setup = prepare_jobs(federation, plan)
        placed: Federation = self._setup[0]
        return placed

    def map(
        self,
        jobs: Iterable[Job],
        *,
        ahead: int | None = None,  # noqa: ARG002 (a job is drawn only when it runs)
        done: Callable[[int, Outcome], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Outcome]:
        """Run each job when its outcome is needed; see `Executor.map`."""
        for number, job in enumerate(jobs):
            if should_stop():
                raise Stopped
            outcome = self._run(job)
            if done is not None:
                done(number, outcome)
            yield outcome

    def memory_peak(self) -> ProcessMemoryPeak:
        """Start to measure the memory of this process."""
        return ProcessMemoryPeak()

    def _run(self, job: Job) -> Outcome:
        begin = time.perf_counter()
        try:
            with one_thread():
                value = job.run(*self._setup)
        except Exception as error:
            return failure(error)
        return Done(value, time.perf_counter() - begin)
