"""The vote's mix of classes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbe import ClientUpdate, FedBE
from fedbe.algorithms.balance import LIMIT, balance, expected_mix, known_mix, noticed_target, target_mix
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.vote import Member, vote
from fedbe.core.metrics import compute_metrics
from fedbe.core.state import ModelState
from fedbe.errors import SettingError

UNIFORM = torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_the_mix_is_the_mean_over_everything_but_the_classes():
    pixels = torch.tensor([[[0.2, 0.4], [0.8, 0.6]], [[0.6, 0.8], [0.4, 0.2]]])  # [2 inputs, 2 classes, 2 pixels]
    assert expected_mix(pixels).tolist() == pytest.approx([0.5, 0.5])
    assert expected_mix(torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]])).tolist() == pytest.approx([0.6, 0.4])


@given(st.randoms(use_true_random=False))
def test_the_mix_does_not_depend_on_the_order_not_even_in_the_last_bit(order):
    probabilities = torch.rand(301, 3, generator=torch.Generator().manual_seed(0)).softmax(1)
    rows = list(range(301))
    order.shuffle(rows)
    assert torch.equal(expected_mix(probabilities[rows]), expected_mix(probabilities))


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


def _fair_vote(count, seed):
    """Labels of ten classes that are equally frequent, and a vote that names most of them."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    logits = torch.randn(count, 10, generator=draw) + 2.0 * torch.nn.functional.one_hot(labels, 10)
    return labels, logits.softmax(1)


class TestNoticedTarget:
    uniform = torch.full((10,), 0.1, dtype=torch.float64)

    @pytest.mark.parametrize("count", [5, 20, 50])
    def test_a_fair_vote_on_few_inputs_is_not_made_worse(self, count):
        plain, corrected, forced = [], [], []
        for seed in range(100):
            labels, fair = _fair_vote(count, seed)
            for scores, target in (
                (plain, None),
                (corrected, noticed_target(self.uniform, fair)),
                (forced, self.uniform),
            ):
                answer = fair if target is None else balance(fair, target)
                scores.append(float((answer.argmax(1) == labels).double().mean()))
        mean = [sum(scores) / 100 for scores in (plain, corrected, forced)]
        assert mean[1] > mean[0] - 0.015
        assert mean[2] < mean[0] - 0.02

    def test_a_vote_that_prefers_a_class_is_still_corrected(self):
        draw = torch.Generator().manual_seed(0)
        biased = (torch.randn(500, 10, generator=draw) + torch.tensor([2.0] + [0.0] * 9)).softmax(1)
        assert noticed_target(self.uniform, biased)[0] < 0.11  # its own mix has more than 0.5 there

    def test_one_input_keeps_its_vote(self):
        alone = torch.tensor([[0.7, 0.2, 0.1]])
        target = noticed_target(torch.full((3,), 1 / 3, dtype=torch.float64), alone)
        torch.testing.assert_close(balance(alone, target), alone)

    def test_the_pixels_of_an_input_count_once(self):
        _, fair = _fair_vote(20, 1)
        pixels = fair.unsqueeze(2).expand(-1, -1, 30)
        torch.testing.assert_close(noticed_target(self.uniform, pixels), noticed_target(self.uniform, fair))


class TestBalance:
    def test_the_mean_becomes_the_target(self):
        draw = torch.Generator().manual_seed(1)
        vote_ = (torch.randn(2000, 3, generator=draw) + torch.tensor([0.3, 0.0, -0.3])).softmax(1)
        target = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
        balanced = balance(vote_, target)
        cubes = balanced**3
        assert expected_mix(cubes / cubes.sum(1, keepdim=True)).tolist() == pytest.approx(target.tolist(), abs=0.02)
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


def _vote(answers, balanced, class_mix=()):
    nothing = ModelState(torch.zeros(0), torch.zeros(0), {})
    members = [Member(str(i), nothing) for i in range(len(answers))]
    labels = torch.tensor([0, 1]).repeat(len(answers[0]) // 2)
    return vote(
        members, lambda asked: (answers[i] for i, _ in enumerate(asked)), labels, balanced=balanced, class_mix=class_mix
    )


def test_a_vote_is_balanced_before_it_is_measured():
    answers = [torch.tensor([[0.9, 0.1], [0.7, 0.3]])] * 2 + [torch.tensor([[0.4, 0.6], [0.1, 0.9]])]
    answers = [answer.repeat(50, 1) for answer in answers]
    plain, balanced = _vote(answers, False), _vote(answers, True)
    target = target_mix(torch.stack([expected_mix(a) for a in answers]))
    expected = balance(plain.probabilities, noticed_target(target, plain.probabilities))
    assert torch.equal(balanced.probabilities, expected)
    assert balanced.metrics == compute_metrics(expected, torch.tensor([0, 1]).repeat(50))
    assert balanced.metrics.nll < plain.metrics.nll


def test_one_member_alone_is_not_balanced():
    answers = [torch.tensor([[0.9, 0.1], [0.7, 0.3]])]
    assert torch.equal(_vote(answers, True).probabilities, answers[0])


def test_kept_members_are_not_balanced():
    for setting in ({"balance": True}, {"class_mix": [1, 2]}):
        with pytest.raises(SettingError, match="kept members are not balanced"):
            get_method("1-ensemble", **setting)


def test_a_student_learns_the_balanced_vote():
    torch.manual_seed(0)
    model, unlabeled = torch.nn.Linear(4, 3), torch.randn(60, 4)
    start = model.state_dict()
    updates = [ClientUpdate({k: v + 0.5 * torch.randn_like(v) for k, v in start.items()}, 10) for _ in range(4)]

    def learned(**settings):
        return FedBE(model, unlabeled=unlabeled, gate="off", **settings).aggregate(start, updates)["bias"]

    assert torch.equal(learned(), learned(balance=True))  # the default
    assert not torch.equal(learned(), learned(balance=False))


class TestKnownMix:
    def test_counts_are_as_good_as_shares(self):
        assert torch.equal(known_mix([3, 1], 2), known_mix([0.75, 0.25], 2))

    def test_the_vote_gets_it_whatever_the_members_expect(self):
        answers = [torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([[0.6, 0.4], [0.4, 0.6]])]
        plain = _vote(answers, False).probabilities
        for balanced in (False, True):
            assert torch.equal(_vote(answers, balanced, [1, 9]).probabilities, balance(plain, known_mix([1, 9], 2)))
        assert torch.equal(_vote(answers[:1], True, [1, 9]).probabilities, balance(answers[0], known_mix([1, 9], 2)))

    def test_a_student_learns_it(self):
        torch.manual_seed(0)
        model, unlabeled = torch.nn.Linear(4, 2), torch.randn(60, 4)
        start = model.state_dict()
        updates = [ClientUpdate({k: v + 0.1 * torch.randn_like(v) for k, v in start.items()}, 10) for _ in range(3)]

        def mean_of_first_class(mix):
            server = FedBE(model, unlabeled=unlabeled, gate="off", distill_epochs=40, class_mix=mix)
            model_ = torch.nn.Linear(4, 2)
            model_.load_state_dict(server.aggregate(start, updates))
            return float(model_(unlabeled).softmax(1)[:, 0].mean().detach())

        assert mean_of_first_class([1, 9]) < 0.3 < 0.7 < mean_of_first_class([9, 1])

    @pytest.mark.parametrize(
        "mix",
        [[0, 0], [-1, 2], [float("nan"), 1], [True, 1], ["a", 1], [None, 1], [10**400, 1], [1e308, 1e308]],
        ids=["zeros", "negative", "nan", "bool", "text", "none", "huge", "infinite sum"],
    )
    def test_it_must_be_numbers(self, mix):
        with pytest.raises(SettingError, match="`class_mix` must be numbers >= 0"):
            get_method("fedbe", class_mix=mix)

    @pytest.mark.parametrize("mix", [0.5, "even", {"cat": 1}])
    def test_it_must_be_a_list(self, mix):
        with pytest.raises(SettingError, match="`class_mix` must be a list of numbers"):
            get_method("fedbe", class_mix=mix)

    def test_one_number_for_each_class(self):
        answers = [torch.tensor([[0.9, 0.1], [0.7, 0.3]])]
        with pytest.raises(SettingError, match="the model's 2 classes, got 3"):
            _vote(answers, True, [1, 1, 1])
        with pytest.raises(SettingError, match="the model's 2 classes, got 3"):  # before any client trains
            FedBE(torch.nn.Linear(4, 2), unlabeled=torch.zeros(5, 4), class_mix=[1, 1, 1])
