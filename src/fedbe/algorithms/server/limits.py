"""The limits of the guard: settings of the library, of recipes and of strategies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from fedbe.algorithms.server.influence import cap_weights
from fedbe.core.updates import ClientId, check_num_examples
from fedbe.errors import SettingError, StateError

REPORTED, EQUAL = "reported", "equal"
ClientWeights = str | Mapping[ClientId, float]


@dataclass(frozen=True)
class Limits:
    """When an update or a round is refused, and how much a client may count. See `outliers` and `influence`.

    Attributes:
        min_clients: with fewer usable updates than this the round has no result.
        max_norm_ratio: a client may change a tensor by this many times what is usual. Honest clients differ in data
            and epochs, so the default is wide.
        max_change: a client may always change a tensor by this many times the tensor's own norm.
        max_share: the largest share of the total weight that one client may have; 1 for no limit.
        max_size_ratio: how many times the cohort's median number of examples one client may count.
        client_weights: "reported" (each client's number of examples), "equal" (all count the same; reports are
            ignored), or the number of examples by client id, as the server knows it. Only reports are capped.
    """

    min_clients: int = 1
    max_norm_ratio: float = 100.0
    max_change: float = 30.0
    max_share: float = 0.25
    client_weights: ClientWeights = REPORTED
    max_size_ratio: float = 20.0

    def __post_init__(self) -> None:
        check_count("min_clients", self.min_clients)
        if not isinstance(self.max_norm_ratio, Real) or not self.max_norm_ratio > 1:
            raise SettingError(f"`max_norm_ratio` must be a number > 1, got {self.max_norm_ratio!r}")
        if not isinstance(self.max_change, Real) or not self.max_change > 0:
            raise SettingError(f"`max_change` must be a number > 0, got {self.max_change!r}")
        if not isinstance(self.max_share, Real) or not 0 < self.max_share <= 1:
            raise SettingError(f"`max_share` must be a number in (0, 1], got {self.max_share!r}")
        if not isinstance(self.max_size_ratio, Real) or not self.max_size_ratio >= 1:
            raise SettingError(f"`max_size_ratio` must be a number >= 1, got {self.max_size_ratio!r}")
        _check_client_weights(self.client_weights)

    def counted(self, claims: Sequence[tuple[ClientId, float]]) -> list[float]:
        """The weights that clients with these numbers of examples count with.

        Only reports are capped: the server may trust what it declared. A client that it did not declare counts 0.

        Example:
            >>> claims = [(0, 1e15), (1, 100.0)]
            >>> Limits().counted(claims), Limits(client_weights={1: 7}).counted(claims)
            ([300.0, 100.0], [0.0, 7.0])
        """
        if isinstance(self.client_weights, Mapping):
            return [float(self.client_weights.get(client, 0.0)) for client, _ in claims]
        if self.client_weights == EQUAL or not claims:
            return [1.0 for _ in claims]
        return cap_weights([examples for _, examples in claims], self.max_share, self.max_size_ratio)


def _check_client_weights(weights: ClientWeights) -> None:
    if isinstance(weights, Mapping):
        for client, examples in weights.items():
            try:
                check_num_examples(examples)
            except StateError as error:
                raise SettingError(f"`client_weights` of client {client}: {error}") from error
    elif weights not in (REPORTED, EQUAL):
        raise SettingError(
            f"`client_weights` must be '{REPORTED}', '{EQUAL}' or a number by client id, got {weights!r}"
        )


def check_count(name: str, value: object) -> None:
    """Refuse a setting that is not a whole number >= 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise SettingError(f"`{name}` must be a whole number >= 1, got {value!r}")
