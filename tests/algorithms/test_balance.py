"""The vote's mix of classes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbe import ClientUpdate, FedBE
from fedbe.algorithms.balance import LIMIT, balance, class_mix, target_mix
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.vote import Member, vote
from fedbe.core.metrics import compute_metrics
from fedbe.core.state import ModelState
from fedbe.errors import SettingError

UNIFORM = torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_the_mix_is_the_mean_over_everything_but_the_classes():
    pixels = torch.tensor([[[0.2, 0.4], [0.8, 0.6]], [[0.6, 0.8], [0.4, 0.2]]])  # [2 inputs, 2 classes, 2 pixels]
    assert class_mix(pixels).tolist() == pytest.approx([0.5, 0.5])
    assert class_mix(torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]])).tolist() == pytest.approx([0.6, 0.4])


@given(st.randoms(use_true_random=False))
def test_the_mix_does_not_depend_on_the_order_not_even_in_the_last_bit(order):
    probabilities = torch.rand(301, 3, generator=torch.Generator().manual_seed(0)).softmax(1)
    rows = list(range(301))
    order.shuffle(rows)
    assert torch.equal(class_mix(probabilities[rows]), class_mix(probabilities))


class TestTarget:
    def test_members_that_agree_are_believed(self):
        rare = torch.tensor([0.97, 0.03], dtype=torch.float64)
        assert target_mix(rare.repeat(10, 1)).tolist() == pytest.approx([0.97, 0.03])

    def test_by_hand(self):
        # Mean (0.8, 0.2); squared distances to it 2 · 0.01, 0, 2 · 0.01: s² = 0.04 / (3 · 2), and 9 s² = 0.06.
        # The distance to uniform is 2 · 0.09 = 0.18: λ = 1/3, and 0.8 − 0.3/3
        mixes = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]], dtype=torch.float64)
        assert target_mix(mixes).tolist() == pytest.approx([0.7, 0.3])

    def test_members_with_one_class_each_say_nothing(self):
        assert target_mix(torch.eye(4, dtype=torch.float64)).tolist() == pytest.approx([0.25] * 4)

    def test_hostile_members_do_not_choose_it(self):
        honest = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64).repeat(6, 1)
        hostile = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).repeat(4, 1)
        assert target_mix(torch.cat([honest, hostile])).tolist() == pytest.approx([1 / 3] * 3)  # the mean has 0.55


class TestBalance:
    def test_the_mean_becomes_the_target(self):
        draw = torch.Generator().manual_seed(1)
        vote_ = (torch.randn(2000, 3, generator=draw) + torch.tensor([0.3, 0.0, -0.3])).softmax(1)
        target = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
        balanced = balance(vote_, target)
        cubes = balanced**3
        assert class_mix(cubes / cubes.sum(1, keepdim=True)).tolist() == pytest.approx(target.tolist(), abs=0.02)
        assert balanced.sum(1).tolist() == pytest.approx([1.0] * 2000)
        assert balanced.dtype == vote_.dtype

    def test_one_factor_for_each_class(self):
        vote_ = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]])
        balanced = balance(vote_, UNIFORM)
        odds = (balanced[:, 1] / balanced[:, 0]) / (vote_[:, 1] / vote_[:, 0])
        assert odds.tolist() == pytest.approx([float(odds[0])] * 3, rel=1e-5)
        assert float(odds[0]) > 1

    def test_a_vote_with_the_right_mix_stays(self):
        vote_ = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
        torch.testing.assert_close(balance(vote_, UNIFORM), vote_)

    def test_a_class_that_nobody_names_is_not_invented(self):
        vote_ = torch.tensor([[1.0, 0.0], [1.0 - 1e-6, 1e-6]])
        balanced = balance(vote_, UNIFORM)
        assert balanced[1, 1] <= 1e-6 * LIMIT**2 * 1.01  # one class times 10, the other divided by 10
        assert bool(torch.isfinite(balanced).all())

    def test_pixels(self):
        flat = torch.rand(40, 3, generator=torch.Generator().manual_seed(2)).softmax(1)
        pixels = flat.reshape(10, 4, 3).transpose(1, 2)  # [10 inputs, 3 classes, 4 pixels]
        target = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        assert torch.equal(balance(pixels, target).transpose(1, 2).reshape(40, 3), balance(flat, target))


def _vote(answers, balanced):
    nothing = ModelState(torch.zeros(0), torch.zeros(0), {})
    members = [Member(str(i), nothing) for i in range(len(answers))]
    labels = torch.tensor([0, 1])
    return vote(members, lambda asked: (answers[i] for i, _ in enumerate(asked)), labels, balanced=balanced)


def test_a_vote_is_balanced_before_it_is_measured():
    answers = [torch.tensor([[0.9, 0.1], [0.7, 0.3]])] * 2 + [torch.tensor([[0.4, 0.6], [0.1, 0.9]])]
    plain, balanced = _vote(answers, False), _vote(answers, True)
    expected = balance(plain.probabilities, target_mix(torch.stack([class_mix(a) for a in answers])))
    assert torch.equal(balanced.probabilities, expected)
    assert balanced.metrics == compute_metrics(expected, torch.tensor([0, 1]))
    assert balanced.metrics.nll < plain.metrics.nll


def test_one_member_alone_is_not_balanced():
    answers = [torch.tensor([[0.9, 0.1], [0.7, 0.3]])]
    assert torch.equal(_vote(answers, True).probabilities, answers[0])


def test_kept_members_are_not_balanced():
    with pytest.raises(SettingError, match="`balance` must be false"):
        get_method("1-ensemble", balance=True)


def test_a_student_learns_the_balanced_vote():
    torch.manual_seed(0)
    model, unlabeled = torch.nn.Linear(4, 3), torch.randn(60, 4)
    start = model.state_dict()
    updates = [ClientUpdate({k: v + 0.5 * torch.randn_like(v) for k, v in start.items()}, 10) for _ in range(4)]

    def learned(**settings):
        return FedBE(model, unlabeled=unlabeled, gate="off", **settings).aggregate(start, updates)["bias"]

    assert torch.equal(learned(), learned(balance=True))  # the default
    assert not torch.equal(learned(), learned(balance=False))
