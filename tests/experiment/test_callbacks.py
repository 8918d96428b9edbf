import io

import pytest
from rich.console import Console

from fedbe.experiment.callbacks import observer
from fedbe.experiment.run_folder import Record


def record(round: int, seconds: float) -> Record:
    return {
        "round": round,
        "train_loss": 0.5,
        "test": {"accuracy": 0.5},
        "set_aside": [],
        "seconds": {"train": seconds / 2, "round": seconds},
    }


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_follows_from_what_the_rounds_took_and_not_from_the_clock(terminal: bool) -> None:
    """A resumed round that finds most of its clients trained ends at once; the next ones will not. By hand:
    two rounds of 50 and 70 s were played and 4 - 2 are left, so 2 × 60 s."""
    said = io.StringIO()
    watcher = observer(4, quiet=False, console=Console(file=said, force_terminal=terminal, width=120))
    watcher.begin("FedAvg, seed 0", 10, 6)
    watcher.round_ended(record(7, 50))
    watcher.round_ended(record(8, 70))
    watcher.end()
    assert "2 min 0 s left" in said.getvalue()
    if not terminal:
        assert "round 7/10: accuracy 50.0 %; 2 min 30 s left" in said.getvalue()
