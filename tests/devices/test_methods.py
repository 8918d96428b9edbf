"""Local training, vote, distillation and every method on a device: the numbers of the CPU, and no mixed devices."""

import pytest
import torch

import fedbe
from fedbe.algorithms.client.rules import ControlVariate, Dynamic, Prox
from fedbe.algorithms.distillation import DistillSettings, distill
from fedbe.algorithms.methods import METHODS
from fedbe.algorithms.vote import VOTE_RULES, Member, local_predictor, predict, vote
from fedbe.core.inputs import TensorInputs
from fedbe.core.normalization import recalibrate

QUICK = {"distill_epochs": 1, "distill_batch_size": 12, "num_samples": 2}
RULES = {
    "none": (),
    "prox": (Prox(0.5),),
    "unsquared": (Prox(0.5, "unsquared"),),
    "memory": (ControlVariate(), Dynamic()),
}
TRAINED = [("conv-gn", rule) for rule in RULES] + [(name, "none") for name in ("mlp-bn", "dropout-bn", "view", "dense")]
WAYS = ("model", "plan")  # the caller's module is on the device; or only the passes are


@pytest.fixture(params=WAYS)
def runner_on(request, network):
    """runner_on("mlp-bn", "emu"): a runner that computes on the device, and where its states are."""

    def make(name, device):
        if request.param == "model":
            return fedbe.ModelRunner(network(name).to(device), fedbe.Plan(batch_size=8))
        return fedbe.ModelRunner(network(name), fedbe.Plan(batch_size=8, device=device))

    return make


def host(state):
    return {"params": state.params.cpu(), "buffers": state.buffers.cpu()} | {
        n: c.cpu() for n, c in state.counters.items()
    }


def here(named):
    return {name: tensor.cpu() for name, tensor in named.items()}


@pytest.mark.parametrize(
    ("method", "way"),
    [(method, "model") for method in METHODS] + [(m, "plan") for m in ("fedbe", "scaffold", "feddf", "fedavg-bn")],
)
def test_every_method_gives_the_bits_of_the_cpu(method, way, network, inputs_for, replies, same):
    name = "dropout-bn"
    quick = {k: v for k, v in QUICK.items() if k in METHODS[method].settings()}
    quick |= {"gate_margin": 0.0, "gate_gain": 0.0} if "gate" in METHODS[method].settings() else {}

    def two_rounds(device):
        module = network(name)
        plan = fedbe.Plan(batch_size=8, device=device if way == "plan" else None)
        if way == "model":
            module = module.to(device)
        labels = torch.arange(24) % 3
        server = fedbe.server(
            method, module, unlabeled=inputs_for(name), labels=labels, total_clients=5, plan=plan, **quick
        )
        state = server.aggregate(module.state_dict(), replies(network(name)))
        state = server.aggregate(state, replies(network(name)))
        assert {tensor.device.type for tensor in state.values()} == {device if way == "model" else "cpu"}
        return here(state), server.predict_proba(state, inputs_for(name)).cpu(), str(server.info.step.student)

    there, predictions, report = two_rounds("emu")
    expected, expected_predictions, expected_report = two_rounds("cpu")
    assert same(there, expected)
    assert torch.equal(predictions, expected_predictions)
    assert report == expected_report


@pytest.mark.parametrize(("name", "rule"), TRAINED)
def test_local_training(name, rule, runner_on, inputs_for):
    def trained(device):
        runner = runner_on(name, device)
        labels = torch.arange(24) % 3
        if name == "dense":
            labels = labels.view(-1, 1, 1).expand(-1, 6, 6)
        vectors = {"control": torch.linspace(-1, 1, runner.layout.size)}
        result = fedbe.train(
            runner,
            runner.read(),
            TensorInputs(inputs_for(name)),
            labels,
            fedbe.LocalSettings(epochs=1, batch_size=5),
            torch.Generator().manual_seed(3),
            rules=RULES[rule],
            broadcast=vectors,
            memory={"gradient": vectors["control"]},
        )
        assert result.state.params.device == runner.layout.device
        assert all(v.device == runner.layout.device for v in (*result.extras.values(), *result.memory.values()))
        return host(result.state), here(result.extras) | here(result.memory), result.loss

    there, expected = trained("emu"), trained("cpu")
    # Only on the CPU does torch compute the gradient of GroupNorm in channels-last, so sums have another order.
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if name == "conv-gn" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(there, expected, **tolerance)


def test_no_step_of_local_training_waits_for_the_device(runner_on, inputs_for, emulator):
    def stops(epochs):
        runner = runner_on("dropout-bn", "emu")
        start, inputs = runner.read(), TensorInputs(inputs_for("dropout-bn")).on(runner.device)
        runner.logits(inputs.batch(torch.arange(2)))  # checks the outputs once
        with emulator.counted() as counts:
            settings = fedbe.LocalSettings(epochs=epochs, batch_size=4)
            generator = torch.Generator().manual_seed(3)
            fedbe.train(runner, start, inputs, torch.arange(24) % 3, settings, generator, rules=(Prox(1, "unsquared"),))
        return counts.stops, counts.to_device

    (few_stops, few_copies), (many_stops, many_copies) = stops(1), stops(5)
    assert many_stops == few_stops
    assert many_copies - few_copies == 2 * 4  # order and labels of four further epochs, in the queue of the device


@pytest.mark.parametrize("optimizer", ["swa", "sgd", "adam"])
def test_distillation(optimizer, runner_on, inputs_for, same, emulator):
    name = "dropout-bn"
    settings = {"optimizer": optimizer, "distill_batch_size": 4, "swa_start_steps": 4, "swa_cycle_steps": 2}
    settings |= {} if optimizer == "swa" else {"distill_patience_epochs": 2}

    def student(device, epochs=2):
        runner = runner_on(name, device)
        inputs = TensorInputs(inputs_for(name)).on(runner.device)
        targets = predict(runner, runner.read(), inputs)
        chosen = DistillSettings(**settings, distill_epochs=epochs)
        with emulator.counted() as counts:
            state = distill(runner, runner.read(), inputs, targets, chosen, torch.Generator().manual_seed(2))
        assert state.params.device == runner.layout.device
        return host(state), counts

    (there, few), (expected, _) = student("emu"), student("cpu")
    assert same(there, expected)
    many = student("emu", 4)[1]
    # Early stopping reads one number an epoch, and keeps the best state.
    assert many.stops - few.stops <= (0 if optimizer == "swa" else 2 * 6)


@pytest.mark.parametrize("rule", VOTE_RULES)
def test_votes(rule, runner_on, inputs_for, nearby, network):
    def result(device):
        runner = runner_on("conv-gn", device)
        states = [runner.layout.pack(s) for s in nearby(network("conv-gn"), 3)]
        members = [Member(f"client {i}", s) for i, s in enumerate(states)]
        inputs = TensorInputs(inputs_for("conv-gn"))
        return vote(members, local_predictor(runner, inputs), torch.arange(24) % 3, rule=VOTE_RULES[rule])

    there, expected = result("emu"), result("cpu")
    assert torch.equal(there.probabilities.cpu(), expected.probabilities)
    assert (there.members, there.disagreement, there.metrics) == (
        expected.members, expected.disagreement, expected.metrics,
    )  # fmt: skip


def test_recalibration_does_not_wait_for_the_device(runner_on, inputs_for, same, emulator):
    def recalibrated(device):
        runner = runner_on("mlp-bn", device)
        inputs = TensorInputs(inputs_for("mlp-bn")).on(runner.device)
        runner.logits(inputs.batch(torch.arange(2)))
        with emulator.counted() as counts:
            recalibrate(runner, inputs)
        assert counts.stops == 0
        return host(runner.read())

    assert same(recalibrated("emu"), recalibrated("cpu"))


def test_the_seed_decides_dropout_on_the_device_too(runner_on, inputs_for, same):
    def trained(seed, device="emu"):
        torch.manual_seed(seed)  # what others drew before must not matter
        runner = runner_on("dropout-bn", device)
        settings, generator = fedbe.LocalSettings(epochs=1, batch_size=8), torch.Generator().manual_seed(1)
        before = torch.emu.get_rng_state(torch.device("emu:0")).clone()
        labels = torch.arange(24) % 3
        result = fedbe.train(runner, runner.read(), TensorInputs(inputs_for("dropout-bn")), labels, settings, generator)
        assert torch.equal(torch.emu.get_rng_state(torch.device("emu:0")), before)
        return host(result.state)

    assert same(trained(1), trained(2))
    assert same(trained(1), trained(2, "cpu"))


def test_inputs_are_copied_to_the_device_once(network, inputs_for, replies):
    def check(augment):
        options = {"distill_epochs": 2, "distill_batch_size": 8, "members": "AC", "variant": "paper"}
        plan = fedbe.Plan(device="emu")
        server = fedbe.FedBE(network("mlp"), unlabeled=inputs_for("mlp"), plan=plan, augment=augment, **options)
        assert server.inputs.tensor.device.type == ("cpu" if augment else "emu")
        server.aggregate(network("mlp").state_dict(), replies(network("mlp")))

    check(None)
    check(lambda batch, generator: batch + torch.randn(batch.shape, generator=generator))  # written for the CPU
