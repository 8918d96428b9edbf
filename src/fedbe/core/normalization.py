"""Every decision about normalisation layers, in one place.

- The mean of models averages BatchNorm's running statistics like weights (`Moments`).
- A sample has its statistics measured anew on the server's inputs (`recalibrated`), or keeps the posterior mean's
  (`averaged`; a Dirichlet sample its own mix), or draws them like weights and mends what no variance can be
  (`sampled`, the released program).
- After SWA the statistics belong to none of the averaged points: they are always measured anew.
- Weight decay does not touch the weights and biases of normalisation layers.
GroupNorm and LayerNorm keep no statistics, so only the last point concerns them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbe.core.inputs import Inputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import Layout, ModelState
from fedbe.errors import SettingError

STATISTICS = ("recalibrated", "averaged", "sampled")
NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def batch_norm_layers(module: nn.Module) -> list[_BatchNorm]:
    """The layers that keep running statistics which `recalibrate` can measure."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def names_without_decay(module: nn.Module) -> set[str]:
    """Names of the parameters of normalisation layers: weight decay leaves them alone."""
    layers = [(prefix, m) for prefix, m in module.named_modules() if isinstance(m, NORMS)]
    return {f"{prefix}.{n}" if prefix else n for prefix, m in layers for n, _ in m.named_parameters(recurse=False)}


def clamp_variances(state: ModelState, layout: Layout) -> ModelState:
    """A state whose running variances are not below zero, as those of a Gaussian draw and those of the released
    form's mean (which lies outside the range of the clients') can be."""
    buffers = state.buffers.clone()
    for slot in layout.buffers:
        if slot.name.rsplit(".", 1)[-1] == "running_var":
            slot.view(buffers).clamp_(min=0.0)
    return ModelState(state.params, buffers, state.counters)


def negative_variance(state: ModelState, layout: Layout) -> str | None:
    """The name of a running variance with a value below zero, if there is one."""
    for slot in layout.buffers:
        if slot.name.rsplit(".", 1)[-1] == "running_var" and bool((slot.view(state.buffers) < 0).any()):
            return slot.name
    return None


def check_batch(module: nn.Module, size: int) -> None:
    """BatchNorm cannot measure the spread of a single input."""
    if size == 1 and batch_norm_layers(module):
        raise SettingError("BatchNorm cannot learn from a single input: give more of them, in batches of two or more")


@torch.no_grad()
def recalibrate(runner: ModelRunner, inputs: Inputs) -> None:
    """Measure the running statistics of the module on the runner anew: their mean over batches of plain inputs.

    As torch's `update_bn`, but only BatchNorm is in training mode: dropout is off, as it is when the model is asked
    later.
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
            layer.momentum = None  # torch's word for the plain mean of all batches
            layer.train()
        for index in calibration_batches(len(inputs), runner.plan.batch_size):
            runner.logits(inputs.batch(index))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def calibration_batches(count: int, size: int) -> tuple[Tensor, ...]:
    """Batches of one size, give or take one, in a mixed order that is always the same.

    Each batch has the same say in the mean: a small one at the end would have too much. And inputs often lie sorted by
    class: the variance within a batch would then lack that between classes.
    """
    parts = max(1, min(math.ceil(count / size), count // 2))
    return torch.randperm(count, generator=generator(0, role="recalibrate")).tensor_split(parts)
