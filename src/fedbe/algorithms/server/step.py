"""One server step: guard, then the method's stages in order. The simulator and Flower both call this function."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbe.algorithms.ensemble import Member
from fedbe.algorithms.server.context import Context, Draft, Round, StepInfo
from fedbe.algorithms.server.guard import Limits, SetAside, admit
from fedbe.algorithms.server.stages import Stage
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, ClientUpdate
from fedbe.errors import AggregationError


@dataclass(frozen=True, eq=False)
class StepResult:
    """The next global model, what the server remembers, and what happened.

    members: models whose vote is the prediction, where the method keeps them (1-Ensemble).
    """

    state: ModelState
    memory: Mapping[str, Tensor]
    info: StepInfo
    clients: tuple[ClientId, ...]
    set_aside: tuple[SetAside, ...]
    members: tuple[Member, ...] = ()


def server_step(
    stages: Sequence[Stage],
    previous: ModelState,
    updates: Iterable[ClientUpdate],
    memory: Mapping[str, Tensor],
    context: Context,
    *,
    limits: Limits | None = None,
    extras: Sequence[str] = (),
) -> StepResult:
    """previous model + client updates + memory -> next model + next memory. A pure function of its arguments."""
    if not previous.finite():
        raise AggregationError("the global model that was given has NaN or infinite values: begin with another one")
    info = StepInfo()
    with info.timed("guard"):
        admission = admit(updates, previous, context.runner.layout, limits or Limits(), extras, memory)
    draft = Draft(previous, memory)
    round = Round(admission.admitted, previous, context, info)
    for stage in stages:
        draft = stage(draft, round)
    if not draft.state.finite():
        raise AggregationError("the combined model has NaN or infinite values; the global model is unchanged")
    if spoilt := [name for name, value in draft.memory.items() if not bool(torch.isfinite(value).all())]:
        raise AggregationError(
            f"the server's new '{spoilt[0]}' has NaN or infinite values; the global model is unchanged"
        )
    return StepResult(
        state=draft.state,
        memory=draft.memory,
        info=info,
        clients=tuple(u.client_id for u in admission.admitted),
        set_aside=admission.set_aside,
        members=draft.members,
    )
