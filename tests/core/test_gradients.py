"""The gradient of a batch, in parts."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbe.core.gradients import PARTS, backward_in_parts, backward_whole
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner

SIZES: list[int] = []  # of the batches of each pass of a `Recorder`; of the class, because each thread has a copy


class Recorder(nn.Module):
    """Notes how many inputs a pass has. It keeps a value between its layers, which another thread must not change."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.conv, self.extra, self.head = nn.Conv2d(1, 3, 2), nn.Sequential(*extra), nn.Linear(3, 4)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        SIZES.append(len(x))
        self.kept = self.conv(x)
        out: Tensor = self.head(self.extra(self.kept.sin()).mean((2, 3)) + self.kept.mean((2, 3)))
        return out


class Counting(nn.Module):
    """Changes a buffer in each training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x


class Normalizing(nn.Sequential):
    """BatchNorm without a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(super().forward(x), None, None, training=True)


@pytest.fixture
def threads():
    def use(count: int) -> None:
        torch.set_num_threads(count)

    before = torch.get_num_threads()
    yield use
    torch.set_num_threads(before)


def make(*extra: nn.Module, count: int = 10) -> tuple[ModelRunner, Tensor, Tensor]:
    torch.manual_seed(0)
    runner = ModelRunner(Recorder(*extra).double())
    runner.module.train()
    return runner, torch.randn(count, 1, 5, 5, dtype=torch.double), torch.rand(count, 4, dtype=torch.double).softmax(1)


def gradients(runner: ModelRunner, images: Tensor, targets: Tensor, compute=backward_in_parts) -> dict[str, Tensor]:
    SIZES.clear()
    with compute(runner, TensorInputs(images)) as backward:
        backward(images, targets, functional.cross_entropy)
    return {name: p.grad.clone() for name, p in runner.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("count", "sizes"), [(10, [3, 3, 2, 2]), (3, [1, 1, 1]), (8, [2] * 4)])
def test_parts_give_the_gradient_of_the_whole_batch(count: int, sizes: list[int]) -> None:
    runner, images, targets = make(count=count)
    whole = gradients(runner, images, targets, backward_whole)
    parts = gradients(make(count=count)[0], images, targets)
    assert sorted(SIZES[-len(sizes) :]) == sorted(sizes)
    assert set(parts) == set(whole) == {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-15)


def test_the_gradient_does_not_depend_on_the_number_of_threads(threads) -> None:
    images = torch.randn(64, 1, 40, 40)
    results = []
    for count in (1, 2, 4, 2):
        threads(count)
        runner, _, targets = make(count=64)
        results.append(gradients(ModelRunner(runner.module.float()), images, targets.float()))
        assert torch.get_num_threads() == count
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_parts_are_computed_by_as_many_threads_as_torch_has(threads) -> None:
    threads(2)
    runner, images, targets = make()
    started = set(threading.enumerate())
    with backward_in_parts(runner, TensorInputs(images)) as backward:
        for _ in range(5):
            backward(images, targets, functional.cross_entropy)
        assert 1 <= len(set(threading.enumerate()) - started) <= 2
    assert set(threading.enumerate()) == started


@pytest.mark.parametrize(
    "extra",
    [
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Dropout(0.5),
        Counting(),
        Normalizing(),
        Normalizing(nn.AdaptiveAvgPool2d(1)),
    ],
    ids=["batch norm", "without statistics", "dropout", "buffer", "functional", "functional of single values"],
)
def test_a_batch_stays_whole_if_its_examples_are_not_independent(extra: nn.Module) -> None:
    runner, images, targets = make(extra)
    gradients(runner, images, targets)
    assert SIZES[-1] == 10
    assert max(SIZES[:-1], default=2) <= 2, "the trial has two inputs"


def test_a_trial_changes_nothing() -> None:
    runner, images, _ = make(nn.Dropout(0.5), Counting())
    before = torch.get_rng_state()
    with backward_in_parts(runner, TensorInputs(images)):
        pass
    assert torch.equal(before, torch.get_rng_state())
    assert runner.module.extra[1].seen == 0


def test_a_network_without_convolutions_stays_whole() -> None:
    runner = ModelRunner(nn.Linear(3, 2))
    images, targets = torch.randn(8, 3), torch.rand(8, 2).softmax(1)
    parts = gradients(runner, images, targets)
    runner.module.zero_grad()
    torch.testing.assert_close(parts, gradients(runner, images, targets, backward_whole), rtol=0, atol=0)


def test_an_error_in_a_part_reaches_the_caller(threads) -> None:
    threads(2)
    runner, images, targets = make()
    with (
        pytest.raises(ValueError, match="no loss"),
        backward_in_parts(runner, TensorInputs(images)) as backward,
    ):
        backward(images, targets, _fails)


def _fails(*_: Tensor) -> Tensor:
    raise ValueError("no loss")


def test_a_module_that_cannot_be_copied_stays_whole() -> None:
    runner, images, targets = make()
    gradients(runner, images, targets, backward_whole)  # `kept` now has a graph, which deepcopy refuses
    gradients(runner, images, targets)
    assert SIZES == [10]


def test_four_parts() -> None:
    assert PARTS == 4, "another number changes the last bits of every distillation"
