"""Every decision about normalisation layers, in one place.

- The mean of models averages BatchNorm's running statistics like weights (`Moments`).
- A Gaussian sample keeps the mean's statistics (`averaged`), or draws them like weights and mends what no variance
  can be (`sampled`, the released program), or has them measured anew on the server's inputs (`recalibrated`).
- After SWA the statistics belong to none of the averaged points: they are always measured anew.
- Weight decay does not touch the weights and biases of normalisation layers.
GroupNorm and LayerNorm keep no statistics, so only the last point concerns them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim.swa_utils import update_bn

from fedbe.inputs import Inputs, batches
from fedbe.states import Layout, ModelState
from fedbe.workbench import Workbench

STATISTICS = ("averaged", "sampled", "recalibrated")
NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def has_statistics(module: nn.Module) -> bool:
    """Does the module keep running statistics that `recalibrate` can measure?"""
    return any(isinstance(m, _BatchNorm) and m.track_running_stats for m in module.modules())


def undecayed(module: nn.Module) -> set[str]:
    """Names of the parameters of normalisation layers: weight decay leaves them alone."""
    layers = [(prefix, m) for prefix, m in module.named_modules() if isinstance(m, NORMS)]
    return {f"{prefix}.{n}" if prefix else n for prefix, m in layers for n, _ in m.named_parameters(recurse=False)}


def keep_valid(state: ModelState, layout: Layout) -> ModelState:
    """A state whose running variances are not below zero, as a Gaussian draw of them can be."""
    buffers = state.buffers.clone()
    for slot in layout.buffers:
        if slot.name.rsplit(".", 1)[-1] == "running_var":
            slot.view(buffers).clamp_(min=0.0)
    return ModelState(state.params, buffers, state.counters)


def invalid_variance(state: ModelState, layout: Layout) -> str | None:
    """The name of a running variance with a value below zero, if there is one."""
    for slot in layout.buffers:
        if slot.name.rsplit(".", 1)[-1] == "running_var" and bool((slot.view(state.buffers) < 0).any()):
            return slot.name
    return None


def recalibrate(bench: Workbench, inputs: Inputs) -> None:
    """Measure the running statistics of the module on the bench anew, on plain inputs, as `update_bn` does."""
    if not has_statistics(bench.module):
        return

    def plain() -> Iterator[Tensor]:
        for index in batches(len(inputs), bench.plan.batch):
            batch = inputs.batch(index).to(bench.device)
            yield batch.to(bench.layout.dtype) if batch.is_floating_point() else batch

    with torch.no_grad(), bench.plan.autocast(bench.device):
        update_bn(plain(), bench.module)
