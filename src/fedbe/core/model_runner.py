"""A private copy of a module, into which one model after another is loaded.

Each process has one. Nothing is rebuilt for each model, and the caller's module is never changed.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbe.core.compute import Plan
from fedbe.core.devices import to_device
from fedbe.core.inputs import Batch, Inputs, count_of, map_batch, tensors_of
from fedbe.core.layout import Layout
from fedbe.core.random import preserved_rng
from fedbe.core.state import ModelState
from fedbe.errors import FedBEError, ModelError, ModelWarning, SettingError


class ModelRunner:
    """Runs models of one architecture: load a state, compute logits or train, read the state.

    Args:
        module: The architecture. It is copied in the working dtype of its layout (half precision computes in float32).
        plan: How passes are computed; default `Plan()`.
        output: Which part of the module's output are the logits, a name or a position. Default: a tensor as it is,
            `logits` of a dict or an object (such as a Hugging Face `ModelOutput`), the first entry of a tuple.

    Attributes:
        layout: Which tensor lies where in a flat vector. Its device is that of the given module: states stay there.
        device: Where the module computes: the plan's device, or that of the given module.
        plan: The plan as given.
        threads: How many threads compute the parts of a batch (`backward_in_parts`); None for as many as torch has.
        channels_last: Whether images are computed in channels-last. False if the plan says so, on an MPS device, or if
            the first images showed that the module does not take it.

    Raises:
        ModelError: `module` is not a module, cannot be copied, or has a state that cannot be averaged.
        SettingError: `plan` is not a `Plan`.

    Example:
        >>> runner = ModelRunner(nn.Linear(2, 3))
        >>> runner.load(ModelState(torch.ones(9), torch.empty(0), {}))
        >>> runner.logits(torch.tensor([[1.0, 2.0]])).tolist()
        [[4.0, 4.0, 4.0]]
    """

    def __init__(self, module: nn.Module, plan: Plan | None = None, output: str | int | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise ModelError(f"`model` must be a torch.nn.Module, got {type(module).__name__}")
        if not isinstance(plan, Plan | None):
            raise SettingError(f"`plan` must be a fedbe.Plan, got {plan!r}")
        self.plan, self._output = plan or Plan(), output
        self.threads: int | None = None
        self._task_is_checked = False
        self.layout = Layout(module)
        self.device = self.plan.compute_device(self.layout.device)
        self.module = _copy_of(module).to(self.device, self.layout.dtype)
        # Torch's MPS convolutions are written for the plain layout.
        self.channels_last = self.plan.channels_last and self.device.type != "mps"
        self._format_chosen = not self.channels_last
        if self.channels_last:
            _set_memory_format(self.module, torch.channels_last)
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers(remove_duplicate=False))
        self._params = [named[s.name] for s in self.layout.params]
        self._buffers = [named[s.name] for s in self.layout.buffers]
        self._counters = {name: named[name] for name in self.layout.counters}
        self._unsaved = self._unsaved_buffers()

    def _unsaved_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers that are not in the `state_dict`, with their first values: no model may leave values to the next."""
        saved = {id(t) for t in (*self._buffers, *self._counters.values())}
        return [(b, b.clone()) for b in self.module.buffers() if id(b) not in saved]

    @torch.no_grad()
    def load(self, state: ModelState) -> None:
        """Copy the numbers of a state into the module."""
        params, buffers = to_device(state.params, self.device), to_device(state.buffers, self.device)  # whole vectors
        for tensor, slot in zip(self._params, self.layout.params, strict=True):
            tensor.copy_(slot.view(params))
        for tensor, slot in zip(self._buffers, self.layout.buffers, strict=True):
            tensor.copy_(slot.view(buffers))
        if self._counters:  # as one vector: each copy to a device costs the same, however small
            joined = torch.cat([state.counters[name].reshape(-1).long() for name in self._counters])
            for counter, numbers in zip(self._counters.values(), self._split(joined.to(self.device)), strict=True):
                counter.copy_(numbers)
        for buffer, first in self._unsaved:
            buffer.copy_(first)

    @torch.no_grad()
    def read(self) -> ModelState:
        """A copy of the module's numbers, on the layout's device."""
        counters: dict[str, Tensor] = {}
        if self._counters:
            joined = torch.cat([counter.reshape(-1).long() for counter in self._counters.values()])
            for (name, counter), numbers in zip(
                self._counters.items(), self._split(joined.to(self.layout.device)), strict=True
            ):
                counters[name] = numbers.to(counter.dtype, copy=True)
        return ModelState(self._flat(self._params), self._flat(self._buffers), counters)

    def _split(self, joined: Tensor) -> list[Tensor]:
        """The counters in one vector, each in its shape."""
        counters = self._counters.values()
        parts = torch.split(joined, [counter.numel() for counter in counters])
        return [part.view(counter.shape) for part, counter in zip(parts, counters, strict=True)]

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=self.layout.dtype, device=self.layout.device)
        return torch.cat([t.detach().reshape(-1) for t in tensors]).to(self.layout.device)

    def logits(self, batch: Batch) -> Tensor:
        """One forward pass in the current mode of the module.

        Args:
            batch: Inputs [N, …], on any device; several tensors in a tuple (positional arguments of the module) or a
                dict (arguments by name).

        Returns:
            Logits [N, classes, …] in the working dtype.

        Raises:
            ModelError: The module does not return logits for at least two classes.
        """
        batch = map_batch(self._placed, batch)
        self.choose_memory_format(batch)
        batch = map_batch(self._formatted, batch)
        with self.plan.autocast(self.device):
            out = call_module(self.module, batch)
        logits = _checked_logits(select_logits(out, self._output), count_of(batch))
        if not self._task_is_checked:
            _check_task(logits)
            self._task_is_checked = True
        return logits.to(self.layout.dtype)

    def _placed(self, tensor: Tensor) -> Tensor:
        """A tensor on the module's device, in the working dtype if it is floating-point."""
        return to_device(tensor.to(self.layout.dtype) if tensor.is_floating_point() else tensor, self.device)

    def _formatted(self, tensor: Tensor) -> Tensor:
        """Images in the memory layout of the module; another tensor as it is."""
        if tensor.ndim != 4:
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last) if self.channels_last else plain_layout(tensor)

    def choose_memory_format(self, batch: Batch) -> None:
        """Decide once, on the first images, whether the module computes in channels-last.

        A module that calls `x.view(…)` after a convolution runs in plain torch, but not in channels-last: it then
        computes in the plain layout. If the module fails in both, nothing is decided: its next pass raises the error.

        Args:
            batch: Inputs, of which the first is used. Inputs without a tensor [N, C, H, W] decide nothing.
        """
        if self._format_chosen or all(tensor.ndim != 4 for tensor in tensors_of(batch)):
            return
        first = map_batch(lambda tensor: self._placed(tensor[:1]), batch)
        works = next((form for form in (True, False) if self._runs(first, channels_last=form)), None)
        self._format_chosen = works is not None
        if works is False:
            self.channels_last = False
            _set_memory_format(self.module, torch.contiguous_format)

    def _runs(self, first: Batch, *, channels_last: bool) -> bool:
        """Whether a copy of the module trains and predicts in this layout. The module and torch's RNG do not change."""
        form = torch.channels_last if channels_last else torch.contiguous_format
        module = _copy_of(self.module)
        _set_memory_format(module, form)

        def twice(tensor: Tensor) -> Tensor:  # BatchNorm cannot train on one
            pair = torch.cat([tensor, tensor])
            return pair.clone(memory_format=form) if pair.ndim == 4 else pair

        pair = map_batch(twice, first)
        try:
            with preserved_rng(self.device), torch.enable_grad():
                for mode in (True, False):
                    module.train(mode)
                    with self.plan.autocast(self.device):
                        out = select_logits(call_module(module, pair), self._output)
                    if isinstance(out, Tensor) and out.requires_grad:
                        out.sum().backward()  # type: ignore[no-untyped-call]
        except Exception:
            return False
        return True

    def twin(self, *, shares_tensors: bool = True) -> "ModelRunner":
        """A runner for another thread: it has a copy of the module, in its mode, with the same parameters and buffers.

        Args:
            shares_tensors: Whether these are the same tensors, or copies of them.

        Raises:
            ModelError: The module cannot be copied as it is now.
        """
        tensors = (*self.module.parameters(), *self.module.buffers()) if shares_tensors else ()
        twin = copy.copy(self)
        twin.module = _copy_of(self.module, {id(tensor): tensor for tensor in tensors})
        return twin

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


def plain_layout(images: Tensor) -> Tensor:
    """A copy of images [N, C, H, W] in torch's usual memory layout.

    `contiguous()` is not enough: images of one channel count as contiguous in both layouts, and convolutions follow
    their strides.
    """
    return images.clone(memory_format=torch.contiguous_format)


def _set_memory_format(module: nn.Module, form: torch.memory_format) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=form)  # the tensor stays the same object


def _copy_of(module: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    try:
        return copy.deepcopy(module, shared)
    except Exception as error:
        raise ModelError(f"`model` cannot be copied ({error}); give a module that copy.deepcopy accepts") from error


def try_model(runner: ModelRunner, inputs: Inputs, what: str = "`unlabeled`") -> int:
    """Run the first two inputs through the model, to refuse now what would fail only after all clients have trained.

    Returns:
        The number of classes.

    Raises:
        SettingError: The model fails on them.
        ModelError: Its output does not consist of logits.
    """
    runner.module.eval()
    few = inputs.batch(torch.arange(min(2, len(inputs))))
    try:
        with torch.enable_grad():  # `_check_task` reads the last operation
            return runner.logits(few).shape[1]
    except FedBEError:
        raise
    except Exception as error:
        raise SettingError(f"`model` cannot run on {what}: {error}") from error


def call_module(module: nn.Module, batch: Batch) -> object:
    """The output of a module: a tuple gives positional arguments, a dict arguments by name."""
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)


def select_logits(out: object, output: str | int | None = None) -> Any:
    """The part of a model's output that `output` names; see `ModelRunner`."""
    if output is None:
        if isinstance(out, Tensor):
            return out
        output = "logits" if isinstance(out, Mapping) or hasattr(out, "logits") else 0
    try:
        if isinstance(output, str) and not isinstance(out, Mapping):
            return getattr(out, output)
        return out[output]  # type: ignore[index]
    except (KeyError, IndexError, TypeError, AttributeError):
        has = f" with {', '.join(map(str, out))}" if isinstance(out, Mapping) else ""
        raise ModelError(
            f"`model` must return logits, but its output ({type(out).__name__}{has}) has no {output!r}: "
            "name the logits with `output`"
        ) from None


def _checked_logits(out: object, count: int) -> Tensor:
    if not isinstance(out, Tensor):
        raise ModelError(f"`model` must return one tensor of logits, got {type(out).__name__}")
    if out.ndim < 2 or len(out) != count or not out.is_floating_point():
        raise ModelError(
            f"`model` must return logits of shape [N, classes, …] with N = {count} (single-label classification), "
            f"got {out.dtype} of shape {list(out.shape)}"
        )
    if out.shape[1] < 2:
        raise ModelError(
            "`model` returns one number for each input, but fedbe is for single-label classification: "
            "return one logit for each class, at least two"
        )
    return out


def _check_task(out: Tensor) -> None:
    """Refuse the outputs of a sigmoid; warn if the outputs are probabilities already."""
    if out.grad_fn is not None and out.grad_fn.name().startswith("Sigmoid"):
        raise ModelError(
            "`model` ends in a sigmoid (multi-label), but fedbe is for single-label classification: "
            "return logits, of which one class is right"
        )
    values = out.detach()
    if bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            "`model` returns probabilities (its outputs sum to 1), and fedbe applies the softmax itself: "
            "remove the model's last softmax",
            ModelWarning,
            stacklevel=3,
        )
