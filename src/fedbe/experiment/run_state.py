"""The state that passes from one round to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedbe.algorithms.vote import Member
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId


@dataclass(frozen=True, eq=False)
class RunState:
    """Everything that a round hands to the next round. A checkpoint holds exactly this.

    Args:
        round: The number of finished rounds; 0 before the first round.
        model: The global model.
        memory: Vectors that the server keeps (momentum buffer, SCAFFOLD's c), by name.
        clients: Vectors that each client keeps (SCAFFOLD's c_i), by client and name.
        members: Models that vote instead of one global model (1-Ensemble).
    """

    round: int
    model: ModelState
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    clients: Mapping[ClientId, Mapping[str, Tensor]] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
