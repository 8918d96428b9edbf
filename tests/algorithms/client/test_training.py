import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedbe import ClientUpdate, ControlVariate, Plan, Prox, Scaffold
from fedbe.algorithms.client import LocalSettings, train
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.optim import SGD
from fedbe.core.random import generator
from fedbe.errors import SettingError

SETTINGS = LocalSettings(epochs=2, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.fixture
def job(network, inputs_for):
    """A runner, its start, inputs and labels for one small network in float64: 16 examples make batches of 5 5 6."""

    def make(name: str, count: int = 16, plan: Plan | None = None):
        module = network(name).double()
        inputs = inputs_for(name, count).double()
        labels = torch.arange(count) % 3
        runner = ModelRunner(module, plan)
        return runner, runner.layout.pack(module.state_dict()), TensorInputs(inputs), labels

    return make


def _by_hand(module, inputs, labels, settings, draw, penalty=None):
    """torch's own optimizer and autograd on whole losses: penalty(module) is added to the loss, not to gradients."""
    module = copy.deepcopy(module).train()
    normal = [p for n, p in module.named_parameters() if not _is_norm(module, n)]
    spared = [p for n, p in module.named_parameters() if _is_norm(module, n)]
    groups = [{"params": normal, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD([g for g in groups if g["params"]], lr=settings.lr, momentum=settings.momentum)
    torch.randint(0, 2**62, (1,), generator=draw)  # the seed of the global RNG
    for _ in range(settings.epochs):
        for index in torch.randperm(16, generator=draw).tensor_split([5, 10]):
            loss = functional.cross_entropy(module(inputs[index]), labels[index])
            loss = loss + (penalty(module) if penalty else 0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return module


def _is_norm(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), nn.BatchNorm1d | nn.GroupNorm)


def _away(module, start, *, only=""):
    return [p - start[n] for n, p in module.named_parameters() if only in n]


C, OWN = 0.05, -0.02  # the control variates of server and client, everywhere


@pytest.mark.parametrize("name", ["mlp-bn", "conv-gn"])
@pytest.mark.parametrize(
    ("rules", "penalty"),
    [
        ((), None),
        ((Prox(proximal_mu=0.3),), lambda m, s: 0.15 * sum((a**2).sum() for a in _away(m, s))),
        (
            (Prox(proximal_mu=0.3, prox_form="unsquared"),),
            lambda m, s: 0.15 * sum(a.norm() for a in _away(m, s, only="weight")),
        ),
        ((ControlVariate(),), lambda m, _: (C - OWN) * sum(p.sum() for p in m.parameters())),
        (
            (Prox(proximal_mu=0.3), ControlVariate()),
            lambda m, s: (
                0.15 * sum((a**2).sum() for a in _away(m, s)) + (C - OWN) * sum(p.sum() for p in m.parameters())
            ),
        ),
    ],
    ids=["fedavg", "fedprox", "fedprox-released", "scaffold", "both"],
)
def test_the_loop_is_sgd_on_the_whole_loss(job, name, rules, penalty):
    runner, start, inputs, labels = job(name)
    module = copy.deepcopy(runner.module)
    module.load_state_dict(runner.layout.unpack(start))
    center = {n: p.detach().clone() for n, p in module.named_parameters()}
    full = None if penalty is None else lambda m: penalty(m, center)
    reference = _by_hand(module, inputs.tensor, labels, SETTINGS, generator(4), full)
    vectors = {
        "broadcast": {"control": torch.full_like(start.params, C)},
        "memory": {"control": torch.full_like(start.params, OWN)},
    }
    got = train(runner, start, inputs, labels, SETTINGS, generator(4), rules=rules, **vectors)
    expected = runner.layout.pack(reference.state_dict())
    torch.testing.assert_close(got.state.params, expected.params, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.state.buffers, expected.buffers, rtol=1e-9, atol=1e-9)
    assert got.steps == 6


def test_the_rules_differ_from_plain_training(job):
    """So that the test above cannot pass with rules that do nothing."""
    runner, start, inputs, labels = job("mlp")
    ends = [
        train(runner, start, inputs, labels, SETTINGS, generator(4), rules=rules).state.params
        for rules in ((), (Prox(proximal_mu=0.3),), (Prox(proximal_mu=0.3, prox_form="unsquared"),))
    ]
    assert not torch.allclose(ends[0], ends[1], atol=1e-6)
    assert not torch.allclose(ends[0], ends[2], atol=1e-6)
    assert not torch.allclose(ends[1], ends[2], atol=1e-6)


@pytest.mark.parametrize(
    "rule", [Prox(proximal_mu=0.0), Prox(proximal_mu=0.0, prox_form="unsquared"), ControlVariate()]
)
def test_without_effect_a_rule_is_fedavg_to_the_bit(job, rule):
    runner, start, inputs, labels = job("mlp-bn")
    plain = train(runner, start, inputs, labels, SETTINGS, generator(4))
    ruled = train(runner, start, inputs, labels, SETTINGS, generator(4), rules=(rule,))
    assert plain.state.digest() == ruled.state.digest()
    assert plain.loss == ruled.loss


class _PartlyUsed(nn.Module):
    """`late` is reached only by batches whose first feature has a positive sum; `never` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.late = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(x)
        return out + self.late(x) if float(x[:, 0].sum()) > 0 else out


@pytest.mark.parametrize("rule", [None, Prox(proximal_mu=0.0), ControlVariate()])
def test_parameters_that_the_loss_does_not_always_reach(rule):
    module = _PartlyUsed()
    runner = ModelRunner(module)
    start = runner.layout.pack(module.state_dict())
    # One pass over single examples, of which the first that is drawn does not reach `late` and the others do.
    draw = generator(4)
    torch.randint(0, 2**62, (1,), generator=draw)
    inputs = torch.ones(6, 4)
    inputs[torch.randperm(6, generator=draw)[0]] = -1.0
    settings = LocalSettings(epochs=1, batch_size=1, lr=0.1, momentum=0.9, weight_decay=0.01)
    rules = () if rule is None else (rule,)
    end = train(runner, start, TensorInputs(inputs), torch.arange(6) % 3, settings, generator(4), rules=rules)
    before, after = runner.layout.unpack(start), runner.layout.unpack(end.state)
    assert torch.equal(before["never.weight"], after["never.weight"])
    assert not torch.equal(before["late.weight"], after["late.weight"])


def test_scaffold_s_outcome_is_option_two(job):
    runner, start, inputs, labels = job("mlp")
    settings = LocalSettings(epochs=1, batch_size=5, lr=0.1, momentum=0.0, weight_decay=0.0)
    own, server = torch.full_like(start.params, OWN), torch.full_like(start.params, C)
    got = train(
        runner, start, inputs, labels, settings, generator(1), rules=(ControlVariate(),),
        broadcast={"control": server}, memory={"control": own},
    )  # fmt: skip
    expected = own - server + (start.params - got.state.params) / (3 * 0.1)
    torch.testing.assert_close(got.memory["control"], expected)
    torch.testing.assert_close(got.extras["control"], expected - own)


def test_scaffold_from_the_public_door(network, inputs_for, nearby):
    """What `Server.broadcast` gives can be handed to `train`, named or as the vector that the server keeps."""
    module = network("mlp-bn")
    server = Scaffold(module)
    control = torch.linspace(-1, 1, server.runner.layout.size)
    server.aggregate(module.state_dict(), [ClientUpdate(s, 1, extras={"control": control}) for s in nearby(module)])
    runner = ModelRunner(module)
    ends = [
        train(
            runner, runner.layout.pack(module.state_dict()),
            TensorInputs(inputs_for("mlp-bn", 12)), torch.arange(12) % 3,
            SETTINGS, generator(0), rules=(ControlVariate(),), broadcast=broadcast,
        )
        for broadcast in (server.broadcast, server.memory, None)
    ]  # fmt: skip
    assert ends[0].state.digest() == ends[1].state.digest() != ends[2].state.digest()
    assert torch.equal(ends[0].extras["control"], ends[1].extras["control"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.rand(12), "single-label classification; got torch.float32"),
        (torch.rand(12, 3).round(), r"got torch.float32 of shape \[12, 3\]"),
        (torch.ones(12, 3, dtype=torch.int64), r"got torch.int64 of shape \[12, 3\]"),
        (torch.arange(12), "from 0 to 2 .*got 0 to 11"),
    ],
    ids=["regression", "multi-label", "one-hot", "too-many"],
)
def test_labels_of_another_task(network, inputs_for, labels, message):
    runner = ModelRunner(network("mlp"))
    start = runner.read()
    with pytest.raises(SettingError, match=message):
        train(runner, start, TensorInputs(inputs_for("mlp", 12)), labels, SETTINGS, generator(0))


def test_examples_without_a_label_are_ignored(network, inputs_for):
    runner = ModelRunner(network("mlp"))
    labels = torch.tensor([-100] * 12)
    labels[3] = 1
    end = train(runner, runner.read(), TensorInputs(inputs_for("mlp", 12)), labels, SETTINGS, generator(0))
    assert end.steps


def test_frozen_parameters_stay(network, inputs_for):
    module = network("mlp-bn")
    module[0].weight.requires_grad_(False)
    runner = ModelRunner(module)
    start = runner.layout.pack(module.state_dict())
    end = train(
        runner, start, TensorInputs(inputs_for("mlp-bn", 12)), torch.arange(12) % 3, SETTINGS, generator(0),
        rules=(Prox(proximal_mu=0.1), ControlVariate()),
    )  # fmt: skip
    before, after = runner.layout.unpack(start), runner.layout.unpack(end.state)
    assert "0.weight" not in after
    assert torch.equal(runner.module[0].weight, module[0].weight)
    assert not torch.equal(before["3.weight"], after["3.weight"])
    assert "0.weight" not in runner.layout.unpack_params(end.extras["control"])


def test_weight_decay_spares_normalisation(network, inputs_for):
    """BatchNorm's weight gets a gradient of 0 where the layers after it are 0: only decay could move it."""
    module = network("mlp-bn")
    nn.init.zeros_(module[3].weight)
    runner = ModelRunner(module)
    start = runner.layout.pack(module.state_dict())
    settings = LocalSettings(epochs=1, batch_size=12, lr=0.1, momentum=0.0, weight_decay=0.5)
    inputs = TensorInputs(inputs_for("mlp-bn", 12))
    end = runner.layout.unpack(train(runner, start, inputs, torch.arange(12) % 3, settings, generator(0)).state)
    assert torch.equal(end["1.weight"], module[1].weight)
    # w ← w − 0.1·0.5·w: its gradient is 0 too, but it is not a normalisation
    torch.testing.assert_close(end["0.weight"], 0.95 * module[0].weight.detach())


def test_the_loss_is_the_mean_of_the_last_epoch(job):
    runner, start, inputs, labels = job("mlp")
    settings = LocalSettings(epochs=1, batch_size=100, lr=0.1)
    module = copy.deepcopy(runner.module)
    module.load_state_dict(runner.layout.unpack(start))
    expected = float(functional.cross_entropy(module(inputs.tensor), labels).detach())
    got = train(runner, start, inputs, labels, settings, generator(0), rules=(Prox(proximal_mu=5.0),))
    assert got.loss == pytest.approx(expected)  # without what the rule adds


def test_channels_last_changes_nothing_but_memory(job):
    ends = []
    for channels_last in (True, False):
        runner, start, inputs, labels = job("conv-gn", plan=Plan(channels_last=channels_last))
        ends.append(
            train(runner, start, inputs, labels, SETTINGS, generator(0), rules=(Prox(proximal_mu=0.1),)).state.params
        )
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


def test_a_model_that_does_not_take_channels_last_trains_as_without_it(job):
    ends = []
    for channels_last in (True, False):
        runner, start, inputs, labels = job("view", plan=Plan(channels_last=channels_last))
        ends.append(train(runner, start, inputs, labels, SETTINGS, generator(0)).state)
    assert ends[0].digest() == ends[1].digest()


def test_dropout_follows_the_seed_and_leaves_the_callers_rng_alone(job):
    runner, start, inputs, labels = job("dropout-bn")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = train(runner, start, inputs, labels, SETTINGS, generator(0)).state.digest()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert train(runner, start, inputs, labels, SETTINGS, generator(0)).state.digest() == one
    assert train(runner, start, inputs, labels, SETTINGS, generator(1)).state.digest() != one


def test_no_epochs_train_nothing(job):
    runner, start, inputs, labels = job("mlp-bn")
    settings = LocalSettings(epochs=0)
    got = train(runner, start, inputs, labels, settings, generator(0), rules=(ControlVariate(),))
    assert got.state.digest() == start.digest()
    assert got.steps == 0
    assert not got.extras["control"].any()


def test_data_that_cannot_be_trained_on(job):
    runner, start, inputs, labels = job("mlp")
    with pytest.raises(SettingError, match="one length, got 16 and 15"):
        train(runner, start, inputs, labels[:-1], SETTINGS, generator(0))
    with pytest.raises(SettingError, match="`inputs` is empty"):
        train(runner, start, TensorInputs(torch.zeros(0, 4)), labels[:0], SETTINGS, generator(0))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("epochs", -1),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr_decay", 1.1),
        ("momentum", 1.0),
        ("weight_decay", -0.1),
    ],
)
def test_settings(setting, value):
    with pytest.raises(SettingError, match=f"`{setting}` must be"):
        LocalSettings(**{setting: value})


def test_the_step_size_can_fall_within_a_round(job):
    """lr·0.5^k: with one batch an epoch and no momentum, three steps are three single ones of halved size."""
    runner, start, inputs, labels = job("mlp", 8)

    def trained(begin, epochs, lr, lr_decay=1.0):
        settings = LocalSettings(epochs, batch_size=8, lr=lr, lr_decay=lr_decay, momentum=0.0, weight_decay=0.0)
        return train(runner, begin, inputs, labels, settings, generator(0)).state

    whole = trained(start, 3, 0.4, lr_decay=0.5)
    torch.testing.assert_close(whole.params, trained(trained(trained(start, 1, 0.4), 1, 0.2), 1, 0.1).params)


def test_weight_decay_can_spare_biases():
    """Where the loss has no gradient, only weight decay moves a parameter."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    start = {name: p.detach().clone() for name, p in module.named_parameters()}

    def moved(**options):
        runner = ModelRunner(module)
        optimizer = SGD(runner, 0.0, 0.5, **options)
        for _, parameter in runner.trainable():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(1.0)
        after = runner.layout.unpack(runner.read())
        return {name for name, before in start.items() if not torch.equal(after[name], before)}

    assert moved() == {"0.weight", "0.bias"}
    assert moved(decay_biases=False) == {"0.weight"}
    assert moved(decay_norms=True) == {"0.weight", "0.bias", "1.weight"}  # 1.bias is zero


def test_settings_of_decay_reach_the_optimizer(job):
    runner, start, inputs, labels = job("mlp")
    settings = LocalSettings(epochs=1, batch_size=16, lr=0.1, momentum=0.0, weight_decay=0.5)
    with_decay, without = (
        train(runner, start, inputs, labels, replace(settings, decay_biases=decay), generator(0)).state.params
        for decay in (True, False)
    )
    named = runner.layout.unpack_params(with_decay - without)
    assert {name for name, change in named.items() if change.any()} == {"0.bias", "2.bias"}


def test_the_step_size_falls_to_a_tenth_after_every_so_many_epochs(job):
    settings = LocalSettings(epochs=5, batch_size=16, lr=1.0, lr_drop_epochs=2)
    assert [settings.step_size(0, epoch) for epoch in range(5)] == [1.0, 1.0, 0.1, 0.1, 0.01]
    assert replace(settings, lr_drop_epochs=0).step_size(0, 1000) == 1.0
    runner, start, inputs, labels = job("mlp")
    with pytest.raises(SettingError, match="`lr_drop_epochs` must be >= 0, got -1"):
        LocalSettings(lr_drop_epochs=-1)
    # one step an epoch, without momentum: the second epoch moves a tenth as far as it would
    plain = LocalSettings(epochs=1, batch_size=16, lr=0.1, momentum=0.0, weight_decay=0.0)

    def end(**changes):
        return train(runner, start, inputs, labels, replace(plain, **changes), generator(0)).state.params

    first, full, dropped = end(), end(epochs=2), end(epochs=2, lr_drop_epochs=1)
    torch.testing.assert_close(dropped - first, (full - first) / 10, rtol=1e-3, atol=1e-6)


def test_scaffold_knows_how_far_falling_steps_go(job):
    """Without momentum T = Σ_k η_k: two steps of 0.1 and two of 0.01."""
    runner, start, inputs, labels = job("mlp")
    settings = LocalSettings(epochs=4, batch_size=16, lr=0.1, momentum=0.0, weight_decay=0.0, lr_drop_epochs=2)
    trained = train(runner, start, inputs, labels, settings, generator(0), rules=(ControlVariate(),))
    expected = (start.params - trained.state.params) / 0.22
    torch.testing.assert_close(trained.memory["control"], expected)
