"""How much memory the processes of a run need, phase by phase."""

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path


class Peak:
    """The largest resident memory of some processes since this was made, summed, in MB.

    Linux keeps a high-water mark for each process and lets it be reset; pages that processes share count in each.
    Elsewhere the figure is the peak of this process since it started.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._pids = (os.getpid(), *workers)
        for pid in self._pids:
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:  # not Linux, or a worker that has just died
                continue

    def mb(self) -> float:
        found = [_high_water_mb(pid) for pid in self._pids]
        return round(sum(found) or _own_peak_mb(), 1)


def _high_water_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def _own_peak_mb() -> float:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
