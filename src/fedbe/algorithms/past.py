"""Averages of earlier rounds, which vote as members P.

FedSDD (Kwan and Song 2023) lets the aggregated models of the last rounds teach, and does not distil into those models.
Here the averages are kept as they were *before* the distillation, so a student does not become its own teacher.
"""

from collections.abc import Mapping

from torch import Tensor

from fedbe.core.layout import Layout
from fedbe.core.state import ModelState


def past_sizes(count: int, layout: Layout) -> dict[str, int]:
    """The vectors in the server's memory: this round's average, and those of `count` rounds before it."""
    return {name: size for i in range(count + 1) for name, size in zip(_names(i), _sizes(layout), strict=True)}


def remember(count: int, memory: Mapping[str, Tensor], average: ModelState) -> dict[str, Tensor]:
    """The memory with this round's average as number 0; the others move on by one, and the oldest is dropped."""
    states = [(average.params, average.buffers), *_kept(count - 1, memory)]
    others = {name: vector for name, vector in memory.items() if not name.startswith("past ")}
    return others | {n: v for i, state in enumerate(states) for n, v in zip(_names(i), state, strict=True)}


def recall(count: int, memory: Mapping[str, Tensor], average: ModelState) -> list[ModelState]:
    """The averages of up to `count` earlier rounds, the latest first. Counters are those of this round's average."""
    return [ModelState(params, buffers, average.counters) for params, buffers in _kept(count, memory)[1:]]


def _kept(last: int, memory: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    pairs = [_names(i) for i in range(last + 1)]
    return [(memory[params], memory[buffers]) for params, buffers in pairs if params in memory]


def _names(i: int) -> tuple[str, str]:
    return f"past {i} params", f"past {i} buffers"


def _sizes(layout: Layout) -> tuple[int, int]:
    return layout.size, layout.buffer_size
