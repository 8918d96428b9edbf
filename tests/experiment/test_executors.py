"""Serial, and the choice of an executor. test_process_pool.py has the worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.errors import RunError, SettingError
from fedbe.experiment.executors import make_executor
from fedbe.experiment.executors.base import Done, Failed, Job, Outcome, Stopped
from fedbe.experiment.executors.memory_usage import ProcessMemoryPeak
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.executors.worker_pool import Worker, WorkerPool
from fedbe.experiment.federation import Federation, prepare
from fedbe.experiment.recipe import Recipe


@dataclass(frozen=True)
class Echo:
    number: int
    name: str = "echo"

    def run(self, federation: Federation, runner: ModelRunner) -> tuple[int, int]:  # noqa: ARG002
        if self.number < 0:
            raise ValueError("it must not be negative")
        return self.number, torch.get_num_threads()


@pytest.fixture
def serial(small: Recipe) -> Iterator[Serial]:
    with Serial() as executor:
        executor.configure(prepare(small, 0), Plan())
        yield executor


def test_workers_decide_the_executor() -> None:
    with make_executor(0) as none, make_executor(1) as one:
        assert isinstance(none, Serial)
        assert isinstance(one, ProcessPool)
        assert none.workers == one.workers == 1
    with pytest.raises(RunError, match="workers"):
        make_executor(-1)
    with pytest.raises(SettingError, match="unknown executor 'rai': did you mean 'ray'"):
        make_executor(1, "rai")
    with pytest.raises(SettingError, match="add --executor ray"):
        make_executor(1, address="auto")
    for reserved in ({"cpus_per_worker": 2.0}, {"gpus_per_worker": 0.5}):
        with pytest.raises(SettingError, match="add --executor ray"):
            make_executor(1, **reserved)


def test_jobs_are_lazy_and_single_threaded(serial: Serial) -> None:
    drawn: list[int] = []

    def jobs() -> Iterator[Echo]:
        for number in range(3):
            drawn.append(number)
            yield Echo(number)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        outcomes = serial.map(jobs(), ahead=1)
        first = next(outcomes)
        assert isinstance(first, Done)
        assert (first.value, drawn) == ((0, 1), [0])
        assert torch.get_num_threads() == 2
        assert len(list(outcomes)) == 2
    finally:
        torch.set_num_threads(before)


def test_an_exception_fails_the_job(serial: Serial) -> None:
    failed, done = serial.map([Echo(-1), Echo(1)])
    assert failed == Failed("ValueError: it must not be negative")
    assert isinstance(done, Done)


def test_a_stop_starts_no_other_job(serial: Serial) -> None:
    finished: list[int] = []

    def done(number: int, _: Outcome) -> None:
        finished.append(number)

    with pytest.raises(Stopped):
        list(serial.map([Echo(i) for i in range(3)], done=done, should_stop=lambda: bool(finished)))
    assert finished == [0]
    assert len(list(serial.map([Echo(0)], done=done, should_stop=lambda: False))) == 1


def test_memory_is_measured(serial: Serial) -> None:
    assert serial.memory_peak().mb() > 0


class Starting(Worker):
    """A worker that answers at once, and may still be starting."""

    is_ready = True

    def set_up(self, setup: tuple[object, ...]) -> bool:  # noqa: ARG002
        return True

    def start(self, job: Job) -> bool:
        assert self.is_ready, "it would lose the job if it died before it is ready"
        self.given = job
        return True

    def receive(self) -> Outcome:
        return Done(self.given)

    def kill(self) -> None: ...

    def close(self) -> str:
        return "closed"


class SlowPool(WorkerPool[Starting]):
    """One worker. One that replaces it is ready only when the pool has waited."""

    def _make_worker(self) -> Starting:
        worker = Starting()
        worker.is_ready = not self._workers
        return worker

    def _wait(self, busy: Sequence[Starting]) -> Sequence[Starting]:
        for worker in self._workers:
            worker.is_ready = True
        return busy

    def memory_peak(self) -> ProcessMemoryPeak:
        return ProcessMemoryPeak()


def test_a_worker_that_replaces_another_gets_its_job_when_it_is_ready() -> None:
    with SlowPool(1) as pool:
        abandoned = pool.map([Echo(0), Echo(1)])
        assert isinstance(next(abandoned), Done)  # and the worker runs the second job
        (outcome,) = pool.map([Echo(2)])
    assert isinstance(outcome, Done)
    assert outcome.value == Echo(2)
