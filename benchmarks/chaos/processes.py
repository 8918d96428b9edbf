"""Processes that die or hang: the whole run, or one of its workers."""

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.common import Tally, new_run, reference_run, train
from fedbe.algorithms.methods import METHODS
from fedbe.experiment.executors.process_pool import ProcessPool

HANG_SECONDS = 6.0  # until the watchdog ends a stopped worker; the default is two minutes


def kills(count: int, draw: random.Random, root: Path, methods: Sequence[str] = tuple(METHODS)) -> Tally:
    """Kill a run three times at random moments, then resume it: every method in turn."""
    tally, seconds = Tally(), dict[str, float]()
    while tally.tried < count:
        method = methods[tally.tried // 3 % len(methods)]
        reference = reference_run(root, method)
        if method not in seconds:
            folder, begin = new_run(root / "timed", method), time.perf_counter()
            train(folder)
            seconds[method] = time.perf_counter() - begin
            tally.finish(folder, reference)
        folder = new_run(root / "killed", method)
        for _ in range(3):
            tally.tried += 1
            child = os.fork()
            if not child:
                _quiet_child(folder)
            time.sleep(draw.uniform(0, seconds[method]))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        tally.finish(folder, reference)
    return tally


def _quiet_child(folder: Path) -> None:
    try:
        train(folder)
    finally:
        os._exit(0)


def workers(count: int, draw: random.Random, root: Path, patience: float = 300.0) -> Tally:
    """Stop (SIGSTOP) or kill a random worker process while a run trains; the run must end, and end the same.

    Args:
        patience: seconds after which a run counts as hung.
    """
    tally = Tally()
    if not count:
        return tally
    reference = reference_run(root, "fedbe")
    pool = ProcessPool(2, hang_seconds=HANG_SECONDS)
    with pool:
        for _ in range(2):  # the second one has workers that are ready
            warm, begin = new_run(root / "warm", "fedbe"), time.perf_counter()
            tally.finish(warm, reference, pool)
        seconds = time.perf_counter() - begin
        for number in range(count):
            tally.tried += 1
            folder = new_run(root / "workers", "fedbe")
            thread = threading.Thread(target=tally.finish, args=(folder, reference, pool), daemon=True)
            thread.start()
            time.sleep(draw.uniform(0, seconds / 2))
            if thread.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(pool.pids), signal.SIGKILL if number % 4 == 3 else signal.SIGSTOP)
            thread.join(patience)
            if thread.is_alive():
                tally.hung += 1
                for pid in pool.pids:  # the pool finds them dead, and goes on
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                thread.join()
    return tally
