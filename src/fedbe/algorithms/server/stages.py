"""The server's stages. A method is a short tuple of them; each takes the draft and returns the next one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedbe.algorithms.distillation import DistillSettings, distill, sharpen
from fedbe.algorithms.ensemble import EnsembleSettings, list_members
from fedbe.algorithms.gate import GATE_MEMORY, GateSettings, GateState, judge
from fedbe.algorithms.past import past_sizes, recall, remember
from fedbe.algorithms.server.context import Context, Draft, Round
from fedbe.algorithms.server.robust import ROBUST_RULES, robust_mean
from fedbe.algorithms.vote import Member, Vote, get_vote_rule, predict, vote
from fedbe.core.inputs import Inputs, SubsetInputs, hold_out
from fedbe.core.metrics import compute_metrics
from fedbe.core.moments import weighted_mean
from fedbe.core.normalization import recalibrated
from fedbe.core.state import Layout, ModelState
from fedbe.errors import SettingError, check_option

MEAN_WEIGHTS = ("examples", "uniform")
MOMENTUM_FORMS = ("heavy-ball", "damped", "released")


class Stage(ABC):
    """draft, round -> next draft. A stage changes no argument but `round.info`.

    A stage is a small frozen dataclass; its fields become settings. It says what it is and what it needs:

    Attributes:
        result: what the model is after this stage ("average", "student", …); None if the model stays as it was.
        replaces_model: whether the average becomes something else. The hook of `server_step` runs before such a stage.
        needs_rounds: whether the stage must know how many rounds there will be.
    """

    replaces_model: ClassVar[bool] = False

    @property
    def result(self) -> str | None:
        return None

    @property
    def needs_rounds(self) -> bool:
        return False

    def needs_unlabeled(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Whether the server needs unlabeled inputs for this model."""
        return False

    def memory_sizes(self, layout: Layout) -> dict[str, int]:  # noqa: ARG002
        """What the stage keeps between rounds: the length of each vector, by name."""
        return {}

    def voting_ensemble(self, draft: Draft, context: Context) -> EnsembleSettings | None:  # noqa: ARG002
        """The ensemble that this stage makes in this round, if it makes one."""
        return None

    @abstractmethod
    def __call__(self, draft: Draft, round: Round) -> Draft:
        """The next draft."""


@dataclass(frozen=True)
class Mean(Stage):
    """FedAvg: w̄ = Σ_i (n_i/n) w_i (Eq. 2).

    Attributes:
        mean_weights: examples, as above; or uniform, w̄ = (1/k) Σ_i w_i over the k clients of the round.
        robust: none, as above; or a mean that hostile clients cannot move far: median, trimmed, krum, geometric or
            clip-median (see `robust`). It counts each client once. A student starts from it.
        hostile_fraction: the part of the clients that may be hostile, for trimmed and krum.
    """

    mean_weights: str = "examples"
    robust: str = "none"
    hostile_fraction: float = 0.3

    def __post_init__(self) -> None:
        check_option("mean_weights", self.mean_weights, MEAN_WEIGHTS)
        check_option("robust", self.robust, ROBUST_RULES)
        if not 0 <= self.hostile_fraction < 0.5:
            raise SettingError(f"`hostile_fraction` must be in [0, 0.5), got {self.hostile_fraction}")

    @property
    def result(self) -> str:
        return "average"

    def __call__(self, draft: Draft, round: Round) -> Draft:
        with round.info.timed("mean"):
            if self.robust != "none":
                state = robust_mean(round.updates, round.previous, self.robust, self.hostile_fraction)
                return replace(draft, state=state)
            if self.mean_weights == "uniform":
                return replace(draft, state=weighted_mean([(u.state, 1.0) for u in round.updates]))
            return replace(draft, state=round.weighted_mean())


@dataclass(frozen=True)
class Momentum(Stage):
    """FedAvgM: momentum on the mean update Δ = w̄ − w_last. The next model is w_last + m.

    Attributes:
        beta: β, the momentum.
        momentum_form: heavy-ball, m ← β m + Δ (Hsu et al.); damped, m ← β m + (1 − β) Δ; or released, the authors'
            program: rounds 1 and 2 are plain averages with m = Δ, later rounds are damped.
    """

    beta: float = 0.9
    momentum_form: str = "heavy-ball"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise SettingError(f"`beta` must be in [0, 1), got {self.beta}")
        check_option("momentum_form", self.momentum_form, MOMENTUM_FORMS)

    def memory_sizes(self, layout: Layout) -> dict[str, int]:
        return {"momentum": layout.size}

    @property
    def result(self) -> str:
        return "model"

    def __call__(self, draft: Draft, round: Round) -> Draft:
        with round.info.timed("mean"):
            change = draft.state.params - round.previous.params
            buffer = draft.memory.get("momentum", torch.zeros_like(change))
            # w_last + m, written from w̄ so that β = 0 gives w̄ without rounding: m − Δ is β m, or β (m − Δ) if damped.
            extra = self.beta * (buffer if self.momentum_form == "heavy-ball" else buffer - change)
            if self.momentum_form == "released" and round.context.round <= 2:
                extra = torch.zeros_like(change)
            state = replace(draft.state, params=draft.state.params + extra)
            return replace(draft, state=state, memory={**draft.memory, "momentum": change + extra})


@dataclass(frozen=True)
class ControlUpdate(Stage):
    """SCAFFOLD's server side: c ← c + (1/N) Σ_{i in cohort} (c_i⁺ − c_i), where N is the number of all clients."""

    def memory_sizes(self, layout: Layout) -> dict[str, int]:
        return {"control": layout.size}

    def __call__(self, draft: Draft, round: Round) -> Draft:
        total = round.total_clients()
        with round.info.timed("mean"):
            control = draft.memory.get("control", torch.zeros_like(draft.state.params)).clone()
            for update in round.updates:
                control.add_(update.extras["control"], alpha=1.0 / total)
            return replace(draft, memory={**draft.memory, "control": control})


@dataclass(frozen=True)
class KeepMembers(Stage):
    """1-Ensemble: the members themselves are the result. Predictions are their vote; no model is distilled."""

    replaces_model: ClassVar[bool] = True

    ensemble: EnsembleSettings = field(default_factory=EnsembleSettings)

    def __post_init__(self) -> None:
        if self.ensemble.has_past:
            raise SettingError("`members` must not include P where members are kept: there is no earlier round")
        if self.ensemble.balance:
            raise SettingError("`balance` must be false where members are kept: they also vote on single inputs")

    @property
    def result(self) -> str:
        return "kept members' vote"

    def needs_unlabeled(self, module: nn.Module) -> bool:
        return self.ensemble.needs_unlabeled(module)

    def voting_ensemble(self, draft: Draft, context: Context) -> EnsembleSettings:  # noqa: ARG002
        return self.ensemble

    def __call__(self, draft: Draft, round: Round) -> Draft:
        return replace(draft, members=tuple(round.members(self.ensemble, draft.state)))


@dataclass(frozen=True)
class Distill(Stage):
    """FedBE's core: members vote on the server's inputs, and the average learns the vote.

    Attributes:
        ensemble: who votes, and how votes are combined.
        distillation: how the student learns.
        gating: who decides whether the student replaces the average.
    """

    replaces_model: ClassVar[bool] = True

    ensemble: EnsembleSettings = field(default_factory=EnsembleSettings)
    distillation: DistillSettings = field(default_factory=DistillSettings)
    gating: GateSettings = field(default_factory=GateSettings)

    @property
    def result(self) -> str:
        """A student, or, where not every round ends with one, just a model."""
        return "model" if self.needs_rounds or self.gating.is_on else "student"

    @property
    def needs_rounds(self) -> bool:
        return self.distillation.distill_until < 1

    def needs_unlabeled(self, module: nn.Module) -> bool:  # noqa: ARG002
        return True

    def memory_sizes(self, layout: Layout) -> dict[str, int]:
        past = past_sizes(self.ensemble.num_past, layout) if self.ensemble.has_past else {}
        return past | (dict.fromkeys(GATE_MEMORY, 1) if self.gating.is_on else {})

    def voting_ensemble(self, draft: Draft, context: Context) -> EnsembleSettings | None:
        votes = self.distillation.targets == "ensemble" and self._is_active(draft, context)
        return self.ensemble if votes else None

    def _is_active(self, draft: Draft, context: Context) -> bool:
        rests = self.gating.is_on and GateState.of(draft.memory).rest > 0
        return not rests and self.distillation.is_active(context.round, context.rounds)

    def __call__(self, draft: Draft, round: Round) -> Draft:
        context = round.context
        inputs = context.unlabeled()
        if self.gating.is_on:
            with round.info.timed("gate"):
                draft = replace(draft, state=recalibrated(context.runner, draft.state, inputs))
        if self.ensemble.has_past:
            draft = replace(draft, memory=remember(self.ensemble.num_past, draft.memory, draft.state))
        if not self._is_active(draft, context):
            return self._rested(draft)
        if self.distillation.targets == "labels":  # there is no vote to agree with, so no gate
            labels = self._true_labels(draft, round)
            return replace(draft, state=self._student(draft, round, inputs, labels, self.distillation))
        posterior = round.fit_posterior(self.ensemble)
        samples = round.sample_models(self.ensemble, posterior)
        teacher = self._vote(samples, draft, round)
        targets = sharpen(teacher.probabilities, self.distillation.sharpening)
        if self.gating.is_on:
            return self._gated(draft, round, teacher, targets)
        return replace(draft, state=self._student(draft, round, inputs, targets, self.distillation))

    def _rested(self, draft: Draft) -> Draft:
        state = GateState.of(draft.memory)
        return replace(draft, memory=state.rested().stored_in(draft.memory)) if state.rest else draft

    def _gated(self, draft: Draft, round: Round, teacher: Vote, targets: Tensor) -> Draft:
        """A student that learns from a part of the inputs, if it agrees more with the vote on the others."""
        state, inputs = GateState.of(draft.memory), round.context.unlabeled()
        settings = self.distillation.scaled(state.factor(self.gating))
        learn, held_out = hold_out(len(inputs), self.gating.gate_share, round.context.generator("gate"))
        student = self._student(draft, round, SubsetInputs(inputs, learn), targets[learn], settings)
        with round.info.timed("gate"):
            unseen = SubsetInputs(inputs, held_out)
            average, learned = (predict(round.context.runner, s, unseen) for s in (draft.state, student))
            judgement = judge(self.gating, average, learned, teacher.probabilities[held_out], settings.distill_lr)
        round.info.gate = judgement
        state = state.after(judgement.accepted, self.gating)
        chosen = student if judgement.accepted else draft.state
        return replace(draft, state=chosen, memory=state.stored_in(draft.memory))

    def _student(
        self, draft: Draft, round: Round, inputs: Inputs, targets: Tensor, settings: DistillSettings
    ) -> ModelState:
        context = round.context
        with round.info.timed("distill"):
            student = distill(
                context.runner,
                draft.state,
                inputs,
                targets,
                settings,
                context.generator("distill"),
                progress=context.phase_progress("distill"),
            )
        self._report(student, round)
        return student

    def _vote(self, samples: Iterable[ModelState], draft: Draft, round: Round) -> Vote:
        past = recall(self.ensemble.num_past, draft.memory, draft.state)
        members = list_members(self.ensemble, samples, draft.state, round.updates, past)
        progress = round.context.phase_progress("ensemble")
        total = self.ensemble.count(len(round.updates))

        def counted() -> Iterator[Member]:
            for i, member in enumerate(members):
                if progress is not None:
                    progress(i, total)
                yield member

        rule, balanced = get_vote_rule(self.ensemble.vote), self.ensemble.balance
        with round.info.timed("ensemble"):
            predictor = round.context.server_predictor()
            result = vote(counted(), predictor, round.context.labels, rule=rule, balanced=balanced)
        round.info.record_vote(result)
        return result

    def _true_labels(self, draft: Draft, round: Round) -> Tensor:
        """The oracle: the server's labels instead of the vote."""
        context = round.context
        if context.labels is None:
            raise SettingError("targets = 'labels' needs the true labels of the server's inputs: give `labels`")
        with round.info.timed("evaluate"):  # also finds labels that are not a class of the model
            prediction = predict(context.runner, draft.state, context.unlabeled())
            round.info.average = compute_metrics(prediction, context.labels)
        return context.labels

    def _report(self, student: ModelState, round: Round) -> None:
        context = round.context
        if context.labels is not None:
            with round.info.timed("evaluate"):
                prediction = predict(context.runner, student, context.unlabeled())
                round.info.student = compute_metrics(prediction, context.labels)
