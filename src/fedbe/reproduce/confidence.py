"""How sure the clients' models and the sampled models are when they are right and when they are wrong.

The paper's Figure 1c and its appendix: test examples by the confidence (the largest probability) of the prediction,
right and wrong ones apart, averaged over the models; as many samples as clients.
"""

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fedbe.algorithms.ensemble import Member
from fedbe.analysis.rerun import Replayed, last_round
from fedbe.analysis.runs import Trial
from fedbe.core.metrics import compute_metrics
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.report.chart import Chart, Panel, Table
from fedbe.reproduce.study import NAMES

BINS = 20
GROUPS = ("clients", "samples")


def measure(trial: Trial, pool: ProcessPool) -> dict[str, Any]:
    """For clients and samples: accuracy, confidence, confidence when wrong, ECE (means over models), and the bins."""
    replayed = last_round(trial, pool)
    sampling = replayed.sim.teacher(members="S", num_samples=len(replayed.round.updates))
    samples = sampling.voters(replayed.draft, replayed.round)
    return {name: _group(replayed, own) for name, own in zip(GROUPS, (replayed.clients(), samples), strict=True)}


def _group(replayed: Replayed, members: Iterable[Member]) -> dict[str, Any]:
    labels = replayed.sim.federation.test_labels
    asked = replayed.sim.predictor("test")(members)
    found = [p for p in asked if bool(torch.isfinite(p).all())]  # as in a vote: who has no finite answer, has none
    each = [compute_metrics(p, labels) for p in found]
    bins = torch.stack([histogram(p, labels) for p in found]).double().mean(0)
    return {
        "models": len(found),
        "accuracy": mean(q.accuracy for q in each),
        "confidence": mean(q.confidence for q in each),
        "confidence when wrong": mean(when_wrong(p, labels) for p in found),
        "ECE": mean(q.ece for q in each),
        "bins": bins.tolist(),
    }


def histogram(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Counts [2, 20] of right and of wrong predictions over equal bins of confidence from 0 to 1.

    >>> found = histogram(torch.tensor([[0.9, 0.1], [0.43, 0.57], [0.44, 0.56]]), torch.tensor([0, 1, 0]))
    >>> found.nonzero().tolist()
    [[0, 11], [0, 18], [1, 11]]
    """
    top, predicted = probabilities.max(1)
    place = (top * BINS).long().clamp_(max=BINS - 1)
    return torch.stack([place[(predicted == labels) == right].bincount(minlength=BINS) for right in (True, False)])


def when_wrong(probabilities: Tensor, labels: Tensor) -> float:
    """Mean confidence of the wrong predictions; 0 if there are none.

    >>> round(when_wrong(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])), 3)
    0.8
    """
    top, predicted = probabilities.max(1)
    wrong = top[predicted != labels].double()
    return float(wrong.mean()) if len(wrong) else 0.0


def chart(seen: Sequence[tuple[Trial, dict[str, Any]]]) -> Chart:
    panels, rows, findings = [], [], []
    for trial, found in seen:
        source = _name(trial)
        findings.append(
            f"{source}: when wrong, clients are {100 * found['clients']['confidence when wrong']:.0f} % sure, "
            f"samples {100 * found['samples']['confidence when wrong']:.0f} %"
        )
        for group in GROUPS:
            right, wrong = found[group]["bins"]
            title = f"{source}: {found[group]['models']} {group}, {100 * found[group]['accuracy']:.0f} % right"
            panels.append(Panel(title, rows=("right", "wrong"), counts=(tuple(right), tuple(wrong))))
            for i, (a, b) in enumerate(zip(right, wrong, strict=True)):
                rows.append((source, group, f"{i / BINS:.2f}", f"{(i + 1) / BINS:.2f}", f"{a:.1f}", f"{b:.1f}"))
    runs = "; ".join(f"{_name(t)}: {t.title}, seed {t.info.seed}, round {len(t.records)}" for t, _ in seen)
    return Chart(
        "confidence",
        "histogram",
        "; ".join(findings),
        "Test examples by the confidence (largest probability) of the prediction, right and wrong ones stacked: the "
        "mean of the clients' models of the last round, and of as many models sampled from the distribution fitted to "
        f"them (paper, Figure 1c and appendix). One run for each row: {runs}.",
        tuple(panels),
        Table(("Data", "Models", "Confidence from", "to", "Right", "Wrong"), tuple(rows)),
        "confidence",
        "test examples",
    )


def _name(trial: Trial) -> str:
    return NAMES.get(trial.recipe.data.source, trial.recipe.data.source)
