"""What this machine can do."""

import math
import os
from pathlib import Path

CPU_FLAGS = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # as a container sees its own (cgroup v2)
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is ARM's


def cores() -> int:
    """The cores that this process may use: `taskset` or a container's quota can leave it fewer than the machine has."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()  # "150000 100000": one core and a half; "max 100000": no limit
        return there if quota == "max" else min(there, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return there


def has_bfloat16() -> bool:
    """Does the processor compute bfloat16 in hardware? Elsewhere it is emulated and slower than float32."""
    try:
        text = CPU_FLAGS.read_text()
    except OSError:
        return False
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return bool(BFLOAT16_FLAGS & set(next(lines, "").split()))
