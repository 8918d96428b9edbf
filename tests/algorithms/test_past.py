"""Averages of earlier rounds as members of the vote."""

import pytest
import torch
from torch import nn

import fedbe
from fedbe import ClientUpdate
from fedbe.algorithms.past import past_sizes, recall, remember
from fedbe.core.layout import Layout
from fedbe.errors import RecipeError
from fedbe.experiment.recipe_files import load_recipe

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
QUICK = {"distill_epochs": 1, "distill_batch_size": 8, "distill_lr": 0.1}


def test_the_memory_by_hand(state):
    memory = {"other": torch.ones(1)}
    for number in range(1, 5):  # averages 1, 2, 3, 4, with two to remember
        memory = remember(2, memory, state([float(number)], [10.0 * number]))
    assert {name: vector.tolist() for name, vector in memory.items()} == {
        "other": [1], "past 0 params": [4], "past 0 buffers": [40], "past 1 params": [3], "past 1 buffers": [30],
        "past 2 params": [2], "past 2 buffers": [20],
    }  # fmt: skip
    past = recall(2, memory, state([4.0], [40.0]))
    assert [(s.params.tolist(), s.buffers.tolist()) for s in past] == [([3], [30]), ([2], [20])]
    assert recall(2, {}, state([4.0])) == []
    layout = Layout(nn.BatchNorm1d(3))
    assert past_sizes(1, layout) == {f"past {i} {n}": 6 for i in (0, 1) for n in ("params", "buffers")}


@pytest.fixture
def play():
    """play(server, rounds): names of the members and the global model of each round."""

    def run(server, rounds, start):
        names, states = [], [start]
        for number in range(1, rounds + 1):
            moved = [
                {k: v + 0.1 * number * (i + 1) if v.is_floating_point() else v for k, v in start.items()}
                for i in range(2)
            ]
            states.append(server.aggregate(states[-1], [ClientUpdate(s, 1 + i, i) for i, s in enumerate(moved)]))
            names.append([m.name for m in server.info.step.members])
        return names, states

    return run


def test_who_votes_in_which_round(network, play):
    module = network("mlp-bn")
    server = fedbe.server("past-averages", module, unlabeled=INPUTS, num_past=2, **QUICK)
    names, _ = play(server, 4, module.state_dict())
    assert names == [["average"], ["average", "past 1"], *[["average", "past 1", "past 2"]] * 2]


def test_the_kept_models_are_the_averages_and_not_the_students(network, play):
    module = network("mlp-bn")
    server = fedbe.server("past-averages", module, unlabeled=INPUTS, num_past=1, **QUICK)
    _, states = play(server, 2, module.state_dict())
    layout = server.runner.layout
    expected = layout.pack(play(fedbe.FedAvg(module), 2, module.state_dict())[1][-1])  # clients ignore the student here
    assert torch.equal(server.memory["past 0 params"], expected.params)
    assert torch.equal(server.memory["past 0 buffers"], expected.buffers)
    assert not torch.equal(layout.pack(states[-1]).params, expected.params)


def test_past_members_change_the_student(network, play):
    module = network("mlp-bn")
    states = [
        play(fedbe.FedBE(module, unlabeled=INPUTS, members=members, gate="off", **QUICK), 2, module.state_dict())[1]
        for members in ("AC", "APC")
    ]
    assert all(torch.equal(states[0][1][k], states[1][1][k]) for k in states[0][1])  # round 1: nothing is past
    assert any(not torch.equal(states[0][2][k], states[1][2][k]) for k in states[0][2])


def test_a_server_resumes_with_its_past(network, play, same):
    module = network("mlp-bn")
    make = lambda: fedbe.server("past-averages", module, unlabeled=INPUTS, **QUICK)  # noqa: E731
    straight, resumed = make(), make()
    _, states = play(straight, 2, module.state_dict())
    resumed.load_state_dict(straight.state_dict())
    updates = [ClientUpdate({k: v * 1.1 if v.is_floating_point() else v for k, v in states[-1].items()}, 1, 0)]
    assert same(straight.aggregate(states[-1], updates), resumed.aggregate(states[-1], updates))
    assert [m.name for m in resumed.info.step.members] == ["average", "past 1", "past 2"]


def test_a_measured_ensemble_has_no_past():
    with pytest.raises(RecipeError, match=r"evaluation\.ensemble must not include P"):
        load_recipe("digits", ["evaluation.ensemble=AP"])
