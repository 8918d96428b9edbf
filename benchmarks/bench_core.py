"""The middle of FedBE beside bare torch: posterior, vote and distillation of ResNet-20, on one core.

    python -m benchmarks core

Ours and bare torch are measured in turn, so that a busy machine slows both alike; medians are shown, and the ratio
of each pair's times with its quartiles. Peak memory is measured in child processes, one for each number of members.
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
VOTERS = 2  # few members and many rounds: on a busy machine pairs that lie close together compare best
STEPS, BATCH = 4, 128
ROUNDS, WARM_UP = 9, 1
PEAKS = (2, 5, 20)  # the second member meets a fragmented heap, later ones find room


@dataclass(frozen=True, eq=False)
class Scene:
    """A ResNet-20, ten clients around it and images like CIFAR's."""

    bench: ModelRunner
    updates: list[Update]
    images: Tensor

    @classmethod
    def make(cls) -> "Scene":
        module = build("resnet20", 10, (3, 32, 32), generator(0, role="bench-model"))
        bench = ModelRunner(module)
        draw = generator(0, role="bench-clients")
        start = bench.read()
        updates = []
        for i in range(CLIENTS):
            noise = 0.01 * torch.randn(start.params.shape, generator=draw)
            updates.append(Update(i, ModelState(start.params + noise, start.buffers, start.counters), 1.0 + i, {}))
        return cls(bench, updates, torch.randn(IMAGES, 3, 32, 32, generator=draw))

    def members(self, count: int) -> Iterator[Member]:
        """Samples, each drawn when it is asked for."""
        drawn = Gaussian.fit(self.updates).sample_states(count, generator(0, role="bench-samples"))
        return (Member(str(i), state) for i, state in enumerate(drawn))


def in_turn(*calls: Callable[[], object]) -> list[list[float]]:
    """Seconds of each call in each round; the rounds that warm up are dropped."""
    took: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS + WARM_UP):
        for call, seconds in zip(calls, took, strict=True):
            start = time.perf_counter()
            call()
            if number >= WARM_UP:
                seconds.append(time.perf_counter() - start)
    return took


def posterior(scene: Scene) -> Table:
    """What the server does before anybody votes: fit, mean and samples, beside copying the models once."""
    fitted = Gaussian.fit(scene.updates)
    draw = generator(0, role="bench-draw")
    target = torch.empty_like(fitted.std)

    def copy() -> None:
        for update in scene.updates:
            target.copy_(update.state.params)

    jobs: dict[str, Callable[[], object]] = {
        f"copy {CLIENTS} models": copy,
        f"mean of {CLIENTS} models": lambda: weighted_mean([(u.state, u.num_examples) for u in scene.updates]),
        f"fit the Gaussian to {CLIENTS} models": lambda: Gaussian.fit(scene.updates),
        f"draw {SAMPLES} models": lambda: list(fitted.sample_states(SAMPLES, draw)),
        f"bare randn for {SAMPLES} models": lambda: [torch.randn_like(fitted.std) for _ in range(SAMPLES)],
    }
    table = Table("posterior of ResNet-20", "milliseconds", title_justify="left")
    for name, seconds in zip(jobs, in_turn(*jobs.values()), strict=True):
        table.add_row(name, f"{1e3 * statistics.median(seconds):.2f}")
    return table


def ensemble(scene: Scene) -> Table:
    """The vote of M members beside M forward passes of the module alone, in the same batches and layout."""
    members = [Member(str(i), u.state) for i, u in enumerate(scene.updates[:VOTERS])]
    inputs = TensorInputs(scene.images)
    module = scene.bench.module
    batches = [b.contiguous(memory_format=torch.channels_last) for b in scene.images.split(scene.bench.plan.batch_size)]

    @torch.no_grad()
    def bare() -> None:
        module.eval()
        for _ in members:
            for batch in batches:
                module(batch)

    ours, plain = in_turn(lambda: vote(members, local_predictor(scene.bench, inputs)), bare)
    return compared(f"{len(members)} members, {IMAGES:,} images", "vote", ours, "forward passes alone", plain)


def distillation(scene: Scene) -> Table:
    """Steps of `distill` beside forward, backward and torch's own SGD on batches that lie ready."""
    images = scene.images[: STEPS * BATCH]
    targets = torch.randn(len(images), 10, generator=generator(0, role="bench-targets")).softmax(1)
    start = scene.updates[0].state
    settings = DistillSettings(optimizer="sgd", distill_epochs=1, distill_batch_size=BATCH)
    other = ModelRunner(scene.bench.module)
    other.load(start)
    optimizer = torch.optim.SGD(other.module.parameters(), lr=1e-3, momentum=0.9, fused=True)
    ready = [b.contiguous(memory_format=torch.channels_last) for b in images.split(BATCH)]

    def bare() -> None:
        other.module.train()
        for batch, target in zip(ready, targets.split(BATCH), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(other.module(batch), target).backward()
            optimizer.step()

    ours, plain = in_turn(
        lambda: distill(scene.bench, start, TensorInputs(images), targets, settings, generator(0)), bare
    )
    return compared(f"{STEPS} steps of {BATCH} images", "distill", ours, "bare SGD steps", plain)


def compared(title: str, name: str, ours: list[float], bare_name: str, bare: list[float]) -> Table:
    table = Table(title, "seconds", "ratio of pairs (quartiles)")
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, bare, strict=True)], n=4)
    table.add_row(name, f"{statistics.median(ours):.3f}", f"{middle:.3f} ({low:.3f} … {high:.3f})")
    table.add_row(bare_name, f"{statistics.median(bare):.3f}", "1")
    return table


def peaks() -> Table:
    """The largest resident memory of a process that holds a vote of M samples."""
    table = Table("members", "peak memory in MB", "above the first")
    found = [_peak(count) for count in PEAKS]
    for count, peak in zip(PEAKS, found, strict=True):
        table.add_row(str(count), f"{peak:.1f}", f"{peak - found[0]:+.1f}")
    return table


def _peak(members: int) -> float:
    code = f"from benchmarks.bench_core import child; child({members})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def child(members: int) -> None:
    torch.set_num_threads(1)
    scene = Scene.make()
    vote(scene.members(members), local_predictor(scene.bench, TensorInputs(scene.images)))
    # Linux only. Not resource.getrusage: its maximum begins with that of the process that started this one.
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    print(int(line.split()[1]) / 1024)


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    scene = Scene.make()
    for part in (posterior, ensemble, distillation):
        console.print(part(scene))
    console.print(peaks())


if __name__ == "__main__":
    main()
