"""What this machine can do."""

import os
from pathlib import Path

CPU_FLAGS = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is ARM's


def cores() -> int:
    """The cores that this process may use: `taskset` can leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_bfloat16() -> bool:
    """Does the processor compute bfloat16 in hardware? Elsewhere it is emulated and slower than float32."""
    try:
        text = CPU_FLAGS.read_text()
    except OSError:
        return False
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return bool(BFLOAT16_FLAGS & set(next(lines, "").split()))
