"""What a client sends: `ClientUpdate` as the user gives it, `Update` after the guard has let it in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedbe.core.state import ModelState

ClientId = int | str


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """One client's reply to one round.

    state     its trained model: a `state_dict`, or a `ModelState` where the sender already has one
    examples  |D_i|, how many examples it trained on: its weight
    client    a stable id, the same in every round; needed by nothing but good for reports and for SCAFFOLD
    extras    what a rule sends back, by name: SCAFFOLD's {"control": change of the control variate}
    metrics   numbers for the report, used in no computation
    """

    state: Mapping[str, Tensor] | ModelState
    num_examples: float
    client_id: ClientId | None = None
    extras: Mapping[str, Mapping[str, Tensor] | Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Update:
    """An admitted reply: checked, packed, and in an order that does not depend on arrival."""

    client_id: ClientId
    state: ModelState
    num_examples: float
    extras: Mapping[str, Tensor]
