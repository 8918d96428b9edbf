import math

import pytest
import torch

from fedbe.core.metrics import compute_metrics, confidence
from fedbe.errors import AggregationError, SettingError


def test_by_hand():
    # largest: .9 right, .8 wrong, .6 right, .5 wrong (index 0 wins a tie)
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    labels = torch.tensor([0, 0, 0, 1])
    got = compute_metrics(probabilities, labels)
    assert got.accuracy == 0.5
    assert got.nll == pytest.approx(-(math.log(0.9) + math.log(0.2) + math.log(0.6) + math.log(0.5)) / 4, rel=1e-6)
    assert got.confidence == confidence(probabilities) == pytest.approx(0.7)
    # 15 bins: .9 in bin 13, .8 in 12, .6 in 9, .5 in 7, each alone: (|1−.9| + |0−.8| + |1−.6| + |0−.5|)/4
    assert got.ece == pytest.approx((0.1 + 0.8 + 0.4 + 0.5) / 4)
    assert got.as_dict()["accuracy"] == 0.5


def test_within_a_bin_gaps_cancel():
    # .70 and .72 share bin 10 (.667 … .733): |(1 + 0) − (.70 + .72)|/2 = .21
    got = compute_metrics(torch.tensor([[0.70, 0.30], [0.72, 0.28]]), torch.tensor([0, 1]))
    assert got.ece == pytest.approx(0.21)


def test_confidence_one_is_in_the_last_bin_and_its_mistakes_are_finite():
    got = compute_metrics(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert got.ece == 1.0
    assert got.nll == pytest.approx(-math.log(1e-12))


def test_dense_predictions_count_every_position(rng):
    dense = torch.rand(2, 3, 4, 5, generator=rng).softmax(1)
    labels = torch.randint(3, (2, 4, 5), generator=rng)
    flat = compute_metrics(dense.permute(0, 2, 3, 1).reshape(-1, 3), labels.reshape(-1))
    assert compute_metrics(dense, labels).as_dict() == pytest.approx(flat.as_dict())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 2]), "got 0 to 2"),
        (torch.tensor([0, -1]), "got -1 to 0"),
        (torch.zeros(2, 3, dtype=torch.int64), r"single-label classification; got torch.int64 of shape \[2, 3\]"),
    ],
)
def test_labels_that_do_not_fit(labels, message):
    with pytest.raises(SettingError, match=message):
        compute_metrics(torch.full((2, 2), 0.5), labels)


def test_predictions_that_are_not_finite():
    with pytest.raises(AggregationError, match="NaN or infinite"):
        compute_metrics(torch.tensor([[0.5, 0.5], [float("nan"), 0.5]]), torch.tensor([0, 1]))
