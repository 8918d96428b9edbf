"""Mean and variance of a stream of model states."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedbe.core.compute import one_thread
from fedbe.core.state import PIECE, ModelState, pieces
from fedbe.errors import StateError

PARTS = ("params", "buffers")
LERP_BELOW = 0.49  # torch's lerp is μ + s (w − μ) for s < 0.5: the bits of West's update in one operation
Watch = Callable[
    [str, int, int, Tensor], None
]  # part ("params", "buffers"), number of the state and of its piece, values
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

    def add_all(self, states: Iterable[tuple[ModelState, float]], watch: Watch | None = None) -> None:
        """Add pairs of a state and its weight, in this order. The result has the bits of one `add` after the other.

        Args:
            states: The pairs.
            watch: Called with every piece of every state, while it is in the processor's cache.

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
        self._merge(streams, watch)

    def merge(self, other: "Moments") -> None:
        """Add everything that another stream has received, as in a tree of aggregators.

        Raises:
            StateError: Only one of the two streams tracks the variance.
        """
        if self._tracks_variance != other._tracks_variance:
            raise StateError("only moments that both track the variance, or both do not, can be merged")
        if other._mean is not None:
            self._merge([(other._mean, other._variance, other.weight)])

    def _merge(self, streams: Sequence[_Stream], watch: Watch | None = None) -> None:
        if not streams:
            return
        if is_start := self._mean is None:
            self._allocate(*streams[0][:2])
        shares = []
        for _, _, weight in streams:
            self.weight += weight
            shares.append(weight / self.weight)
        with one_thread():
            for part in PARTS:
                self._merge_part(part, streams, shares, is_start, watch)
        for mean, _, _ in streams:
            for name, counter in self.mean.counters.items():
                torch.maximum(counter, mean.counters[name], out=counter)

    def _allocate(self, mean: ModelState, variance: tuple[Tensor, Tensor] | None) -> None:
        """The first state's variance, and memory for its mean, which is copied piece by piece."""
        params, buffers = (f[0].new_empty(sum(map(len, f))) for f in map(mean.fragments, PARTS))
        self._mean = ModelState(params, buffers, {name: counter.clone() for name, counter in mean.counters.items()})
        if variance is not None:
            self._variance = (variance[0].clone(), variance[1].clone())
        elif self._tracks_variance:
            self._variance = (torch.zeros_like(params), torch.zeros_like(buffers))

    def _merge_part(
        self, part: str, streams: Sequence[_Stream], shares: Sequence[float], is_start: bool, watch: Watch | None
    ) -> None:
        """Merge one part of all streams, piece by piece: a piece of the mean stays in the cache for all of them."""
        number = PARTS.index(part)
        columns = [pieces(mean.fragments(part)) for mean, _, _ in streams]
        for position, (ours, *values) in enumerate(zip(pieces(self.mean.fragments(part)), *columns, strict=True)):
            piece = slice(position * PIECE, (position + 1) * PIECE)
            for stream, (value, (_, variance, _), share) in enumerate(zip(values, streams, shares, strict=True)):
                if watch is not None:
                    watch(part, stream, position, value)
                if is_start and stream == 0:
                    ours.copy_(value)
                elif self._variance is None:
                    _move(ours, value, share)
                else:
                    spread = self._variance[number][piece]
                    _move_with_variance(ours, spread, value, share)
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


def _move(mean: Tensor, value: Tensor, share: float) -> None:
    """μ ← μ + s (w − μ)."""
    if share < LERP_BELOW:
        mean.lerp_(value, share)
    else:
        mean.add_(value - mean, alpha=share)


def _move_with_variance(mean: Tensor, variance: Tensor, value: Tensor, share: float) -> None:
    """μ ← μ + s δ and V ← (1 − s)(V + s δ²)."""
    delta = value - mean
    mean.add_(delta, alpha=share)
    variance.addcmul_(delta, delta, value=share).mul_(1 - share)


def weighted_mean(states: Iterable[tuple[ModelState, float]], watch: Watch | None = None) -> ModelState:
    """Σ_i (n_i/Σn) w_i.

    Args:
        states: Pairs of a state w_i and its weight n_i. They are read one at a time.
        watch: As in `Moments.add_all`.
    """
    moments = Moments()
    moments.add_all(states, watch)
    return moments.mean
