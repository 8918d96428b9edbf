"""FedAdam, FedYogi, FedDyn and measured BatchNorm statistics, with numbers worked out by hand."""

import pytest
import torch
from torch import nn

import fedbe
from fedbe import ClientUpdate
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.server import Adaptive, DynamicUpdate, Mean
from fedbe.algorithms.server.context import Context, Draft, Round, StepInfo
from fedbe.core.model_runner import ModelRunner


@pytest.fixture
def round_of(state):
    """A round of a model with two numbers."""

    def make(updates=(), previous=(0.0, 0.0), **context):
        return Round(
            updates, state(previous), Context(ModelRunner(nn.Linear(2, 1, bias=False)), 0, 1, **context), StepInfo()
        )

    return make


def test_a_uniform_mean_ignores_the_examples(round_of, update, state):
    round = round_of([update(0, [1.0, 2.0], 1), update(1, [5.0, 2.0], 3)])
    means = {w: Mean(mean_weights=w)(Draft(state([0.0, 0.0]), {}), round) for w in ("examples", "uniform")}
    assert means["examples"].state.params.tolist() == [4.0, 2.0]
    assert means["uniform"].state.params.tolist() == [3.0, 2.0]


class TestAdaptive:
    @pytest.mark.parametrize(
        ("form", "second", "third"),
        [
            # β₁ = ½, β₂ = ¾, τ = 1, η = 3. Round 1 from 0: Δ = (2, 0), m = (1, 0), v from τ² = 1.
            # adam: v = ¾ + ¼·(4, 0) = (1.75, .75)
            # Round 2 with Δ = (0, 0): m = (½, 0), v = ¾ (1.75, .75)
            ("adam", (1.75, 0.75), (1.3125, 0.5625)),
            # yogi: v = 1 − ¼ (4, 0) sign(1 − (4, 0)) = (2, 1), for sign(−3) = −1 and sign(1)·0 = 0.
            # Round 2 with Δ = 0: v stays.
            ("yogi", (2.0, 1.0), (2.0, 1.0)),
        ],
    )
    def test_two_rounds_by_hand(self, round_of, state, form, second, third):
        stage = Adaptive(adaptive_form=form, eta=3.0, beta1=0.5, beta2=0.75, tau=1.0)
        first = stage(Draft(state([2.0, 0.0]), {}), round_of())
        assert first.memory["first moment"].tolist() == [1.0, 0.0]
        assert first.memory["second moment"].tolist() == list(second)
        torch.testing.assert_close(first.state.params, torch.tensor([3.0 / (second[0] ** 0.5 + 1), 0.0]))
        again = stage(Draft(first.state, first.memory), round_of(previous=first.state.params))
        assert again.memory["first moment"].tolist() == [0.5, 0.0]
        assert again.memory["second moment"].tolist() == list(third)
        step = 3.0 * 0.5 / (third[0] ** 0.5 + 1)
        torch.testing.assert_close(again.state.params, first.state.params + torch.tensor([step, 0.0]))
        assert first.memory["first moment"].tolist() == [1.0, 0.0]  # returned, not changed

    def test_yogi_shrinks_a_second_moment_that_is_too_large(self, round_of, state):
        # v = 9 − ¼·4·sign(9 − 4) = 8, where Adam's would be ¾·9 + ¼·4 = 7.75
        memory = {"first moment": torch.zeros(2), "second moment": torch.tensor([9.0, 9.0])}
        draft = Adaptive(adaptive_form="yogi", beta2=0.75)(Draft(state([2.0, 2.0]), memory), round_of())
        assert draft.memory["second moment"].tolist() == [8.0, 8.0]

    def test_buffers_are_those_of_the_average(self, round_of, state):
        assert Adaptive()(Draft(state([2.0, 0.0], [5.0]), {}), round_of()).state.buffers.tolist() == [5.0]

    def test_the_rows(self):
        assert get_method("fedadam").stages == (Mean(), Adaptive())
        assert get_method("fedyogi").stages == (Mean(), Adaptive(adaptive_form="yogi"))


class TestDynamic:
    def test_two_rounds_by_hand(self, round_of, update, state):
        # α = ½, N = 4. Round 1 from 0, clients (1, 2) and (3, 2): Σ (w_i − 0) = (4, 4), h = −½/4·(4, 4) = (−½, −½).
        # mean (2, 2), w = (2, 2) − h/α = (3, 3)
        stage = DynamicUpdate(dyn_alpha=0.5)
        updates = [update(0, [1.0, 2.0], 1), update(1, [3.0, 2.0], 3)]
        first = stage(Draft(state([2.0, 2.0]), {}), round_of(updates, total_clients=4))
        assert first.memory["drift"].tolist() == [-0.5, -0.5]
        assert first.state.params.tolist() == [3.0, 3.0]
        # Round 2 from (3, 3), one client (5, 3): h = (−½, −½) − ⅛ (2, 0) = (−¾, −½), w = (5, 3) + (1½, 1)
        again = stage(
            Draft(state([5.0, 3.0]), first.memory), round_of([update(2, [5.0, 3.0])], (3.0, 3.0), total_clients=4)
        )
        assert again.memory["drift"].tolist() == [-0.75, -0.5]
        assert again.state.params.tolist() == [6.5, 4.0]
        assert first.memory["drift"].tolist() == [-0.5, -0.5]  # returned, not changed

    def test_its_mean_is_uniform(self):
        module = nn.Linear(1, 1, bias=False)
        server = fedbe.server("feddyn", module, total_clients=2)
        gradient = {"gradient": torch.zeros(1)}
        updates = [
            ClientUpdate({"weight": torch.tensor([[w]])}, n, i, gradient)
            for i, (w, n) in enumerate(((1.0, 1), (3.0, 9)))
        ]
        state = server.aggregate({"weight": torch.tensor([[0.0]])}, updates)
        assert state["weight"].item() == pytest.approx(4.0)  # 2 − h/α with h = −α·(1 + 3)/2

    def test_at_its_fixed_point_nothing_moves(self):
        """Two clients with losses ½(w − 1)² and ½(w − 3)²: the mean of the optima is the optimum of the sum."""
        optima, alpha = (1.0, 3.0), 0.5
        server = fedbe.server("feddyn", nn.Linear(1, 1, bias=False), dyn_alpha=alpha)
        state, gradients = {"weight": torch.zeros(1, 1)}, [0.0, 0.0]
        for _ in range(60):
            center, updates = state["weight"].item(), []
            for i, optimum in enumerate(optima):
                # the exact local minimum: (w − optimum) − g + α (w − center) = 0
                w = (optimum + gradients[i] + alpha * center) / (1 + alpha)
                change = -alpha * (w - center)
                gradients[i] += change
                extras = {"gradient": torch.tensor([change])}
                updates.append(ClientUpdate({"weight": torch.tensor([[w]])}, 1 + i, i, extras))
            state = server.aggregate(state, updates)
        assert state["weight"].item() == pytest.approx(2.0, abs=1e-4)
        assert gradients == pytest.approx([1.0, -1.0], abs=1e-3)  # each client's own gradient at w = 2


class TestRecalibrate:
    def test_statistics_by_hand_and_weights_of_the_average(self):
        module = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
        start = module.state_dict()
        clients = [{k: v + (0.5 + i if v.is_floating_point() else 0) for k, v in start.items()} for i in range(2)]
        updates = [ClientUpdate(s, 1, i) for i, s in enumerate(clients)]
        inputs = torch.tensor([[1.0], [3.0]])
        state = fedbe.server("fedavg-bn", module, unlabeled=inputs).aggregate(start, updates)
        average = fedbe.FedAvg(module).aggregate(start, updates)
        assert state["0.running_mean"].tolist() == [2.0]
        assert state["0.running_var"].tolist() == [2.0]  # unbiased: ((1 − 2)² + (3 − 2)²)/1
        for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
            assert torch.equal(state[name], average[name])

    def test_without_batch_norm_it_is_fedavg_and_needs_no_inputs(self, network, replies, same):
        module = network("conv-gn")
        states = [
            fedbe.server(n, module).aggregate(module.state_dict(), replies(module)) for n in ("fedavg-bn", "fedavg")
        ]
        assert same(*states)

    def test_with_batch_norm_it_needs_inputs(self, network):
        with pytest.raises(fedbe.SettingError, match="give `unlabeled`"):
            fedbe.server("fedavg-bn", network("mlp-bn"))


def test_the_length_of_every_memory_is_checked(network, replies):
    module = network("mlp")
    server = fedbe.server("fedadam", module)
    server.aggregate(module.state_dict(), replies(module))
    saved = server.state_dict()
    assert set(saved["memory"]) == {"first moment", "second moment"}
    saved["memory"]["second moment"] = saved["memory"]["second moment"][:-1]
    with pytest.raises(fedbe.StateError, match="second moment' must have shape"):
        server.load_state_dict(saved)
