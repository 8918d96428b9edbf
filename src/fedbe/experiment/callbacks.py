"""Callbacks of a run: progress bars in a terminal, lines elsewhere. `trackers.py` has more."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedbe.experiment.run_folder import Record


class Callback:
    """The base class of callbacks. Its methods do nothing; a callback overrides the methods that it needs.

    `loop.execute` calls `begin` and `end` once for each run, so one callback can follow several runs.
    """

    def begin(self, title: str, rounds: int, done: int) -> None:
        """A run of `rounds` rounds starts, or continues after round `done`."""

    def phase(self, round: int, phase: str, done: int, total: int) -> None:
        """Within a round, `done` of `total` steps of a phase (clients, ensemble, distill, evaluate) have finished."""

    def round_ended(self, record: Record) -> None:
        """A round has finished; `record` is its line in rounds.jsonl."""

    def end(self) -> None:
        """The run has finished or was stopped."""


class CallbackList(Callback):
    """Calls several callbacks, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def begin(self, title: str, rounds: int, done: int) -> None:
        for callback in self._callbacks:
            callback.begin(title, rounds, done)

    def phase(self, round: int, phase: str, done: int, total: int) -> None:
        for callback in self._callbacks:
            callback.phase(round, phase, done, total)

    def round_ended(self, record: Record) -> None:
        for callback in self._callbacks:
            callback.round_ended(record)

    def end(self) -> None:
        for callback in self._callbacks:
            callback.end()


def duration(seconds: float) -> str:
    """Seconds in a readable form.

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


class _TimeLeft:
    """Estimates the time left from the mean time of the rounds so far. `rounds`: how many are left in all runs.

    It uses the times in the records, because they include clients that were trained before a resume.
    """

    def __init__(self, rounds: int) -> None:
        self._left, self._finished, self._seconds = rounds, 0, 0.0

    def update(self, record: Record) -> str:
        """Count one more round; returns the time left."""
        self._left, self._finished = self._left - 1, self._finished + 1
        self._seconds += record["seconds"]["round"]
        return duration(max(0, self._left) * self._seconds / self._finished)


class ProgressLines(Callback):
    """Prints a line for each round.

    Args:
        rounds: The number of rounds that are left in all runs, for the time left.
        console: Where to print.
    """

    def __init__(self, rounds: int, console: Console) -> None:
        self._time_left, self._console = _TimeLeft(rounds), console
        self._title, self._rounds = "", 0

    def begin(self, title: str, rounds: int, done: int) -> None:
        self._title, self._rounds = title, rounds
        if done:
            self._console.print(f"{title}: resumed after round {done}")

    def round_ended(self, record: Record) -> None:
        where = f"{self._title}: round {record['round']}/{self._rounds}"
        self._console.print(f"{where}: {summary(record)}; {self._time_left.update(record)} left")
        for aside in record["set_aside"]:
            self._console.print(f"  set aside: client {aside['client']}: {aside['reason']}")
        for capped in record.get("capped", ()):
            self._console.print(f"  {capped}")


PHASES = {"clients": "clients train", "ensemble": "members vote", "distill": "student learns", "evaluate": "test"}


class ProgressBars(Callback):
    """Shows a bar for the rounds of the current run, and below it a bar for the phase of the current round.

    Args:
        rounds: The number of rounds that are left in all runs, for the time left.
        console: The terminal.
    """

    def __init__(self, rounds: int, console: Console) -> None:
        self._time_left, self._console = _TimeLeft(rounds), console
        self._bars: Progress | None = None

    def begin(self, title: str, rounds: int, done: int) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4}/{task.total:<4} {task.fields[note]}", markup=False),
            console=self._console,
        )
        self._bars.start()
        self._rounds_bar = self._bars.add_task(title, total=rounds, completed=done, note="")
        self._phase_bar = self._bars.add_task("  starting", total=1, note="")

    def phase(self, round: int, phase: str, done: int, total: int) -> None:  # noqa: ARG002
        if self._bars is not None:
            name = f"  {PHASES.get(phase, phase)}"
            self._bars.update(self._phase_bar, description=name, completed=done, total=total)

    def round_ended(self, record: Record) -> None:
        if self._bars is None:
            return
        note = f"{summary(record)}; {self._time_left.update(record)} left"
        self._bars.update(self._rounds_bar, completed=record["round"], note=note)
        for aside in record["set_aside"]:
            self._bars.print(f"set aside in round {record['round']}: client {aside['client']}: {aside['reason']}")
        for capped in record.get("capped", ()):
            self._bars.print(f"round {record['round']}: {capped}")

    def end(self) -> None:
        if self._bars is not None:
            self._bars.remove_task(self._phase_bar)
            self._bars.stop()
            self._bars = None


def progress_callback(rounds: int, *, quiet: bool, console: Console) -> Callback:
    """The callback that shows progress: bars in a terminal, lines in a pipe or a log, nothing if `quiet`.

    Args:
        rounds: The number of rounds that are left in all runs, for the time left.
        quiet: Show nothing.
        console: Where to show it.
    """
    if quiet:
        return Callback()
    return ProgressBars(rounds, console) if console.is_terminal else ProgressLines(rounds, console)
