"""What a measurement was made on."""

import platform
from pathlib import Path

import torch

from fedbe.core.compute import cores, cpu_flags


def describe_machine() -> str:
    """Processor, cores, its vector instructions, and versions, in one line."""
    names = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    vectors = next((name for name in ("avx512f", "avx2", "avx") if name in cpu_flags()), "no vector instructions")
    return (
        f"{cores()} cores of {', '.join(sorted(names)) or platform.machine()} ({vectors}), Python "
        f"{platform.python_version()}, torch {torch.__version__}, float32"
    )
