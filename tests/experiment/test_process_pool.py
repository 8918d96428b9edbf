"""Worker processes: order, replacement, giving up, shared data."""

from pathlib import Path

import pytest

from fedbe.core.compute import Plan
from fedbe.errors import RunError
from fedbe.experiment.executors.base import Done, Failed, Stopped
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe import Recipe

JOBS = '''
"""Jobs for the tests; worker processes import this file."""
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

size = 1.0


@dataclass(frozen=True)
class Echo:
    number: int
    seconds: float = 0.0
    name = "echo"

    def run(self, federation, runner):
        time.sleep(self.seconds)
        return self.number


@dataclass(frozen=True)
class Dies:
    """Kills its worker the first `times` times."""
    diary: str
    times: int
    name = "dies"

    def run(self, federation, runner):
        before = len(Path(self.diary).read_text()) if Path(self.diary).exists() else 0
        if before < self.times:
            with open(self.diary, "a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return before


@dataclass(frozen=True)
class Raises:
    name = "raises"

    def run(self, federation, runner):
        raise ValueError("three is not four")


@dataclass(frozen=True)
class Shared:
    """Where this worker sees the pixels, and a mark that only shared memory carries back."""
    name = "shared"

    def run(self, federation, runner):
        federation.train._inputs[0, 0, 0, 0] = 77
        return federation.train._inputs.is_shared()
'''


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    (tmp_path / "jobs_for_tests.py").write_text(JOBS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import jobs_for_tests  # type: ignore[import-not-found]

    return jobs_for_tests


@pytest.fixture
def ready(small: Recipe, jobs: object):  # type: ignore[no-untyped-def]  # noqa: ARG001
    with ProcessPool(2) as workers:
        workers.configure(prepare(small, 0), Plan())
        yield workers


def test_results_come_in_the_order_of_the_jobs(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    slow_first = [jobs.Echo(0, 0.2), jobs.Echo(1), jobs.Echo(2), jobs.Echo(3)]
    assert [o.value for o in ready.map(slow_first) if isinstance(o, Done)] == [0, 1, 2, 3]


def test_a_lazy_source_is_drawn_only_as_far_ahead_as_asked(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    drawn: list[int] = []

    def source():  # type: ignore[no-untyped-def]
        for i in range(10):
            drawn.append(i)
            yield jobs.Echo(i)

    results = ready.map(source(), ahead=3)
    next(results)
    assert len(drawn) <= 4
    assert len(list(results)) == 9


def test_a_job_whose_worker_dies_is_done_again(ready: ProcessPool, jobs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcomes = list(ready.map([jobs.Dies(str(tmp_path / "diary"), 2), jobs.Echo(5)]))
    assert [o.value for o in outcomes if isinstance(o, Done)] == [2, 5]


def test_three_deaths_and_the_job_is_given_up_by_name(ready: ProcessPool, jobs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    dying, echo = list(ready.map([jobs.Dies(str(tmp_path / "diary"), 9), jobs.Echo(5)]))
    assert isinstance(dying, Failed)
    assert "died 3 times" in dying.reason
    assert "-9" in dying.reason
    assert echo == Done(5) or echo.value == 5


def test_an_exception_is_a_reason_and_the_worker_lives_on(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    before = ready.pids
    raised, echo = list(ready.map([jobs.Raises(), jobs.Echo(1)]))
    assert raised == Failed("ValueError: three is not four")
    assert isinstance(echo, Done)
    assert ready.pids == before


def test_data_is_shared_not_copied(small: Recipe, jobs) -> None:  # type: ignore[no-untyped-def]
    federation = prepare(small, 0)
    with ProcessPool(1) as workers:
        workers.configure(federation, Plan())
        (outcome,) = list(workers.map([jobs.Shared()]))
    assert outcome.value is True
    assert federation.train._inputs[0, 0, 0, 0] == 77


def test_closing_leaves_no_process(small: Recipe) -> None:  # noqa: ARG001
    with ProcessPool(2) as workers:
        processes = [w.process for w in workers._workers]
    assert not any(p.is_alive() for p in processes)


def test_no_workers_is_refused() -> None:
    with pytest.raises(RunError, match="`workers` must be >= 1, got 0"):
        ProcessPool(0)


def test_a_stop_ends_what_is_begun_and_begins_nothing(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    done: list[int] = []
    results = ready.map(
        [jobs.Echo(i, 0.2) for i in range(6)], done=lambda n, _: done.append(n), should_stop=lambda: bool(done)
    )
    with pytest.raises(Stopped):
        list(results)
    assert sorted(done) == [0, 1, 2]  # the third was begun before `done` was told of the first
    assert [o.value for o in ready.map([jobs.Echo(7)]) if isinstance(o, Done)] == [7]


def test_a_stop_after_the_last_job_was_begun_loses_nothing(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    done: list[int] = []
    results = ready.map(
        [jobs.Echo(0, 0.2), jobs.Echo(1)], done=lambda n, _: done.append(n), should_stop=lambda: bool(done)
    )
    assert [o.value for o in results if isinstance(o, Done)] == [0, 1]


def test_outcomes_of_a_map_that_was_given_up_are_never_taken_for_another_s(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RunError, match="disk is full"):
        list(ready.map([jobs.Echo(100), jobs.Echo(101, 0.3), jobs.Echo(102, 0.3)], done=_cannot_write))
    again = list(ready.map([jobs.Echo(i) for i in range(4)]))
    assert [o.value for o in again if isinstance(o, Done)] == [0, 1, 2, 3]


def test_a_worker_that_nobody_waits_for_ends_quietly(small: Recipe, jobs, capfd: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    with ProcessPool(1) as workers:
        workers.configure(prepare(small, 0), Plan())
        assert len(list(workers.map([jobs.Echo(0)]))) == 1  # it is up
        with pytest.raises(RunError):
            for _ in workers.map([jobs.Echo(1), jobs.Echo(2, 0.5)], done=_cannot_write):
                pass
    assert "Traceback" not in capfd.readouterr().err


def _cannot_write(number: int, _: object) -> None:
    raise RunError(f"the disk is full at {number}")
