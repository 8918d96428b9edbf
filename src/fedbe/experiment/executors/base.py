"""The interface of an executor. A new one (Ray, devices) implements `Executor` and gets a line in `make_executor`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

from fedbe.core.compute import Plan
from fedbe.core.devices import is_device_failure, is_out_of_memory
from fedbe.core.model_runner import ModelRunner
from fedbe.experiment.federation import Federation


class Job(Protocol):
    """A piece of work whose result depends on the job alone, never on where it runs.

    A job is a frozen dataclass. Its fields and its result consist of tensors, dicts, dataclasses and plain values, so
    that an executor can send them to another process. A job that chooses its device has `for_worker(number)`: the job
    as one of several workers runs it.
    """

    @property
    def name(self) -> str:
        """What the job does, for messages."""
        ...

    def run(self, federation: Federation, runner: ModelRunner) -> Any:
        """Do the work with the federation's data and a model that the executor reuses for all its jobs.

        A job that makes its own (a whole run) needs no call of `configure`, and gets None for both.
        """
        ...


@dataclass(frozen=True, eq=False)
class Done:
    """The result of a job, and how long it took."""

    value: Any
    seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """Why a job has no result."""

    reason: str


@dataclass(frozen=True)
class Lost(Failed):
    """A job that this machine could not run: its worker died or hung several times, or the device's memory was full."""


@dataclass(frozen=True)
class Broken(Lost):
    """A job whose process cannot use its device any more. A pool replaces the worker, and the job runs again."""


def failure(error: Exception) -> Failed:
    """Why a job that raised an error has no result."""
    if is_out_of_memory(error):
        return Lost("the memory of the device is full")
    if is_device_failure(error):
        return Broken(f"the device failed: {str(error).splitlines()[0]}")
    return Failed(f"{type(error).__name__}: {error}")


Outcome = Done | Failed
LOST_ADVICE = "free some memory, use fewer workers (--workers) or another device (--device), then resume"


class Stopped(Exception):  # noqa: N818 (a stop is not an error)
    """A run was stopped on request, and some jobs have not run."""


class MemoryPeak(Protocol):
    """Measures memory from the moment when it is created."""

    def mb(self) -> float:
        """The largest resident memory since then, in MB, summed over all processes that work for the executor."""
        ...


class Executor(Protocol):
    """Runs jobs. It is a context manager; leaving it frees what it holds.

    Example:
        with make_executor(2) as executor:
            executor.configure(federation, plan)
            outcomes = list(executor.map(jobs))
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def workers(self) -> int:
        """How many jobs can run at the same time."""
        ...

    @property
    def has_own_devices(self) -> bool:
        """Whether jobs may run on other machines, so that this process need not have the device of a run."""
        ...

    def configure(self, federation: Federation, plan: Plan) -> Federation | None:
        """Set the data and the arithmetic of the jobs that follow.

        Returns:
            The data as the jobs of this process use it, on the plan's device; None if jobs run in other processes.
        """
        ...

    def map(
        self,
        jobs: Iterable[Job],
        *,
        ahead: int | None = None,
        done: Callable[[int, Outcome], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Outcome]:
        """Run jobs and yield their outcomes in the order of the jobs.

        Args:
            jobs: The jobs; may be a generator.
            ahead: How many jobs may be drawn from `jobs` before the outcome of the first of them was taken; all if
                None. It limits how many models are in memory.
            done: Called with the number of a job and its outcome as soon as the job ends, in any order.
            should_stop: Called between jobs. If True, running jobs end and no other job starts.

        Raises:
            Stopped: `should_stop` returned True, and some jobs have not run.
        """
        ...

    def memory_peak(self) -> MemoryPeak:
        """Start to measure the memory of this process and of the processes that run jobs."""
        ...
