"""What a client sends: `ClientUpdate` as the user gives it, `Update` after the guard has let it in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

from torch import Tensor

from fedbe.core.state import ModelState
from fedbe.errors import StateError

ClientId = int | str
MAX_EXAMPLES = 1e15  # with larger weights their sum could overflow


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


def check_num_examples(num_examples: object) -> float:
    """The number of examples as a weight, or a StateError.

    Example:
        >>> check_num_examples(100)
        100.0
    """
    is_number = isinstance(num_examples, Real) and not isinstance(num_examples, bool)
    if not is_number or not num_examples > 0:  # type: ignore[operator]
        raise StateError(f"`num_examples` must be a number > 0, got {num_examples!r}")
    if num_examples > MAX_EXAMPLES:  # type: ignore[operator]
        raise StateError(f"`num_examples` must be at most {MAX_EXAMPLES:g}, got more")
    return float(num_examples)  # type: ignore[arg-type]
