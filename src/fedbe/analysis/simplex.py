"""Models sampled between three clients and their test accuracy (paper, Figure 1b).

A point γ of the simplex is the model Σ_i γ_i w_i. The corners are the clients' models, the centre is their average.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch

from fedbe.algorithms.vote import mean_vote, predict
from fedbe.analysis.rerun import Rerun, rerun_last_round
from fedbe.analysis.runs import Run
from fedbe.core import random
from fedbe.core.compute import one_thread
from fedbe.core.metrics import compute_metrics
from fedbe.core.state import ModelState
from fedbe.errors import RunError
from fedbe.experiment.executors.base import Executor
from fedbe.posterior import Dirichlet

SAMPLES, VOTERS = 300, 10


@dataclass(frozen=True)
class Judged:
    """Test accuracy of each model in percent, and the mean accuracy of the votes of ten models each."""

    accuracies: tuple[float, ...]
    vote: float


@dataclass(frozen=True)
class SimplexSamples:
    """Models at the points γ between three clients.

    Attributes:
        alpha: Concentration of the Dirichlet distribution that γ is drawn from.
        gammas: The mixture weights of each sample, [300, 3].
        judged: Accuracy of the samples and of their votes.
        clients: Name and test accuracy in percent of each client's model.
        average: Test accuracy in percent of the average of the clients' models.
    """

    alpha: float
    gammas: tuple[tuple[float, ...], ...]
    judged: Judged
    clients: tuple[tuple[str, float], ...]
    average: float

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SimplexSamples":
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**values, "judged": Judged(**values["judged"])})


def measure(run: Run, executor: Executor) -> dict[str, Any]:
    """Accuracy of 300 models of the Dirichlet and of 300 models of the Gaussian, for the same three clients.

    Returns:
        `picture`, the samples of the Dirichlet as JSON, and the numbers of `dirichlet` and `gaussian` as shares.
    """
    rerun = rerun_last_round(run, executor)
    samples = sample(rerun)
    gaussian = rerun.sim.ensemble(members="S", num_samples=SAMPLES, posterior="gaussian")
    states = (member.state for member in rerun.round.members(gaussian, rerun.draft.state))
    return {
        "picture": asdict(samples),
        "dirichlet": _numbers(samples, samples.judged),
        "gaussian": _numbers(samples, judge(rerun, states)),
    }


def _numbers(samples: SimplexSamples, judged: Judged) -> dict[str, float]:
    percent = {
        "FedAvg": samples.average,
        "vote of 10": judged.vote,
        "clients": mean(accuracy for _, accuracy in samples.clients),
        "samples": mean(judged.accuracies),
        "best sample": max(judged.accuracies),
        "samples above FedAvg": 100 * mean(a > samples.average for a in judged.accuracies),
    }
    return {name: value / 100 for name, value in percent.items()}


def sample(rerun: Rerun) -> SimplexSamples:
    """Sample models between the three clients of a run's last round and test them.

    Raises:
        RunError: Another number of clients took part in the round.
    """
    updates, seed = rerun.round.updates, rerun.run.info.seed
    if len(updates) != 3:
        raise RunError(f"{len(updates)} clients took part in the last round, not three")
    posterior = Dirichlet.fit(updates, alpha=rerun.sim.ensemble().alpha)
    draw = random.numpy_generator(random.generator(seed, len(rerun.run.records), "triangle"))
    gammas = draw.dirichlet(posterior.alpha, SAMPLES)
    client_accuracies = judge(rerun, (u.state for u in updates)).accuracies
    names = (member.name for member in rerun.clients())
    return SimplexSamples(
        alpha=float(posterior.alpha[0]),
        gammas=tuple(map(tuple, gammas.tolist())),
        judged=judge(rerun, map(posterior.mix, gammas)),
        clients=tuple(zip(names, client_accuracies, strict=True)),
        average=judge(rerun, [rerun.draft.state]).accuracies[0],
    )


def judge(rerun: Rerun, states: Iterable[ModelState]) -> Judged:
    """Test each model, and the vote (Eq. 4) of each ten models in turn."""
    federation = rerun.sim.federation
    with one_thread():
        probabilities = torch.stack([predict(rerun.sim.runner, state, federation.test) for state in states])
    votes = [mean_vote(probabilities[first : first + VOTERS]) for first in range(0, len(probabilities), VOTERS)]
    accuracies, vote_accuracies = (
        [100 * compute_metrics(p, federation.test_labels).accuracy for p in group] for group in (probabilities, votes)
    )
    return Judged(tuple(accuracies), mean(vote_accuracies))
