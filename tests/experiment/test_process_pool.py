"""Worker processes: order of outcomes, replacement of dead workers, stops, shared data."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedbe.core.compute import Plan
from fedbe.errors import RunError
from fedbe.experiment.executors import watchdog
from fedbe.experiment.executors.base import Done, Failed, Lost, Stopped
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.executors.watchdog import JobTimes
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import override_recipe
from fedbe.experiment.run_jobs import RunJob

JOBS = '''
"""Jobs for the tests; worker processes import this file."""
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

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
class LosesDevice:
    """The device fails as CUDA does the first `times` times: a process then cannot use it any more."""
    diary: str
    times: int
    name = "loses its device"

    def run(self, federation, runner):
        pids = Path(self.diary).read_text().split() if Path(self.diary).exists() else []
        if len(pids) < self.times:
            Path(self.diary).write_text(" ".join([*pids, str(os.getpid())]))
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\nmore lines")
        return len({*pids, str(os.getpid())})


@dataclass(frozen=True)
class Placed:
    """Knows the number of its worker."""
    seconds: float
    worker: object = None
    name = "placed"

    def for_worker(self, number):
        return Placed(self.seconds, number)

    def run(self, federation, runner):
        time.sleep(self.seconds)
        return self.worker


class TooLarge(torch.nn.Linear):
    """A network that does not fit on the device."""
    def to(self, *arguments):
        raise torch.AcceleratorError("CUDA error: out of memory")


class Unmovable(torch.nn.Linear):
    def to(self, *arguments):
        raise KeyError("not this one")


def too_large(**settings):
    return TooLarge(2, 2)


def unmovable(**settings):
    return Unmovable(2, 2)


@dataclass(frozen=True)
class Large:
    values: object
    name = "large"

    def run(self, federation, runner):
        return float(self.values.sum())


@dataclass(frozen=True)
class Shared:
    """Whether the labels are in shared memory, and a mark that only shared memory carries back."""
    name = "shared"

    def run(self, federation, runner):
        federation.labels[0] = 77
        return federation.labels.is_shared()
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


def test_a_job_that_chooses_its_device_knows_its_worker(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    """Not its position: the second of two workers is free while the first one works."""
    assert len(list(ready.map([jobs.Echo(0), jobs.Echo(1)]))) == 2  # both are up
    outcomes = ready.map([jobs.Placed(3.0), jobs.Placed(0.0), jobs.Placed(0.0), jobs.Placed(0.0)])
    assert [o.value for o in outcomes if isinstance(o, Done)] == [0, 1, 1, 1]


def test_jobs_are_drawn_no_further_than_ahead(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    drawn: list[int] = []

    def source():  # type: ignore[no-untyped-def]
        for i in range(10):
            drawn.append(i)
            yield jobs.Echo(i)

    results = ready.map(source(), ahead=3)
    next(results)
    assert len(drawn) <= 4
    assert len(list(results)) == 9


def test_a_job_whose_worker_dies_runs_again(ready: ProcessPool, jobs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcomes = list(ready.map([jobs.Dies(str(tmp_path / "diary"), 2), jobs.Echo(5)]))
    assert [o.value for o in outcomes if isinstance(o, Done)] == [2, 5]


def test_a_job_fails_after_three_deaths_of_its_worker(ready: ProcessPool, jobs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    dying, echo = list(ready.map([jobs.Dies(str(tmp_path / "diary"), 9), jobs.Echo(5)]))
    assert isinstance(dying, Lost)
    assert "died or hung 3 times" in dying.reason
    assert "-9" in dying.reason
    assert echo == Done(5) or echo.value == 5


def test_an_exception_fails_the_job_and_the_worker_stays(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    before = ready.pids
    raised, echo = list(ready.map([jobs.Raises(), jobs.Echo(1)]))
    assert raised == Failed("ValueError: three is not four")
    assert isinstance(echo, Done)
    assert ready.pids == before


def test_a_worker_that_lost_its_device_is_replaced(ready: ProcessPool, jobs, tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    again, lost = ready.map([jobs.LosesDevice(str(tmp_path / "twice"), 2), jobs.LosesDevice(str(tmp_path / "ever"), 9)])
    assert isinstance(again, Done)
    assert again.value == 3, "each attempt had another process"
    assert isinstance(lost, Lost)
    assert "3 times (the device failed: CUDA error: an illegal memory access was encountered)" in lost.reason
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "reason"), [("too_large", "the memory of the device is full"), ("unmovable", "KeyError: 'not this one'")]
)
def test_a_worker_that_cannot_be_set_up_sets_no_client_aside(small: Recipe, jobs, model: str, reason: str) -> None:  # type: ignore[no-untyped-def]
    federation = prepare(small, 0)
    broken = replace(federation, model=replace(federation.model, name=f"jobs_for_tests:{model}", settings={}))
    with ProcessPool(1) as workers:
        workers.configure(broken, Plan())
        before = workers.pids
        (outcome,) = workers.map([jobs.Echo(1)])
        assert workers.pids == before
    assert isinstance(outcome, Lost)
    assert reason in outcome.reason


def test_data_is_in_shared_memory(small: Recipe, jobs) -> None:  # type: ignore[no-untyped-def]
    federation = prepare(small, 0)
    with ProcessPool(1) as workers:
        workers.configure(federation, Plan())
        (outcome,) = list(workers.map([jobs.Shared()]))
    assert outcome.value is True
    assert federation.labels[0] == 77


@pytest.mark.e2e
class TestHung:
    """A process that is stopped does not end, and does not answer."""

    @pytest.fixture
    def watched(self, small: Recipe, jobs: object):  # type: ignore[no-untyped-def]  # noqa: ARG002
        with ProcessPool(2, hang_seconds=2.0) as workers:
            workers.configure(prepare(small, 0), Plan())
            yield workers

    def test_while_it_works_its_job_runs_again(self, watched: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
        assert len(list(watched.map([jobs.Echo(0), jobs.Echo(1)]))) == 2  # both are up
        hung = watched.pids[0]
        timer = threading.Timer(0.3, os.kill, (hung, signal.SIGSTOP))
        timer.start()
        outcomes = list(watched.map([jobs.Echo(i, 1.0) for i in range(4)]))
        assert [o.value for o in outcomes if isinstance(o, Done)] == [0, 1, 2, 3]
        assert hung not in watched.pids

    def test_while_it_is_idle_and_the_job_is_large(self, watched: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
        """Nobody reads the pipe, so sending the job blocks until the process is killed."""
        assert len(list(watched.map([jobs.Echo(0), jobs.Echo(1)]))) == 2
        for pid in watched.pids:
            os.kill(pid, signal.SIGSTOP)
        large = [jobs.Large(torch.zeros(10**6)), jobs.Large(torch.ones(10**6))]
        assert [o.value for o in watched.map(large) if isinstance(o, Done)] == [0.0, 1e6]

    def test_a_request_to_stop_is_heard(self, watched: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
        assert len(list(watched.map([jobs.Echo(0), jobs.Echo(1)]))) == 2
        stopping = threading.Event()

        def freeze() -> None:
            for pid in watched.pids:
                os.kill(pid, signal.SIGSTOP)
            stopping.set()

        threading.Timer(0.3, freeze).start()
        with pytest.raises(Stopped):
            list(watched.map([jobs.Echo(i, 1.0) for i in range(4)], should_stop=stopping.is_set))

    def test_a_job_far_beyond_its_time_is_started_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = JobTimes()
        job = SimpleNamespace(size=10)
        assert times.limit(job) == 3600.0 + 10 * 10.0  # it may loop forever, too
        assert times.limit(SimpleNamespace()) is None  # of unknown size
        times.note(job, 200.0)
        assert times.limit(job) == 30 * 200.0
        assert times.limit(SimpleNamespace(size=1)) == 600.0  # at least
        whole = RunJob(Path("run"))
        times.note(whole, 12.0)  # one round was left
        assert times.limit(whole) is None
        monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
        killed = threading.Event()
        beat = SimpleNamespace(value=1)
        worker = FakeWorker(beat, started=1.0, job_limit=0.05, kill=killed.set)
        dog = watchdog.Watchdog(lambda: [worker], hang_seconds=100.0)
        assert killed.wait(10)
        dog.close()


@dataclass(eq=False)
class FakeWorker:
    beat: SimpleNamespace
    started: float
    job_limit: float | None
    kill: Callable[[], None]


@pytest.mark.e2e
def test_too_few_open_files_are_one_sentence() -> None:
    script = (
        "import resource, sys\n"
        "from fedbe.errors import RunError\n"
        "from fedbe.experiment.executors.process_pool import ProcessPool\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (26, 26))\n"
        "try:\n    ProcessPool(2)\nexcept RunError as error:\n    print(error)\n    sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 3, done.stderr
    assert "raise the system's limits" in done.stdout
    assert "Traceback" not in done.stderr


def test_many_clients_need_few_files(small: Recipe) -> None:
    """One tensor for each client would be one file for each client and worker."""
    many = override_recipe(small, ["split.kind=iid", "split.clients=1000", "data.server=100"])
    federation = prepare(many, 0)
    assert len(federation.clients) == 1000
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ProcessPool(2) as workers:
        workers.configure(federation, Plan())
        assert len(list(Path("/proc/self/fd").iterdir())) - before < 100


def test_closing_leaves_no_process() -> None:
    with ProcessPool(2) as workers:
        pids = set(workers.pids)
    assert not pids & {process.pid for process in multiprocessing.active_children()}


def test_zero_workers_are_refused() -> None:
    with pytest.raises(RunError, match="`workers` must be >= 1"):
        ProcessPool(0)


def test_a_stop_finishes_running_jobs_and_starts_no_other(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    done: list[int] = []
    results = ready.map(
        [jobs.Echo(i, 0.2) for i in range(6)], done=lambda n, _: done.append(n), should_stop=lambda: bool(done)
    )
    with pytest.raises(Stopped):
        list(results)
    assert sorted(done) == [0, 1, 2]  # the third had started before `done` was called for the first
    assert [o.value for o in ready.map([jobs.Echo(7)]) if isinstance(o, Done)] == [7]


def test_a_stop_after_the_last_job_has_started_loses_nothing(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    done: list[int] = []
    results = ready.map(
        [jobs.Echo(0, 0.2), jobs.Echo(1)], done=lambda n, _: done.append(n), should_stop=lambda: bool(done)
    )
    assert [o.value for o in results if isinstance(o, Done)] == [0, 1]


def test_outcomes_of_an_abandoned_map_are_dropped(ready: ProcessPool, jobs) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RunError, match="disk is full"):
        list(ready.map([jobs.Echo(100), jobs.Echo(101, 0.3), jobs.Echo(102, 0.3)], done=_cannot_write))
    again = list(ready.map([jobs.Echo(i) for i in range(4)]))
    assert [o.value for o in again if isinstance(o, Done)] == [0, 1, 2, 3]


def test_an_abandoned_worker_ends_without_a_traceback(small: Recipe, jobs, capfd: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    with ProcessPool(1) as workers:
        workers.configure(prepare(small, 0), Plan())
        assert len(list(workers.map([jobs.Echo(0)]))) == 1  # it is up
        with pytest.raises(RunError):
            for _ in workers.map([jobs.Echo(1), jobs.Echo(2, 0.5)], done=_cannot_write):
                pass
    assert "Traceback" not in capfd.readouterr().err


def _cannot_write(number: int, _: object) -> None:
    raise RunError(f"the disk is full at {number}")
