"""Callbacks of a run: progress bars in a terminal, lines elsewhere. `trackers.py` has more."""

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedbe.experiment.run_folder import Record

EndStatus = Literal["finished", "stopped", "failed"]


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

    def end(self, status: EndStatus) -> None:
        """The run has finished, was stopped (Ctrl-C), or failed with an error."""

    def for_run(self) -> "Callback":
        """A callback for one of several runs that train at the same time; by default this one.

        It gets `begin` and `round_ended`. This callback gets `begin` with the rounds of all runs, and `end`.
        """
        return self


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

    def end(self, status: EndStatus) -> None:
        for callback in self._callbacks:
            callback.end(status)


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
    """Estimates the time left from the mean time of the rounds so far.

    It uses the times in the records, because they include clients that were trained before a resume.

    Args:
        rounds: How many rounds are left in all runs.
        at_once: How many runs train at the same time.
    """

    def __init__(self, rounds: int, at_once: int = 1) -> None:
        self._left, self._finished, self._seconds, self._at_once = rounds, 0, 0.0, at_once

    def update(self, record: Record) -> str:
        """Count one more round; returns the time left."""
        self._left, self._finished = self._left - 1, self._finished + 1
        self._seconds += record["seconds"]["round"]
        return duration(max(0, self._left) * self._seconds / self._finished / self._at_once)


class ProgressLines(Callback):
    """Prints a line for each round.

    Args:
        time_left: Estimates the time left; runs that train at the same time share it.
        console: Where to print.
    """

    def __init__(self, time_left: _TimeLeft, console: Console) -> None:
        self._time_left, self._console = time_left, console
        self._title, self._rounds = "", 0

    def for_run(self) -> Callback:
        return ProgressLines(self._time_left, self._console)

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
        time_left: Estimates the time left.
        console: The terminal.
    """

    def __init__(self, time_left: _TimeLeft, console: Console) -> None:
        self._time_left, self._console = time_left, console
        self._bars: Progress | None = None

    def begin(self, title: str, rounds: int, done: int) -> None:
        self._bars = _bars(self._console)
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
        _print_problems(self._bars, record)

    def end(self, status: EndStatus) -> None:  # noqa: ARG002
        if self._bars is not None:
            self._bars.remove_task(self._phase_bar)
            self._bars.stop()
            self._bars = None


class ParallelBars(Callback):
    """Shows a bar for the rounds of all runs, and one for each run that trains, from its first round on.

    Args:
        time_left: Estimates the time left.
        console: The terminal.
    """

    def __init__(self, time_left: _TimeLeft, console: Console) -> None:
        self._time_left, self._console = time_left, console

    def begin(self, title: str, rounds: int, done: int) -> None:
        self.bars = _bars(self._console)
        self._rounds_bar = self.bars.add_task(title, total=rounds, completed=done, note="first rounds")

    def for_run(self) -> Callback:
        return _RunBar(self)

    def count_round(self, record: Record) -> None:
        """Note that one of the runs has finished a round."""
        self.bars.update(self._rounds_bar, advance=1, note=f"{self._time_left.update(record)} left")

    def end(self, status: EndStatus) -> None:  # noqa: ARG002
        self.bars.stop()


class _RunBar(Callback):
    """The bar of one run in `ParallelBars`. It disappears with the last round, whose result stays as a line."""

    def __init__(self, parallel: ParallelBars) -> None:
        self._parallel, self._bars = parallel, parallel.bars

    def begin(self, title: str, rounds: int, done: int) -> None:
        self._title, self._rounds = title, rounds
        self._bar = self._bars.add_task(title, total=rounds, completed=done, note="")

    def round_ended(self, record: Record) -> None:
        self._parallel.count_round(record)
        _print_problems(self._bars, record)
        if record["round"] < self._rounds:
            self._bars.update(self._bar, completed=record["round"], note=summary(record))
        else:
            self._bars.remove_task(self._bar)
            self._bars.print(f"{self._title}: {summary(record)}")


def _bars(console: Console) -> Progress:
    """Bars that are on the screen until `stop`."""
    bars = Progress(
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:>4}/{task.total:<4} {task.fields[note]}", markup=False),
        console=console,
    )
    bars.start()
    return bars


def _print_problems(bars: Progress, record: Record) -> None:
    """Print a line above the bars for each client that was set aside or capped."""
    for aside in record["set_aside"]:
        bars.print(f"set aside in round {record['round']}: client {aside['client']}: {aside['reason']}")
    for capped in record.get("capped", ()):
        bars.print(f"round {record['round']}: {capped}")


def progress_callback(rounds: int, *, quiet: bool, console: Console, at_once: int = 1) -> Callback:
    """The callback that shows progress: bars in a terminal, lines in a pipe or a log, nothing if `quiet`.

    Args:
        rounds: The number of rounds that are left in all runs, for the time left.
        quiet: Show nothing.
        console: Where to show it.
        at_once: How many runs train at the same time.
    """
    if quiet:
        return Callback()
    time_left = _TimeLeft(rounds, at_once)
    if not console.is_terminal:
        return ProgressLines(time_left, console)
    return ProgressBars(time_left, console) if at_once == 1 else ParallelBars(time_left, console)
