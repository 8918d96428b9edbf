"""Confidence of the clients' models and of sampled models, for right and for wrong predictions.

The paper's Figure 1c and its appendix: test examples by the confidence (the largest probability) of the prediction,
counted separately for right and wrong predictions, averaged over the models; as many samples as clients.
"""

from collections.abc import Iterable
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fedbe.algorithms.vote import Member
from fedbe.analysis.rerun import Rerun, rerun_last_round
from fedbe.analysis.runs import Run
from fedbe.core.metrics import compute_metrics
from fedbe.experiment.executors.base import Executor

BINS = 20


def measure(run: Run, executor: Executor) -> dict[str, Any]:
    """Calibration of the `clients` of the last round and of as many `samples`.

    Returns:
        For each group: `accuracy`, `confidence`, `confidence when wrong` and `ECE` (means over its models) and `bins`.
    """
    rerun = rerun_last_round(run, executor)
    sampling = rerun.sim.ensemble(members="S", num_samples=len(rerun.round.updates))
    samples = rerun.round.members(sampling, rerun.draft.state)
    return {"clients": _group(rerun, rerun.clients()), "samples": _group(rerun, samples)}


def _group(rerun: Rerun, members: Iterable[Member]) -> dict[str, Any]:
    labels = rerun.sim.federation.test_labels
    answers = rerun.sim.predictor("test")(members)
    finite = [p for p in answers if bool(torch.isfinite(p).all())]  # as in a vote: a broken model does not count
    metrics = [compute_metrics(p, labels) for p in finite]
    bins = torch.stack([confidence_histogram(p, labels) for p in finite]).double().mean(0)
    return {
        "models": len(finite),
        "accuracy": mean(m.accuracy for m in metrics),
        "confidence": mean(m.confidence for m in metrics),
        "confidence when wrong": mean(confidence_when_wrong(p, labels) for p in finite),
        "ECE": mean(m.ece for m in metrics),
        "bins": bins.tolist(),
    }


def confidence_histogram(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Count right and wrong predictions by confidence.

    Args:
        probabilities: [N, classes].
        labels: int64 [N].

    Returns:
        int64 [2, 20]: right and wrong predictions in 20 equal bins of [0, 1].

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.43, 0.57], [0.44, 0.56]])
        >>> counts = confidence_histogram(probabilities, torch.tensor([0, 1, 0]))
        >>> counts.nonzero().tolist()
        [[0, 11], [0, 18], [1, 11]]
    """
    confidence, predicted = probabilities.max(1)
    bins = (confidence * BINS).long().clamp_(max=BINS - 1)
    return torch.stack([bins[(predicted == labels) == right].bincount(minlength=BINS) for right in (True, False)])


def confidence_when_wrong(probabilities: Tensor, labels: Tensor) -> float:
    """Mean confidence of the wrong predictions; 0 if there are none.

    Example:
        >>> round(confidence_when_wrong(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])), 3)
        0.8
    """
    confidence, predicted = probabilities.max(1)
    wrong = confidence[predicted != labels].double()
    return float(wrong.mean()) if len(wrong) else 0.0
