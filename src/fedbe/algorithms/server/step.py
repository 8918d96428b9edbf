"""One server step: guard, transforms, stages. The simulator, Flower and the library all call this function."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedbe.algorithms.server.context import Context, Draft, Round, StepInfo
from fedbe.algorithms.server.guard import SetAside, admit
from fedbe.algorithms.server.influence import Capped
from fedbe.algorithms.server.limits import Limits
from fedbe.algorithms.server.stages import Stage
from fedbe.algorithms.server.transforms import Transform
from fedbe.algorithms.vote import Member
from fedbe.core.state import ModelState, all_finite
from fedbe.core.updates import ClientId, ClientUpdate
from fedbe.errors import AggregationError

# Called once a step with the draft before a stage replaces the model (or with the last draft): for measurements.
DraftHook = Callable[[Draft, Round], None]


@dataclass(frozen=True, eq=False)
class StepResult:
    """The next global model, what the server keeps, and what happened.

    Attributes:
        state: the next global model.
        memory: what the server keeps between rounds, by name.
        info: the report of the stages.
        clients: ids of the clients whose updates were used.
        set_aside: clients whose updates were not used, with reasons.
        capped: clients that count less than they report.
        members: models whose vote is the prediction, where the method keeps them (1-Ensemble).
    """

    state: ModelState
    memory: Mapping[str, Tensor]
    info: StepInfo
    clients: tuple[ClientId, ...]
    set_aside: tuple[SetAside, ...]
    capped: tuple[Capped, ...] = ()
    members: tuple[Member, ...] = ()


def server_step(
    stages: Sequence[Stage],
    previous: ModelState,
    updates: Iterable[ClientUpdate],
    memory: Mapping[str, Tensor],
    context: Context,
    *,
    transforms: Sequence[Transform] = (),
    limits: Limits | None = None,
    extras: Sequence[str] = (),
    on_draft: DraftHook | None = None,
) -> StepResult:
    """previous model + client updates + memory -> next model + next memory. A pure function of its arguments.

    Args:
        stages: the method's stages, run in order.
        previous: the global model that the clients started from.
        updates: the clients' replies, in any order.
        memory: what the server kept from the round before.
        context: the server's resources in this round.
        transforms: run on the admitted updates, before every stage.
        limits: of the guard.
        extras: names of what the method's clients send next to the model.
        on_draft: called once, with the draft before the first stage that replaces the model, or with the last draft.
            It can measure but not change.

    Raises:
        AggregationError: if too few updates are usable, or a result is not finite. Then nothing has changed.
    """
    if not previous.finite():
        raise AggregationError("the global model that was given has NaN or infinite values: start from another one")
    info = StepInfo()
    with info.timed("guard"):
        admission = admit(updates, previous, context.runner.layout, limits or Limits(), extras, memory)
    round = Round(admission.admitted, previous, context, info)
    if admission.mean is not None:
        round.keep_mean(admission.mean)
    round = _transformed(round, transforms)
    draft = _run_stages(stages, Draft(previous, memory), round, on_draft)
    _check_finite(draft)
    info.channels_last = context.runner.channels_last
    return StepResult(
        state=draft.state,
        memory=draft.memory,
        info=info,
        clients=tuple(u.client_id for u in round.updates),
        set_aside=admission.set_aside,
        capped=admission.capped,
        members=draft.members,
    )


def _transformed(round: Round, transforms: Sequence[Transform]) -> Round:
    for transform in transforms:
        with round.info.timed("transform"):
            round = replace(round, updates=tuple(transform(round)))
    if not round.updates:
        raise AggregationError("the transforms left no client update: the global model is unchanged")
    return round


def _run_stages(stages: Sequence[Stage], draft: Draft, round: Round, on_draft: DraftHook | None) -> Draft:
    for stage in stages:
        if on_draft is not None and stage.replaces_model:
            on_draft(draft, round)
            on_draft = None
        draft = stage(draft, round)
    if on_draft is not None:
        on_draft(draft, round)
    return draft


def _check_finite(draft: Draft) -> None:
    if not draft.state.finite():
        raise AggregationError("the combined model has NaN or infinite values; the global model is unchanged")
    if broken := [name for name, value in draft.memory.items() if not all_finite(value)]:
        raise AggregationError(
            f"the server's new '{broken[0]}' has NaN or infinite values; the global model is unchanged"
        )
