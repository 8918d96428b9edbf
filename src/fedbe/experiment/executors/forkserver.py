"""Worker processes fork from one server process. This starts it early, before this process imports torch itself."""

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def start_method() -> str:
    """The start method of multiprocessing: forkserver where it exists, else spawn.

    With it torch is imported once for all workers, and no lock is copied by a fork.
    """
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def warm_up() -> None:
    """Start the process that workers fork from: it imports torch while the caller does. A second call does nothing."""
    if start_method() == "forkserver":
        from multiprocessing import forkserver

        forkserver.set_forkserver_preload(["fedbe.experiment.executors.process_pool"])
        with _ignoring_interrupts():
            forkserver.ensure_running()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes that start in this context ignore Ctrl-C, even while they import: the parent decides when they end."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # only the main thread can change handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
