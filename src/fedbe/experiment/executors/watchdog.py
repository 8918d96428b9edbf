"""Ends worker processes that hang: one that is stopped, or that works on a job for far too long, is killed.

A killed worker is replaced like one that died. Time is counted in ticks of the watchdog itself, so a machine that
sleeps for a night does not look like one whose workers hang.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TICK_SECONDS = 1.0
HANG_SECONDS = 120.0  # without a sign of life
START_SECONDS = 900.0  # until the first sign of life: a loaded machine imports torch slowly
JOB_SECONDS = 600.0  # any job may take this long, …
JOB_RATIO = 30.0  # … or this many times as long as the slowest job so far, scaled by size
FIRST_JOB_SECONDS = 3600.0  # as long as no job of its kind has finished: this, …
FIRST_JOB_SECONDS_PER_EXAMPLE = 10.0  # … and so much for each example; one core trains the largest models faster


class Watched(Protocol):
    """A worker process as the watchdog sees it."""

    beat: Any  # a shared counter that the worker increases
    started: float  # when the current job was started: another value is another job
    job_limit: float | None  # seconds that the current job may take; None for no limit, or no job

    def kill(self) -> None:
        """End the process at once."""


@dataclass
class _Seen:
    beat: int = 0
    silent: float = 0.0
    started: float = 0.0
    working: float = 0.0


class Watchdog:
    """A thread that looks at all workers once in a second.

    Args:
        workers: Returns the current workers.
        hang_seconds: A worker without a sign of life for this long is killed.
    """

    def __init__(self, workers: Callable[[], Sequence[Watched]], hang_seconds: float = HANG_SECONDS) -> None:
        self._workers, self._hang_seconds = workers, hang_seconds
        self._seen: dict[Watched, _Seen] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fedbe-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            workers = list(self._workers())
            self._seen = {worker: self._seen.get(worker, _Seen()) for worker in workers}
            for worker in workers:
                if self._hangs(worker, self._seen[worker]):
                    worker.kill()

    def _hangs(self, worker: Watched, seen: _Seen) -> bool:
        beat, limit = worker.beat.value, worker.job_limit
        seen.silent = 0.0 if beat != seen.beat else seen.silent + TICK_SECONDS
        seen.working = seen.working + TICK_SECONDS if worker.started == seen.started else 0.0
        seen.beat, seen.started = beat, worker.started
        silent_too_long = seen.silent > (self._hang_seconds if beat else max(START_SECONDS, self._hang_seconds))
        return silent_too_long or (limit is not None and seen.working > limit)


def start_beating(beat: Any) -> None:
    """In a worker: increase the counter from a thread, for as long as the process runs.

    The thread also ends the process when its parent has died: a job can be a whole run.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def run() -> None:
        while parent.is_alive():
            beat.value += 1
            time.sleep(TICK_SECONDS / 2)
        os._exit(1)

    threading.Thread(target=run, name="fedbe-beat", daemon=True).start()


@dataclass
class JobTimes:
    """How long a job may take: a multiple of what the slowest job so far took for the same work.

    The first job of a kind may loop forever, too, so it has a limit by its size alone. A job without a size has none
    until one of its kind has finished. An `unlimited` job, such as a whole run, never has one: another run, with cached
    clients or few rounds left, says nothing about its time.
    """

    _seconds_per_unit: dict[type, float] = field(default_factory=dict)

    def note(self, job: Any, seconds: float) -> None:
        """Note how long a job took."""
        rate = seconds / max(1, getattr(job, "size", 1))
        self._seconds_per_unit[type(job)] = max(rate, self._seconds_per_unit.get(type(job), 0.0))

    def limit(self, job: Any) -> float | None:
        """The seconds that a job may take; None for no limit."""
        if getattr(job, "unlimited", False):
            return None
        rate, size = self._seconds_per_unit.get(type(job)), getattr(job, "size", None)
        if rate is not None:
            return max(JOB_SECONDS, JOB_RATIO * rate * max(1, size or 1))
        return None if size is None else FIRST_JOB_SECONDS + FIRST_JOB_SECONDS_PER_EXAMPLE * size
