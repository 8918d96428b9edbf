"""The peak of a phase is that of the phase, not of what happened before."""

import mmap
import platform
import subprocess
import sys

import pytest

from fedbe.experiment.executors.memory_usage import ProcessMemoryPeak


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a mark that can be reset")
def test_a_peak_belongs_to_its_phase() -> None:
    first = ProcessMemoryPeak([])
    with mmap.mmap(-1, 100 * 2**20) as big:  # not the heap's, which may keep what other tests have freed
        big.write(bytes(len(big)))
        before = first.mb()
    second = ProcessMemoryPeak([])
    assert before - second.mb() > 80


FAULTS = """
import resource, torch
from fedbe.experiment.executors.memory_usage import keep_freed_memory
keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(10):
    if step == 2: before = faults()
    blocks = [torch.ones(14 * 2**18) for _ in range(8)]  # 14 MB each: what one training step might take and free
    del blocks
print(faults() - before)
"""


@pytest.mark.e2e
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a setting to keep memory")
def test_freed_memory_is_reused() -> None:
    # Handed back and taken again, it would be 229,000 pages (unless something happens to lie at the heap's end).
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, check=True, text=True)
    assert int(ran.stdout) < 20_000
