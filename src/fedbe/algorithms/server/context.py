"""What the stages of one server step share, and what they report."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbe.algorithms.ensemble import EnsembleSettings, fit_posterior, list_members, sample_models
from fedbe.algorithms.gate import Judgement
from fedbe.algorithms.vote import Member, MemberReport, Predictor, Vote, local_predictor
from fedbe.core.inputs import Inputs
from fedbe.core.metrics import Metrics
from fedbe.core.model_runner import ModelRunner
from fedbe.core.moments import weighted_mean
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.errors import SettingError
from fedbe.posterior import Posterior


@dataclass
class StepInfo:
    """What happened in one server step. Metrics are on the server's own inputs; they need labels.

    Attributes:
        members: one report for each member that voted.
        left_out: names of members whose predictions were not finite.
        disagreement: how often two members, drawn at random, name different classes.
        ensemble, average, student: metrics of the vote, of the average and of the distilled model.
        gate: whether the student replaced the average, and why; None if nothing was judged.
        seconds: time by phase.
        channels_last: False if the model does not take channels-last and so computes in the plain memory layout.
    """

    members: tuple[MemberReport, ...] = ()
    left_out: tuple[str, ...] = ()
    disagreement: float | None = None
    ensemble: Metrics | None = None
    average: Metrics | None = None
    student: Metrics | None = None
    gate: Judgement | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    channels_last: bool = True

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent in the block to the seconds of a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def as_record(self) -> dict[str, Any]:
        """What the stages measured on the server's inputs, for rounds.jsonl: plain numbers and texts by name."""
        record: dict[str, Any] = {}
        for name in ("average", "ensemble", "student"):
            if (metrics := getattr(self, name)) is not None:
                record[name] = metrics.as_dict()
        if self.disagreement is not None:
            record["disagreement"] = self.disagreement
        if not self.channels_last:
            record["memory_layout"] = "contiguous"
        if self.gate is not None:
            record["gate"] = self.gate.as_record()
        if self.left_out:
            record["left_out"] = list(self.left_out)
        if self.members:
            record["members"] = {m.name: m.metrics.accuracy if m.metrics else None for m in self.members}
        return record

    def record_vote(self, vote: Vote) -> None:
        """Take over what is known about a vote."""
        self.members, self.left_out = vote.members, vote.left_out
        self.disagreement, self.ensemble = vote.disagreement, vote.metrics
        self.average = next((m.metrics for m in vote.members if m.name == "average"), None)


@dataclass(frozen=True, eq=False)
class Context:
    """The server's resources in one round.

    Attributes:
        runner: runs models of this architecture.
        seed, round: all randomness follows from these two.
        inputs, labels: the server's own data. Labels are used for reports and by the oracle targets only.
        rounds: how many rounds there will be, if that is known (for distilling in a fraction of them).
        total_clients: how many clients there are in all, of which the updates are a part (SCAFFOLD, FedDyn).
        predictor: turns members into predictions on `inputs`; None runs them in this process.
        progress: called with (phase, done, total).
    """

    runner: ModelRunner
    seed: int
    round: int
    inputs: Inputs | None = None
    labels: Tensor | None = None
    rounds: int | None = None
    total_clients: int | None = None
    predictor: Predictor | None = None
    progress: Callable[[str, int, int], None] | None = None

    def generator(self, role: str) -> torch.Generator:
        """The random numbers for one purpose in this round."""
        return generator(self.seed, self.round, role)

    def unlabeled(self) -> Inputs:
        """The server's inputs, or a SettingError if there are none."""
        if self.inputs is None:
            raise SettingError("this method needs unlabeled inputs at the server: give `unlabeled`")
        return self.inputs

    def server_predictor(self) -> Predictor:
        """How members predict on the server's inputs."""
        return self.predictor or local_predictor(self.runner, self.unlabeled())

    def phase_progress(self, phase: str) -> Callable[[int, int], None] | None:
        """A progress callback (done, total) for one phase."""
        progress = self.progress
        return None if progress is None else lambda done, total: progress(phase, done, total)


@dataclass(frozen=True, eq=False)
class Draft:
    """The next global model while the stages work on it.

    Attributes:
        state: the model so far.
        memory: what the server keeps between rounds, by name (momentum, SCAFFOLD's c).
        members: models that vote instead of one model (1-Ensemble).
    """

    state: ModelState
    memory: Mapping[str, Tensor]
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, eq=False)
class Round:
    """What transforms and stages work on, next to the draft.

    Attributes:
        updates: the admitted updates, after the transforms.
        previous: the global model that the clients started from.
        context: the server's resources.
        info: the report of this step, filled in by the stages.
    """

    updates: Sequence[Update]
    previous: ModelState
    context: Context
    info: StepInfo
    # Not part of `replace`: what was computed from other updates must not be used.
    _means: list[ModelState] = field(default_factory=list, init=False)
    _posteriors: list[tuple[EnsembleSettings, Posterior]] = field(default_factory=list, init=False)
    _samples: list[tuple[EnsembleSettings, tuple[ModelState, ...]]] = field(default_factory=list, init=False)

    def total_clients(self) -> int:
        """N, the number of all clients: the given one, or else those that replied."""
        total = self.context.total_clients or len(self.updates)
        if total < len(self.updates):
            raise SettingError(f"`total_clients` is {total}, but {len(self.updates)} clients replied")
        return total

    def keep_mean(self, mean: ModelState) -> None:
        """Keep what `weighted_mean` would compute."""
        self._means.append(mean)

    def weighted_mean(self) -> ModelState:
        """Σ_i (n_i/n) w_i over this round's updates."""
        if not self._means:
            self.keep_mean(weighted_mean([(u.state, u.num_examples) for u in self.updates]))
        return self._means[0]

    def fit_posterior(self, settings: EnsembleSettings) -> Posterior | None:
        """p(w | D), fitted once to this round's updates; None if no samples vote."""
        if not settings.has_samples:
            return None
        for fitted_with, posterior in self._posteriors:
            if fitted_with.samples_like(settings):
                return posterior
        with self.info.timed("fit"):
            posterior = fit_posterior(settings, self.updates, self.previous, self.context.runner.layout)
        self._posteriors.append((settings, posterior))
        return posterior

    def sample_models(self, settings: EnsembleSettings, posterior: Posterior | None) -> Iterable[ModelState]:
        """M models from the posterior: the kept ones (see `keep_samples`), or else drawn one at a time."""
        if posterior is None:
            return ()
        for drawn_with, samples in self._samples:
            if drawn_with.samples_like(settings):
                return samples
        context = self.context
        inputs = context.unlabeled() if settings.needs_unlabeled(context.runner.module) else None
        return sample_models(settings, posterior, context.runner, inputs, context.generator("posterior"))

    def keep_samples(self, settings: EnsembleSettings) -> None:
        """Draw the samples now and keep them, so that no model is sampled twice in this round."""
        if settings.has_samples:
            posterior = self.fit_posterior(settings)
            with self.info.timed("ensemble"):
                samples = tuple(self.sample_models(settings, posterior))
            self._samples.append((settings, samples))

    def members(self, settings: EnsembleSettings, average: ModelState) -> Iterator[Member]:
        """The voters: samples, average and clients, as the settings say."""
        samples = self.sample_models(settings, self.fit_posterior(settings))
        return list_members(settings, samples, average, self.updates)
