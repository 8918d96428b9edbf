"""Mean and variance of a stream of model states."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedbe.core.state import ModelState
from fedbe.errors import StateError

PIECE = 2**16  # elements that are merged at once: they stay in the processor's cache
_Stream = tuple[ModelState, tuple[Tensor, Tensor] | None, float]  # mean, variance (None is zero) and total weight


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

        `add_all` is faster for many states.

        Args:
            state: The state; all states of a stream have the same layout.
            weight: Its weight, such as a client's number of examples; > 0 and finite.

        Raises:
            StateError: The weight is out of range, or `state` is not a `ModelState`.
        """
        self.add_all([(state, weight)])

    def add_all(self, states: Iterable[tuple[ModelState, float]]) -> None:
        """Add pairs of a state and its weight, in this order. The result has the bits of one `add` after the other.

        Raises:
            StateError: As in `add`; then nothing was added.
        """
        streams = []
        for state, weight in states:
            if not (weight > 0 and math.isfinite(weight)):
                raise StateError(f"`weight` must be > 0 and finite, got {weight}")
            if not isinstance(state, ModelState):
                raise StateError(
                    f"`state` must be a ModelState (Layout(model).pack(state_dict)), got {type(state).__name__}"
                )
            streams.append((state, None, float(weight)))
        self._merge(streams)

    def merge(self, other: "Moments") -> None:
        """Add everything that another stream has received, as in a tree of aggregators.

        Raises:
            StateError: Only one of the two streams tracks the variance.
        """
        if self._tracks_variance != other._tracks_variance:
            raise StateError("only moments that both track the variance, or both do not, can be merged")
        if other._mean is not None:
            self._merge([(other._mean, other._variance, other.weight)])

    def _merge(self, streams: Sequence[_Stream]) -> None:
        if self._mean is None and streams:
            self._start(*streams[0])
            streams = streams[1:]
        shares = []
        for _, _, weight in streams:
            self.weight += weight
            shares.append(weight / self.weight)
        self._merge_vectors("params", 0, streams, shares)
        self._merge_vectors("buffers", 1, streams, shares)
        for mean, _, _ in streams:
            for name, counter in self.mean.counters.items():
                torch.maximum(counter, mean.counters[name], out=counter)

    def _start(self, mean: ModelState, variance: tuple[Tensor, Tensor] | None, weight: float) -> None:
        self.weight, self._mean = weight, mean.clone()
        if variance is not None:
            self._variance = (variance[0].clone(), variance[1].clone())
        elif self._tracks_variance:
            self._variance = (torch.zeros_like(mean.params), torch.zeros_like(mean.buffers))

    def _merge_vectors(self, part: str, number: int, streams: Sequence[_Stream], shares: Sequence[float]) -> None:
        """Merge one part of all streams, piece by piece: a piece of the mean stays in the cache for all of them."""
        if not streams:
            return
        whole: Tensor = getattr(self.mean, part)
        scratch = torch.empty_like(whole[:PIECE])
        for start in range(0, len(whole), PIECE):
            piece = slice(start, start + PIECE)
            ours = whole[piece]
            for (mean, variance, _), share in zip(streams, shares, strict=True):
                delta = torch.sub(getattr(mean, part)[piece], ours, out=scratch[: len(ours)])
                ours.add_(delta, alpha=share)
                if self._variance is not None:
                    spread = self._variance[number][piece]
                    spread.addcmul_(delta, delta, value=share).mul_(1 - share)
                    if variance is not None:
                        spread.add_(variance[number][piece], alpha=share)

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
    moments.add_all(states)
    return moments.mean
