"""An accelerator that computes on the CPU, but is as strict as CUDA: for machines without one.

A tensor of the device "emu" wraps a tensor of the CPU. The device

- refuses operations on tensors of two devices, except for a single number of the host and for indices, as CUDA does;
- has its own generator, and refuses another device's;
- counts copies to the device, copies from it, and how often the host waits for a number;
- can run out of memory.

The same kernels run on the same numbers, so the results must have the bits of the CPU.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "emu"
COUNT = 2
CPU = torch.device("cpu")
COPIES = ("aten::_to_copy", "aten::copy_", "aten::copy")
INDEXED = ("aten::index.Tensor", "aten::index_put_", "aten::index_put")  # take indices of the host
WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::is_nonzero")


class EmulatedTensor(torch.Tensor):
    """A tensor on the device; `held` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> "EmulatedTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=device, requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor, device: torch.device) -> None:  # noqa: ARG002
        self.held = inner

    def __repr__(self) -> str:
        return f"{self.held!r} on {self.device}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].held = args[1].held
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@dataclass
class Counts:
    """What crossed the border between host and device."""

    to_device: int = 0
    from_device: int = 0
    numbers_to_device: int = 0  # the elements of the tensors that were copied there
    waits: int = 0  # the host read a number, or a size that depends on numbers

    @property
    def stops(self) -> int:
        """How often the host had to wait for the device."""
        return self.from_device + self.waits


@dataclass
class Emulator:
    """The state of all emulated devices."""

    counts: Counts = field(default_factory=Counts)
    memory_ends_in: int | None = None  # operations
    full: Exception = field(default_factory=lambda: torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB"))
    generators: list[torch.Generator] = field(default_factory=lambda: [torch.Generator() for _ in range(COUNT)])
    used: set[int] = field(default_factory=set)  # the numbers of devices that computed something

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count from zero within a block."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def spend_memory(self) -> None:
        # Not in a backward pass: torch runs it in a thread that no Python error may leave.
        if self.memory_ends_in is not None and threading.current_thread() is threading.main_thread():
            self.memory_ends_in -= 1
            if self.memory_ends_in < 0:
                raise self.full


EMULATOR = Emulator()


def _is_ours(device: torch.device | None) -> bool:
    return device is not None and torch.device(device).type == NAME


def _inner(value: Any) -> Any:
    if isinstance(value, EmulatedTensor):
        return value.held
    return CPU if isinstance(value, torch.device) and value.type == NAME else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.name().removesuffix(".default")
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    ours = [t for t in tensors if isinstance(t, EmulatedTensor)]
    target = kwargs.get("device")
    if name.split(".")[0] in COPIES:
        return _copy(func, name, args, kwargs)
    if not ours and not _is_ours(target):
        return func(*args, **kwargs)
    _check_devices(name, tensors, ours)
    EMULATOR.spend_memory()
    if name.split(".")[0] in WAITS or _has_mask(name, args):
        EMULATOR.counts.waits += 1
    where = ours[0].device if ours else torch.device(target)
    where = torch.device(NAME, where.index or 0)
    EMULATOR.used.add(where.index)
    with _own_random_numbers(name, func, kwargs, where):
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func._schema.is_mutable:
        return _mutated(args, kwargs, result, where)
    return tree_map(lambda x: EmulatedTensor(x, where) if isinstance(x, torch.Tensor) else x, result)


def _has_mask(name: str, args: Any) -> bool:
    """Whether an operation turns a mask of the device into indices: then the host waits for their number."""
    if not name.startswith(INDEXED):
        return False
    masks = [t for t in tree_leaves(args[1]) if isinstance(t, EmulatedTensor) and t.dtype in (torch.bool, torch.uint8)]
    # A plain number fills the mask without indices. (For CUDA torch keeps it on the host; here it is on the device.)
    filled = name.startswith("aten::index_put") and not args[2].ndim
    return bool(masks) and not filled


def _mutated(args: Any, kwargs: Any, result: Any, where: torch.device) -> Any:
    """An operation in place returns the tensor that it changed, not another one for the same numbers."""
    changed = [t for t in tree_leaves((args, kwargs)) if isinstance(t, EmulatedTensor)]
    by_inner = {id(t.held): t for t in changed}

    def back(x: Any) -> Any:
        return by_inner.get(id(x)) if id(x) in by_inner else EmulatedTensor(x, where)

    return tree_map(lambda x: back(x) if isinstance(x, torch.Tensor) else x, result)


@contextmanager
def _own_random_numbers(name: str, func: Any, kwargs: dict[str, Any], where: torch.device) -> Iterator[None]:
    """Let an operation draw from the device's generator instead of the CPU's."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: expected a generator of {where}, got one of the CPU")
    generator, before = EMULATOR.generators[where.index], torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    yield
    generator.set_state(torch.get_rng_state())
    torch.set_rng_state(before)


def _check_devices(name: str, tensors: list[torch.Tensor], ours: list[EmulatedTensor]) -> None:
    if len({t.device for t in ours}) > 1:
        raise RuntimeError(f"{name}: tensors on several devices: {sorted({str(t.device) for t in ours})}")
    others = [t for t in tensors if not isinstance(t, EmulatedTensor)]
    if others and name.startswith(INDEXED) and isinstance(tensors[0], EmulatedTensor):
        EMULATOR.counts.to_device += len(others)
        EMULATOR.counts.waits += 1  # torch copies such indices while the host waits
        return
    for tensor in others if ours else ():
        if tensor.ndim:
            raise RuntimeError(f"{name}: expected all tensors on {ours[0].device}, got one of the CPU {tensor.shape}")


def _copy(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copies are the only operations between devices."""
    in_place = name == "aten::copy_"
    source = args[1] if in_place else args[0]
    given = args[0].device if in_place else kwargs.get("device", source.device)
    target = torch.device(given if given is not None else source.device)
    if source.device.type != target.type:
        if target.type == NAME:
            EMULATOR.counts.to_device += 1
            EMULATOR.counts.numbers_to_device += source.numel()
        else:
            EMULATOR.counts.from_device += 1
    if target.type == NAME or source.device.type == NAME:
        EMULATOR.spend_memory()
    result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if in_place:
        return args[0]
    return EmulatedTensor(result, torch.device(NAME, target.index or 0)) if target.type == NAME else result


class EmulatedMode(TorchDispatchMode):
    """Within it, `torch.zeros(3, device="emu")` and `tensor.to("emu")` work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Module:
    """torch.emu, with the functions of torch.cuda that a program uses."""

    def __init__(self) -> None:
        self._current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return self._current

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._current = self._current, torch.device(device).index or 0
        try:
            yield
        finally:
            self._current = before

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        EMULATOR.generators[self._current].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in EMULATOR.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return EMULATOR.generators[device.index or 0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        EMULATOR.generators[device.index or 0].set_state(state)


def register() -> None:
    """Make the device known to torch, once in a process, before its first backward pass."""
    if not hasattr(torch, NAME):
        torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
