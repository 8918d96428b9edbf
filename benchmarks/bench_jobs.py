"""Processor time to hand a model to a worker process and get one back: through shared memory, and through the pipe.

    python -m benchmarks jobs

Both kinds of pool take turns. The processor time of driver and worker is measured, not the time on the clock, so that
others on the machine change little.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from fedbe.core.state import ModelState
from fedbe.experiment.executors.memory_usage import keep_freed_memory
from fedbe.experiment.executors.process_pool import ProcessPool

PARAMETERS, JOBS, REPEATS = 1_600_000, 50, 5


@dataclass(frozen=True, eq=False)
class Return:
    """A job that only returns its model."""

    state: ModelState
    name: str = "return"

    def run(self, federation: Any, runner: Any) -> ModelState:  # noqa: ARG002
        """The model."""
        return self.state


def processor_seconds(pids: list[int]) -> float:
    """The processor time of this process and of others."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def pool(shared: bool) -> Iterator[ProcessPool]:
    """A worker process with or without shared memory."""
    with patch("fedbe.experiment.executors.mailbox.os", os if shared else object()), ProcessPool(1) as workers:
        yield workers


def main() -> None:
    """Measure and print."""
    job = Return(ModelState(torch.zeros(PARAMETERS), torch.empty(0), {}))
    keep_freed_memory()
    costs: dict[str, list[float]] = {"shared memory": [], "pipe": []}
    with pool(True) as shared, pool(False) as piped:
        for workers in (shared, piped):
            list(workers.map([job]))
        for _ in range(REPEATS):
            for kind, workers in (("shared memory", shared), ("pipe", piped)):
                begin = processor_seconds(workers.pids)
                for _ in workers.map([job] * JOBS):
                    pass  # kept results would need new memory, which costs more than the way
                costs[kind].append((processor_seconds(workers.pids) - begin) / JOBS)
    for kind, seconds in costs.items():
        Console().print(f"{kind}: {1000 * median(seconds):.1f} ms a job of {PARAMETERS:,} parameters there and back")


if __name__ == "__main__":
    main()
