"""Mean and variance of a stream of model states."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fedbe.core.state import ModelState
from fedbe.errors import StateError


class Moments:
    """Weighted mean and, on request, variance of a stream of states, in two models' worth of memory.

    West's update, for a state w_i with weight n_i, the total weight W (n_i included) and the share s = n_i/W:

        δ = w_i − μ;   μ ← μ + s δ;   V ← (1 − s)(V + s δ²)

    Identical states give exactly themselves and the variance 0. `merge` joins two streams (Chan et al.), with
    s = W_b/W:

        δ = μ_b − μ_a;   μ = μ_a + s δ;   V = (1 − s)(V_a + s δ²) + s V_b

    Only shares of the total are used, so weights may be very small or very large. Counters keep their integer dtype:
    the result is their element-wise maximum.

    Args:
        variance: Whether the variance is tracked too.

    Attributes:
        weight: The total weight W.

    Example:
        >>> moments = Moments(variance=True)
        >>> moments.add(ModelState(torch.tensor([1.0, 2.0]), torch.empty(0), {}), 1)
        >>> moments.add(ModelState(torch.tensor([5.0, 2.0]), torch.empty(0), {}), 3)
        >>> moments.mean.params
        tensor([4., 2.])
        >>> moments.variance[0]
        tensor([3., 0.])
    """

    def __init__(self, *, variance: bool = False) -> None:
        self.weight = 0.0
        self._tracks_variance = variance
        self._mean: ModelState | None = None
        self._variance: tuple[Tensor, Tensor] | None = None

    def add(self, state: ModelState, weight: float) -> None:
        """Add one state. It is neither kept nor changed.

        Args:
            state: The state; all states of a stream have the same layout.
            weight: Its weight, such as a client's number of examples; > 0 and finite.

        Raises:
            StateError: The weight is out of range, or `state` is not a `ModelState`.
        """
        if not (weight > 0 and math.isfinite(weight)):
            raise StateError(f"`weight` must be > 0 and finite, got {weight}")
        if not isinstance(state, ModelState):
            raise StateError(
                f"`state` must be a ModelState (Layout(model).pack(state_dict)), got {type(state).__name__}"
            )
        self._merge(state, None, float(weight))

    def merge(self, other: "Moments") -> None:
        """Add everything that another stream has received, as in a tree of aggregators.

        Raises:
            StateError: Only one of the two streams tracks the variance.
        """
        if self._tracks_variance != other._tracks_variance:
            raise StateError("only moments that both track the variance, or both do not, can be merged")
        if other._mean is not None:
            self._merge(other._mean, other._variance, other.weight)

    def _merge(self, mean: ModelState, variance: tuple[Tensor, Tensor] | None, weight: float) -> None:
        """Merge a stream with this mean, variance (None is zero) and total weight."""
        if self._mean is None:
            self.weight, self._mean = weight, mean.clone()
            if variance is not None:
                self._variance = (variance[0].clone(), variance[1].clone())
            elif self._tracks_variance:
                self._variance = (torch.zeros_like(mean.params), torch.zeros_like(mean.buffers))
            return
        total = self.weight + weight
        share = weight / total
        self._merge_vectors(mean, variance, share)
        for name, counter in self._mean.counters.items():
            torch.maximum(counter, mean.counters[name], out=counter)
        self.weight = total

    def _merge_vectors(self, mean: ModelState, variance: tuple[Tensor, Tensor] | None, share: float) -> None:
        pairs = ((self.mean.params, mean.params), (self.mean.buffers, mean.buffers))
        for i, (ours, theirs) in enumerate(pairs):
            delta = theirs - ours
            ours.add_(delta, alpha=share)
            if self._variance is not None:
                self._variance[i].addcmul_(delta, delta, value=share).mul_(1 - share)
                if variance is not None:
                    self._variance[i].add_(variance[i], alpha=share)

    @property
    def mean(self) -> ModelState:
        """μ = Σ_i (n_i/W) w_i, FedAvg's average (Eq. 2). Valid until the next `add` or `merge`."""
        if self._mean is None:
            raise StateError("no state was added yet, so there is no mean")
        return self._mean

    @property
    def variance(self) -> tuple[Tensor, Tensor]:
        """Σ_i (n_i/W)(w_i − μ)² of params [P] and of buffers [B] (Eq. 5). Valid until the next `add` or `merge`.

        Raises:
            StateError: The variance is not tracked, or no state was added yet.
        """
        if self._variance is None:
            raise StateError("no variance is tracked: create Moments(variance=True) and add a state")
        return self._variance


def weighted_mean(states: Iterable[tuple[ModelState, float]]) -> ModelState:
    """Σ_i (n_i/Σn) w_i over pairs of a state w_i and its weight n_i."""
    moments = Moments()
    for state, weight in states:
        moments.add(state, weight)
    return moments.mean
