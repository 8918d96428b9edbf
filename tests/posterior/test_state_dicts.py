"""Posteriors without a server: plain state_dicts in, plain state_dicts out."""

import math

import pytest
import torch
from torch import nn

from fedbe import ClientUpdate, Dirichlet, Gaussian, Layout, Moments, SettingError, StateError

# Two clients with 1 and 3 examples:
#   mean = (1·a + 3·b)/4 = [4 2 | 6];  variance = (1·(a − mean)² + 3·(b − mean)²)/4 = [3 0 | 3]
CLIENT_A = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0]), "steps": torch.tensor(5)}
CLIENT_B = {"weight": torch.tensor([[5.0, 2.0]]), "bias": torch.tensor([7.0]), "steps": torch.tensor(9)}


@pytest.fixture
def clients():
    return [ClientUpdate(CLIENT_A, num_examples=1, client_id="a"), ClientUpdate(CLIENT_B, num_examples=3)]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class TestGaussian:
    def test_mean_and_samples_by_hand(self, clients):
        posterior = Gaussian.fit(clients, scale=2.0)
        assert list(posterior.mean) == ["weight", "bias", "steps"]
        assert posterior.mean["weight"].tolist() == [[4, 2]]
        assert posterior.mean["bias"].tolist() == [6]
        noise = torch.randn(3, generator=seeded())
        (model,) = posterior.sample(1, seeded())
        expected = torch.tensor([4.0, 2.0, 6.0]) + 2 * math.sqrt(3) * torch.tensor([1.0, 0.0, 1.0]) * noise
        torch.testing.assert_close(model["weight"], expected[:2].reshape(1, 2))
        torch.testing.assert_close(model["bias"], expected[2:])

    def test_integers_stay_integers(self, clients):
        for model in Gaussian.fit(clients).sample(2, seeded()):
            assert model["steps"].dtype == torch.int64
            assert int(model["steps"]) == 9  # the largest, never a mean

    def test_each_sample_has_its_own_memory(self, clients):
        posterior = Gaussian.fit(clients, scale=0.0)
        first, second = posterior.sample(2, seeded())
        first["weight"].zero_()
        first["steps"].zero_()
        assert second["weight"].tolist() == posterior.mean["weight"].tolist() == [[4, 2]]
        assert int(second["steps"]) == int(posterior.mean["steps"]) == 9

    def test_the_clients_are_not_changed(self, clients):
        list(Gaussian.fit(clients).sample(2, seeded()))
        assert CLIENT_A["weight"].tolist() == [[1, 2]]
        assert CLIENT_B["weight"].tolist() == [[5, 2]]

    def test_half_precision_comes_back_as_half(self):
        states = [{"w": torch.tensor([value], dtype=torch.float16)} for value in (1.0, 2.0)]
        posterior = Gaussian.fit([ClientUpdate(state, 1) for state in states])
        assert posterior.mean["w"].dtype == torch.float16
        assert posterior.mean["w"].tolist() == [1.5]

    @pytest.mark.parametrize("given", [lambda module: module, Layout])
    def test_a_model_tells_buffers_and_tied_weights(self, given):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        module[2].weight = module[0].weight
        states = [{k: v.clone() for k, v in module.state_dict().items()} for _ in range(2)]
        for state, value in zip(states, (1.0, 3.0), strict=True):
            state["0.weight"] = state["2.weight"] = torch.full((2, 2), value)
            state["1.running_mean"] = torch.full((2,), value)
        posterior = Gaussian.fit([ClientUpdate(state, 1) for state in states], model=given(module))
        (model,) = posterior.sample(1, seeded())
        assert model["1.running_mean"].tolist() == [2, 2]  # the mean's: buffers are not sampled
        assert not (model["0.weight"] == 2).any()
        assert torch.equal(model["0.weight"], model["2.weight"])
        module.load_state_dict(model)

    def test_moments_of_packed_states_with_a_layout(self, clients):
        layout, moments = Layout(CLIENT_A), Moments(variance=True)
        for client in clients:
            moments.add(layout.pack(client.state), client.num_examples)
        assert Gaussian.from_moments(moments, layout=layout).mean["bias"].tolist() == [6]


def test_dirichlet_mean_and_samples_by_hand(clients):
    posterior = Dirichlet.fit(clients)
    assert posterior.mean["weight"].tolist() == [[4, 2]]
    for model in posterior.sample(5, seeded()):
        share = (float(model["weight"][0, 0]) - 1) / 4  # how much of client b is in it
        assert 0 <= share <= 1
        assert float(model["weight"][0, 1]) == pytest.approx(2)
        assert float(model["bias"][0]) == pytest.approx(3 + 4 * share, rel=1e-6)


@pytest.mark.parametrize("posterior", [Gaussian, Dirichlet])
class TestWrongUse:
    def test_no_updates(self, posterior):
        with pytest.raises(StateError, match="`updates` is empty"):
            posterior.fit([])

    @pytest.mark.parametrize("updates", [[{"w": torch.zeros(1)}], [ClientUpdate({"w": torch.zeros(1)}, 1), None]])
    def test_something_else_than_an_update(self, posterior, updates):
        with pytest.raises(StateError, match="must be a ClientUpdate"):
            posterior.fit(updates)

    def test_packed_states_have_no_names(self, posterior, update):
        fitted = posterior.fit([update(0, [1.0]), update(1, [2.0])])
        assert fitted.mean_state.params.tolist() == [1.5]
        with pytest.raises(StateError, match="names of the tensors"):
            _ = fitted.mean
        with pytest.raises(StateError, match="names of the tensors"):
            fitted.sample(1, seeded())

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"w": torch.zeros(2)}, "shape"),
            ({"v": torch.zeros(1)}, "lacks 'w'"),
            (None, "must be a mapping"),
        ],
    )
    def test_states_that_differ(self, posterior, state, message):
        with pytest.raises(StateError, match=f"client 7.*{message}"):
            posterior.fit([ClientUpdate({"w": torch.zeros(1)}, 1), ClientUpdate(state, 1, client_id=7)])

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (3, "must be a mapping"),
            ({}, "no parameters"),
            ({"w": [1.0]}, "not a tensor: 'w'"),
            ({"w": torch.zeros(1, dtype=torch.complex64)}, "complex 'w'"),
            ({"w": torch.zeros(1, device="meta")}, "meta device"),
        ],
    )
    def test_states_that_cannot_be_packed(self, posterior, state, message):
        with pytest.raises(StateError, match=message):
            posterior.fit([ClientUpdate(state, 1)])

    @pytest.mark.parametrize("num_examples", [0, -1, float("nan"), True, "many", 1e16])
    def test_number_of_examples(self, posterior, num_examples):
        with pytest.raises(StateError, match="`num_examples` must be"):
            posterior.fit([ClientUpdate({"w": torch.zeros(1)}, num_examples)])

    def test_a_packed_state_first_and_then_a_state_dict(self, posterior, state):
        with pytest.raises(StateError, match="must be a ModelState"):
            posterior.fit([ClientUpdate(state([1.0]), 1), ClientUpdate({"w": torch.zeros(1)}, 1)])


def test_settings_are_checked():
    with pytest.raises(SettingError, match="`scale`"):
        Gaussian.fit([ClientUpdate({"w": torch.zeros(1)}, 1)], scale=-1)
    with pytest.raises(SettingError, match="`alpha`"):
        Dirichlet.fit([ClientUpdate({"w": torch.zeros(1)}, 1)], alpha=0)
