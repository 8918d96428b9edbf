"""Progress lines and bars, and the base class of callbacks."""

import io

import pytest
from rich.console import Console

from fedbe.experiment.callbacks import Callback, CallbackList, EndStatus, progress_callback
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
def test_time_left_follows_from_recorded_round_times(terminal: bool) -> None:
    """A resumed round that finds most of its clients trained ends at once; the next ones will not. By hand:
    two rounds of 50 and 70 s were played and 4 - 2 are left, so 2 × 60 s."""
    output = io.StringIO()
    callback = progress_callback(4, quiet=False, console=Console(file=output, force_terminal=terminal, width=120))
    callback.begin("FedAvg, seed 0", 10, 6)
    callback.round_ended(record(7, 50))
    callback.round_ended(record(8, 70))
    callback.end("finished")
    assert "2 min 0 s left" in output.getvalue()
    if not terminal:
        assert "accuracy 50.0 %; 2 min 30 s left" in output.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_runs_at_the_same_time_share_the_time_left(terminal: bool) -> None:
    """By hand: one round of 60 s is done, 3 are left, two at a time: 3 × 60 / 2 s."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    callback = progress_callback(4, quiet=False, console=console, at_once=2)
    callback.begin("all rounds", 4, 0)
    first, second = callback.for_run(), callback.for_run()
    first.begin("FedAvg, seed 0", 2, 0)
    first.round_ended(record(1, 60) | {"set_aside": [{"client": 7, "reason": "it sent NaN"}]})
    assert terminal or "50.0 %, 1 set aside; 1 min 30 s left" in output.getvalue()
    second.begin("FedBE, seed 0", 2, 1)
    second.round_ended(record(2, 60))
    callback.end("finished")
    assert "1 min 0 s left" in output.getvalue()
    assert "it sent NaN" in output.getvalue()
    assert "FedBE, seed" in output.getvalue()


class Log(Callback):
    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin(self, title: str, rounds: int, done: int) -> None:
        self.calls.append((title, rounds, done))

    def phase(self, round: int, phase: str, done: int, total: int) -> None:
        self.calls.append((round, phase, done, total))

    def round_ended(self, record: Record) -> None:
        self.calls.append(record["round"])

    def end(self, status: EndStatus) -> None:
        self.calls.append(status)


def test_a_list_calls_all_its_callbacks() -> None:
    first, second = Log(), Log()
    callbacks = CallbackList([first, Callback(), second])
    callbacks.begin("FedAvg", 2, 1)
    callbacks.phase(2, "clients", 1, 3)
    callbacks.round_ended(record(2, 1.0))
    callbacks.end("stopped")
    assert first.calls == second.calls == [("FedAvg", 2, 1), (2, "clients", 1, 3), 2, "stopped"]


def test_quiet_prints_nothing() -> None:
    output = io.StringIO()
    callback = progress_callback(1, quiet=True, console=Console(file=output))
    callback.begin("FedAvg", 1, 0)
    callback.round_ended(record(1, 1.0))
    callback.end("finished")
    assert output.getvalue() == ""
