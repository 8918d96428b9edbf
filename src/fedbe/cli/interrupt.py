"""Ctrl-C while a command trains."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from fedbe.cli.console import err


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Stop after the current step on the first Ctrl-C, and at once on the second.

    Yields:
        A function that says whether Ctrl-C was pressed.
    """
    signals: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt
        err.print("\nstopping after the current step; press Ctrl-C again to stop at once")

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(signals)
    except KeyboardInterrupt:
        err.print("stopped at once; finished rounds are kept, and finished clients of a long round")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, previous)
