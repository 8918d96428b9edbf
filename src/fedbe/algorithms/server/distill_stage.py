"""The stage that makes a method FedBE: members vote, and the average learns the vote."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor, nn

from fedbe.algorithms.distillation import DistillSettings, check_student, distill, sharpen
from fedbe.algorithms.ensemble import EnsembleSettings, list_members
from fedbe.algorithms.gate import GATE_MEMORY, GateSettings, GateState, judge
from fedbe.algorithms.pace import PACE_MEMORY, follow, median_move
from fedbe.algorithms.past import past_sizes, recall, remember
from fedbe.algorithms.server.context import Context, Draft, Round
from fedbe.algorithms.server.stages import Stage, check_names
from fedbe.algorithms.vote import Member, Vote, get_vote_rule, predict, vote
from fedbe.core.inputs import Inputs, SubsetInputs, hold_out
from fedbe.core.layout import Layout
from fedbe.core.metrics import compute_metrics
from fedbe.core.normalization import recalibrated
from fedbe.core.state import ModelState
from fedbe.errors import SettingError, StateError


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
        pace = {PACE_MEMORY: 1} if self.distillation.distill_follow else {}
        return past | pace | (dict.fromkeys(GATE_MEMORY, 1) if self.gating.is_on else {})

    def check_memory(self, memory: Mapping[str, Tensor], round: int, layout: Layout) -> None:
        count, known = self.ensemble.num_past, self.memory_sizes(layout)
        past = past_sizes(min(round - 1, count), layout) if self.ensemble.has_past else {}
        pace = [name for name in (PACE_MEMORY,) if name in known and round]
        gate = [name for name in GATE_MEMORY if name in known]
        judged = any(name in memory for name in gate)  # not before the first round that distils
        check_names(memory, known, [*past, *pace, *(gate if judged else ())], round)
        if any(bool((memory[name] < 0).any() | (memory[name] % 1 != 0).any()) for name in gate if judged):
            raise StateError(f"`memory` must have whole numbers >= 0 for {' and '.join(gate)}")

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
        settings = self.distillation
        if settings.distill_follow:
            factor, memory = follow(draft.memory, median_move(round.updates, round.previous))
            settings, draft = settings.scaled(factor), replace(draft, memory=memory)
        if not self._is_active(draft, context):
            return self._rested(draft)
        if settings.targets == "labels":  # there is no vote to agree with, so no gate
            labels = self._true_labels(draft, round)
            return replace(draft, state=self._student(draft, round, inputs, labels, settings))
        posterior = round.fit_posterior(self.ensemble)
        samples = round.sample_models(self.ensemble, posterior)
        teacher = self._vote(samples, draft, round)
        targets = sharpen(teacher.probabilities, settings.sharpening)
        if self.gating.is_on:
            return self._gated(draft, round, teacher, targets, settings)
        return replace(draft, state=self._student(draft, round, inputs, targets, settings))

    def _rested(self, draft: Draft) -> Draft:
        state = GateState.of(draft.memory)
        return replace(draft, memory=state.rested().stored_in(draft.memory)) if state.rest else draft

    def _gated(self, draft: Draft, round: Round, teacher: Vote, targets: Tensor, settings: DistillSettings) -> Draft:
        """A student that learns from a part of the inputs, if it agrees more with the vote on the others."""
        state, inputs, runner = GateState.of(draft.memory), round.context.unlabeled(), round.context.runner
        settings = settings.scaled(state.factor(self.gating))
        learn, held_out = hold_out(len(inputs), self.gating.gate_share, round.context.generator("gate"))
        student = self._learn(draft, round, SubsetInputs(inputs, learn), targets[learn], settings)
        with round.info.timed("gate"):
            unseen = SubsetInputs(inputs, held_out)
            average, learned = (predict(runner, s, unseen) for s in (draft.state, student))
            if not student.finite():  # softmax hides an infinite logit
                learned = learned.new_full(learned.shape, float("nan"))
            judgement = judge(self.gating, average, learned, teacher.probabilities[held_out], settings.distill_lr)
        round.info.gate = judgement
        if bool(learned.isfinite().all()):  # a student that diverged is refused, and the next one takes smaller steps
            self._report(student, round)
        state = state.after(judgement.accepted, self.gating)
        chosen = student if judgement.accepted else draft.state
        return replace(draft, state=chosen, memory=state.stored_in(draft.memory))

    def _student(
        self, draft: Draft, round: Round, inputs: Inputs, targets: Tensor, settings: DistillSettings
    ) -> ModelState:
        student = self._learn(draft, round, inputs, targets, settings)
        check_student(student, settings)
        self._report(student, round)
        return student

    def _learn(
        self, draft: Draft, round: Round, inputs: Inputs, targets: Tensor, settings: DistillSettings
    ) -> ModelState:
        context, progress = round.context, round.context.phase_progress("distill")
        with round.info.timed("distill"):
            source = context.generator("distill")
            return distill(context.runner, draft.state, inputs, targets, settings, source, progress=progress)

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

        settings = self.ensemble
        with round.info.timed("ensemble"):
            predictor = round.context.server_predictor()
            result = vote(
                counted(),
                predictor,
                round.context.labels,
                rule=get_vote_rule(settings.vote),
                balanced=settings.balance,
                class_mix=settings.class_mix,
            )
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
