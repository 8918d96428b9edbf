"""Accuracy and calibration of predictions."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedbe.errors import AggregationError, SettingError

ECE_BINS = 15


@dataclass(frozen=True)
class Metrics:
    """Accuracy and calibration of n predictions.

    Args:
        accuracy: The share of correct predictions, from 0 to 1.
        nll: The negative log-likelihood: the mean of −log p of the true class.
        confidence: The mean of the largest probability.
        ece: The expected calibration error Σ_b (n_b/n) |accuracy_b − confidence_b| over 15 equal bins of confidence.

    Example:
        >>> Metrics(accuracy=0.5, nll=0.7, confidence=0.8, ece=0.3).as_dict()
        {'accuracy': 0.5, 'nll': 0.7, 'confidence': 0.8, 'ece': 0.3}
    """

    accuracy: float
    nll: float
    confidence: float
    ece: float

    def as_dict(self) -> dict[str, float]:
        """The four numbers by name."""
        return asdict(self)


def confidence(probabilities: Tensor) -> float:
    """The mean of the largest probability, of probabilities [N, classes, …]."""
    return float(probabilities.amax(1).cpu().double().mean())


def compute_metrics(probabilities: Tensor, labels: Tensor) -> Metrics:
    """Compare predictions with the true classes.

    Args:
        probabilities: Predictions [N, classes, …].
        labels: True classes [N, …], from 0 to classes − 1.

    Raises:
        SettingError: The labels do not fit the predictions.
        AggregationError: The predictions are NaN or infinite.

    Example:
        >>> metrics = compute_metrics(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        >>> metrics.accuracy, round(metrics.confidence, 2), round(metrics.ece, 2)
        (0.5, 0.85, 0.45)
    """
    if len(labels) != len(probabilities):
        raise SettingError(f"`labels` must be as many as predictions, {len(probabilities)}, got {len(labels)}")
    # On the host: one copy instead of one for each number, and MPS devices have no float64.
    probabilities, labels = probabilities.cpu(), labels.cpu()
    check_labels(labels, probabilities)
    if not bool(torch.isfinite(probabilities).all()):
        raise AggregationError("the model's predictions are NaN or infinite: it has diverged; lower the step size")
    top, predicted = probabilities.max(1)
    correct = (predicted == labels).double().flatten()
    top = top.double().flatten()
    true = probabilities.gather(1, labels.unsqueeze(1)).double().clamp_min(1e-12)
    bins = (top * ECE_BINS).long().clamp_(max=ECE_BINS - 1)
    gap = torch.zeros(ECE_BINS, dtype=torch.float64).index_add_(0, bins, correct - top)
    return Metrics(
        accuracy=float(correct.mean()),
        nll=float(-true.log().mean()),
        confidence=float(top.mean()),
        ece=float(gap.abs().sum() / len(top)),
    )


def check_labels(labels: Tensor, outputs: Tensor, ignored: int | None = None) -> None:
    """Raise a SettingError unless labels [N, …] are classes of the outputs [N, classes, …].

    Args:
        labels: True classes. There may be more of them than outputs.
        outputs: Logits or probabilities.
        ignored: A label that is valid, too, or None.
    """
    classes, shape = outputs.shape[1], list(outputs.shape[2:])
    if labels.is_floating_point() or list(labels.shape[1:]) != shape:
        expected = ", ".join(["N", *map(str, shape)])
        raise SettingError(
            f"`labels` must be whole numbers of shape [{expected}] for the outputs {list(outputs.shape)}, because "
            f"fedbe is for single-label classification; got {labels.dtype} of shape {list(labels.shape)}"
        )
    if bool((((labels < 0) | (labels >= classes)) & (labels != ignored if ignored is not None else True)).any()):
        raise SettingError(
            f"`labels` must be from 0 to {classes - 1} for the model's {classes} classes, "
            f"got {int(labels.min())} to {int(labels.max())}"
        )
