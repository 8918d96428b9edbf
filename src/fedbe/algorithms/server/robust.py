"""Robust means of client models: a few clients that send anything cannot move them far.

Each client counts once: its number of examples is its own claim. On clients whose data differ widely an honest client
is an outlier, too, and a robust mean leaves out what only this client knows: docs/robustness.md has measured both.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedbe.core.moments import weighted_mean
from fedbe.core.state import ModelState
from fedbe.core.updates import Update

CHUNK = 2**20  # parameters that are sorted at once, for all clients
ITERATIONS, SMOOTHING = 32, 1e-6  # of the geometric median


def coordinate_median(rows: Tensor, hostile: int = 0) -> Tensor:  # noqa: ARG001
    """The median of each coordinate; of an even number of values the mean of the two in the middle. [k, P] -> [P].

    Example:
        >>> coordinate_median(torch.tensor([[1.0, 9.0], [2.0, 8.0], [100.0, 1.0], [3.0, 7.0]]))
        tensor([2.5000, 7.5000])
    """
    return trimmed_mean(rows, (len(rows) - 1) // 2)


def trimmed_mean(rows: Tensor, hostile: int) -> Tensor:
    """The mean of each coordinate without its `hostile` smallest and largest values (Yin et al., 2018). [k, P] -> [P].

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [100.0]]), 1)
        tensor([3.])
    """
    cut = min(hostile, (len(rows) - 1) // 2)
    return rows.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0)


def krum_selection(rows: Tensor, hostile: int) -> list[int]:
    """The k − f clients with the smallest Krum scores (Blanchard et al., 2017): their positions, ascending.

    A score is the sum of the squared distances to the k − f − 2 nearest other clients.

    Example:
        >>> krum_selection(torch.tensor([[0.0], [1.0], [2.0], [1.5], [50.0]]), 1)
        [0, 1, 2, 3]
    """
    count = len(rows)
    squares = torch.cdist(rows.double(), rows.double()).square()
    nearest = squares.sort(dim=1).values[:, 1 : 1 + max(1, count - hostile - 2)]  # without the client itself
    order = nearest.sum(dim=1).argsort(stable=True)
    return sorted(order[: max(1, count - hostile)].tolist())


def geometric_median(rows: Tensor, hostile: int = 0) -> Tensor:  # noqa: ARG001
    """The point with the least sum of distances to all clients (Weiszfeld's steps, smoothed). [k, P] -> [P].

    Example:
        >>> geometric_median(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [90.0, 0.0]])).abs().max() < 1e-3
        tensor(True)
    """
    centre = coordinate_median(rows)
    for _ in range(ITERATIONS):
        inverse = 1.0 / (rows - centre).double().norm(dim=1).clamp(min=SMOOTHING)
        centre = ((inverse / inverse.sum()).to(rows.dtype) @ rows).to(rows.dtype)
    return centre


def clip_to_median(updates: Sequence[Update], previous: ModelState) -> Tensor:
    """The mean of changes that are clipped to the median of their norms: w̄ + (1/k) Σ_i min(1, C/‖Δ_i‖) Δ_i, [P]."""
    changes = torch.stack([u.state.params - previous.params for u in updates])
    norms = changes.double().norm(dim=1)
    limit = norms.sort().values[(len(norms) - 1) // 2 :][: 2 - len(norms) % 2].mean()
    scales = (limit / norms.clamp(min=1e-30)).clamp(max=1.0).to(changes.dtype)
    return torch.add(previous.params, scales @ changes, alpha=1 / len(updates))


_BY_COORDINATE: dict[str, Callable[[Tensor, int], Tensor]] = {"median": coordinate_median, "trimmed": trimmed_mean}
ROBUST_RULES = ("none", "median", "trimmed", "krum", "geometric", "clip-median")


def robust_mean(updates: Sequence[Update], previous: ModelState, rule: str, fraction: float) -> ModelState:
    """A robust mean of the clients' models. Running statistics are combined by their coordinate median.

    Args:
        updates: the admitted updates.
        previous: the global model that the clients started from.
        rule: a name of `ROBUST_RULES` except none.
        fraction: the part of the clients that may be hostile, for trimmed and krum.
    """
    hostile = math.floor(fraction * len(updates))
    if rule == "krum":
        chosen = krum_selection(torch.stack([u.state.params for u in updates]), hostile)
        return weighted_mean([(updates[i].state, 1.0) for i in chosen])
    if rule in _BY_COORDINATE:
        combine = _BY_COORDINATE[rule]
        params = _in_chunks([u.state.params for u in updates], lambda rows: combine(rows, hostile))
    elif rule == "geometric":
        params = geometric_median(torch.stack([u.state.params for u in updates]))
    else:
        params = clip_to_median(updates, previous)
    buffers = _in_chunks([u.state.buffers for u in updates], coordinate_median)
    names = previous.counters
    counters = {n: torch.stack([u.state.counters[n] for u in updates]).median(dim=0).values for n in names}
    return ModelState(params, buffers, counters)


def _in_chunks(vectors: Sequence[Tensor], combine: Callable[[Tensor], Tensor]) -> Tensor:
    def parts() -> Iterator[Tensor]:
        for start in range(0, max(1, len(vectors[0])), CHUNK):
            yield combine(torch.stack([v[start : start + CHUNK] for v in vectors]))

    return torch.cat(list(parts()))
