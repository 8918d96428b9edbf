"""Which tensor of a model lies where in its flat vectors.

A `Layout` is made once from a module. It packs a `state_dict` into a `ModelState` and unpacks it under the same names.
Tensors are matched by name only when they are packed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbe.core.compute import one_thread
from fedbe.core.entries import frozen_parameters, list_entries, tied_names
from fedbe.core.state import FragmentedState, ModelState
from fedbe.errors import StateError

PLAIN_TENSORS = (Tensor, nn.Parameter)  # code of a subclass would run in every operation


@dataclass(frozen=True)
class Slot:
    """The position of one named tensor in a flat vector: elements `start` to `stop`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int

    def view(self, vector: Tensor) -> Tensor:
        """The tensor as a view of the vector, in its shape."""
        return vector[self.start : self.stop].view(self.shape)


class Layout:
    """Which tensor of a model lies where in a flat vector.

    Args:
        source: A module, or a plain `state_dict`. A `state_dict` does not tell parameters from buffers, so all of its
            floating-point tensors count as parameters, and tied weights count as separate ones.

    If some parameters of a module have requires_grad=False and others not (LoRA, a frozen backbone), the frozen ones
    are not part of the layout: they are never sent, averaged or sampled.

    Attributes:
        keys: The names of the `state_dict`, in its order, without frozen parameters.
        all_keys: The same with them.
        frozen: The frozen parameters by name; empty if all parameters are frozen or none.
        params: The slots of the parameters, tied ones once.
        buffers: The slots of the floating-point buffers.
        counters: Shape and dtype of the integer and boolean buffers, by name.
        aliases: The name of the tied tensor that a further name stands for.
        dtype: The working dtype: float64 if any tensor has it, otherwise float32.
        device: The device of all tensors.

    Raises:
        ModelError: The module cannot be represented: complex, lazy or meta tensors, no parameters, several devices.
        StateError: The same for a `state_dict`.

    Example:
        >>> import fedbe, torch
        >>> layout = fedbe.Layout(torch.nn.Linear(2, 1))
        >>> state = layout.pack({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])})
        >>> state.params
        tensor([1., 2., 3.])
        >>> layout.unpack(state)["weight"]
        tensor([[1., 2.]])
    """

    def __init__(self, source: nn.Module | Mapping[str, Tensor]) -> None:
        entries, params = list_entries(source)
        self.device = next(iter(entries.values())).device
        self.dtype = torch.float64 if torch.float64 in {t.dtype for t in entries.values()} else torch.float32
        self.all_keys = tuple(entries)
        self.frozen = frozen_parameters(entries)
        entries, params = ({n: t for n, t in part.items() if n not in self.frozen} for part in (entries, params))
        self.aliases = tied_names(entries, params) if isinstance(source, nn.Module) else {}
        rest = {n: t for n, t in entries.items() if n not in params and n not in self.aliases}
        self.keys: tuple[str, ...] = tuple(entries)
        self.params = _slots(params)
        self.buffers = _slots({n: t for n, t in rest.items() if t.is_floating_point()})
        self.counters = {n: (t.shape, t.dtype) for n, t in rest.items() if not t.is_floating_point()}

    @property
    def size(self) -> int:
        """P: the number of parameters, tied ones counted once, frozen ones not."""
        return _total(self.params)

    @property
    def buffer_size(self) -> int:
        """B: the number of floating-point buffer elements."""
        return _total(self.buffers)

    def pack(self, named: Mapping[str, Tensor], what: str = "the state") -> ModelState:
        """Copy a `state_dict` into flat vectors.

        Args:
            named: Tensors with the keys, shapes and dtypes of this layout. They are not changed. Frozen parameters may
                be among them.
            what: How an error message calls `named`.

        Raises:
            StateError: A key, shape or dtype differs, the copies of a tied tensor differ, or a frozen parameter has
                other values than the module's.
        """
        return self.gather(named, what).clone()

    def gather(self, named: Mapping[str, Tensor], what: str = "the state") -> FragmentedState:
        """`pack` without a copy: the state shares the memory of `named`, which must not be changed any more."""
        if not isinstance(named, Mapping):
            raise StateError(f"{what} must be a mapping of names to tensors, got {type(named).__name__}")
        self._check_keys(named, what)
        counters = {}
        for name, (shape, dtype) in self.counters.items():
            counters[name] = check_tensor(named[name], name, shape, dtype, what).detach().to(self.device)
        params, buffers = (self._vectors(named, slots, what) for slots in (self.params, self.buffers))
        self.check_fixed(named, what)
        return FragmentedState(params, buffers, counters)

    def check_fixed(self, named: Mapping[str, Tensor], what: str = "the state") -> None:
        """Raise a StateError if the copies of a tied tensor differ, or a frozen parameter is not the module's."""
        for name, source in self.aliases.items():
            _check_tied(named, name, source, what)
        for name in self.frozen.keys() & named.keys():
            self._check_frozen(named[name], name, what)

    def _check_frozen(self, tensor: object, name: str, what: str) -> None:
        expected = self.frozen[name]
        checked = check_tensor(tensor, name, expected.shape, expected.dtype, what)
        if not torch.equal(checked.detach().to(expected.device), expected):
            raise StateError(f"{what}: the frozen '{name}' differs from `model`'s: build both from the same weights")

    def packed(self, state: ModelState | Mapping[str, Tensor], what: str = "the state") -> ModelState:
        """A packed state as it is, after a check; a `state_dict` packed."""
        if not isinstance(state, ModelState):
            return self.pack(state, what)
        if not isinstance(state, FragmentedState):  # `gather` has checked those
            self.check(state, what)
        return state

    def check(self, state: ModelState, what: str = "the state") -> None:
        """Raise a StateError unless a packed state fits this layout."""
        check_tensor(state.params, "params", torch.Size([self.size]), self.dtype, what)
        check_tensor(state.buffers, "buffers", torch.Size([self.buffer_size]), self.dtype, what)
        if state.counters.keys() != self.counters.keys():
            raise StateError(f"{what} has the counters {sorted(state.counters)}, expected {sorted(self.counters)}")
        for name, (shape, dtype) in self.counters.items():
            check_tensor(state.counters[name], name, shape, dtype, what)

    def unpack(self, state: ModelState) -> dict[str, Tensor]:
        """A `state_dict` with new tensors: the names, order, shapes and dtypes of the layout, tied names included."""
        named = {n: t.clone() for n, t in state.counters.items()}
        with one_thread():
            for slots, vector in ((self.params, state.params), (self.buffers, state.buffers)):
                named |= {s.name: s.view(vector).to(s.dtype, copy=True) for s in slots}
        return {name: named[self.aliases.get(name, name)] for name in self.keys}

    def with_frozen(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A complete `state_dict`: the named tensors, and copies of the frozen parameters."""
        return {name: named[name] if name in named else self.frozen[name].clone() for name in self.all_keys}

    def pack_params(self, named: Mapping[str, Tensor] | Tensor, what: str) -> Tensor:
        """A vector [P] from named tensors with the shapes of the parameters, such as SCAFFOLD's control variates."""
        if isinstance(named, Tensor):
            return self.check_vector(named, self.size, what)
        if not isinstance(named, Mapping):
            raise StateError(f"{what} must be a tensor or a mapping of names to tensors, got {type(named).__name__}")
        missing = [s.name for s in self.params if s.name not in named]
        if missing:
            raise StateError(f"{what} lacks {_some(missing)}")
        tensors = [self._check_real(named[s.name], f"{what}: '{s.name}'", s.shape) for s in self.params]
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def check_vector(self, vector: object, size: int, what: str) -> Tensor:
        """A vector of `size` floating-point numbers on the layout's device and in its dtype, or a StateError."""
        return self._check_real(vector, what, torch.Size([size]))

    def unpack_params(self, vector: Tensor) -> dict[str, Tensor]:
        """The named tensors of a vector [P], as views of it."""
        return {s.name: s.view(vector) for s in self.params}

    def _vectors(self, named: Mapping[str, Tensor], slots: Sequence[Slot], what: str) -> list[Tensor]:
        checked = (check_tensor(named[s.name], s.name, s.shape, s.dtype, what) for s in slots)
        vectors = [tensor.detach().to(self.device, self.dtype).reshape(-1) for tensor in checked]
        return vectors or [torch.empty(0, dtype=self.dtype, device=self.device)]

    def _check_real(self, tensor: object, what: str, shape: torch.Size) -> Tensor:
        checked = _check_dense(tensor, what, shape)
        if not checked.is_floating_point():
            raise StateError(f"{what} must hold floating-point numbers, got {checked.dtype}")
        return checked.detach().to(self.device, self.dtype)

    def _check_keys(self, named: Mapping[str, Tensor], what: str) -> None:
        missing = [k for k in self.keys if k not in named]
        known = {*self.keys, *self.frozen}
        extra = [str(k) for k in named if k not in known]
        problems = [f"lacks {_some(missing)}"] if missing else []
        problems += [f"has unknown {_some(extra)}"] if extra else []
        if problems:
            raise StateError(f"{what} does not fit the model: it {' and '.join(problems)}")


def _check_tied(named: Mapping[str, Tensor], name: str, source: str, what: str) -> None:
    a, b = named[name], named[source]
    check_tensor(a, name, b.shape, b.dtype, what)
    # Two NaNs count as equal here: the guard reports NaN with a better message.
    if a is not b and not bool(((a == b) | ((a != a) & (b != b))).all()):
        raise StateError(f"{what}: '{name}' and '{source}' are one tied tensor but differ")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{n}'" for n in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def check_tensor(tensor: object, name: str, shape: torch.Size, dtype: torch.dtype, what: str) -> Tensor:
    """The tensor if it is a plain, dense one of this shape and dtype, or a StateError."""
    checked = _check_dense(tensor, f"{what}: '{name}'", shape)
    if checked.dtype != dtype:
        raise StateError(f"{what}: '{name}' must be {dtype}, got {checked.dtype}")
    return checked


def _check_dense(tensor: object, what: str, shape: torch.Size) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise StateError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if type(tensor) not in PLAIN_TENSORS:
        raise StateError(f"{what} must be a plain tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise StateError(f"{what} must be a dense tensor with data")
    if tensor.shape != shape:
        raise StateError(f"{what} must have shape {list(shape)}, got {list(tensor.shape)}")
    return tensor


def _slots(tensors: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    slots, start = [], 0
    for name, tensor in tensors.items():
        slots.append(Slot(name, tensor.shape, tensor.dtype, start, start + tensor.numel()))
        start += tensor.numel()
    return tuple(slots)


def _total(slots: Sequence[Slot]) -> int:
    return slots[-1].stop if slots else 0
