"""How much a client may count.

A client's number of examples is its own claim. Unbounded, one claim of 10¹⁵ decides the model. So no client may have
more than a quarter of the total weight; among fewer than ten clients, not more than three times the mean of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedbe.core.updates import ClientId

MEAN_RATIO = 3.0  # in a small cohort a client may always count this many times the mean of the others


@dataclass(frozen=True)
class Capped:
    """A client whose weight was reduced, and its share of the total before and after."""

    client_id: ClientId
    reported_share: float
    share: float

    def __str__(self) -> str:
        return (
            f"client {self.client_id} reports {100 * self.reported_share:.3g} % of all examples and counts as "
            f"{100 * self.share:.3g} %"
        )


def share_limit(count: int, max_share: float) -> float:
    """The largest share of the total weight that one of `count` clients may have.

    Example:
        >>> share_limit(10, 0.25), share_limit(100, 0.25), share_limit(2, 0.25)
        (0.25, 0.25, 0.75)
    """
    return max(max_share, MEAN_RATIO / (MEAN_RATIO + count - 1))


def cap_weights(weights: Sequence[float], max_share: float) -> list[float]:
    """The weights with the largest ones reduced, so that none has more than its share of the new total.

    The common cap c solves c = s · Σ_i min(n_i, c), where s is `share_limit`. With the k largest capped,
    c = s · (sum of the others) / (1 − k s). Weights within the limit stay as they are, to the last bit.

    Args:
        weights: n_i > 0.
        max_share: the largest share of a client in a large cohort; 1 for no limit.

    Example:
        >>> cap_weights([1e15, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0.25)
        [3.0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        >>> cap_weights([3, 1], 0.25)
        [3, 1]
    """
    share = share_limit(len(weights), max_share)
    ordered = sorted(weights)
    capped = 0
    while ordered[-1] > (cap := share * sum(ordered) / (1 - capped * share)) * (1 + 1e-9):
        ordered.pop()  # now the sum of the others is exact: next to 1e15 they would be lost
        capped += 1
    return [min(weight, cap) for weight in weights] if capped else list(weights)
