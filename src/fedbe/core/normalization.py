"""Every decision about normalization layers, in one place.

- The mean of models averages BatchNorm's running statistics like weights (`Moments`).
- The statistics of a sample are recomputed on the server's inputs (`recalibrated`), or are those of the posterior's
  mean (`averaged`; a Dirichlet sample mixes them like weights), or are sampled like weights, with negative variances
  set to zero (`sampled`, as in the released program).
- After SWA the statistics fit none of the averaged points, so they are always recomputed.
- Where a gate compares a student with the average, the average's statistics are recomputed, too: otherwise the student
  could win by its statistics alone, and a refusal would keep statistics that fit the average badly.
- Weight decay is not applied to the weights and biases of normalization layers, except where the released program does.

GroupNorm and LayerNorm have no statistics: only the last point concerns them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbe.core.inputs import Inputs
from fedbe.core.layout import Layout, Slot
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.errors import SettingError

STATISTICS = ("recalibrated", "averaged", "sampled")
NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def batch_norm_layers(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers with running statistics, which `recalibrate` recomputes."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def names_without_decay(module: nn.Module) -> set[str]:
    """The names of the parameters of normalization layers. By default weight decay is not applied to them."""
    layers = [(prefix, m) for prefix, m in module.named_modules() if isinstance(m, NORMS)]
    return {f"{prefix}.{n}" if prefix else n for prefix, m in layers for n, _ in m.named_parameters(recurse=False)}


def clamp_variances(state: ModelState, layout: Layout) -> ModelState:
    """The state with negative running variances set to zero.

    Samples of a Gaussian can have them, and so can the mean of the released form, which is not within the clients'
    range.
    """
    buffers = state.buffers.clone()
    for slot in _running_variances(layout):
        slot.view(buffers).clamp_(min=0.0)
    return ModelState(state.params, buffers, state.counters)


def negative_variance(state: ModelState, layout: Layout) -> str | None:
    """The name of the first running variance with a negative value, if there is one."""
    negative = (slot.name for slot in _running_variances(layout) if bool((slot.view(state.buffers) < 0).any()))
    return next(negative, None)


def _running_variances(layout: Layout) -> list[Slot]:
    return [slot for slot in layout.buffers if is_running_variance(slot.name)]


def is_running_variance(name: str) -> bool:
    """Whether a buffer of that name is the running variance of a normalization layer."""
    return name.rsplit(".", 1)[-1] == "running_var"


def check_batch(module: nn.Module, size: int) -> None:
    """Raise a SettingError for a batch of one input, if the module has BatchNorm."""
    if size == 1 and batch_norm_layers(module):
        raise SettingError("BatchNorm cannot learn from a single input: give two or more, in batches of two or more")


@torch.no_grad()
def recalibrate(runner: ModelRunner, inputs: Inputs) -> None:
    """Recompute the BatchNorm statistics of the runner's module: their mean over batches of plain inputs.

    This is torch's `update_bn`, but only BatchNorm is in training mode. Dropout is off, as in later predictions.

    Args:
        runner: The runner with a loaded model; its running statistics are changed in place.
        inputs: At least two inputs. They are not augmented.
    """
    layers = batch_norm_layers(runner.module)
    if not layers:
        return
    check_batch(runner.module, len(inputs))
    runner.module.eval()
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        for number, index in enumerate(calibration_batches(len(inputs), runner.plan.batch_size), start=1):
            for layer in layers:
                # The plain mean of all batches, as with momentum None; but then torch reads a counter from the device.
                layer.momentum = 1.0 / number
            runner.logits(inputs.batch(index))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def recalibrated(runner: ModelRunner, state: ModelState, inputs: Inputs) -> ModelState:
    """The state with BatchNorm statistics recomputed on the inputs (see `recalibrate`); itself without BatchNorm."""
    if not batch_norm_layers(runner.module):
        return state
    runner.load(state)
    recalibrate(runner, inputs)
    return runner.read()


def calibration_batches(count: int, size: int) -> tuple[Tensor, ...]:
    """Split indices into batches of nearly equal sizes, in a fixed random order.

    The sizes are nearly equal because each batch counts the same in the mean. The order is random because inputs are
    often sorted by class, and batches of one class would underestimate the variance.
    """
    parts = max(1, min(math.ceil(count / size), count // 2))
    return torch.randperm(count, generator=generator(0, role="recalibrate")).tensor_split(parts)
