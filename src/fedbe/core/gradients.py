"""The gradient of a batch, in parts that threads compute at the same time.

A batch is cut into a fixed number of parts, and their gradients are added in a fixed order. So the result does not
depend on the number of threads. Threads inside a convolution wait for each other in every operation, which is slower.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedbe.core.compute import has_convolutions, one_thread
from fedbe.core.inputs import Batch, Inputs, count_of, map_batch
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import preserved_rng
from fedbe.errors import ModelError

ROUNDING = 1e-3  # of the largest logit: kernels for one input and for two may round differently
PARTS = 4  # of 32 inputs at FedBE's batch size of 128; a convolution is less efficient on fewer

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, target probabilities) -> the mean loss of the examples
Backward = Callable[[Batch, Tensor, Loss], None]  # sets `grad` of each parameter, from a batch, its targets and a loss


@contextmanager
def backward_whole(runner: ModelRunner, inputs: Inputs) -> Iterator[Backward]:  # noqa: ARG001 (as below)
    """A function that computes the gradient of a whole batch."""

    def compute(batch: Batch, targets: Tensor, loss_of: Loss) -> None:
        loss_of(runner.logits(batch), targets).backward()  # type: ignore[no-untyped-call]

    yield compute


@contextmanager
def backward_in_parts(runner: ModelRunner, inputs: Inputs) -> Iterator[Backward]:
    """A function that computes the gradient of a batch in parts, where the model allows it, and whole elsewhere.

        ∇ = Σ_k (n_k/n) ∇_k   over the parts k = 1 … 4 with n_k of the batch's n examples, added in this order

    A batch is cut if the model has convolutions, computes on a CPU and treats each example by itself: it has no
    BatchNorm, and a training pass neither draws random numbers (dropout), nor changes buffers, nor gives the first of
    two examples other logits than it has alone. As many threads compute as torch has in this process, or as
    `runner.threads` says.

    Args:
        runner: Its module must be in training mode, without gradients before each call.
        inputs: Two of them are tried, to see what a training pass does.

    Example:
        >>> from fedbe.core.inputs import TensorInputs
        >>> runner = ModelRunner(torch.nn.Conv2d(1, 2, 1, bias=False))
        >>> images, targets = torch.ones(8, 1, 1, 1), torch.zeros(8, 2, 1, 1)
        >>> with backward_in_parts(runner, TensorInputs(images)) as backward:
        ...     backward(images, targets, lambda logits, targets: logits.sum() / len(logits))
        >>> runner.module.weight.grad.flatten()
        tensor([1., 1.])
    """
    twins = _twins(runner, inputs)
    if not twins:
        with backward_whole(runner, inputs) as compute_whole:
            yield compute_whole
        return
    parameters = [parameter for _, parameter in runner.trainable()]
    threads = min(PARTS, runner.threads or torch.get_num_threads())
    # A new thread computes with torch's default number of threads, whatever this one has.
    with one_thread(), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def compute(batch: Batch, targets: Tensor, loss_of: Loss) -> None:
            count = count_of(batch)

            def gradients_of(twin: ModelRunner, index: Tensor) -> tuple[Tensor | None, ...]:
                part = slice(int(index[0]), int(index[-1]) + 1)
                logits = twin.logits(map_batch(lambda tensor: tensor[part], batch))
                loss = loss_of(logits, targets[part]) * (len(index) / count)
                return torch.autograd.grad(loss, parameters, allow_unused=True)

            parts = list(pool.map(gradients_of, twins, torch.arange(count).tensor_split(min(count, PARTS))))
            for parameter, gradients in zip(parameters, zip(*parts, strict=True), strict=True):
                parameter.grad = _sum([gradient for gradient in gradients if gradient is not None])

        yield compute


def _sum(gradients: list[Tensor]) -> Tensor | None:
    if not gradients:
        return None
    for gradient in gradients[1:]:
        gradients[0].add_(gradient)
    return gradients[0]


def learns_in_parts(runner: ModelRunner, inputs: Inputs) -> bool:
    """Whether `backward_in_parts` cuts the batches of this model. Its module is in training mode afterwards."""
    runner.module.train()
    return bool(_twins(runner, inputs))


def _twins(runner: ModelRunner, inputs: Inputs) -> list[ModelRunner]:
    """A runner for each part, because a module may keep values between its layers. None if batches stay whole."""
    if not has_convolutions(runner.module) or runner.device.type != "cpu":
        return []
    few = inputs.batch(torch.arange(min(2, len(inputs))))
    runner.choose_memory_format(few)
    try:
        if not _is_by_example(runner, few):
            return []
        return [runner.twin() for _ in range(PARTS)]
    except ModelError:  # a module that keeps values of its last pass cannot be copied
        return []


def _is_by_example(runner: ModelRunner, few: Batch) -> bool:
    """Whether a training pass treats each example by itself.

    It has no BatchNorm, draws no random numbers, changes no buffers, and the first of two inputs has the logits that it
    has alone: a module can call `functional.batch_norm` itself.
    """
    if any(isinstance(layer, _BatchNorm) for layer in runner.module.modules()):
        return False
    trial = runner.twin(shares_tensors=False)
    trial.plan = replace(trial.plan, precision="float32")  # so that logits differ by little if nothing is shared
    before = [buffer.clone() for buffer in trial.module.buffers()]
    with preserved_rng(runner.device), torch.no_grad():
        state = torch.get_rng_state()
        try:
            together = trial.logits(few)[:1]
            draws = not torch.equal(state, torch.get_rng_state())
            if draws or not all(map(torch.equal, before, trial.module.buffers())):
                return False
            alone = trial.logits(map_batch(lambda tensor: tensor[:1], few))
        except Exception:  # `functional.batch_norm` of a single value; what fails on whole batches, too, fails there
            return False
    return bool((together - alone).abs().amax() <= ROUNDING * together.abs().amax())
