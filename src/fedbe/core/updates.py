"""The updates of clients: `ClientUpdate` as the user gives it, `Update` after the guard has admitted it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from fedbe.core.state import ModelState
from fedbe.errors import StateError

ClientId = int | str
MAX_EXAMPLES = 1e15  # with larger weights their sum could overflow
MAX_METRICS = 1000  # numbers that one client may report in a round: the file of all rounds is written after each


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """One client's reply in one round.

    Args:
        state: The trained model: a `state_dict`, or a packed `ModelState`.
        num_examples: |D_i|, the number of examples that it was trained on; > 0. This is the client's weight.
        client_id: A stable id, the same in every round. It is optional, and useful in reports.
        extras: Further tensors of a local rule, by name. SCAFFOLD sends {"control": change of the control variate}.
        metrics: Numbers for the report. They are not used in any computation.

    Example:
        >>> from torch import nn
        >>> update = ClientUpdate(nn.Linear(2, 1).state_dict(), num_examples=100, client_id=7)
        >>> update.num_examples
        100
    """

    state: Mapping[str, Tensor] | ModelState
    num_examples: float
    client_id: ClientId | None = None
    extras: Mapping[str, Mapping[str, Tensor] | Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Update:
    """An admitted update: checked, and with a packed state and packed extras [P].

    Attributes:
        client_id: Who sent it.
        state: The client's model, as two flat vectors.
        num_examples: Its weight: the number of examples that counts for it.
        extras: What else the client's rules sent (SCAFFOLD's change of its control variate), by name.
    """

    client_id: ClientId
    state: ModelState
    num_examples: float
    extras: Mapping[str, Tensor]


def changed_memory(memory: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A client's memory after a round, m + Δ, where a vector that the client did not have before starts at 0.

    Example:
        >>> changed_memory({"control": torch.tensor([1.0])}, {"control": torch.tensor([0.5])})
        {'control': tensor([1.5000])}
    """
    return {name: memory.get(name, torch.zeros(())) + change for name, change in changes.items()}


def is_num_examples(num_examples: object) -> bool:
    """Whether a number of examples can be a weight."""
    try:
        check_num_examples(num_examples)
    except StateError:
        return False
    return True


def check_num_examples(num_examples: object) -> float:
    """The number of examples as a weight, or a StateError.

    Example:
        >>> check_num_examples(100)
        100.0
    """
    is_number = isinstance(num_examples, Real) and not isinstance(num_examples, bool)
    try:
        # First as a plain float: in float16 every limit is infinite.
        weight = float(num_examples) if is_number else 0.0  # type: ignore[arg-type]
    except OverflowError:
        weight = float("inf")
    if not weight > 0:
        raise StateError(f"`num_examples` must be a number > 0, got {num_examples!r}"[:200])
    if weight > MAX_EXAMPLES:
        raise StateError(f"`num_examples` must be at most {MAX_EXAMPLES:g}, got more")
    return weight
