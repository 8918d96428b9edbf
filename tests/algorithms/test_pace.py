"""The student's step sizes follow those of the clients."""

import pytest
import torch
from torch import nn

from fedbe import ClientUpdate, FedBE
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.pace import PACE_MEMORY, SMALLEST, follow, median_move
from fedbe.core.layout import Layout
from fedbe.core.state import ModelState
from fedbe.core.updates import Update


def _state(*params):
    return ModelState(torch.tensor(params), torch.empty(0), {})


def test_the_median_of_the_distances():
    start = _state(1.0, 1.0)
    ends = [_state(4.0, 5.0), _state(1.0, 1.0), _state(1.0, 1e9)]  # distances 5, 0 and a hostile one
    assert median_move([Update(str(i), end, 1.0, {}) for i, end in enumerate(ends)], start).item() == 5.0


def test_a_model_in_fragments_has_the_same_distance():
    layout = Layout(nn.Linear(300, 500))
    named = {"weight": torch.randn(500, 300), "bias": torch.randn(500)}
    whole, fragments = layout.pack(named), layout.gather(named)
    start = layout.pack({name: torch.zeros_like(part) for name, part in named.items()})
    distances = [median_move([Update("0", state, 1.0, {})], start) for state in (whole, fragments)]
    assert torch.equal(*distances)
    assert distances[0].item() == pytest.approx(whole.params.double().norm().item())


def _factors(*moves):
    memory, factors = {}, []
    for move in moves:
        factor, memory = follow(memory, torch.tensor(move, dtype=torch.float64))
        factors.append(factor)
    return factors, memory[PACE_MEMORY].tolist()


def test_steps_shrink_with_the_square_and_grow_back_to_the_full_size():
    assert _factors(1.0, 2.0, 4.0, 1.0, 4.0, 0.0) == ([1.0, 1.0, 1.0, 1 / 16, 1.0, SMALLEST], [4.0])


def test_the_first_round_takes_full_steps_and_does_not_count():
    """Its clients start from random weights and move further than they ever do again."""
    assert _factors(8.0, 4.0, 2.0) == ([1.0, 1.0, 1 / 4], [4.0])


def test_clients_that_never_move_leave_the_steps_alone():
    assert _factors(0.0, 0.0, 0.0) == ([1.0, 1.0, 1.0], [0.0])


@pytest.fixture
def distances():
    """How far the student goes from the average in the last two of three rounds: the clients move less in the last."""
    torch.manual_seed(0)
    model, unlabeled = nn.Linear(4, 3), torch.randn(60, 4)
    directions = [{k: torch.randn_like(v) for k, v in model.state_dict().items()} for _ in range(3)]

    def run(**settings):
        server = FedBE(model, unlabeled=unlabeled, gate="off", distill_epochs=2, **settings)
        state, gone = model.state_dict(), []
        for size in (1.0, 1.0, 0.1):
            clients = [{k: v + size * d[k] for k, v in state.items()} for d in directions]
            average = torch.stack([client["weight"] for client in clients]).mean(0)
            state = server.aggregate(state, [ClientUpdate(client, 10) for client in clients])
            gone.append(float((state["weight"] - average).norm()))
        return gone[1:]

    return run


def test_a_server_takes_small_steps_when_the_clients_do(distances):
    first, second = distances()  # the default
    first_fixed, second_fixed = distances(distill_follow=False)
    assert first == pytest.approx(first_fixed)
    assert second < 0.1 * second_fixed


def test_the_largest_move_is_in_the_servers_memory():
    layout = Layout(nn.Linear(2, 2))
    assert get_method("fedbe").stages[-1].memory_sizes(layout)[PACE_MEMORY] == 1
    assert PACE_MEMORY not in get_method("fedbe", "paper").stages[-1].memory_sizes(layout)
