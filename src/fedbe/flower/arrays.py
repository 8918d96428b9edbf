"""Flower's ArrayRecord ⇄ named tensors.

A record from the network is read without numpy.load: its header is parsed within a limit, compared with what the
model has there and with the bytes that came, and only then are the bytes looked at. Nothing is allocated on its word.

bfloat16 has no NumPy form: such tensors travel as float32, which holds every bfloat16 exactly, and are turned back.
What goes beside the model (SCAFFOLD's control variates) lies in the same record under a prefix.
"""

import ast
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedbe.core.state import Layout
from fedbe.errors import StateError

PREFIX = "fedbe/"  # no module's own names begin so
BEGINNINGS = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}  # versions of .npy: bytes of the header's length
MAX_HEADER = 10_000  # bytes of a .npy header; numpy's own limit for strangers' files
Expected = Mapping[str, tuple[torch.Size, torch.dtype]]


def to_record(named: Mapping[str, Tensor], extras: Mapping[str, Mapping[str, Tensor]] | None = None) -> ArrayRecord:
    """A `state_dict`, and vectors beside it by name, as one ArrayRecord.

    >>> sorted(to_record({"w": torch.zeros(2)}, {"control": {"w": torch.ones(2)}}))
    ['fedbe/control/w', 'w']
    """
    flat = dict(named)
    for extra, tensors in (extras or {}).items():
        flat |= {f"{PREFIX}{extra}/{name}": tensor for name, tensor in tensors.items()}
    return ArrayRecord({name: Array(_sendable(tensor)) for name, tensor in flat.items()})


def from_record(record: ArrayRecord, model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` in a record, checked against the model; what lies under prefixes is left out."""
    own = {name: array for name, array in record.items() if not name.startswith(PREFIX)}
    return read(own, expected(Layout(model)), "the record")


def expected(layout: Layout) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every entry of a model's `state_dict`."""
    known = {s.name: (s.shape, s.dtype) for s in (*layout.params, *layout.buffers)} | layout.counters
    return {name: known[layout.aliases.get(name, name)] for name in layout.keys}


def expected_extra(layout: Layout) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The same for something that has one number for each parameter."""
    return {s.name: (s.shape, layout.dtype) for s in layout.params}


def split(record: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """The model's own arrays, and those beside it by the name of the extra."""
    own: dict[str, Array] = {}
    extras: dict[str, dict[str, Array]] = {}
    for key, array in record.items():
        if not key.startswith(PREFIX):
            own[key] = array
            continue
        extra, _, name = key.removeprefix(PREFIX).partition("/")
        extras.setdefault(extra, {})[name] = array
    return own, extras


def read(arrays: Mapping[str, Array], wanted: Expected, what: str) -> dict[str, Tensor]:
    """Tensors of exactly the wanted names, shapes and dtypes, or a StateError that says what is wrong."""
    if missing := [name for name in wanted if name not in arrays]:
        raise StateError(f"{what} does not fit the model: it lacks '{missing[0]}' ({len(missing)} missing in all)")
    if unknown := [name for name in arrays if name not in wanted]:
        raise StateError(f"{what} does not fit the model: it has unknown {unknown[0][:80]!r} ({len(unknown)} in all)")
    return {name: _tensor(arrays[name], shape, dtype, f"{what}: '{name}'") for name, (shape, dtype) in wanted.items()}


def _sendable(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def _tensor(array: Array, shape: torch.Size, dtype: torch.dtype, what: str) -> Tensor:
    carried = torch.float32 if dtype == torch.bfloat16 else dtype
    kind = torch.empty(0, dtype=carried).numpy().dtype
    if array.stype != "numpy.ndarray":
        raise StateError(f"{what} must be a NumPy array, got {array.stype[:40]!r}")
    found_shape, fortran, found_kind, start = _header(array.data, what)
    if found_shape != tuple(shape):
        raise StateError(f"{what} must have shape {list(shape)}, got {list(found_shape[:8])}")
    if found_kind != kind.str:
        raise StateError(f"{what} must be {kind} ('{kind.str}'), got {found_kind[:20]!r}")
    if len(array.data) - start != math.prod(shape) * kind.itemsize:
        raise StateError(f"{what} must have {math.prod(shape) * kind.itemsize} bytes, got {len(array.data) - start}")
    # A copy, because the bytes of a message may not be written to.
    flat = np.frombuffer(array.data, dtype=kind, offset=start).copy()
    shaped = flat.reshape(found_shape, order="F" if fortran else "C")
    return torch.from_numpy(np.ascontiguousarray(shaped).reshape(found_shape)).to(dtype)


def _header(data: bytes, what: str) -> tuple[tuple[int, ...], bool, str, int]:
    """Shape, memory order, kind as it is written there, and where the numbers begin.

    Not by NumPy's own parser: it makes a dtype of what a stranger wrote, and some of them end the process.
    """
    try:
        begin = 8 + BEGINNINGS[data[:8]]
        start = begin + int.from_bytes(data[8:begin], "little")
        if start > min(len(data), MAX_HEADER):
            raise ValueError("a header that is too long")
        said = ast.literal_eval(data[begin:start].decode("latin1"))
        shape, fortran, kind = said.pop("shape"), said.pop("fortran_order"), said.pop("descr")
        fits = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 2**63 for size in shape)
        if said or not fits or not isinstance(fortran, bool) or not isinstance(kind, str):
            raise ValueError("another form")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, KeyError, AttributeError) as error:
        raise StateError(f"{what} has a header that cannot be read") from error
    return shape, fortran, kind, start
