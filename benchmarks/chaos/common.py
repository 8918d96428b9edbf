"""What all trials share: a small run, what a result must equal, and the counts."""

import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedbe.errors import FedBEError
from fedbe.experiment import checkpoint, loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.base import Executor
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.recipe_files import load_recipe

RECIPE = (
    "training.rounds=2", "training.epochs=1", "training.one_round_epochs=1", "split.clients=3", "model.hidden=[8]",
    "settings.distill_epochs=1", "settings.num_samples=2", "evaluation.ensemble=", "evaluation.clients=false",
)  # fmt: skip


@dataclass
class Tally:
    """What became of the trials of one kind."""

    tried: int = 0
    differing: int = 0
    lost: int = 0
    raw: int = 0
    hung: int = 0

    @property
    def bad(self) -> int:
        """How many trials did not end well."""
        return self.differing + self.lost + self.raw + self.hung

    def row(self, name: str) -> str:
        """A line of the table."""
        counts = f"{self.differing} | {self.lost} | {self.raw} | {self.hung}"
        return f"| {name} | {self.tried:,} | {self.tried - self.bad:,} | {counts} |"

    def disturb(self, action: Callable[[], object]) -> None:
        """Do something that may fail with one sentence; anything else is raw."""
        try:
            action()
        except FedBEError:
            pass
        except Exception:
            self.raw += 1
            traceback.print_exc()

    def finish(self, folder: Path, reference: Path, executor: Executor | None = None) -> None:
        """Resume a run to its end, compare it with the undisturbed one, and remove it."""
        try:
            train(folder, executor)
            self.differing += not same(reference, folder)
        except FedBEError:
            self.lost += 1
            traceback.print_exc()
        except Exception:
            self.raw += 1
            traceback.print_exc()
        shutil.rmtree(folder)


class LastRound(Callback):
    """Remembers the last round that the run has reported as finished."""

    def __init__(self) -> None:
        self.number = 0

    def round_ended(self, record: run_folder.Record) -> None:
        """Called by the loop after each round."""
        self.number = record["round"]


def new_run(folder: Path, method: str) -> Path:
    """A small run folder, not trained yet."""
    return run_folder.create(folder, load_recipe("digits", RECIPE), method, 0, "float32")


def train(folder: Path, executor: Executor | None = None, callback: Callback | None = None) -> None:
    """Train a run to its end; default: in this process."""
    if executor is None:
        with Serial() as executor:
            loop.execute(folder, executor, callback or Callback())
    else:
        loop.execute(folder, executor, callback or Callback())


def reference_run(root: Path, method: str) -> Path:
    """An undisturbed run of a method, trained once."""
    folder = root / f"reference-{method}"
    if not folder.exists():
        train(new_run(folder, method))
    return folder


def same(a: Path, b: Path) -> bool:
    """Whether two finished runs have the same model and last checkpoint, bit for bit."""
    names = ["model.safetensors", checkpoint.paths(a)[0].name]
    return all((b / name).exists() and (a / name).read_bytes() == (b / name).read_bytes() for name in names)
