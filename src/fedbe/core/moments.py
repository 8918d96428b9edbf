"""Mean and variance of a stream of model states."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fedbe.core.state import ModelState
from fedbe.errors import StateError


class Moments:
    """Weighted mean and, on request, variance of a stream of states, in two models' worth of memory.

    West's update, for weights n_i with running total W (n_i included) and s = n_i/W:
        δ = w_i − μ;   μ ← μ + s δ;   V ← (1 − s)(V + s δ²)
    Identical states give exactly themselves and variance 0. `merge` joins two streams (Chan et al.), with s = W_b/W:
        δ = μ_b − μ_a;   μ = μ_a + s δ;   V = (1 − s)(V_a + s δ²) + s V_b
    Only shares of the total enter, so weights may be as small or as large as floating-point numbers are.
    Counters keep their integer dtype: the element-wise maximum.
    """

    def __init__(self, *, variance: bool = False) -> None:
        self.weight = 0.0
        self._variance = variance
        self._mean: ModelState | None = None
        self._spread: tuple[Tensor, Tensor] | None = None

    def add(self, state: ModelState, weight: float) -> None:
        """Take one more state in; it is neither kept nor changed."""
        if not (weight > 0 and math.isfinite(weight)):
            raise StateError(f"`weight` must be > 0, got {weight}")
        if not isinstance(state, ModelState):
            raise StateError(
                f"`state` must be a ModelState (Layout(model).pack(state_dict)), got {type(state).__name__}"
            )
        one = Moments(variance=self._variance)
        one.weight, one._mean = float(weight), state
        self._merge(one)

    def merge(self, other: "Moments") -> None:
        """Take in all that another stream has seen, as a tree of aggregators does."""
        if self._variance != other._variance:
            raise StateError("only moments that both track the variance, or both do not, can be merged")
        if other._mean is not None:
            self._merge(other)

    def _merge(self, other: "Moments") -> None:
        assert other._mean is not None
        theirs = other._mean
        if self._mean is None:
            self.weight = other.weight
            self._mean = theirs.clone()
            if self._variance:
                self._spread = _spread_of(other, self._mean)
            return
        total = self.weight + other.weight
        share = other.weight / total
        ours = (self._mean.params, self._mean.buffers)
        for i, (mean, new) in enumerate(zip(ours, (theirs.params, theirs.buffers), strict=True)):
            delta = new - mean
            mean.add_(delta, alpha=share)
            if self._spread is not None:
                self._spread[i].addcmul_(delta, delta, value=share).mul_(1 - share)
                if other._spread is not None:
                    self._spread[i].add_(other._spread[i], alpha=share)
        for name, counter in self._mean.counters.items():
            torch.maximum(counter, theirs.counters[name], out=counter)
        self.weight = total

    @property
    def mean(self) -> ModelState:
        """Σ_i (n_i/W) w_i: what FedAvg calls the average (Eq. 2). Valid until the next `add`."""
        if self._mean is None:
            raise StateError("no state was added yet, so there is no mean")
        return self._mean

    @property
    def variance(self) -> tuple[Tensor, Tensor]:
        """Σ_i (n_i/W)(w_i − μ)² of params and of buffers, element by element (Eq. 5). Valid until the next `add`."""
        if self._spread is None:
            raise StateError("no variance is tracked: create Moments(variance=True) and add a state")
        return self._spread


def _spread_of(moments: Moments, like: ModelState) -> tuple[Tensor, Tensor]:
    if moments._spread is not None:
        return moments._spread[0].clone(), moments._spread[1].clone()
    return torch.zeros_like(like.params), torch.zeros_like(like.buffers)


def weighted_mean(states: Iterable[tuple[ModelState, float]]) -> ModelState:
    """Σ_i (n_i/Σn) w_i over pairs (state, n)."""
    moments = Moments()
    for state, weight in states:
        moments.add(state, weight)
    return moments.mean
