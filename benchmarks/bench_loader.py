"""The speed of the batch loader: augmented CIFAR images a second on one core, next to a plain copy.

    python -m benchmarks loader

The reference only copies the bytes of a batch (uint8 gathered, float32 written). All take turns, many times; the output
shows medians and quartiles.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedbe.core.random import generator
from fedbe.data import Augment, BatchLoader

IMAGES = 50_000
BATCH_SIZES = (40, 128)
REPEATS, CALLS = 40, 50
TARGET = 100_000  # augmented images a second


@dataclass(frozen=True)
class Speed:
    """Quartiles of the images a second, over all repeats."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, batch_size: int, seconds: list[float]) -> "Speed":
        return cls(*statistics.quantiles([CALLS * batch_size / second for second in seconds], n=4))

    def __str__(self) -> str:
        return f"{self.median:>9,.0f} ({self.low:,.0f} … {self.high:,.0f})"


def seconds(call: Callable[[torch.Tensor], object], indices: list[torch.Tensor]) -> float:
    """The time of one call for each index."""
    start = time.perf_counter()
    for index in indices:
        call(index)
    return time.perf_counter() - start


def measure(pixels: torch.Tensor, batch_size: int) -> dict[str, Speed]:
    """The speed of every way to make a batch. They take turns, so that other load slows all equally."""
    draw, pick = generator(0, role="bench"), generator(0, role="bench-index")
    loader = BatchLoader(pixels, mean=torch.full((3,), 0.47), std=torch.full((3,), 0.25), augment=Augment())
    half, source, target = loader.to(torch.bfloat16), torch.rand(batch_size, 3072), torch.empty(batch_size, 3072)

    def copy(index: torch.Tensor) -> None:
        pixels.index_select(0, index)
        target.copy_(source)

    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "augmented float32": lambda index: loader.batch(index, draw),
        "augmented bfloat16": lambda index: half.batch(index, draw),
        "plain float32": loader.batch,
        "plain copy": copy,
    }
    timings: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(REPEATS + 2):
        indices = [torch.randint(IMAGES, (batch_size,), generator=pick) for _ in range(CALLS)]
        for name, call in ways.items():
            spent = seconds(call, indices)
            if number >= 2:  # the first two are a warm-up
                timings[name].append(spent)
    return {name: Speed.of(batch_size, spent) for name, spent in timings.items()}


def main() -> None:
    """Print the speeds for each batch size."""
    torch.set_num_threads(1)
    pixels = torch.randint(0, 256, (IMAGES, 32, 32, 3), dtype=torch.uint8, generator=generator(0, role="bench-pixels"))
    for batch_size in BATCH_SIZES:
        print(f"batches of {batch_size}, one core: images a second, median (quartiles)")
        speeds = measure(pixels, batch_size)
        for name, speed in speeds.items():
            ratio = speeds["plain copy"].median / speed.median
            print(f"  {name:<20}{speed!s:<36}{ratio:6.1f} × the time of the copy")
        verdict = "at least" if speeds["augmented float32"].median >= TARGET else "BELOW"
        print(f"  {verdict} the {TARGET:,} augmented images a second that we aim for")


if __name__ == "__main__":
    main()
