"""How much memory processes use, and how they reuse it."""

import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# The names of mallopt's options in glibc's malloc.h, and the largest threshold that it accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 32 * 2**20
SYSTEM_MEMORY = Path("/proc/meminfo")
MEMORY_GROUP = Path("/sys/fs/cgroup")


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees instead of handing it back to the system.

    Each step of a convolutional network frees and takes the same few megabytes. Handed back, they return as fresh
    pages that must be mapped and zeroed one by one: that was a third of a ConvNet step. Only glibc has this setting;
    elsewhere nothing changes.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST)


def available_mb() -> float:
    """The memory that new processes can take without swapping, in MB; unlimited where the system does not say."""
    limits = [_free_in_group_mb()]
    with suppress(OSError):
        lines = SYSTEM_MEMORY.read_text().splitlines()
        limits += [int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(limits)


def _free_in_group_mb() -> float:
    """What the container's limit leaves (cgroup v2)."""
    try:
        limit = int((MEMORY_GROUP / "memory.max").read_text())
        return (limit - int((MEMORY_GROUP / "memory.current").read_text())) / 2**20
    except (OSError, ValueError):  # "max" means that there is none
        return math.inf


class ProcessMemoryPeak:
    """The largest resident memory of some processes since this object was created, summed, in MB.

    Linux keeps a high-water mark for each process and can reset it. Pages that processes share count in each of them.
    On other systems the figure is the peak of this process since it started.

    Args:
        workers: The ids of the processes that count in addition to this one.
    """

    def __init__(self, workers: Iterable[int] = ()) -> None:
        self._pids = (os.getpid(), *workers)
        for pid in self._pids:
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:  # not Linux, or a worker that has just died
                continue

    def mb(self) -> float:
        """The sum of the peaks, in MB."""
        peaks = [_high_water_mb(pid) for pid in self._pids]
        return round(sum(peaks) or _own_peak_mb(), 1)


def _high_water_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def _own_peak_mb() -> float:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
