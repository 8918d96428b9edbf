"""How a person watches a run: bars in a terminal, plain lines elsewhere, TensorBoard files, or nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedbe.errors import RunError
from fedbe.experiment.loop import Observer
from fedbe.experiment.run_folder import Record


def duration(seconds: float) -> str:
    """
    >>> duration(5.2), duration(125), duration(7300)
    ('5 s', '2 min 5 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def summary(record: Record) -> str:
    """One round in a few words."""
    if "test" not in record:
        loss = record["train_loss"]
        return "trained nothing" if loss is None else f"loss {loss:.3f}"
    parts = [f"accuracy {100 * record['test']['accuracy']:.1f} %"]
    for key, name in (("test_average", "average"), ("test_ensemble", "ensemble")):
        if key in record:
            parts.append(f"{name} {100 * record[key]['accuracy']:.1f} %")
    if record["set_aside"]:
        parts.append(f"{len(record['set_aside'])} set aside")
    return ", ".join(parts)


class _Clock:
    """Time left, from what the rounds of this process took by their records: those count, too, the clients of a resumed
    round that were trained before the stop."""

    def __init__(self, rounds: int) -> None:
        self._left, self._played, self._seconds = rounds, 0, 0.0

    def tick(self, record: Record) -> str:
        self._left, self._played = self._left - 1, self._played + 1
        self._seconds += record["seconds"]["round"]
        return duration(max(0, self._left) * self._seconds / self._played)


class Lines:
    """A line a round. `rounds`: how many there are to play in all."""

    def __init__(self, rounds: int, console: Console) -> None:
        self._clock, self._console = _Clock(rounds), console
        self._title, self._rounds = "", 0

    def begin(self, title: str, rounds: int, done: int) -> None:
        self._title, self._rounds = title, rounds
        if done:
            self._console.print(f"{title}: resumed after round {done}")

    def phase(self, round: int, phase: str, done: int, total: int) -> None: ...

    def round_ended(self, record: Record) -> None:
        place = f"{self._title}: round {record['round']}/{self._rounds}"
        self._console.print(f"{place}: {summary(record)}; {self._clock.tick(record)} left")
        for aside in record["set_aside"]:
            self._console.print(f"  set aside: client {aside['client']}: {aside['reason']}")

    def end(self) -> None: ...


PHASES = {"clients": "clients train", "ensemble": "members vote", "distill": "student learns", "evaluate": "test"}


class Bars:
    """One bar for the rounds of the current run, and below it what is happening in this round."""

    def __init__(self, rounds: int, console: Console) -> None:
        self._clock, self._console = _Clock(rounds), console
        self._bars: Progress | None = None

    def begin(self, title: str, rounds: int, done: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4}/{task.total:<4} {task.fields[note]}", markup=False),
            console=self._console,
        )
        self._bars.start()
        self._whole = self._bars.add_task(title, total=rounds, completed=done, note="")
        self._part = self._bars.add_task("  starting", total=1, note="")

    def phase(self, round: int, phase: str, done: int, total: int) -> None:  # noqa: ARG002
        if self._bars is not None:
            name = f"  {PHASES.get(phase, phase)}"
            self._bars.update(self._part, description=name, completed=done, total=total)

    def round_ended(self, record: Record) -> None:
        if self._bars is None:
            return
        note = f"{summary(record)}; {self._clock.tick(record)} left"
        self._bars.update(self._whole, completed=record["round"], note=note)
        for aside in record["set_aside"]:
            self._bars.print(f"set aside in round {record['round']}: client {aside['client']}: {aside['reason']}")

    def end(self) -> None:
        if self._bars is not None:
            self._bars.remove_task(self._part)
            self._bars.stop()
            self._bars = None


class Nobody:
    """--quiet."""

    def begin(self, title: str, rounds: int, done: int) -> None: ...

    def phase(self, round: int, phase: str, done: int, total: int) -> None: ...

    def round_ended(self, record: Record) -> None: ...

    def end(self) -> None: ...


class TensorBoard:
    """Event files beside the run, one scalar for each number of rounds.jsonl."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError("--tensorboard needs the package tensorboard: pip install 'fedbe[tensorboard]'") from None
        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def begin(self, title: str, rounds: int, done: int) -> None:  # noqa: ARG002
        # Rounds that a crash left without a checkpoint are played again; their old points must go.
        self._writer = self._make(str(self._folder / "tensorboard"), purge_step=done + 1)

    def phase(self, round: int, phase: str, done: int, total: int) -> None: ...

    def round_ended(self, record: Record) -> None:
        for name, value in _numbers(record):
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()


class All:
    """Several observers at once."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin(self, title: str, rounds: int, done: int) -> None:
        for observer in self._observers:
            observer.begin(title, rounds, done)

    def phase(self, round: int, phase: str, done: int, total: int) -> None:
        for observer in self._observers:
            observer.phase(round, phase, done, total)

    def round_ended(self, record: Record) -> None:
        for observer in self._observers:
            observer.round_ended(record)

    def end(self) -> None:
        for observer in self._observers:
            observer.end()


def _numbers(record: Record, prefix: str = "") -> list[tuple[str, float]]:
    """All numbers of a nested record with their paths, without lists."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            found += _numbers(value, f"{path}/")
        elif isinstance(value, int | float) and path != "round":
            found.append((path, float(value)))
    return found


def observer(rounds: int, *, quiet: bool, console: Console) -> Observer:
    """The observer that fits where we are: bars in a terminal, lines in a pipe or a log."""
    if quiet:
        return Nobody()
    return Bars(rounds, console) if console.is_terminal else Lines(rounds, console)
