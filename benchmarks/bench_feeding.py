"""How fast batches are made: augmented CIFAR images a second on one core, beside the memory's own speed.

    python benchmarks/bench_feeding.py

The reference copies as many bytes as a batch has in and out (uint8 gathered, float32 written) and does nothing
else. Both are measured in turn, many times, and the median of each is shown with the quartiles.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedbe.core.random import generator
from fedbe.data import Augment, BatchLoader

IMAGES = 50_000
BATCHES = (40, 128)
ROUNDS, CALLS = 40, 50
FLOOR = 100_000  # augmented images a second that issue 3 asks for


@dataclass(frozen=True)
class Speed:
    """Images a second over all rounds: quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, batch: int, seconds: list[float]) -> "Speed":
        return cls(*statistics.quantiles([CALLS * batch / second for second in seconds], n=4))

    def __str__(self) -> str:
        return f"{self.median:>9,.0f} ({self.low:,.0f} … {self.high:,.0f})"


def seconds(call: Callable[[torch.Tensor], object], indices: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    for index in indices:
        call(index)
    return time.perf_counter() - start


def measure(pixels: torch.Tensor, batch: int) -> dict[str, Speed]:
    """Every way of making a batch, in turn, so that a busy machine slows all of them alike."""
    draw, pick = generator(0, role="bench"), generator(0, role="bench-index")
    loader = BatchLoader(pixels, mean=torch.full((3,), 0.47), std=torch.full((3,), 0.25), augment=Augment())
    half, source, target = loader.to(torch.bfloat16), torch.rand(batch, 3072), torch.empty(batch, 3072)

    def copy(index: torch.Tensor) -> None:
        pixels.index_select(0, index)
        target.copy_(source)

    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "augmented float32": lambda index: loader.batch(index, draw),
        "augmented bfloat16": lambda index: half.batch(index, draw),
        "plain float32": loader.batch,
        "copy alone": copy,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 2):
        indices = [torch.randint(IMAGES, (batch,), generator=pick) for _ in range(CALLS)]
        for name, call in ways.items():
            spent = seconds(call, indices)
            if number >= 2:  # the first two rounds warm up
                took[name].append(spent)
    return {name: Speed.of(batch, spent) for name, spent in took.items()}


def main() -> None:
    torch.set_num_threads(1)
    pixels = torch.randint(0, 256, (IMAGES, 32, 32, 3), dtype=torch.uint8, generator=generator(0, role="bench-pixels"))
    for batch in BATCHES:
        print(f"batches of {batch}, one core: images a second, median (quartiles)")
        speeds = measure(pixels, batch)
        for name, speed in speeds.items():
            ratio = speeds["copy alone"].median / speed.median
            print(f"  {name:<20}{speed!s:<36}{ratio:6.1f} × the time of the copy")
        verdict = "at least" if speeds["augmented float32"].median >= FLOOR else "BELOW"
        print(f"  {verdict} the {FLOOR:,} augmented images a second asked for")


if __name__ == "__main__":
    main()
