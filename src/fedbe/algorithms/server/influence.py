"""How much a client may count.

A client's number of examples is its own claim. Unbounded, one claim of 10¹⁵ decides the model. So no client counts more
than 20 times the cohort's median; and no client may have more than a quarter of the total weight, among fewer than ten
clients not more than three times the mean of the others.

Why 20: of clients whose sizes are spread evenly (in logarithm) from 3 to 3,000, the median has 95 examples and 7 % have
more than 20 times as many; the cap takes 8 % of the total weight. Four hostile clients of 100 equal ones have at most
45 % of the weight; without this cap they have all of it, because a quarter of any total is theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

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


def cap_weights(weights: Sequence[float], max_share: float, max_size_ratio: float = math.inf) -> list[float]:
    """The weights with the largest ones reduced: to a multiple of the median, then to a share of the new total.

    The first cap is r times the (lower) median. The common cap c of the share solves c = s · Σ_i min(n_i, c), where s
    is `share_limit`. With the k largest capped, c = s · (sum of the others) / (1 − k s). Weights within the limits stay
    as they are, to the last bit.

    Args:
        weights: n_i > 0.
        max_share: the largest share of a client in a large cohort; 1 for no limit.
        max_size_ratio: r, how many times the median a client may count; infinity for no limit.

    Example:
        >>> cap_weights([1e15, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0.25)
        [3.0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        >>> cap_weights([3, 1], 0.25)
        [3, 1]
        >>> cap_weights([1e15, 2, 2, 2], 1.0, 20)
        [40, 2, 2, 2]
    """
    most = max_size_ratio * median_low(weights)
    if max(weights) > most:
        weights = [min(weight, most) for weight in weights]
    share = share_limit(len(weights), max_share)
    ordered = sorted(weights)
    capped = 0
    while ordered[-1] > (cap := share * sum(ordered) / (1 - capped * share)) * (1 + 1e-9):
        ordered.pop()  # now the sum of the others is exact: next to 1e15 they would be lost
        capped += 1
    return [min(weight, cap) for weight in weights] if capped else list(weights)
