"""The server step of FedBE next to plain torch: posterior, vote and distillation of ResNet-20, on one core.

    python -m benchmarks core

Our code and plain torch take turns, so that other load slows both equally. The tables show medians, and the ratio of
each pair's times with its quartiles. Peak memory is measured in child processes, one for each number of members.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from fedbe import Gaussian, ModelState
from fedbe.algorithms.distillation import DistillSettings, distill
from fedbe.algorithms.vote import Member, local_predictor, vote
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.moments import weighted_mean
from fedbe.core.random import generator
from fedbe.core.updates import Update
from fedbe.models import build

CLIENTS, SAMPLES, IMAGES = 10, 10, 1000
VOTERS = 2  # few members and many rounds: pairs that are close in time compare best on a busy machine
STEPS, BATCH_SIZE = 4, 128
REPEATS, WARM_UP = 9, 1
PEAKS = (2, 5, 20)  # from 2 on: the second member still needs new memory, later ones reuse it


@dataclass(frozen=True, eq=False)
class Workload:
    """A ResNet-20, ten clients near it, and noise in the shape of CIFAR images."""

    runner: ModelRunner
    updates: list[Update]
    images: Tensor

    @classmethod
    def make(cls) -> "Workload":
        """The same workload on every call."""
        module = build("resnet20", 10, (3, 32, 32), generator(0, role="bench-model"))
        runner = ModelRunner(module)
        draw = generator(0, role="bench-clients")
        start = runner.read()
        updates = []
        for i in range(CLIENTS):
            noise = 0.01 * torch.randn(start.params.shape, generator=draw)
            updates.append(Update(i, ModelState(start.params + noise, start.buffers, start.counters), 1.0 + i, {}))
        return cls(runner, updates, torch.randn(IMAGES, 3, 32, 32, generator=draw))

    def members(self, count: int) -> Iterator[Member]:
        """Samples of the Gaussian, drawn one by one."""
        samples = Gaussian.fit(self.updates).sample_states(count, generator(0, role="bench-samples"))
        return (Member(str(i), state) for i, state in enumerate(samples))


def in_turn(*calls: Callable[[], object]) -> list[list[float]]:
    """The seconds of each call in each repeat, without the warm-up."""
    timings: list[list[float]] = [[] for _ in calls]
    for number in range(REPEATS + WARM_UP):
        for call, seconds in zip(calls, timings, strict=True):
            start = time.perf_counter()
            call()
            if number >= WARM_UP:
                seconds.append(time.perf_counter() - start)
    return timings


def posterior(work: Workload) -> Table:
    """Mean, fit and samples, next to copying the models once."""
    fitted = Gaussian.fit(work.updates)
    draw = generator(0, role="bench-draw")
    target = torch.empty_like(fitted.std)

    def copy() -> None:
        for update in work.updates:
            target.copy_(update.state.params)

    jobs: dict[str, Callable[[], object]] = {
        f"copy {CLIENTS} models": copy,
        f"mean of {CLIENTS} models": lambda: weighted_mean([(u.state, u.num_examples) for u in work.updates]),
        f"fit the Gaussian to {CLIENTS} models": lambda: Gaussian.fit(work.updates),
        f"draw {SAMPLES} models": lambda: list(fitted.sample_states(SAMPLES, draw)),
        f"plain randn for {SAMPLES} models": lambda: [torch.randn_like(fitted.std) for _ in range(SAMPLES)],
    }
    table = Table("posterior of ResNet-20", "milliseconds", title_justify="left")
    for name, seconds in zip(jobs, in_turn(*jobs.values()), strict=True):
        table.add_row(name, f"{1e3 * statistics.median(seconds):.2f}")
    return table


def ensemble(work: Workload) -> Table:
    """The vote of M members next to M plain forward passes, in the same batches and layout."""
    members = [Member(str(i), u.state) for i, u in enumerate(work.updates[:VOTERS])]
    inputs = TensorInputs(work.images)
    module = work.runner.module
    batches = [b.contiguous(memory_format=torch.channels_last) for b in work.images.split(work.runner.plan.batch_size)]

    @torch.no_grad()
    def plain_torch() -> None:
        module.eval()
        for _ in members:
            for batch in batches:
                module(batch)

    ours, plain = in_turn(lambda: vote(members, local_predictor(work.runner, inputs)), plain_torch)
    return compared(f"{len(members)} members, {IMAGES:,} images", "vote", ours, "plain forward passes", plain)


def distillation(work: Workload) -> Table:
    """Steps of `distill` next to forward, backward and torch's SGD on prepared batches."""
    images = work.images[: STEPS * BATCH_SIZE]
    targets = torch.randn(len(images), 10, generator=generator(0, role="bench-targets")).softmax(1)
    start = work.updates[0].state
    settings = DistillSettings(optimizer="sgd", distill_epochs=1, distill_batch_size=BATCH_SIZE)
    plain_runner = ModelRunner(work.runner.module)
    plain_runner.load(start)
    optimizer = torch.optim.SGD(plain_runner.module.parameters(), lr=1e-3, momentum=0.9, fused=True)
    prepared = [b.contiguous(memory_format=torch.channels_last) for b in images.split(BATCH_SIZE)]

    def plain_torch() -> None:
        plain_runner.module.train()
        for batch, target in zip(prepared, targets.split(BATCH_SIZE), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(plain_runner.module(batch), target).backward()
            optimizer.step()

    ours, plain = in_turn(
        lambda: distill(work.runner, start, TensorInputs(images), targets, settings, generator(0)), plain_torch
    )
    return compared(f"{STEPS} steps of {BATCH_SIZE} images", "distill", ours, "plain SGD steps", plain)


def compared(title: str, name: str, ours: list[float], plain_name: str, plain: list[float]) -> Table:
    """A table of two measurements and the ratio of their pairs."""
    table = Table(title, "seconds", "ratio of pairs (quartiles)")
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, plain, strict=True)], n=4)
    table.add_row(name, f"{statistics.median(ours):.3f}", f"{middle:.3f} ({low:.3f} … {high:.3f})")
    table.add_row(plain_name, f"{statistics.median(plain):.3f}", "1")
    return table


def peaks() -> Table:
    """The peak resident memory of a process that runs a vote of M samples."""
    table = Table("members", "peak memory in MB", "above the first")
    measured = [_peak(count) for count in PEAKS]
    for count, peak in zip(PEAKS, measured, strict=True):
        table.add_row(str(count), f"{peak:.1f}", f"{peak - measured[0]:+.1f}")
    return table


def _peak(members: int) -> float:
    code = f"from benchmarks.bench_core import print_peak_memory; print_peak_memory({members})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def print_peak_memory(members: int) -> None:
    """Run a vote and print this process's peak memory in MB."""
    torch.set_num_threads(1)
    work = Workload.make()
    vote(work.members(members), local_predictor(work.runner, TensorInputs(work.images)))
    # Linux only. Not resource.getrusage: its maximum includes that of the parent process.
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    print(int(line.split()[1]) / 1024)


def main() -> None:
    """Print all tables."""
    torch.set_num_threads(1)
    console = Console()
    work = Workload.make()
    for part in (posterior, ensemble, distillation):
        console.print(part(work))
    console.print(peaks())


if __name__ == "__main__":
    main()
