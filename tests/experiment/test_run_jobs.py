"""Whole runs as jobs: the same bits as one after the other, progress, stops, errors, the order, the choice."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fedbe.core.files import locked
from fedbe.errors import DataError, RunError, RunWarning, SettingError
from fedbe.experiment import comparison, run_folder
from fedbe.experiment.callbacks import Callback, EndStatus
from fedbe.experiment.executors import memory_usage
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import override_recipe
from fedbe.experiment.run_folder import Record
from fedbe.experiment.run_jobs import NewRun, RunJob, execute_runs, interleaved, spread_runs

CONVNET = ("model.name=convnet", "model.hidden=", "model.padding=1", "model.widths=[4, 8, 8]")
RESNET = ("model.name=resnet20", "model.hidden=")
Identical = Callable[[Path, Path], bool]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2) as workers:
        yield workers


@pytest.fixture
def quick(small: Recipe) -> Recipe:
    return override_recipe(small, ["training.rounds=2"])


class Log(Callback):
    """Keeps the calls of the callbacks of all runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.title = "parent"

    def for_run(self) -> "Log":
        log = Log()
        log.calls = self.calls
        return log

    def begin(self, title: str, rounds: int, done: int) -> None:
        self.title = title
        self.calls.append((title, "begin", rounds, done))

    def round_ended(self, record: Record) -> None:
        self.calls.append((self.title, record["round"]))

    def end(self, status: EndStatus) -> None:
        self.calls.append((self.title, status))


def jobs_of(folder: Path) -> list[RunJob]:
    return [RunJob(cell, first_round=comparison.first_round(cell)) for cell in comparison.cells(folder)]


def compared(folder: Path, recipe: Recipe, methods: Sequence[str] = ("fedavg", "fedbe")) -> list[RunJob]:
    comparison.create(folder, recipe, methods, [0, 1], "float32")
    return jobs_of(folder)


@pytest.mark.slow
def test_whole_runs_have_the_bits_of_runs_one_after_the_other(
    tmp_path: Path, quick: Recipe, pool: ProcessPool, identical: Identical
) -> None:
    log, ended = Log(), list[Path]()
    together, in_turn = compared(tmp_path / "together", quick), compared(tmp_path / "in_turn", quick)
    assert execute_runs(together, pool, log, lambda: False, whole=True, ended=lambda job: ended.append(job.folder))
    assert execute_runs(in_turn, pool, Callback(), lambda: False)
    for a, b in zip(together, in_turn, strict=True):
        assert identical(a.folder, b.folder)
    assert sorted(ended) == sorted(job.folder for job in together)
    assert log.calls[0] == ("all rounds", "begin", 8, 0)
    assert log.calls[-1] == ("all rounds", "finished")
    assert [call[1:] for call in log.calls if call[0] == "FedBE, seed 1"] == [("begin", 2, 0), (1,), (2,)]
    assert not list((tmp_path / "together").glob(".stop-*"))


@pytest.mark.slow
def test_runs_that_are_stopped_and_then_killed_end_with_the_same_bits(
    tmp_path: Path, small: Recipe, pool: ProcessPool, identical: Identical
) -> None:
    longer = override_recipe(small, ["training.rounds=16"])
    jobs = compared(tmp_path / "stopped", longer, ["fedavg"])
    begun = lambda: all(run_folder.read_rounds(job.folder) for job in jobs)  # noqa: E731
    assert not execute_runs(jobs, pool, Callback(), begun, whole=True)
    left = [job.rounds_left for job in jobs]
    assert all(0 < rounds < 16 for rounds in left)

    before = pool.pids
    thread = threading.Thread(target=kill_after_a_round, args=(jobs, left, before))
    thread.start()
    assert execute_runs(jobs, pool, Callback(), lambda: False, whole=True)
    thread.join()
    assert not set(before) & set(pool.pids)

    uninterrupted = compared(tmp_path / "uninterrupted", longer, ["fedavg"])
    assert execute_runs(uninterrupted, pool, Callback(), lambda: False)
    for a, b in zip(jobs, uninterrupted, strict=True):
        assert identical(a.folder, b.folder)


def test_new_runs_stop_where_there_is_no_folder_yet(tmp_path: Path, small: Recipe, pool: ProcessPool) -> None:
    new = NewRun(override_recipe(small, ["training.rounds=500"]), "fedavg", 0, "float32")
    job = RunJob(tmp_path / "study" / "seed0", new)
    begin = time.monotonic()
    # For long enough that the file is written, then no longer: the run itself must have seen it.
    assert not execute_runs([job], pool, Callback(), lambda: time.monotonic() < begin + 2, whole=True)
    assert job.rounds_left


def kill_after_a_round(jobs: Sequence[RunJob], left: Sequence[int], pids: Sequence[int]) -> None:
    while [job.rounds_left for job in jobs] == left:
        time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_an_error_in_one_run_stops_all_and_is_one_sentence(tmp_path: Path, small: Recipe, pool: ProcessPool) -> None:
    slow = override_recipe(small, ["training.rounds=50"])
    jobs = compared(tmp_path / "some", slow)
    (jobs[0].folder / "rounds.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"line 1 of .* is damaged"):
        execute_runs(jobs, pool, Callback(), lambda: False, whole=True)
    assert all(job.rounds_left for job in jobs[1:])


def test_the_callback_of_all_runs_learns_that_one_failed(tmp_path: Path, quick: Recipe, pool: ProcessPool) -> None:
    jobs, log = compared(tmp_path / "some", quick, ["fedavg"]), Log()
    with locked(jobs[0].folder), pytest.raises(RunError):
        execute_runs(jobs, pool, log, lambda: False, whole=True)
    assert log.calls[-1] == ("all rounds", "failed")


def test_warnings_of_a_run_arrive(tmp_path: Path, quick: Recipe, pool: ProcessPool) -> None:
    (job, *_) = compared(tmp_path / "warned", quick, ["fedavg"])
    assert execute_runs([job], pool, Callback(), lambda: False)
    (newest, *_) = sorted(job.folder.glob("checkpoint-*"), reverse=True)
    newest.write_bytes(b"damaged")
    with pytest.warns(RunWarning, match="damaged"):
        assert execute_runs([job], pool, Callback(), lambda: False, whole=True)


def test_a_new_run_gets_its_folder_in_the_job(tmp_path: Path, quick: Recipe) -> None:
    job = RunJob(tmp_path / "deep" / "seed0", NewRun(quick, "fedavg", 0, "float32"))
    assert job.rounds_left == 2
    assert job.run().finished
    assert job.rounds_left == 0
    broken = RunJob(
        tmp_path / "broken", NewRun(override_recipe(quick, ["split.clients=100000"]), "fedavg", 0, "float32")
    )
    assert "100000 clients" in broken.run().error
    assert not broken.folder.exists()


@pytest.mark.parametrize(
    ("model", "method", "spreads"),
    [
        (CONVNET, "fedbe", True),
        ((*RESNET, "evaluation.ensemble="), "fedavg", True),
        (RESNET, "fedavg", False),  # the statistics of measured samples are recomputed
        (RESNET, "fedbe", False),  # whole batches with a thread for each core
    ],
)
def test_auto_spreads_convolutions_that_can_do_with_one_core(
    model: Sequence[str], method: str, spreads: bool, tmp_path: Path, small: Recipe, pool: ProcessPool
) -> None:
    jobs = compared(tmp_path / "some", override_recipe(small, model), [method])
    assert spread_runs("auto", jobs, pool) == spreads
    assert spread_runs("runs", jobs, pool)


def test_auto_tries_a_split_that_is_run(tmp_path: Path, small: Recipe, pool: ProcessPool) -> None:
    """With another seed the same split may leave a client without examples."""
    uneven = override_recipe(small, ["split.clients=8", "split.kind=dirichlet", "split.alpha=0.012"])
    with pytest.raises(DataError, match="without an example"):
        prepare(uneven, 0)
    jobs = [RunJob(tmp_path / str(seed), NewRun(uneven, "fedavg", seed, "float32")) for seed in (4, 7)]
    assert spread_runs("auto", jobs, pool)


@pytest.mark.slow
def test_convolutions_have_the_same_bits_in_whole_runs(
    tmp_path: Path, small: Recipe, pool: ProcessPool, identical: Identical
) -> None:
    """The server computes the parts of a batch with one thread, or with one for each core."""
    changes = ("variant=auto", "settings.num_samples=2", "training.epochs=1", "training.rounds=1")
    recipe = override_recipe(small, [*CONVNET, *changes])
    together, in_turn = (compared(tmp_path / name, recipe, ["fedbe"]) for name in ("together", "in_turn"))
    assert execute_runs(together, pool, Callback(), lambda: False, whole=True)
    assert execute_runs(in_turn, pool, Callback(), lambda: False)
    for a, b in zip(together, in_turn, strict=True):
        assert identical(a.folder, b.folder)


def test_runs_that_start_together_have_different_seeds(pool: ProcessPool) -> None:
    jobs = [RunJob(Path(f"{m}{s}"), first_round=Path(f"first{s}")) for s in range(3) for m in "ab"]
    assert [job.folder.name for job in interleaved(jobs, pool)] == ["a0", "a1", "b0", "b1", "a2", "b2"]


def test_auto_spreads_runs_if_there_are_enough_and_memory_allows(
    tmp_path: Path, quick: Recipe, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = compared(tmp_path / "some", quick)
    assert spread_runs("auto", jobs, pool)
    assert not spread_runs("auto", jobs[:1], pool)
    assert not spread_runs("auto", [], pool)
    assert not spread_runs("auto", jobs, Serial())
    assert not spread_runs("clients", jobs, pool)
    assert spread_runs("runs", jobs, Serial())
    with pytest.raises(SettingError, match="unknown spread 'run': did you mean"):
        spread_runs("run", jobs, pool)
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 2000000 kB\n")
    monkeypatch.setattr(memory_usage, "SYSTEM_MEMORY", tmp_path / "meminfo")
    assert not spread_runs("auto", jobs, pool)
    assert spread_runs("runs", jobs, pool)
