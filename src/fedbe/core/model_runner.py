"""A private copy of a module, into which one model after another is loaded.

Each process has one. Nothing is rebuilt for each model, and the caller's module is never changed.
"""

import copy

import torch
from torch import Tensor, nn

from fedbe.core.compute import Plan
from fedbe.core.state import Layout, ModelState
from fedbe.errors import ModelError, SettingError


class ModelRunner:
    """Runs models of one architecture: load a state, compute logits or train, read the state.

    Args:
        module: The architecture. It is copied in the working dtype of its layout (half precision computes in float32).
        plan: How passes are computed; default `Plan()`.

    Raises:
        ModelError: `module` is not a module, cannot be copied, or has a state that cannot be averaged.
        SettingError: `plan` is not a `Plan`.

    Example:
        >>> runner = ModelRunner(nn.Linear(2, 3))
        >>> runner.load(ModelState(torch.ones(9), torch.empty(0), {}))
        >>> runner.logits(torch.tensor([[1.0, 2.0]])).tolist()
        [[4.0, 4.0, 4.0]]
    """

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
        self._unsaved = self._unsaved_buffers()

    def _unsaved_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers that are not in the `state_dict`, with their first values: no model may leave values to the next."""
        saved = {id(t) for t in (*self._buffers, *self._counters.values())}
        return [(b, b.clone()) for b in self.module.buffers() if id(b) not in saved]

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self.layout.device

    @torch.no_grad()
    def load(self, state: ModelState) -> None:
        """Copy the numbers of a state into the module."""
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
        """A copy of the module's numbers."""
        counters = {name: t.clone() for name, t in self._counters.items()}
        return ModelState(self._flat(self._params), self._flat(self._buffers), counters)

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=self.layout.dtype, device=self.device)
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def logits(self, batch: Tensor) -> Tensor:
        """One forward pass in the current mode of the module.

        Args:
            batch: Inputs [N, …], on any device.

        Returns:
            Logits [N, classes, …] in the working dtype.

        Raises:
            ModelError: The module does not return one tensor of logits for at least two classes.
        """
        batch = batch.to(self.device)
        if batch.is_floating_point():
            batch = batch.to(self.layout.dtype)
        if self.plan.channels_last and batch.ndim == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        with self.plan.autocast(self.device):
            out = self.module(batch)
        return _checked_logits(out, len(batch)).to(self.layout.dtype)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The names and parameters that training may change, tied ones once.

        Raises:
            ModelError: No parameter requires a gradient, or an embedding has sparse gradients.
        """
        trainable = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not trainable:
            raise ModelError("`model` has no parameter with requires_grad=True, so it cannot be trained")
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                raise ModelError(f"`model` has sparse gradients in '{name}', which cannot be used: set sparse=False")
        return trainable


def _copy_of(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ModelError(f"`model` cannot be copied ({error}); give a module that copy.deepcopy accepts") from error


def _checked_logits(out: object, count: int) -> Tensor:
    if not isinstance(out, Tensor):
        raise ModelError(f"`model` must return one tensor of logits, got {type(out).__name__}")
    if out.ndim < 2 or len(out) != count or not out.is_floating_point():
        raise ModelError(
            f"`model` must return logits of shape [N, classes, …] with N = {count}, "
            f"got {out.dtype} of shape {list(out.shape)}"
        )
    if out.shape[1] < 2:
        raise ModelError("`model` returns one logit, whose softmax is always 1: return one for each class")
    return out
