"""Trained clients are cached until their round has a checkpoint. Only the same training finds them again."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedbe.algorithms.client.rules import Prox
from fedbe.algorithms.client.training import LocalSettings, Trained
from fedbe.algorithms.methods import METHODS
from fedbe.cli.app import app
from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState
from fedbe.data import Augment
from fedbe.experiment import cohort_training, loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.client_cache import ClientCache
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import initial_weights, prepare
from fedbe.experiment.jobs import TrainJob
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import override_recipe
from fedbe.experiment.tensor_files import write_tensors

Play = Callable[..., Path]
Identical = Callable[[Path, Path], bool]
INSTANT = [m for m in METHODS if not METHODS[m].one_round]


@pytest.fixture
def everything_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_training, "CACHE_AFTER_SECONDS", -1.0)
    monkeypatch.setattr(cohort_training, "CACHE_SHARE", float("inf"))


@pytest.fixture
def trained_jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(round, client) of every training that workers were asked for."""
    seen: list[tuple[int, int]] = []
    original = ProcessPool.map

    def noted(self: ProcessPool, jobs: Any, **options: Any) -> Any:
        if "should_stop" in options:  # only training can be stopped
            seen.extend((job.round, job.client) for job in jobs)
        return original(self, jobs, **options)

    monkeypatch.setattr(ProcessPool, "map", noted)
    return seen


class Clients(Callback):
    """Asks to stop when so many clients have finished in some round."""

    def __init__(self, count: int) -> None:
        self.count, self.reached = count, False

    def phase(self, round: int, phase: str, done: int, total: int) -> None:  # noqa: ARG002
        self.reached |= phase == "clients" and done >= self.count

    def should_stop(self) -> bool:
        return self.reached


@pytest.mark.slow
@pytest.mark.usefixtures("everything_cached")
@pytest.mark.parametrize("method", METHODS)
def test_a_run_stopped_between_clients_ends_with_the_same_bits(
    method: str, play: Play, identical: Identical, tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any
) -> None:
    four = override_recipe(small, ["training.clients_per_round=4"])
    straight = play("straight", method, recipe=four)
    stopped = run_folder.create(tmp_path / "stopped", four, method, 0, "float32")
    for count, cached in ((1, (1, 2, 3)), (4, (4,))):
        watch = Clients(count)
        assert not loop.execute(stopped, pool, watch, should_stop=watch.should_stop)
        assert run_folder.read_rounds(stopped) == []
        assert len(list((stopped / "trained").iterdir())) in cached
    assert loop.execute(stopped, pool, silent)
    assert identical(straight, stopped)
    assert not (stopped / "trained").exists()


@pytest.mark.usefixtures("everything_cached")
def test_cached_clients_are_not_trained_again(
    tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any, trained_jobs: list[tuple[int, int]]
) -> None:
    folder = run_folder.create(tmp_path / "stopped", small, "fedavg", 0, "float32")
    watch = Clients(3)
    assert not loop.execute(folder, pool, watch, should_stop=watch.should_stop)
    assert len(trained_jobs) == 3
    assert loop.execute(folder, pool, silent)
    assert sorted(r for r, _ in trained_jobs) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.usefixtures("everything_cached")
def test_the_record_includes_training_time_before_a_stop(
    tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder.create(tmp_path / "stopped", small, "fedavg", 0, "float32")
    watch = Clients(3)
    save = ClientCache.save
    monkeypatch.setattr(ClientCache, "save", lambda self, job, trained, _: save(self, job, trained, 1000.0))
    assert not loop.execute(folder, pool, watch, should_stop=watch.should_stop)
    assert loop.execute(folder, pool, silent)
    first, second, _ = run_folder.read_rounds(folder)
    assert 1500 <= first["seconds"]["train"] < first["seconds"]["round"] < 1600  # three clients, two workers
    assert "train" not in first["memory_mb"]  # that of idle workers says nothing
    assert second["seconds"]["round"] < 1000
    assert second["memory_mb"]["train"] > 0


def test_clients_from_the_first_seconds_of_a_long_round_are_cached_too(
    tmp_path: Path, small: Recipe, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort_training, "CACHE_AFTER_SECONDS", float("inf"))
    monkeypatch.setattr(cohort_training, "CACHE_SHARE", float("inf"))

    class Late(Clients):
        def phase(self, round: int, phase: str, done: int, total: int) -> None:
            super().phase(round, phase, done, total)
            if done == 2:
                monkeypatch.setattr(cohort_training, "CACHE_AFTER_SECONDS", -1.0)

    folder = run_folder.create(tmp_path / "stopped", small, "fedavg", 0, "float32")
    watch = Late(3)
    assert not loop.execute(folder, pool, watch, should_stop=watch.should_stop)
    assert len(list((folder / "trained").iterdir())) == 3


def test_writing_finished_clients_has_a_budget(
    tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort_training, "CACHE_AFTER_SECONDS", -1.0)
    monkeypatch.setattr(cohort_training, "CACHE_SHARE", 0.0)
    written: list[int] = []
    save = ClientCache.save

    def noted(self: ClientCache, job: TrainJob, *result: Any) -> None:
        written.append(job.round)
        save(self, job, *result)

    monkeypatch.setattr(ClientCache, "save", noted)
    folder = run_folder.create(tmp_path / "run", small, "fedavg", 0, "float32")
    assert loop.execute(folder, pool, silent)
    assert written == [1, 2, 3]  # the first of each round, whose cost is not known before


def test_a_stop_in_a_short_round_loses_no_finished_client(
    tmp_path: Path, small: Recipe, pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort_training, "CACHE_AFTER_SECONDS", float("inf"))
    folder = run_folder.create(tmp_path / "stopped", small, "fedavg", 0, "float32")
    watch = Clients(3)
    assert not loop.execute(folder, pool, watch, should_stop=watch.should_stop)
    assert len(list((folder / "trained").iterdir())) == 3


@pytest.mark.parametrize("method", ["fedbe", "scaffold"])
def test_a_large_cohort_stays_on_disk_with_the_same_bits(
    method: str, play: Play, identical: Identical, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = play("straight", method)
    read: list[Trained] = []
    load = ClientCache.load

    def noted(self: ClientCache, job: TrainJob) -> tuple[Trained, float] | None:
        cached = load(self, job)
        read.extend([cached[0]] if cached else [])
        return cached

    monkeypatch.setattr(ClientCache, "load", noted)
    monkeypatch.setattr(cohort_training, "IN_MEMORY_MB", 0)
    assert identical(straight, play("on disk", method))
    assert len(read) == 3 * 3  # each client of each round, once


def test_an_unwritable_cache_is_ignored(cache: ClientCache, job: TrainJob) -> None:
    cache.folder.write_text("a file where the folder should be")
    cache.save(job, _result(job), 1.0)
    assert cache.load(job) is None


def test_the_cache_is_not_written_through_a_link(cache: ClientCache, job: TrainJob, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    cache.folder.symlink_to(tmp_path / "victim")
    cache.save(job, _result(job), 1.0)
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("everything_cached")
@pytest.mark.parametrize("method", INSTANT)
def test_a_shared_first_round_changes_no_bit(
    method: str,
    play: Play,
    identical: Identical,
    tmp_path: Path,
    small: Recipe,
    pool: ProcessPool,
    silent: Any,
    trained_jobs: list[tuple[int, int]],
) -> None:
    alone = play("alone", method)
    together = tmp_path / "first-round"
    loop.execute(
        run_folder.create(tmp_path / "first", small, "fedavg", 0, "float32"), pool, silent, first_round=together
    )
    trained_jobs.clear()
    second = run_folder.create(tmp_path / "second", small, method, 0, "float32")
    assert loop.execute(second, pool, silent, first_round=together)
    assert identical(alone, second)
    again = [r for r, _ in trained_jobs].count(1)
    assert again == (3 if METHODS[method].rules else 0)  # rules change what clients do


@pytest.mark.slow
@pytest.mark.usefixtures("everything_cached")
def test_a_comparison_trains_the_first_round_of_a_seed_once(
    tmp_path: Path, trained_jobs: list[tuple[int, int]]
) -> None:
    small = ["training.rounds=2", "training.epochs=1", "settings.distill_epochs=1", "model.hidden=[8]"]
    changes = [word for change in small for word in ("--set", change)]
    command = ["compare", "--methods", "fedavg,fedbe,fedprox", "--seeds", "2", *changes, "--runs", str(tmp_path), "-q"]
    result = CliRunner().invoke(app, [*command, "--spread", "clients"])
    assert result.exit_code == 0, result.output
    assert [r for r, _ in trained_jobs].count(1) == 2 * 2 * 10  # FedProx's clients do something else
    assert [r for r, _ in trained_jobs].count(2) == 2 * 3 * 10
    assert not list(tmp_path.rglob("first-round*"))


def test_short_rounds_write_no_cache(
    tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort_training, "CACHE_AFTER_SECONDS", float("inf"))
    together = tmp_path / "first-round"
    assert loop.execute(
        run_folder.create(tmp_path / "a", small, "fedavg", 0, "float32"), pool, silent, first_round=together
    )
    assert not together.exists()
    assert not (tmp_path / "a" / "trained").exists()


@pytest.fixture
def cache(tmp_path: Path, small: Recipe) -> ClientCache:
    return ClientCache(tmp_path / "cache", prepare(small, 0), Plan(), "this program")


@pytest.fixture
def job(cache: ClientCache) -> TrainJob:
    state = ModelRunner(initial_weights(cache.federation.model, 0)).read()
    vector = torch.zeros_like(state.params)
    return TrainJob(
        1, 1, 0, state, LocalSettings(), 10, rules=(Prox(),), broadcast={"control": vector}, memory={"control": vector}
    )


def _result(job: TrainJob) -> Trained:
    extras = {"control": torch.ones_like(job.state.params)}
    return Trained(job.state, extras, {"control": extras["control"] * 2}, 0.1 + 0.2, 7)


def test_load_returns_what_was_saved(cache: ClientCache, job: TrainJob) -> None:
    assert cache.load(job) is None
    cache.save(job, _result(job), 1.5)
    found = cache.load(job)
    assert found is not None
    trained, seconds = found
    assert torch.equal(trained.state.params, job.state.params)
    assert (trained.loss, trained.steps, seconds) == (0.1 + 0.2, 7, 1.5)
    assert float(trained.extras["control"][0]) == 1
    assert float(trained.memory["control"][0]) == 2
    cache.clear()
    assert cache.load(job) is None


def test_counters_and_buffers_are_saved_too(cache: ClientCache, job: TrainJob) -> None:
    state = ModelState(torch.tensor([1.0]), torch.tensor([2.0, 3.0]), {"n": torch.tensor(4)})
    cache.save(job, replace(_result(job), state=state), 0.0)
    found = cache.load(job)
    assert found is not None
    assert found[0].state.buffers.tolist() == [2.0, 3.0]
    assert found[0].state.counters["n"].item() == 4


def test_a_damaged_file_is_not_loaded(cache: ClientCache, job: TrainJob) -> None:
    cache.save(job, _result(job), 1.0)
    next(cache.folder.iterdir()).write_bytes(b"half")
    assert cache.load(job) is None


@pytest.mark.parametrize(
    "header", [{}, {"loss": 1.0, "steps": 2}, {"loss": [], "steps": 1, "seconds": 1.0}, {"loss": 1, "steps": 1e999}]
)
def test_a_file_with_another_header_is_not_loaded(header: dict[str, Any], cache: ClientCache, job: TrainJob) -> None:
    cache.save(job, _result(job), 1.0)
    write_tensors(next(cache.folder.iterdir()), {"seconds": 1.0, **header} if "steps" in header else header, {})
    assert cache.load(job) is None


@pytest.mark.parametrize(
    "change",
    [
        {"client": 2},
        {"round": 2},
        {"seed": 1},
        {"rules": (Prox(proximal_mu=0.1),)},
        {"rules": ()},
        {"broadcast": {}},
        {"memory": {}},
        {"memory": "other"},
        {"broadcast": "other"},
        {"state": "other"},
        {"settings": "other"},
    ],
    ids=str,
)
def test_another_job_does_not_load_it(change: dict[str, Any], cache: ClientCache, job: TrainJob) -> None:
    cache.save(job, _result(job), 1.0)
    other = {
        "memory": {"control": torch.ones_like(job.state.params)},
        "broadcast": {"control": torch.ones_like(job.state.params)},
        "state": replace(job.state, params=job.state.params + 1),
        "settings": replace(job.settings, lr=0.02),
    }
    changed = {name: other[name] if value == "other" else value for name, value in change.items()}
    assert cache.load(replace(job, **changed)) is None


@pytest.mark.parametrize("what", ["plan", "made_with", "data", "split", "augment", "model"])
def test_another_federation_or_version_does_not_load_it(
    what: str, cache: ClientCache, job: TrainJob, small: Recipe
) -> None:
    cache.save(job, _result(job), 1.0)
    federation = cache.federation
    train = copy(federation.train)
    train.augment = Augment(1)
    changed = {
        "plan": {"plan": Plan("bfloat16")},
        "made_with": {"made_with": "another program"},
        "data": {"federation": replace(federation, digest="other")},
        "split": {"federation": replace(federation, clients=prepare(small, 1).clients)},
        "augment": {"federation": replace(federation, train=train)},
        "model": {"federation": replace(federation, model=replace(federation.model, name="other"))},
    }[what]
    assert replace(cache, **changed).load(job) is None
    assert cache.load(job) is not None
