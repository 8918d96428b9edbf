import pytest
import torch
from torch import nn

from fedbe.algorithms.ensemble import parse_members
from fedbe.algorithms.vote import Member, local_predictor, logits_vote, predict, vote
from fedbe.core.compute import Plan
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState
from fedbe.errors import AggregationError, SettingError

ONE = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
TWO = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
THREE = torch.tensor([[0.2, 0.8], [0.4, 0.6], [0.4, 0.6]])


def _poll(*answers, labels=None):
    """A vote of members whose answers are known."""
    nothing = ModelState(torch.zeros(0), torch.zeros(0), {})
    members = [Member(f"m{i}", nothing) for i in range(1, len(answers) + 1)]

    def answer(asked):
        for i, _ in enumerate(asked):
            yield answers[i]

    return vote(members, answer, labels)


class TestVote:
    def test_the_mean_of_probabilities(self):
        # column 0: (.9+.7+.2)/3, (.2+.6+.4)/3, (.6+.2+.4)/3
        outcome = _poll(ONE, TWO, THREE)
        torch.testing.assert_close(outcome.probabilities[:, 0], torch.tensor([0.6, 0.4, 0.4]))
        torch.testing.assert_close(outcome.probabilities.sum(1), torch.ones(3))

    def test_disagreement_by_hand(self):
        # inputs 1 to 3: classes 0 0 1, 1 0 1, 0 1 1: of the three pairs of members two disagree, each time
        assert _poll(ONE, TWO, THREE).disagreement == pytest.approx(2 / 3)
        # ONE and TWO: agree, disagree, disagree
        assert _poll(ONE, TWO).disagreement == pytest.approx(2 / 3)
        assert _poll(ONE, ONE, ONE).disagreement == pytest.approx(0)
        assert _poll(ONE).disagreement is None

    def test_reports(self):
        labels = torch.tensor([0, 0, 0])
        outcome = _poll(ONE, TWO, labels=labels)
        assert [m.name for m in outcome.members] == ["m1", "m2"]
        assert [m.metrics.accuracy for m in outcome.members] == pytest.approx([2 / 3, 2 / 3])
        assert outcome.members[0].confidence == pytest.approx((0.9 + 0.8 + 0.6) / 3)
        # means .8, .4, .4 of class 0
        assert outcome.metrics.accuracy == pytest.approx(1 / 3)
        silent = _poll(ONE, TWO)
        assert silent.metrics is None
        assert silent.members[0].metrics is None
        assert torch.equal(silent.probabilities, outcome.probabilities)

    def test_labels_do_not_change_the_vote_and_answers_are_not_changed(self):
        before = ONE.clone()
        _poll(ONE, TWO, labels=torch.tensor([0, 1, 1]))
        assert torch.equal(ONE, before)

    def test_a_member_that_is_not_finite_is_left_out_by_name(self):
        bad = TWO.clone()
        bad[1, 0] = torch.nan
        outcome = _poll(ONE, bad, THREE)
        assert outcome.left_out == ("m2",)
        torch.testing.assert_close(outcome.probabilities, (ONE + THREE) / 2)
        assert outcome.disagreement == pytest.approx(2 / 3)

    def test_nobody_left(self):
        with pytest.raises(AggregationError, match="no member"):
            _poll(torch.full((2, 2), torch.nan))

    def test_dense_answers(self, rng):
        answers = [torch.rand(2, 3, 4, 4, generator=rng).softmax(1) for _ in range(3)]
        outcome = _poll(*answers, labels=torch.randint(3, (2, 4, 4), generator=rng))
        flat = _poll(*(a.permute(0, 2, 3, 1).reshape(-1, 3) for a in answers))
        assert outcome.disagreement == pytest.approx(flat.disagreement)
        torch.testing.assert_close(outcome.probabilities, sum(answers) / 3)


def test_members_are_asked_one_at_a_time(network, inputs_for):
    """The next state is not made before the last one has answered: one model in memory, whatever M is."""
    runner = ModelRunner(network("mlp"))
    alive = 0
    log = []

    def members():
        nonlocal alive
        for i in range(4):
            alive += 1
            log.append(alive)
            yield Member(str(i), runner.read())
            alive -= 1

    vote(members(), local_predictor(runner, TensorInputs(inputs_for("mlp"))))
    assert log == [1, 1, 1, 1]


@pytest.mark.parametrize("batch", [1, 5, 23, 24, 250])
def test_predict_is_softmax_in_evaluation_mode_whatever_the_batch(network, inputs_for, batch):
    module = network("dropout-bn").train()
    runner = ModelRunner(module, Plan(batch_size=batch))
    inputs = inputs_for("dropout-bn", 24)
    got = predict(runner, runner.read(), TensorInputs(inputs))
    with torch.no_grad():
        expected = module.eval()(inputs).softmax(1)
    torch.testing.assert_close(got, expected)
    assert not got.requires_grad


def test_predict_in_bfloat16_is_near_and_in_float32(network, inputs_for):
    module = network("conv-gn")
    inputs = TensorInputs(inputs_for("conv-gn"))
    exact = predict(ModelRunner(module), ModelRunner(module).read(), inputs)
    runner = ModelRunner(module, Plan(precision="bfloat16"))
    near = predict(runner, runner.read(), inputs)
    assert near.dtype == torch.float32
    assert 0 < float((near - exact).abs().max()) < 0.03


@pytest.mark.parametrize(
    "forward",
    [lambda x: x[:, 0], lambda x: x[:1], lambda x: x.long(), lambda x: {"scores": x}],
    ids=["one-dimensional", "short", "integer", "dict"],
)
def test_models_that_return_no_logits(forward):
    class Odd(nn.Linear):
        def forward(self, x):
            return forward(super().forward(x))

    runner = ModelRunner(Odd(4, 3))
    with pytest.raises(TypeError, match="`model` must return"):
        predict(runner, runner.read(), TensorInputs(torch.zeros(2, 4)))


@pytest.mark.parametrize("letters", ["", "SS", "X", "sac", "SAC C"])
def test_letters(letters):
    with pytest.raises(SettingError, match="`members` must be one or more of"):
        parse_members(letters)


class TestLogitsVote:
    def test_by_hand(self):
        # √(.8·.5) : √(.2·.5) = 2 : 1, where the mean of the probabilities would be .65 : .35
        vote = logits_vote([torch.tensor([[0.8, 0.2]]), torch.tensor([[0.5, 0.5]])])
        torch.testing.assert_close(vote, torch.tensor([[2 / 3, 1 / 3]]))

    def test_it_is_the_softmax_of_the_mean_logits(self, rng):
        logits = [3 * torch.randn(5, 4, 2, generator=rng) for _ in range(3)]
        expected = torch.stack(logits).mean(0).softmax(1)
        torch.testing.assert_close(logits_vote(z.softmax(1) for z in logits), expected)

    def test_a_probability_of_zero_is_a_very_low_one(self):
        vote = logits_vote([torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])])
        torch.testing.assert_close(vote, torch.tensor([[0.5, 0.5]]))
