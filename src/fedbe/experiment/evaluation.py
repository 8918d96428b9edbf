"""What is measured on the test data: the global model, its ensemble, the clients' models."""

import time
from dataclasses import replace

import torch

from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.server.context import Draft, Round, StepInfo
from fedbe.algorithms.vote import Member, get_vote_rule, vote
from fedbe.core.metrics import Metrics, compute_metrics
from fedbe.core.state import ModelState
from fedbe.experiment.jobs import test_jobs
from fedbe.experiment.run_folder import Record
from fedbe.experiment.simulation import Simulation, probabilities


def is_measured(sim: Simulation, round: int) -> bool:
    """Whether the recipe asks for measurements in this round; the last round is always measured."""
    return round % sim.recipe.evaluation.every == 0 or round == sim.rounds


def measure(sim: Simulation, model: ModelState, members: tuple[Member, ...] = ()) -> Metrics:
    """Metrics on the test data: of the model, or of the vote of `members` if there are any."""
    labels = sim.federation.test_labels
    if members:
        combined = vote(members, sim.predictor("test"), rule=sim.method.vote_rule)
        return compute_metrics(combined.probabilities, labels)
    parts = map(probabilities, sim.executor.map(test_jobs(model, len(labels))))
    return compute_metrics(torch.cat(list(parts)), labels)


class DraftEvaluation:
    """A hook of the server step: measures the average, its ensemble and the clients on the test data.

    Where the method lets the same ensemble vote, its samples are drawn once and used for both.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.record: Record = {}
        self.seconds = 0.0  # without what the method's own step uses again

    def __call__(self, draft: Draft, round: Round) -> None:
        begin = time.perf_counter()
        evaluation = self._sim.recipe.evaluation
        if self._sim.method.replaces_model:
            self.record["test_average"] = measure(self._sim, draft.state).as_dict()
        if evaluation.ensemble:
            self.record["test_ensemble"] = self._measure_ensemble(draft, round, evaluation.ensemble)
        if evaluation.clients:
            self.record["test_clients"] = self._measure_clients(round)
        self.seconds += time.perf_counter() - begin

    def _measure_ensemble(self, draft: Draft, round: Round, members: str) -> Record:
        settings = self._sim.ensemble(members=members)
        if self._method_samples_too(draft, round, settings):
            begin = time.perf_counter()
            round.keep_samples(settings)  # counts as the method's time
            self.seconds -= time.perf_counter() - begin
        else:
            round = replace(round, info=StepInfo())  # this vote is not part of the method's step
        voters = round.members(settings, draft.state)
        result = vote(
            voters,
            self._sim.predictor("test"),
            self._sim.federation.test_labels,
            rule=get_vote_rule(settings.vote),
            balanced=settings.balance,  # not to `class_mix`, which is the mix of the server's inputs
        )
        assert result.metrics is not None
        return result.metrics.as_dict() | {"disagreement": result.disagreement}

    def _method_samples_too(self, draft: Draft, round: Round, settings: EnsembleSettings) -> bool:
        """Whether the method draws the same samples in this round."""
        ensembles = [stage.voting_ensemble(draft, round.context) for stage in self._sim.method.stages]
        return any(e is not None and e.has_samples and e.samples_like(settings) for e in ensembles)

    def _measure_clients(self, round: Round) -> Record:
        clients = [Member(f"client {u.client_id}", u.state) for u in round.updates]
        reports = vote(clients, self._sim.predictor("test"), self._sim.federation.test_labels).members
        return {r.name: r.metrics.as_dict() for r in reports if r.metrics is not None}
