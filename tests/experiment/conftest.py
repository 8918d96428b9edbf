"""A small federation that trains fast, and worker processes that tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.base import Executor
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe

SMALL = (
    "training.rounds=3",
    "training.epochs=2",
    "training.one_round_epochs=4",
    "variant=paper",
    "split.clients=4",
    "training.clients_per_round=3",
    "model.hidden=[16]",
    "settings.distill_epochs=3",
    "settings.num_samples=3",
    "settings.distill_lr=0.01",
    "settings.distill_lr_min=0.004",
)


class Silent(Callback):
    """A callback that keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def round_ended(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def rounds_ended(self, count: int) -> Callable[[], bool]:
        """For `should_stop`: whether that many more rounds have ended."""
        goal = len(self.records) + count
        return lambda: len(self.records) >= goal


@pytest.fixture(scope="session")
def small() -> Recipe:
    return load_recipe("digits", SMALL)


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2) as workers:
        yield workers


@pytest.fixture
def play(tmp_path: Path, pool: ProcessPool, small: Recipe) -> Callable[..., Path]:
    """Train a whole run and return its folder."""

    def whole(name: str, method: str, *, recipe: Recipe = small, workers: Executor = pool, seed: int = 0) -> Path:
        folder = run_folder.create(tmp_path / name, recipe, method, seed, "float32")
        assert loop.execute(folder, workers, Silent())
        return folder

    return whole


def without_times(folder: Path) -> list[dict[str, Any]]:
    """The records of a run without times and memory."""
    dropped = ("seconds", "memory_mb")
    return [{k: v for k, v in r.items() if k not in dropped} for r in run_folder.read_rounds(folder)]


def same_result(a: Path, b: Path) -> bool:
    """Bit for bit: the final weights, the whole last checkpoint and every number of every round."""
    last = max(p.name for p in a.glob("checkpoint-*"))
    same_files = all((a / f).read_bytes() == (b / f).read_bytes() for f in ("model.safetensors", last))
    return same_files and without_times(a) == without_times(b)


@pytest.fixture
def identical() -> Callable[[Path, Path], bool]:
    return same_result


@pytest.fixture
def silent() -> Silent:
    return Silent()
