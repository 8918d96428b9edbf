"""The result depends only on (recipe, seed): not on the executor, on stops, or on workers that die."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbe.algorithms.methods import METHODS
from fedbe.experiment import loop, run_folder
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import override_recipe

pytestmark = pytest.mark.slow

Play = Callable[..., Path]
Identical = Callable[[Path, Path], bool]


@pytest.fixture(scope="module")
def one_worker() -> Iterator[ProcessPool]:
    with ProcessPool(1) as workers:
        yield workers


@pytest.fixture(scope="module")
def three_workers() -> Iterator[ProcessPool]:
    with ProcessPool(3) as workers:
        yield workers


@pytest.mark.parametrize("method", METHODS)
def test_every_executor_gives_the_same_bits(
    method: str, play: Play, identical: Identical, one_worker: ProcessPool, three_workers: ProcessPool
) -> None:
    two = play("two", method)
    assert identical(play("one", method, workers=one_worker), two)
    assert identical(play("three", method, workers=three_workers), two)
    with Serial() as serial:
        assert identical(play("serial", method, workers=serial), two)


def test_another_seed_gives_another_result(play: Play, identical: Identical) -> None:
    assert not identical(play("a", "fedbe"), play("b", "fedbe", seed=1))


@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS[m].one_round])
def test_a_run_stopped_after_every_round_ends_with_the_same_bits(
    method: str, play: Play, identical: Identical, tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any
) -> None:
    straight = play("straight", method)
    stopped = run_folder.create(tmp_path / "stopped", small, method, 0, "float32")
    for rounds in (1, 2):
        assert not loop.execute(stopped, pool, silent, should_stop=silent.rounds_ended(1))
        assert len(run_folder.read_rounds(stopped)) == rounds
    assert loop.execute(stopped, pool, silent)
    assert identical(straight, stopped)


def test_the_gate_gives_the_same_bits_with_any_executor_and_after_stops(
    play: Play, identical: Identical, tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any
) -> None:
    changes = ["variant=auto", "settings.gate_share=0.3", "settings.distill_lr=0.1", "settings.distill_lr_min=0.1"]
    recipe = override_recipe(small, changes)
    straight = play("straight", "fedbe", recipe=recipe)
    with Serial() as serial:
        assert identical(play("serial", "fedbe", recipe=recipe, workers=serial), straight)
    stopped = run_folder.create(tmp_path / "stopped", recipe, "fedbe", 0, "float32")
    while not loop.execute(stopped, pool, silent, should_stop=silent.rounds_ended(1)):
        pass
    assert identical(straight, stopped)
    judged = [record["server"]["gate"] for record in run_folder.read_rounds(straight) if "gate" in record["server"]]
    assert judged
    assert set(judged[0]) == {"average", "student", "margin", "lr", "accepted"}


def test_a_killed_worker_changes_no_bit(
    play: Play, identical: Identical, tmp_path: Path, small: Recipe, silent: Any
) -> None:
    straight = play("straight", "fedbe+scaffold")
    folder = run_folder.create(tmp_path / "killed", small, "fedbe+scaffold", 0, "float32")
    with ProcessPool(2) as workers:
        first = set(workers.pids)
        killed: list[int] = []

        def kill_now_and_then() -> None:
            while len(killed) < 4:
                time.sleep(0.05)
                pid = workers.pids[len(killed) % 2]
                if pid not in killed:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        assert loop.execute(folder, workers, silent)
        killer.join()
        assert first.isdisjoint(workers.pids) or len(killed) == 4
    assert identical(straight, folder)
