"""The policy for BatchNorm: averaged, sampled or recalibrated; recomputed after SWA."""

import pytest
import torch
from torch import nn

from fedbe import ClientUpdate, FedBE, ModelState, OneEnsemble
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.server.context import Context, Round, StepInfo
from fedbe.core.compute import Plan
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import (
    batch_norm_layers,
    calibration_batches,
    clamp_variances,
    names_without_decay,
    negative_variance,
    recalibrate,
)
from fedbe.core.updates import Update
from fedbe.errors import SettingError


def _fresh(module: nn.Module, inputs: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cumulative mean over batches of the batch mean and the unbiased batch variance before a BatchNorm1d at 1."""
    module.eval()
    with torch.no_grad():
        parts = [module[0](inputs[index]) for index in calibration_batches(len(inputs), batch)]
    return torch.stack([p.mean(0) for p in parts]).mean(0), torch.stack([p.var(0) for p in parts]).mean(0)


def test_recalibration_is_the_mean_over_batches_of_plain_inputs(network, inputs_for):
    module = network("mlp-bn")
    runner = ModelRunner(module, Plan(batch_size=8))
    inputs = inputs_for("mlp-bn", 24)
    recalibrate(runner, TensorInputs(inputs, augment=lambda batch, _: batch + 100))
    named = runner.layout.unpack(runner.read())
    mean, variance = _fresh(module, inputs, 8)
    torch.testing.assert_close(named["1.running_mean"], mean)
    torch.testing.assert_close(named["1.running_var"], variance)
    assert int(named["1.num_batches_tracked"]) == 3
    assert runner.module[1].momentum == 0.1


def test_recalibration_is_not_random(network, inputs_for):
    """Dropout is off, as in predictions, and the caller's RNG is not used."""
    runner = ModelRunner(network("dropout-bn"), Plan(batch_size=8))
    inputs = TensorInputs(inputs_for("dropout-bn", 24))
    before = torch.get_rng_state()
    recalibrate(runner, inputs)
    once = runner.read()
    recalibrate(runner, inputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert once.digest() == runner.read().digest()
    mean, _ = _fresh(network("dropout-bn"), inputs.tensor, 8)
    torch.testing.assert_close(runner.layout.unpack(once)["2.running_mean"], mean)


def test_recalibration_leaves_parameters_and_other_layers_alone(network, inputs_for):
    for name in ("mlp", "conv-gn"):
        runner = ModelRunner(network(name))
        before = runner.read().digest()
        recalibrate(runner, TensorInputs(inputs_for(name)))
        assert runner.read().digest() == before
    runner = ModelRunner(network("mlp-bn"))
    before = runner.read()
    recalibrate(runner, TensorInputs(inputs_for("mlp-bn")))
    assert torch.equal(runner.read().params, before.params)


def test_momentum_is_restored_if_the_model_fails(network):
    runner = ModelRunner(network("mlp-bn"))
    with pytest.raises(RuntimeError):
        recalibrate(runner, TensorInputs(torch.zeros(4, 3)))
    assert runner.module[1].momentum == 0.1


def test_after_swa_the_statistics_are_those_of_the_student_on_plain_inputs(network, inputs_for, replies):
    module = network("mlp-bn")
    inputs = inputs_for("mlp-bn", 24)
    server = FedBE(
        module,
        unlabeled=inputs,
        augment=lambda batch, _: batch + 100,
        plan=Plan(batch_size=8),
        distill_epochs=2,
        gate="off",
    )
    state = server.aggregate(module.state_dict(), replies(module))
    student = network("mlp-bn")
    student.load_state_dict(state)
    mean, variance = _fresh(student, inputs, 8)
    torch.testing.assert_close(state["1.running_mean"], mean)
    torch.testing.assert_close(state["1.running_var"], variance)


@pytest.fixture
def teach(network, inputs_for, nearby):
    """The members of an ensemble with these settings, made from three clients."""

    def make(**settings):
        module = network("mlp-bn")
        runner = ModelRunner(module)
        previous = runner.layout.pack(module.state_dict())
        updates = [Update(i, runner.layout.pack(s), 1.0, {}) for i, s in enumerate(nearby(module))]
        context = Context(runner, 0, 1, TensorInputs(inputs_for("mlp-bn")))
        round = Round(updates, previous, context, StepInfo())
        return runner, updates, list(round.members(EnsembleSettings(members="S", **settings), previous))

    return make


def test_averaged(teach):
    _, updates, members = teach(num_samples=3, statistics="averaged")
    mean = torch.stack([u.state.buffers for u in updates]).mean(0)
    for member in members:
        torch.testing.assert_close(member.state.buffers, mean)


def test_sampled(teach):
    runner, _, members = teach(num_samples=3, statistics="sampled")
    assert len({m.state.digest() for m in members}) == 3
    assert not torch.equal(members[0].state.buffers, members[1].state.buffers)
    assert all(negative_variance(m.state, runner.layout) is None for m in members)


def test_recalibrated(teach, network, inputs_for):
    """The default: recomputed on the server's inputs when the member is made, not on later inputs."""
    runner, _, members = teach(num_samples=2)
    _, _, plain = teach(num_samples=2, statistics="averaged")
    for member, sample in zip(members, plain, strict=True):
        assert torch.equal(member.state.params, sample.state.params)
        module = network("mlp-bn")
        module.load_state_dict(runner.layout.unpack(member.state))
        mean, variance = _fresh(module, inputs_for("mlp-bn"), runner.plan.batch_size)
        named = runner.layout.unpack(member.state)
        torch.testing.assert_close(named["1.running_mean"], mean)
        torch.testing.assert_close(named["1.running_var"], variance)


def test_predictions_of_kept_members_do_not_depend_on_other_inputs(network, inputs_for, replies):
    module = network("mlp-bn")
    server = OneEnsemble(module, unlabeled=inputs_for("mlp-bn"), members="SC", statistics="recalibrated")
    state = server.aggregate(module.state_dict(), replies(module))
    asked = inputs_for("mlp-bn", 9, seed=1)
    together = server.predict_proba(state, asked)
    torch.testing.assert_close(server.predict_proba(state, asked[:1]), together[:1])
    with pytest.raises(SettingError, match="give `unlabeled`"):
        OneEnsemble(module, members="SC", statistics="recalibrated")


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(24, 8, [8, 8, 8]), (252, 250, [126, 126]), (5, 2, [3, 2]), (3, 2, [3]), (3, 1, [3]), (4, 1, [2, 2]), (1, 5, [1])],
)
def test_calibration_batches_are_even_and_cover_all(count, size, sizes):
    parts = calibration_batches(count, size)
    assert [len(p) for p in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == list(range(count))


def test_inputs_sorted_by_class_give_the_full_variance():
    """Within a class the variance is 1; between the five classes it is 50."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 1, generator=draw) + torch.tensor([-10.0, -5, 0, 5, 10]).repeat_interleave(200)[:, None]
    runner = ModelRunner(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)), Plan(batch_size=200))
    recalibrate(runner, TensorInputs(inputs))
    assert float(runner.module[0].running_var) == pytest.approx(float(inputs.var()), rel=0.02)
    assert float(runner.module[0].running_mean) == pytest.approx(float(inputs.mean()), abs=1e-5)


def test_recalibration_needs_two_inputs(network, inputs_for):
    with pytest.raises(SettingError, match="BatchNorm cannot learn from a single input"):
        recalibrate(ModelRunner(network("mlp-bn")), TensorInputs(inputs_for("mlp-bn", 1)))


@pytest.mark.parametrize("statistics", ["averaged", "sampled"])
@pytest.mark.parametrize("posterior", ["gaussian", "gaussian-released"])
def test_sampled_variances_are_never_negative(teach, posterior, statistics):
    runner, _, members = teach(num_samples=20, statistics=statistics, posterior=posterior, scale=300.0)
    slot = next(s for s in runner.layout.buffers if s.name.endswith("running_var"))
    lowest = min(float(slot.view(m.state.buffers).min()) for m in members)
    assert lowest == 0 if statistics == "sampled" else lowest >= 0


def test_a_negative_variance_of_the_released_mean_is_clamped(network, inputs_for, replies):
    """A short change down and a long one sideways: last + mean length × mean direction is far below zero."""
    module = network("mlp-bn")
    one, two, _ = replies(module)
    one.state["1.running_var"] = torch.tensor([0.5] + [1.0] * 7)
    two.state["1.running_var"] = torch.tensor([1.0, 101.0] + [1.0] * 6)
    server = FedBE(module, unlabeled=inputs_for("mlp-bn"), variant="released", statistics="averaged", distill_epochs=1)
    server.aggregate(module.state_dict(), [one, two])
    assert server.info.step.left_out == ()


def test_only_running_variances_are_clamped():
    module = nn.BatchNorm1d(2)
    module.register_buffer("other_var", torch.zeros(1))
    runner = ModelRunner(module)
    assert [s.name for s in runner.layout.buffers] == ["running_mean", "running_var", "other_var"]
    given = ModelState(torch.zeros(4), torch.tensor([-1.0, 2, -3, 4, -5]), runner.read().counters)
    assert negative_variance(given, runner.layout) == "running_var"
    assert clamp_variances(given, runner.layout).buffers.tolist() == [-1, 2, 0, 4, -5]
    assert given.buffers.tolist() == [-1, 2, -3, 4, -5]


def test_weight_decay_skips_normalization_layers():
    module = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.Sequential(nn.LayerNorm(2)),
        nn.InstanceNorm2d(2, affine=True), nn.Linear(2, 2),
    )  # fmt: skip
    layers = ("1", "2", "3.0", "4")
    assert names_without_decay(module) == {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}
    assert names_without_decay(nn.BatchNorm1d(2)) == {"weight", "bias"}


def test_layers_without_running_statistics_are_not_recalibrated():
    assert batch_norm_layers(nn.BatchNorm1d(2, track_running_stats=False)) == []
    assert len(batch_norm_layers(nn.Sequential(nn.BatchNorm1d(2), nn.GroupNorm(1, 2)))) == 1


def test_the_mean_averages_statistics_and_keeps_counters_whole(network, replies):
    from fedbe import FedAvg

    module = network("mlp-bn")
    given = replies(module)
    state = FedAvg(module).aggregate(module.state_dict(), given)
    expected = sum(u.num_examples * u.state["1.running_var"] for u in given) / 70
    torch.testing.assert_close(state["1.running_var"], expected)
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert int(state["1.num_batches_tracked"]) == 2


def test_a_layer_used_twice_has_one_set_of_statistics(inputs_for):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            self.norm = nn.BatchNorm1d(4)
            self.again = self.norm

        def forward(self, x):
            return self.head(self.again(self.norm(self.first(x))))

    module = Twice()
    server = FedBE(module, unlabeled=inputs_for("mlp"), distill_epochs=2)
    state = server.aggregate(module.state_dict(), [ClientUpdate(module.state_dict(), 1)])
    assert list(state) == list(module.state_dict())
    assert torch.equal(state["norm.running_mean"], state["again.running_mean"])
    module.load_state_dict(state)
