import pytest
import torch
from torch import nn

from fedbe import ControlVariate, Dynamic, Layout, Prox
from fedbe.algorithms.client.rules import LocalRun
from fedbe.algorithms.client.training import Odometer
from fedbe.errors import SettingError


@pytest.fixture
def run():
    """A client at w = [3 4; 0 0], bias (0 2); the global model is zero; the last gradient was one everywhere."""

    def make(**vectors):
        module = nn.Linear(2, 2)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
            module.bias.copy_(torch.tensor([0.0, 2.0]))
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        layout = Layout(module)
        return LocalRun(layout, dict(module.named_parameters()), torch.zeros(6), **vectors)

    return make


def _gradient(run: LocalRun) -> list[float]:
    return torch.cat([p.grad.reshape(-1) for p in run.parameters.values()]).tolist()


class TestProx:
    def test_squared(self, run):
        # 1 + 0.5 (w − w̄)
        one = run()
        Prox(proximal_mu=0.5).start(one).correct()
        assert _gradient(one) == [2.5, 3.0, 1.0, 1.0, 1.0, 2.0]

    def test_unsquared_pulls_each_weight_with_one_force_and_leaves_biases(self, run):
        # 1 + (0.5/2) (w − w̄)/‖w − w̄‖ with ‖w − w̄‖ = 5: 1 + 0.25·(.6 .8 0 0)
        one = run()
        Prox(proximal_mu=0.5, prox_form="unsquared").start(one).correct()
        assert _gradient(one) == pytest.approx([1.15, 1.2, 1.0, 1.0, 1.0, 1.0])

    def test_unsquared_leaves_a_bias_alone_whatever_its_module_is_called(self):
        module = nn.ModuleDict({"weightnet": nn.Linear(2, 2)})
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1.0)
                parameter.grad = torch.zeros_like(parameter)
        named = dict(module.named_parameters())
        here = LocalRun(Layout(module), named, torch.zeros(6))
        Prox(proximal_mu=1.0, prox_form="unsquared").start(here).correct()
        # the weight: ½ (w − w̄)/‖w − w̄‖ with ‖(1 1 1 1)‖ = 2
        assert named["weightnet.weight"].grad.flatten().tolist() == [0.25] * 4
        assert named["weightnet.bias"].grad.tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("form", ["squared", "unsquared"])
    def test_no_pull_at_the_center_and_none_without_mu(self, run, form):
        centered, free = run(), run()
        with torch.no_grad():
            for p in centered.parameters.values():
                p.zero_()
        Prox(proximal_mu=0.5, prox_form=form).start(centered).correct()
        Prox(proximal_mu=0.0, prox_form=form).start(free).correct()
        assert _gradient(centered) == _gradient(free) == [1.0] * 6

    def test_a_parameter_without_gradient_is_pulled_too(self, run):
        one = run()
        one.parameters["bias"].grad = None
        Prox(proximal_mu=0.5).start(one).correct()
        assert one.parameters["bias"].grad.tolist() == [0.0, 1.0]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"proximal_mu": -1}, "`proximal_mu` must be >= 0, got -1"),
            ({"proximal_mu": float("nan")}, "`proximal_mu` must be >= 0"),
            ({"prox_form": "square"}, "did you mean 'squared'"),
        ],
    )
    def test_settings(self, settings, message):
        with pytest.raises(SettingError, match=message):
            Prox(**settings)


class TestControlVariate:
    C, OWN = torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.tensor([0.5, 0.5, 0, 0, 5, 7])

    def test_every_gradient_gains_c_minus_own(self, run):
        one = run(broadcast={"control": self.C}, memory={"control": self.OWN})
        ControlVariate().start(one).correct()
        assert _gradient(one) == [1.5, 2.5, 4, 5, 1, 0]

    def test_without_memory_or_broadcast_nothing_is_corrected(self, run):
        one = run()
        ControlVariate().start(one).correct()
        assert _gradient(one) == [1.0] * 6

    def test_option_two_by_hand(self, run):
        # K = 4 steps of η = 0.1: K η = 0.4. c_i⁺ = c_i − c + (w̄ − w_i)/0.4 with w̄ = 0, w_i = −0.4 everywhere: + 1
        active = ControlVariate().start(run(broadcast={"control": self.C}, memory={"control": self.OWN}))
        outcome = active.finish(torch.full((6,), -0.4), 0.4)
        expected = self.OWN - self.C + 1
        torch.testing.assert_close(outcome.memory["control"], expected)
        torch.testing.assert_close(outcome.extras["control"], expected - self.OWN)

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("steps", [1, 2, 7])
    def test_a_constant_gradient_is_recovered_exactly(self, run, momentum, steps):
        """Whatever c and c_i are, K steps along a constant gradient g must leave c_i⁺ = g: our choice for momentum."""
        gradient = torch.tensor([1.0, -2, 0.5, 3, 0, 1], dtype=torch.float64)
        vectors = {"broadcast": {"control": self.C.double()}, "memory": {"control": self.OWN.double()}}
        weights, velocity = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        odometer = Odometer(momentum)
        for _ in range(steps):
            odometer.step(0.1)
            velocity = momentum * velocity + (gradient + vectors["broadcast"]["control"] - vectors["memory"]["control"])
            weights = weights - 0.1 * velocity
        outcome = ControlVariate().start(run(**vectors)).finish(weights, odometer.distance)
        torch.testing.assert_close(outcome.memory["control"], gradient, rtol=1e-12, atol=1e-12)

    def test_with_momentum_the_published_formula_would_be_far_off(self):
        # 20 steps with β = 0.9: Σ (1 − .9^k)/.1 = (20 − .9 (1 − .9^20)/.1)/.1 = 120.94…
        odometer = Odometer(momentum=0.9)
        for _ in range(20):
            odometer.step(1.0)
        assert odometer.distance == pytest.approx((20 - 9 * (1 - 0.9**20)) / 0.1)
        assert odometer.distance > 6 * 20

    def test_a_client_that_did_not_train_changes_nothing(self, run):
        outcome = ControlVariate().start(run(memory={"control": self.OWN})).finish(torch.zeros(6), 0)
        assert torch.equal(outcome.memory["control"], self.OWN)
        assert not outcome.extras["control"].any()


class TestDynamic:
    OWN = torch.tensor([0.5, 0.5, 0, 0, 5, 7])

    def test_every_gradient_gains_the_pull_and_loses_the_memory(self, run):
        # 1 + 0.5 (w − w̄) − g_i
        one = run(memory={"gradient": self.OWN})
        Dynamic(dyn_alpha=0.5).start(one).correct()
        assert _gradient(one) == [2.0, 2.5, 1.0, 1.0, -4.0, -5.0]

    def test_the_memory_by_hand(self, run):
        # g_i⁺ = g_i − 0.5 (w_i − 0) with w_i = 2 everywhere
        outcome = Dynamic(dyn_alpha=0.5).start(run(memory={"gradient": self.OWN})).finish(torch.full((6,), 2.0), 3)
        assert outcome.extras["gradient"].tolist() == [-1.0] * 6
        assert outcome.memory["gradient"].tolist() == [-0.5, -0.5, -1, -1, 4, 6]

    def test_without_memory_it_starts_from_zero(self, run):
        outcome = Dynamic(dyn_alpha=0.5).start(run()).finish(torch.zeros(6), 0)
        assert not outcome.memory["gradient"].any()
