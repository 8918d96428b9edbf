"""The gate without labels: scores worked out by hand, backing off and resting, and the stage that uses it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedbe
from fedbe import ClientUpdate
from fedbe.algorithms.gate import GateSettings, GateState, agreement, judge, soft_agreement
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.server.context import Context, Draft, Round, StepInfo
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.updates import Update
from fedbe.errors import AggregationError, SettingError, StateError

VOTE = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]])
ON = GateSettings(gate="agreement", gate_backoff=0.5, gate_tries=2)


def one_hot(*classes):
    return nn.functional.one_hot(torch.tensor(classes), 2).float()


def test_agreement_counts_equal_first_choices():
    assert agreement(one_hot(0, 0, 1, 0), VOTE).tolist() == [1, 1, 1, 0]


def test_soft_agreement_is_the_votes_probability_of_the_choice():
    assert soft_agreement(one_hot(0, 1, 1, 0), VOTE).tolist() == pytest.approx([0.9, 0.4, 0.8, 0.3])


def test_the_two_judges_can_differ():
    """One differs on two inputs where the vote hesitates, the other on one where it is sure."""
    vote = torch.tensor([[0.95, 0.05], [0.51, 0.49], [0.51, 0.49], [0.1, 0.9]])
    hesitant, wrong = one_hot(0, 1, 1, 1), one_hot(1, 0, 0, 1)
    assert agreement(wrong, vote).mean() > agreement(hesitant, vote).mean()
    assert soft_agreement(wrong, vote).mean() < soft_agreement(hesitant, vote).mean()


def test_the_margin_is_a_standard_error_worked_out_by_hand():
    # The student wins on two of four inputs and loses on one: d = (1, 1, −1, 0), mean 1/4, variance 3/4 − 1/16.
    vote = one_hot(0, 0, 0, 0)
    judgement = judge(ON, one_hot(1, 1, 0, 0), one_hot(0, 0, 1, 0), vote, lr=0.1)
    assert (judgement.average, judgement.student) == (0.5, 0.75)
    assert judgement.margin == pytest.approx((11 / 16) ** 0.5 / 2)
    assert not judgement.accepted  # 0.25 is within 0.41
    assert judge(replace(ON, gate_margin=0.5), one_hot(1, 1, 0, 0), one_hot(0, 0, 1, 0), vote, lr=0.1).accepted


def test_a_gain_must_also_be_large_enough():
    # The student wins on one of 50 inputs: 0.02, and the standard error is √(0.02 · 0.98 / 50) = 0.0198.
    vote, average = one_hot(*[0] * 50), one_hot(1, *[0] * 49)
    assert judge(replace(ON, gate_gain=0.019), average, vote, vote, lr=0.1).accepted
    refused = judge(replace(ON, gate_gain=0.03), average, vote, vote, lr=0.1)
    assert (refused.accepted, refused.margin) == (False, 0.03)


def test_the_default_asks_for_three_points():
    settings = get_method("fedbe").stages[-1].gating
    vote = one_hot(*[0] * 1000)
    two, four = (one_hot(*[1] * wrong, *[0] * (1000 - wrong)) for wrong in (20, 40))
    assert not judge(settings, two, vote, vote, lr=0.1).accepted  # 0.020, more than four standard errors
    assert judge(settings, four, vote, vote, lr=0.1).accepted


def test_the_pixels_of_an_input_are_not_independent():
    vote, right, wrong = one_hot(0, 0, 0, 0), one_hot(0, 0, 0, 0), one_hot(1, 1, 0, 0)
    images = [part.unsqueeze(2).expand(-1, -1, 50) for part in (wrong, right, vote)]  # 50 equal pixels each
    assert judge(ON, *images, lr=0.1).margin == judge(ON, wrong, right, vote, lr=0.1).margin > 0


def test_a_student_without_finite_predictions_agrees_with_nobody():
    # argmax takes a NaN for the largest value, so it would name the class of the vote everywhere.
    judgement = judge(ON, one_hot(1, 1), torch.full((2, 2), torch.nan), one_hot(0, 0), lr=0.1)
    assert (judgement.student, judgement.accepted) == (0.0, False)


def test_a_student_that_only_wins_passes_any_margin():
    assert judge(replace(ON, gate_margin=9.0), one_hot(1, 1), one_hot(0, 0), one_hot(0, 0), lr=0.1).accepted


def test_a_tie_keeps_the_average():
    assert not judge(ON, VOTE, VOTE, VOTE, lr=0.1).accepted


def test_steps_shrink_then_the_server_rests_longer_and_longer():
    state, factors, rests = GateState(), [], []
    for _ in range(5):
        factors.append(state.factor(ON))
        state = state.after(False, ON)
        rests.append(state.rest)
    assert factors == [1, 0.5, 0.25, 0.25, 0.25]
    assert rests == [0, 0, 1, 2, 4]


def test_an_accepted_student_ends_the_long_rests():
    tired = GateState(refusals=7, rest=0)
    assert tired.after(True, ON) == GateState(refusals=2, rest=0)
    assert GateState(refusals=1).after(True, ON) == GateState(refusals=1)


def test_a_rest_cannot_grow_without_end():
    assert GateState(refusals=10**6).after(False, ON).rest == 2**15


@pytest.mark.parametrize(
    "wrong",
    [
        {"gate": "oracle"},
        {"gate_share": 1.0},
        {"gate_margin": -1.0},
        {"gate_gain": 1.0},
        {"gate_backoff": 0.0},
        {"gate_tries": 0},
    ],
)
def test_settings_that_cannot_work(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        GateSettings(**wrong)


# The stage: a linear model of 2 inputs and 2 classes on a ring of points.
ANGLES = torch.arange(40) * (2 * torch.pi / 40) + 0.01
POINTS = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
RIGHT = [[4.0, 0.0], [-4.0, 0.0]]  # class 0 where x > 0
WRONG = [[-1.0, 0.0], [1.0, 0.0]]  # the opposite


@pytest.fixture
def step(state, update):
    """Run the stage on three equal clients, from a draft."""

    def run(draft, client=RIGHT, memory=(), points=POINTS, **settings):
        options = {"members": "C", "distill_lr": 0.5, "distill_lr_min": 0.5, "distill_epochs": 20, "gate": "agreement"}
        stage = get_method("fedbe", "paper", **(options | settings)).stages[-1]
        context = Context(ModelRunner(nn.Linear(2, 2, bias=False)), 0, 1, inputs=TensorInputs(points))
        round = Round([update(i, client) for i in range(3)], state([0.0] * 4), context, StepInfo())
        return stage(Draft(state(draft), dict(memory)), round), round.info

    return run


def test_a_student_that_learns_the_vote_passes(step):
    draft, info = step(WRONG)
    assert info.gate.accepted
    assert info.gate.average < 0.2 < 0.9 < info.gate.student
    assert draft.state.params[0] > draft.state.params[2]  # it has turned around
    assert GateState.of(draft.memory) == GateState()


def test_a_student_made_worse_on_purpose_is_refused(step, state):
    # The average already agrees with the vote everywhere, so no student can agree more.
    draft, info = step(RIGHT)
    assert not info.gate.accepted
    assert torch.equal(draft.state.params, state(RIGHT).params)
    assert GateState.of(draft.memory) == GateState(refusals=1)


def test_a_student_that_diverges_is_refused_and_the_next_one_takes_smaller_steps(step, state):
    too_large = {"distill_lr": 1e30, "distill_lr_min": 1e30, "distill_weight_decay": 1.0}
    draft, info = step(WRONG, **too_large)
    assert (info.gate.student, info.gate.accepted) == (0.0, False)
    assert torch.equal(draft.state.params, state(WRONG).params)
    assert GateState.of(draft.memory) == GateState(refusals=1)
    with pytest.raises(AggregationError, match="diverged"):
        step(WRONG, **too_large, gate="off")


def test_a_student_that_diverges_is_refused_even_if_its_predictions_look_well(step, state, monkeypatch):
    # A weight of -inf for a class that the vote never names: the softmax of its logit is 0, a finite number.
    student = state([[4.0, 0.0], [-torch.inf, 0.0]])
    monkeypatch.setattr("fedbe.algorithms.server.distill_stage.distill", lambda *_, **__: student)
    draft, info = step(WRONG, points=POINTS[POINTS[:, 0] > 0.1])
    assert (info.gate.student, info.gate.accepted) == (0.0, False)
    assert torch.equal(draft.state.params, state(WRONG).params)


def test_without_a_gate_the_same_student_stays(step, state):
    draft, info = step(RIGHT, gate="off")
    assert info.gate is None
    assert not torch.equal(draft.state.params, state(RIGHT).params)
    assert draft.memory == {}


def test_a_refusal_makes_the_next_steps_smaller(step):
    memory = GateState(refusals=1).stored_in({})
    assert step(WRONG, memory=memory, gate_backoff=0.3)[1].gate.lr == pytest.approx(0.15)


def test_a_resting_server_neither_votes_nor_distils(step, state):
    draft, info = step(WRONG, memory=GateState(refusals=4, rest=2).stored_in({}))
    assert info.members == ()
    assert torch.equal(draft.state.params, state(WRONG).params)
    assert GateState.of(draft.memory) == GateState(refusals=4, rest=1)


@pytest.mark.parametrize("memory", [{}, GateState(refusals=4, rest=2).stored_in({})], ids=["refused", "resting"])
def test_an_average_that_stays_has_measured_batch_norm_statistics(memory):
    """Otherwise FedBE with a gate would end below FedAvg with measured statistics."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    inputs = TensorInputs(POINTS * torch.tensor([3.0, 5.0]) + 7.0)
    runner = ModelRunner(module)
    average = runner.read()  # statistics of a fresh layer: mean 0, variance 1
    context = Context(runner, 0, 1, inputs=inputs)
    round = Round([Update("0", average, 1.0, {})], average, context, StepInfo())
    stage = get_method("fedbe", "paper", members="A", gate="agreement").stages[-1]  # it agrees with itself: refused
    kept = stage(Draft(average, memory), round).state
    assert round.info.gate is None or not round.info.gate.accepted
    assert torch.equal(kept.params, average.params)
    measured = runner.layout.unpack(kept)
    torch.testing.assert_close(measured["0.running_mean"], torch.tensor([7.0, 7.0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(measured["0.running_var"], torch.tensor([9.0, 25.0]) / 2 * 40 / 39)


def test_labels_are_no_vote_so_nothing_is_judged(state, update):
    stage = get_method("fedbe", "paper", targets="labels", gate="agreement").stages[-1]
    labels = (POINTS[:, 0] < 0).long()
    context = Context(ModelRunner(nn.Linear(2, 2, bias=False)), 0, 1, inputs=TensorInputs(POINTS), labels=labels)
    round = Round([update(0, RIGHT)], state([0.0] * 4), context, StepInfo())
    stage(Draft(state(WRONG), {}), round)
    assert round.info.gate is None


def test_a_server_saves_and_restores_the_gate():
    module = nn.Linear(2, 2, bias=False)
    server = fedbe.FedBE(module, unlabeled=POINTS, gate="agreement", members="C", distill_epochs=1)
    start = {"weight": torch.tensor(RIGHT)}
    server.aggregate(start, [ClientUpdate(start, 1)])
    assert "gate" in str(server.info)
    saved = server.state_dict()
    assert saved["memory"]["gate_refusals"].tolist() == [1]
    restored = fedbe.FedBE(module, unlabeled=POINTS, gate="agreement", members="C", distill_epochs=1)
    restored.load_state_dict(saved)
    assert GateState.of(restored.memory) == GateState(refusals=1)
    with pytest.raises(StateError, match="gate_rest"):
        restored.load_state_dict(saved | {"memory": {"gate_rest": torch.zeros(2)}})
