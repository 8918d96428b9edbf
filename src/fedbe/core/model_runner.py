"""Our own copy of a module, loaded in place for every model that is to be trained or asked.

One module a process: nothing is rebuilt for each member, and the caller's module is never touched.
"""

import copy

import torch
from torch import Tensor, nn

from fedbe.core.compute import Plan
from fedbe.core.state import Layout, ModelState
from fedbe.errors import ModelError, SettingError


class ModelRunner:
    """A private copy of `module` in the working dtype (half-precision models compute in float32)."""

    def __init__(self, module: nn.Module, plan: Plan | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise ModelError(f"`model` must be a torch.nn.Module, got {type(module).__name__}")
        if not isinstance(plan, Plan | None):
            raise SettingError(f"`plan` must be a fedbe.Plan, got {plan!r}")
        self.plan = plan or Plan()
        self.layout = Layout(module)
        self.module = _copy_of(module).to(self.layout.dtype)
        if self.plan.channels_last and any(p.ndim == 4 for p in self.module.parameters()):
            # torch's overloads do not list this form of `to`
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers(remove_duplicate=False))
        self._params = [named[s.name] for s in self.layout.params]
        self._buffers = [named[s.name] for s in self.layout.buffers]
        self._counters = {name: named[name] for name in self.layout.counters}
        # Buffers that no state_dict has: what a model leaves in them must not reach the next one on the runner.
        saved = {id(t) for t in (*self._buffers, *self._counters.values())}
        self._unsaved = [(b, b.clone()) for b in self.module.buffers() if id(b) not in saved]

    @property
    def device(self) -> torch.device:
        return self.layout.device

    @torch.no_grad()
    def load(self, state: ModelState) -> None:
        """Put a model on the runner: its numbers are copied into the module."""
        for tensor, slot in zip(self._params, self.layout.params, strict=True):
            tensor.copy_(slot.view(state.params))
        for tensor, slot in zip(self._buffers, self.layout.buffers, strict=True):
            tensor.copy_(slot.view(state.buffers))
        for name, counter in self._counters.items():
            counter.copy_(state.counters[name])
        for buffer, first in self._unsaved:
            buffer.copy_(first)

    @torch.no_grad()
    def read(self) -> ModelState:
        """Take the model off the runner: a copy of its numbers."""
        counters = {name: t.clone() for name, t in self._counters.items()}
        return ModelState(self._flat(self._params), self._flat(self._buffers), counters)

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=self.layout.dtype, device=self.device)
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def logits(self, batch: Tensor) -> Tensor:
        """Forward pass of one batch: logits [N, classes, …] in the working dtype."""
        batch = batch.to(self.device)
        if batch.is_floating_point():
            batch = batch.to(self.layout.dtype)
        if self.plan.channels_last and batch.ndim == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        with self.plan.autocast(self.device):
            out = self.module(batch)
        if not isinstance(out, Tensor):
            raise ModelError(f"`model` must return one tensor of logits, got {type(out).__name__}")
        if out.ndim < 2 or len(out) != len(batch) or not out.is_floating_point():
            raise ModelError(
                f"`model` must return logits of shape [N, classes, …] with N = {len(batch)}, "
                f"got {out.dtype} of shape {list(out.shape)}"
            )
        if out.shape[1] < 2:
            raise ModelError(
                "`model` returns one logit, of which softmax makes 1 for all inputs: give one for each class"
            )
        return out.to(self.layout.dtype)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that training may change, tied ones once."""
        chosen = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not chosen:
            raise ModelError("`model` has no parameter with requires_grad=True, so it cannot be trained")
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                raise ModelError(f"`model` has sparse gradients in '{name}', which cannot be used: set sparse=False")
        return chosen


def _copy_of(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ModelError(f"`model` cannot be copied ({error}); give a module that copy.deepcopy accepts") from error
