"""Figure 1b of the paper: models sampled between three clients, each at its γ, coloured by its accuracy."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch

from fedbe.algorithms.ensemble import predict
from fedbe.analysis.rerun import Replayed, last_round, one_thread
from fedbe.analysis.runs import Study, Trial
from fedbe.core import random
from fedbe.core.metrics import compute_metrics
from fedbe.core.state import ModelState
from fedbe.errors import FedBEError, RunError
from fedbe.posterior import Dirichlet
from fedbe.report.chart import Chart, Dot, Panel, Table

SAMPLES, VOTERS = 300, 10
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3) / 2))


@dataclass(frozen=True)
class Judged:
    """Test accuracy of each model, in percent, and of the votes of every ten of them, on average."""

    accuracies: tuple[float, ...]
    vote: float


@dataclass(frozen=True)
class Sampled:
    """Models at the points γ between three clients; those of the corners (by name) and of the centre."""

    alpha: float
    gammas: tuple[tuple[float, ...], ...]
    judged: Judged
    clients: tuple[tuple[str, float], ...]
    average: float


def applies(study: Study) -> bool:
    """Three clients on the Swiss roll."""
    return study.recipe.data.source == "swissroll" and study.recipe.split.clients == 3


def triangle(study: Study) -> Chart | str:
    """The triangle of the study's first finished run; or why there is none."""
    trial = next((t for t in study.trials if t.finished), None)
    if trial is None:
        return "The triangle of sampled models is not shown: no run has ended."
    try:
        return chart(trial, sample(last_round(trial)))
    except FedBEError as error:
        return f"The triangle of sampled models is not shown: {error}."


def sample(replayed: Replayed) -> Sampled:
    """Sample models between the three clients of a run's last round and test them."""
    updates, seed = replayed.round.updates, replayed.trial.info.seed
    if len(updates) != 3:
        raise RunError(f"{len(updates)} clients took part in the last round, not three")
    alpha = replayed.sim.teacher().alpha
    fitted = Dirichlet.fit(updates, alpha=alpha)
    draw = random.numpy_generator(random.generator(seed, len(replayed.trial.records), "triangle"))
    gammas = draw.dirichlet(fitted.alpha, SAMPLES)
    corners = judge(replayed, (u.state for u in updates)).accuracies
    return Sampled(
        alpha=float(fitted.alpha[0]),
        gammas=tuple(map(tuple, gammas.tolist())),
        judged=judge(replayed, map(fitted.mix, gammas)),
        clients=tuple((m.name, found) for m, found in zip(replayed.clients(), corners, strict=True)),
        average=judge(replayed, [replayed.draft.state]).accuracies[0],
    )


def judge(replayed: Replayed, states: Iterable[ModelState]) -> Judged:
    """Test each model, and let every ten of them vote (Eq. 4)."""
    federation = replayed.sim.federation
    with one_thread():
        found = torch.stack([predict(replayed.sim.runner, state, federation.test) for state in states])
    votes = [found[first : first + VOTERS].mean(0) for first in range(0, len(found), VOTERS)]
    each, voted = (
        [100 * compute_metrics(p, federation.test_labels).accuracy for p in parts] for parts in (found, votes)
    )
    return Judged(tuple(each), mean(voted))


def chart(trial: Trial, found: Sampled) -> Chart:
    accuracies = [*found.judged.accuracies, *(a for _, a in found.clients), found.average]
    low, high = min(accuracies), max(accuracies)

    def dot(gamma: Iterable[float], accuracy: float, role: str, label: str) -> Dot:
        x, y = (float(sum(g * c[axis] for g, c in zip(gamma, CORNERS, strict=True))) for axis in (0, 1))
        share = (accuracy - low) / (high - low) if high > low else 1.0
        return Dot(x, y, f"{label}: {accuracy:.1f} %", colour=share, role=role)

    models = list(zip(found.gammas, found.judged.accuracies, strict=True))
    best = max(models, key=lambda model: model[1])
    dots = [dot(g, a, "", _gamma(g)) for g, a in models]
    dots += [dot(np.eye(3)[i], a, "corner", name) for i, (name, a) in enumerate(found.clients)]
    dots += [dot((1 / 3,) * 3, found.average, "centre", "FedAvg"), dot(*best, "best", "best")]
    beat = sum(a > found.average for a in found.judged.accuracies)
    rows = (d.label.removesuffix(" %").rpartition(": ") for d in reversed(dots))
    return Chart(
        "triangle",
        "triangle",
        f"{beat} of {len(models)} sampled models beat FedAvg's {found.average:.1f} %",
        f"Models between the three clients of the last round (n = 1 run: {trial.title}, seed {trial.info.seed}, round "
        f"{len(trial.records)}), sampled from a Dirichlet with α = {found.alpha}: position is the mixture γ, corners "
        "are the clients' own models, the centre is FedAvg's average, the star is the best sample, colour is test "
        f"accuracy (paper, Figure 1b). Ten samples that vote have {found.judged.vote:.1f} % on average.",
        (Panel(dots=tuple(dots), scale=(low, high)),),
        Table(("Model", "Test accuracy, %"), tuple((name, accuracy) for name, _, accuracy in rows)),
        unit="%",
    )


def _gamma(gamma: Iterable[float]) -> str:
    return f"γ = ({', '.join(f'{g:.2f}' for g in gamma)})"
