import copy
import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import update_bn

from fedbe.algorithms.distillation import DistillSettings, check_student, distill, loss_function, sharpen
from fedbe.algorithms.vote import predict
from fedbe.core.compute import Plan
from fedbe.core.inputs import TensorInputs, hold_out
from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import calibration_batches
from fedbe.core.random import generator
from fedbe.errors import AggregationError, SettingError


class TestSchedule:
    @pytest.mark.parametrize(
        ("step", "size"),
        # t = 1/25: 0.96·1e-3 + 0.04·4e-4 = 9.76e-4;   t = 13/25: 0.48·1e-3 + 0.52·4e-4 = 6.88e-4;   t = 1: 4e-4
        [(1, 9.76e-4), (13, 6.88e-4), (25, 4e-4), (26, 9.76e-4), (50, 4e-4), (1580, 8.8e-4)],
    )
    def test_the_step_size_falls_within_each_cycle(self, step, size):
        assert DistillSettings().swa_schedule(1580).step_size(step) == pytest.approx(size, rel=1e-12)

    def test_points_are_collected_at_the_ends_of_cycles_after_step_250(self):
        plan = DistillSettings().swa_schedule(1580)
        assert [i for i in range(1, 1581) if plan.collects(i)] == list(range(275, 1576, 25))

    def test_the_released_form_is_constant_and_starts_after_500(self):
        plan = DistillSettings(distill_lr_min=1e-3, swa_start_steps=500).swa_schedule(1580)
        assert {plan.step_size(i) for i in range(1, 60)} == {1e-3}
        assert next(i for i in range(1, 1581) if plan.collects(i)) == 525

    def test_sgd_has_none(self):
        assert DistillSettings(optimizer="sgd").swa_schedule(1580) is None

    @pytest.mark.parametrize(
        ("total", "collected"),
        [
            (275, [275]),  # one cycle ends after step 250: the paper's schedule as it is
            (274, list(range(50, 271, 5))),  # none does: start after 274 // 6 = 45, cycles of max(5, 274 // 60)
            (60, list(range(15, 61, 5))),
            (7, [5]),
            (3, [3]),
            (1, [1]),
        ],
    )
    def test_few_steps_shrink_it(self, total, collected):
        plan = DistillSettings().swa_schedule(total)
        assert [i for i in range(1, total + 1) if plan.collects(i)] == collected

    @pytest.mark.parametrize("total", [*range(1, 40), 100, 249, 250, 251, 299, 600])
    def test_something_is_always_collected(self, total):
        plan = DistillSettings().swa_schedule(total)
        assert any(plan.collects(i) for i in range(1, total + 1))


class TestSharpen:
    def test_by_hand(self):
        # squares .25 .09 .04, sum .38
        got = sharpen(torch.tensor([[0.5, 0.3, 0.2]]))
        torch.testing.assert_close(got, torch.tensor([[0.25, 0.09, 0.04]]) / 0.38)
        # cubes 125 27 8, sum 160
        got = sharpen(torch.tensor([[0.5, 0.3, 0.2]]), 3.0)
        torch.testing.assert_close(got, torch.tensor([[125.0, 27, 8]]) / 160)

    def test_exponent_one_changes_nothing(self, rng):
        p = torch.rand(50, 7, generator=rng).softmax(1)
        torch.testing.assert_close(sharpen(p, 1.0), p, rtol=1e-6, atol=1e-8)

    def test_classes_lie_in_dimension_one(self, rng):
        p = torch.rand(2, 3, 4, 5, generator=rng).softmax(1)
        got = sharpen(p)
        torch.testing.assert_close(got.sum(1), torch.ones(2, 4, 5))
        torch.testing.assert_close(got[1, :, 2, 3], sharpen(p[1, :, 2, 3][None])[0])

    def test_many_classes_and_high_powers_do_not_vanish(self):
        p = torch.full((1, 1000), 1e-3)  # 1e-3 to the 20th is not a float32 any more
        torch.testing.assert_close(sharpen(p, 20.0), p)


class TestLoss:
    LOGITS = torch.tensor([[math.log(1.0), math.log(3.0)], [0.0, 0.0]])  # probabilities (¼ ¾) and (½ ½)
    TARGET = torch.tensor([[0.5, 0.5], [1.0, 0.0]])

    def test_cross_entropy_by_hand(self):
        # −(½ ln ¼ + ½ ln ¾) = ½ ln(16/3);   −ln ½ = ln 2;   mean over the two examples
        expected = (0.5 * math.log(16 / 3) + math.log(2)) / 2
        assert float(loss_function("cross_entropy")(self.LOGITS, self.TARGET)) == pytest.approx(expected)

    def test_kl_over_classes_by_hand(self):
        # ½ ln(½/¼) + ½ ln(½/¾) = ½ ln(4/3);   1 ln(1/½) = ln 2;   mean over 2 examples × 2 classes
        expected = (0.5 * math.log(4 / 3) + math.log(2)) / 4
        assert float(loss_function("kl_over_classes")(self.LOGITS, self.TARGET)) == pytest.approx(expected)

    @pytest.mark.parametrize("shape", [(6, 10), (2, 10, 3, 3)])
    def test_kl_s_gradient_is_cross_entropy_s_divided_by_the_classes(self, rng, shape):
        target = torch.rand(shape, generator=rng).softmax(1)
        gradients = []
        for name in ("cross_entropy", "kl_over_classes"):
            logits = torch.zeros(shape, requires_grad=True)
            loss_function(name)(logits, target).backward()
            gradients.append(logits.grad)
        torch.testing.assert_close(gradients[1], gradients[0] / 10)


def _problem(network, inputs_for, name, count=22):
    module = network(name).double()
    runner = ModelRunner(module, Plan(batch_size=8))
    targets = torch.rand(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(1)
    return module, runner, runner.layout.pack(module.state_dict()), inputs_for(name, count).double(), targets


def _by_hand(module, inputs, targets, settings, draw, sizes, collect):
    """torch's optimizer, a plain list of collected points and their mean. Batches of `settings.distill_batch_size`."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=settings.distill_momentum)
    torch.randint(0, 2**62, (1,), generator=draw)  # the seed of the global RNG
    points, step = [], 0
    for _ in range(settings.distill_epochs):
        for index in torch.randperm(len(inputs), generator=draw).split(settings.distill_batch_size):
            step += 1
            optimizer.param_groups[0]["lr"] = sizes(step)
            optimizer.zero_grad()
            functional.cross_entropy(module(inputs[index]), targets[index]).backward()
            optimizer.step()
            if collect(step):
                points.append([p.detach().clone() for p in module.parameters()])
    if points:
        with torch.no_grad():
            for i, p in enumerate(module.parameters()):
                p.copy_(torch.stack([point[i] for point in points]).mean(0))
        update_bn([inputs[i] for i in calibration_batches(22, 8)], module)  # 8 7 7 plain inputs
    return module


@pytest.mark.parametrize("name", ["mlp-bn", "mlp", "conv-gn"])
@pytest.mark.parametrize("optimizer", ["swa", "sgd"])
def test_distillation_is_the_hand_loop(network, inputs_for, name, optimizer):
    module, runner, start, inputs, targets = _problem(network, inputs_for, name)
    settings = DistillSettings(
        optimizer=optimizer, distill_epochs=4, distill_batch_size=6, distill_lr=0.2, distill_lr_min=0.05,
        swa_cycle_steps=3, swa_start_steps=5,
    )  # fmt: skip
    # 22 inputs in batches of 6 6 6 4: 16 steps; cycles of 3 end at 3 6 9 12 15, those after step 5 count
    swa = optimizer == "swa"
    reference = _by_hand(
        module, inputs, targets, settings, generator(9),
        sizes=lambda i: {1: 0.15, 2: 0.10, 0: 0.05}[i % 3] if swa else 0.2,
        collect=lambda i: swa and i in (6, 9, 12, 15),
    )  # fmt: skip
    student = distill(runner, start, TensorInputs(inputs), targets, settings, generator(9))
    expected = runner.layout.pack(reference.state_dict())
    torch.testing.assert_close(student.params, expected.params, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(student.buffers, expected.buffers, rtol=1e-9, atol=1e-9)
    assert student.digest() != start.digest()


@pytest.mark.parametrize(("name", "moves"), [("mlp", False), ("conv-gn", False), ("mlp-bn", True)])
def test_learning_ones_own_predictions_moves_nothing(network, inputs_for, name, moves):
    """The appendix: the average as the target, without augmentation, gives zero gradients.

    That holds where the student predicts in training as it did when asked. With BatchNorm it does not: training uses
    the batch's statistics, the vote the running ones.
    """
    _, runner, start, inputs, _ = _problem(network, inputs_for, name)
    targets = sharpen(predict(runner, start, TensorInputs(inputs)), 1.0)
    settings = DistillSettings(distill_epochs=5, distill_batch_size=8, distill_lr=0.1, distill_lr_min=0.05)
    student = distill(runner, start, TensorInputs(inputs), targets, settings, generator(0))
    moved = float((student.params - start.params).abs().max())
    assert (moved > 1e-3) if moves else (moved < 1e-12)
    sharper = distill(runner, start, TensorInputs(inputs), sharpen(targets, 2.0), settings, generator(0))
    assert float((sharper.params - start.params).abs().max()) > 1e-3


def test_class_labels_are_targets_too(network, inputs_for):
    _, runner, start, inputs, _ = _problem(network, inputs_for, "mlp")
    labels = torch.arange(22) % 3
    settings = DistillSettings(
        optimizer="sgd", distill_epochs=200, distill_batch_size=22, distill_lr=0.3, loss="kl_over_classes"
    )
    student = distill(runner, start, TensorInputs(inputs), labels, settings, generator(0))
    right = predict(runner, student, TensorInputs(inputs)).argmax(1) == labels
    assert float(right.double().mean()) > 0.9


def test_augmentation_is_for_the_steps_only(network, inputs_for):
    """Every step sees an augmented batch; the new BatchNorm statistics come from the plain inputs."""
    module, runner, start, inputs, targets = _problem(network, inputs_for, "mlp-bn")
    seen = []

    def augment(batch, draw):
        seen.append(torch.rand(1, generator=draw))
        return batch + 100.0

    settings = DistillSettings(distill_epochs=2, distill_batch_size=6)
    student = distill(runner, start, TensorInputs(inputs, augment), targets, settings, generator(0))
    assert len(seen) == 8
    assert len({float(s) for s in seen}) == 8
    plain = copy.deepcopy(module)
    plain.load_state_dict(runner.layout.unpack(student))
    update_bn([inputs[i] for i in calibration_batches(22, 8)], plain)
    torch.testing.assert_close(runner.layout.pack(plain.state_dict()).buffers, student.buffers, rtol=1e-9, atol=1e-9)
    plain_settings = dataclasses.replace(settings, augment=False)
    distill(runner, start, TensorInputs(inputs, augment), targets, plain_settings, generator(0))
    assert len(seen) == 8


def test_weight_decay_reaches_weights_but_not_normalisation(network, inputs_for):
    _, runner, start, inputs, targets = _problem(network, inputs_for, "mlp-bn")
    shrunk, free = (
        runner.layout.unpack(
            distill(
                runner, start, TensorInputs(inputs), targets,
                DistillSettings(optimizer="sgd", distill_epochs=1, distill_batch_size=22, distill_weight_decay=decay),
                generator(0),
            )
        )
        for decay in (0.5, 0.0)
    )  # fmt: skip
    # one step of 1e-3: w ← w − 1e-3 (g + 0.5 w)
    start_weights = runner.layout.unpack(start)["3.weight"]
    torch.testing.assert_close(shrunk["3.weight"] - free["3.weight"], -5e-4 * start_weights, rtol=1e-6, atol=1e-12)
    assert torch.equal(shrunk["1.weight"], free["1.weight"])


def test_the_released_decay_reaches_normalisation_too(network, inputs_for):
    _, runner, start, inputs, targets = _problem(network, inputs_for, "mlp-bn")
    settings = DistillSettings(optimizer="sgd", distill_epochs=1, distill_batch_size=22, distill_weight_decay=0.5)
    spared, decayed = (
        distill(
            runner, start, TensorInputs(inputs), targets, replace(settings, distill_decay_norms=norms), generator(0)
        ).params
        for norms in (False, True)
    )  # fmt: skip
    changed = runner.layout.unpack_params(decayed - spared)
    # BatchNorm's weight starts at 1 and its bias at 0: only the weight decays, by 1e-3 · 0.5
    assert {name for name, change in changed.items() if change.any()} == {"1.weight"}
    torch.testing.assert_close(changed["1.weight"], torch.full_like(changed["1.weight"], -5e-4))


def test_adam_equals_torchs_with_a_cosine(network, inputs_for):
    module, runner, start, inputs, targets = _problem(network, inputs_for, "mlp-bn")
    settings = DistillSettings(
        optimizer="adam", distill_epochs=2, distill_batch_size=8, distill_lr=0.01, distill_weight_decay=0.1
    )
    got = distill(runner, start, TensorInputs(inputs), targets, settings, generator(4))
    reference, draw = copy.deepcopy(module).train(), generator(4)
    norm = list(reference[1].parameters())
    others = [p for p in reference.parameters() if all(p is not n for n in norm)]
    optimizer = torch.optim.Adam([{"params": others, "weight_decay": 0.1}, {"params": norm}], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    torch.randint(0, 2**62, (1,), generator=draw)  # the seed of the global RNG
    for _ in range(2):
        for index in torch.randperm(22, generator=draw).tensor_split([8, 16]):
            optimizer.zero_grad()
            functional.cross_entropy(reference(inputs[index]), targets[index]).backward()
            optimizer.step()
            schedule.step()
    expected = runner.layout.pack(reference.state_dict())
    torch.testing.assert_close(got.params, expected.params, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got.buffers, expected.buffers, rtol=1e-9, atol=1e-12)


class TestEarlyStopping:
    def _run(self, network, inputs_for, patience, lr=0.05, epochs=60):
        _, runner, start, inputs, targets = _problem(network, inputs_for, "mlp", count=40)
        seen = []
        settings = DistillSettings(
            optimizer="sgd", distill_epochs=epochs, distill_patience_epochs=patience, distill_lr=lr,
            distill_batch_size=40, sharpening=1.0,
        )  # fmt: skip
        progress = lambda done, total: seen.append((done, total))  # noqa: E731
        student = distill(runner, start, TensorInputs(inputs), targets, settings, generator(1), progress=progress)
        learned, held_out = hold_out(40, 0.1, generator(1))
        module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        module.load_state_dict(runner.layout.unpack(student))
        loss = float(functional.cross_entropy(module(inputs[held_out]), targets[held_out]).detach())
        return loss, len(seen), learned, held_out

    def test_a_tenth_is_held_out(self, network, inputs_for):
        _, steps, learned, held_out = self._run(network, inputs_for, patience=100, epochs=3)
        assert (len(learned), len(held_out), steps) == (36, 4, 3)

    def test_it_ends_early_and_takes_the_student_with_the_lowest_loss(self, network, inputs_for):
        patient, all_steps, _, _ = self._run(network, inputs_for, patience=60, lr=1.0)
        hasty, steps, _, _ = self._run(network, inputs_for, patience=5, lr=1.0)
        assert all_steps == 60
        assert steps < 60
        # random targets cannot be learned, so the loss on unseen inputs soon rises; both return their lowest
        last, _, _, _ = self._run(network, inputs_for, patience=steps, lr=1.0, epochs=steps)
        assert last == pytest.approx(hasty)
        assert patient <= hasty


def test_frozen_parameters_stay(network, inputs_for):
    module = network("mlp-bn")
    module[0].weight.requires_grad_(False)
    runner = ModelRunner(module)
    start = runner.layout.pack(module.state_dict())
    targets = torch.rand(22, 3).softmax(1)
    inputs = TensorInputs(inputs_for("mlp-bn", 22))
    student = runner.layout.unpack(
        distill(runner, start, inputs, targets, DistillSettings(distill_epochs=2), generator(0))
    )
    assert "0.weight" not in student
    assert torch.equal(runner.module[0].weight, module[0].weight)
    assert not torch.equal(student["3.weight"], module[3].weight)


def test_progress_is_told_step_by_step(network, inputs_for):
    _, runner, start, inputs, targets = _problem(network, inputs_for, "mlp")
    progress_calls = []
    settings = DistillSettings(distill_epochs=2, distill_batch_size=10)
    distill(
        runner,
        start,
        TensorInputs(inputs),
        targets,
        settings,
        generator(0),
        progress=lambda *a: progress_calls.append(a),
    )
    assert progress_calls == [(i, 6) for i in range(1, 7)]


def test_divergence_is_an_error(network, inputs_for):
    _, runner, start, inputs, targets = _problem(network, inputs_for, "mlp")
    settings = DistillSettings(distill_epochs=5, distill_batch_size=6, distill_lr=1e200, distill_lr_min=1e200)
    student = distill(runner, start, TensorInputs(inputs), targets, settings, generator(0))
    with pytest.raises(AggregationError, match="lower `distill_lr`"):
        check_student(student, settings)


def test_a_model_that_cannot_learn_is_refused():
    module = nn.Linear(4, 3).requires_grad_(False)
    runner = ModelRunner(module)
    with pytest.raises(TypeError, match="no parameter with requires_grad=True"):
        distill(
            runner,
            runner.read(),
            TensorInputs(torch.zeros(4, 4)),
            torch.ones(4, 3) / 3,
            DistillSettings(),
            generator(0),
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "swag"}, "unknown optimizer 'swag': did you mean 'swa'"),
        ({"loss": "kl"}, "unknown loss 'kl'"),
        ({"distill_epochs": 0}, "`distill_epochs` must be >= 1, got 0"),
        ({"distill_batch_size": 0}, "`distill_batch_size` must be >= 1"),
        ({"swa_cycle_steps": 0}, "`swa_cycle_steps` must be >= 1"),
        ({"distill_lr": 0.0}, "`distill_lr` must be > 0"),
        ({"distill_lr": float("nan")}, "`distill_lr` must be > 0"),
        ({"distill_lr": 1e-4}, "must not be above `distill_lr`"),
        ({"distill_lr_min": -1.0}, "`distill_lr_min` must be > 0"),
        ({"swa_start_steps": -1}, "`swa_start_steps` must be >= 0"),
        ({"distill_weight_decay": -1.0}, "`distill_weight_decay` must be >= 0"),
        ({"distill_patience_epochs": -1}, "`distill_patience_epochs` must be >= 0"),
        ({"distill_patience_epochs": 3}, "needs the optimizer sgd or adam"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        DistillSettings(**settings)
