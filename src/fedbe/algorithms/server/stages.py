"""The server's stages. A method is a short list of them; each takes the draft and returns the next one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedbe.algorithms.distillation import DistillSettings, distill, sharpen
from fedbe.algorithms.ensemble import Member, Vote, predict, vote
from fedbe.algorithms.server.context import Draft, Round
from fedbe.algorithms.server.teacher import Teacher
from fedbe.core.inputs import Unaugmented
from fedbe.core.metrics import compute_metrics
from fedbe.core.moments import weighted_mean
from fedbe.errors import SettingError, nearest

TARGETS = ("ensemble", "labels")
MOMENTUM_FORMS = ("heavy-ball", "damped")


class Stage(Protocol):
    """draft, round -> next draft. Changes no argument but `round.info`."""

    def __call__(self, draft: Draft, round: Round) -> Draft: ...


@dataclass(frozen=True)
class Mean:
    """FedAvg: w̄ = Σ_i (n_i/n) w_i (Eq. 2)."""

    def __call__(self, draft: Draft, round: Round) -> Draft:
        with round.info.timed("mean"):
            return replace(draft, state=weighted_mean([(u.state, u.num_examples) for u in round.updates]))


@dataclass(frozen=True)
class Momentum:
    """FedAvgM: momentum on the mean update Δ = w̄ − w_last; the next model is w_last + m.

    momentum_form  heavy-ball: m ← β m + Δ (Hsu et al.);  damped: m ← β m + (1 − β) Δ (the released program)
    """

    beta: float = 0.9
    momentum_form: str = "heavy-ball"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise SettingError(f"`beta` must be in [0, 1), got {self.beta}")
        if self.momentum_form not in MOMENTUM_FORMS:
            hint = nearest(self.momentum_form, MOMENTUM_FORMS)
            raise SettingError(f"unknown momentum_form '{self.momentum_form}': {hint}")

    def __call__(self, draft: Draft, round: Round) -> Draft:
        with round.info.timed("mean"):
            change = draft.state.params - round.previous.params
            before = draft.memory.get("momentum", torch.zeros_like(change))
            # w_last + m, written from w̄ so that β = 0 gives w̄ without rounding: m − Δ is β m, or β (m − Δ) if damped.
            extra = self.beta * (before if self.momentum_form == "heavy-ball" else before - change)
            state = replace(draft.state, params=draft.state.params + extra)
            return replace(draft, state=state, memory={**draft.memory, "momentum": change + extra})


@dataclass(frozen=True)
class ControlUpdate:
    """SCAFFOLD's server side: c ← c + (1/N) Σ_{i in cohort} (c_i⁺ − c_i), N being all clients there are."""

    def __call__(self, draft: Draft, round: Round) -> Draft:
        total = round.context.total_clients or len(round.updates)
        if total < len(round.updates):
            raise SettingError(f"`total_clients` is {total}, but {len(round.updates)} clients replied")
        with round.info.timed("mean"):
            control = draft.memory.get("control", torch.zeros_like(draft.state.params)).clone()
            for update in round.updates:
                control.add_(update.extras["control"], alpha=1.0 / total)
            return replace(draft, memory={**draft.memory, "control": control})


@dataclass(frozen=True)
class KeepMembers(Teacher):
    """1-Ensemble: the members themselves are the result; predictions are their vote, and no model is distilled."""

    def __call__(self, draft: Draft, round: Round) -> Draft:
        return replace(draft, members=tuple(self.voters(draft, round)))


@dataclass(frozen=True)
class Distill(Teacher, DistillSettings):
    """FedBE's heart: the members vote on the server's inputs and the draft learns the vote.

    sharpening    exponent of the pseudo-labels, p̂ ∝ p^e
    targets       ensemble: the vote;  labels: the server's true labels, the oracle of Table 3
    augment       whether the inputs are augmented while the student learns (never while the members vote)
    distill_until the share of all rounds, from the first, in which the draft learns; in the others it stays as it is
    """

    sharpening: float = 2.0
    targets: str = "ensemble"
    augment: bool = True
    distill_until: float = 1.0

    def __post_init__(self) -> None:
        Teacher.__post_init__(self)
        DistillSettings.__post_init__(self)
        if not self.sharpening > 0:
            raise SettingError(f"`sharpening` must be > 0, got {self.sharpening}")
        if not 0 <= self.distill_until <= 1:
            raise SettingError(f"`distill_until` must be from 0 to 1, got {self.distill_until}")
        if self.targets not in TARGETS:
            raise SettingError(f"unknown targets '{self.targets}': {nearest(self.targets, TARGETS)}")

    def needs_unlabeled(self, module: nn.Module) -> bool:  # noqa: ARG002
        return True

    def __call__(self, draft: Draft, round: Round) -> Draft:
        context = round.context
        inputs = context.unlabeled()
        if not self.learns(context.round, context.rounds):
            return draft
        targets = self._targets(draft, round)
        with round.info.timed("distill"):
            student = distill(
                context.runner,
                draft.state,
                inputs if self.augment else Unaugmented(inputs),
                targets,
                self,
                context.generator("distill"),
                progress=context.tell("distill"),
            )
        if context.labels is not None:
            with round.info.timed("evaluate"):
                round.info.student = compute_metrics(predict(context.runner, student, inputs), context.labels)
        return replace(draft, state=student)

    def learns(self, round: int, rounds: int | None) -> bool:
        """Whether the draft learns in this round of so many.

        >>> [r for r in range(1, 41) if Distill(distill_until=0.3).learns(r, 40)][-1]
        12
        """
        if self.distill_until == 1:
            return True
        if rounds is None:
            raise SettingError("`distill_until` needs to know how many rounds there will be: give `rounds`")
        # 0.3 · R in floating point can fall on the wrong side of a round.
        return round - 1 < self.distill_until * rounds - 1e-9

    def _targets(self, draft: Draft, round: Round) -> Tensor:
        labels = round.context.labels
        if self.targets == "labels":
            if labels is None:
                raise SettingError("targets = 'labels' needs the true labels of the server's inputs: give `labels`")
            with round.info.timed("evaluate"):  # which also finds labels that are of no class of the model
                round.info.average = compute_metrics(
                    predict(round.context.runner, draft.state, round.context.unlabeled()), labels
                )
            return labels
        return sharpen(self._vote(draft, round).probabilities, self.sharpening)

    def _vote(self, draft: Draft, round: Round) -> Vote:
        tell = round.context.tell("ensemble")
        total, voters = self.count(round), self.voters(draft, round)

        def counted() -> Iterator[Member]:
            for i, member in enumerate(voters):
                if tell is not None:
                    tell(i, total)
                yield member

        with round.info.timed("ensemble"):
            outcome = vote(counted(), round.context.ask(), round.context.labels)
        round.info.note(outcome)
        round.info.average = next((m.metrics for m in outcome.members if m.name == "average"), None)
        return outcome
