"""Flower's ArrayRecord ⇄ named tensors.

A record from the network is read without numpy.load: its header is parsed within a limit, compared with what the
model has there and with the bytes that came, and only then are the bytes looked at. Nothing is allocated on its word.

bfloat16 has no NumPy form: such tensors travel as float32, which holds every bfloat16 exactly, and are turned back.
What goes beside the model (SCAFFOLD's control variates) lies in the same record under a prefix.
"""

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedbe.errors import StateError
from fedbe.states import Layout

PREFIX = "fedbe/"  # no module's own names begin so
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
        raise StateError(f"{what} does not fit the model: it has unknown '{unknown[0]}' ({len(unknown)} in all)")
    return {name: _tensor(arrays[name], shape, dtype, f"{what}: '{name}'") for name, (shape, dtype) in wanted.items()}


def _sendable(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def _tensor(array: Array, shape: torch.Size, dtype: torch.dtype, what: str) -> Tensor:
    carried = torch.float32 if dtype == torch.bfloat16 else dtype
    kind = torch.empty(0, dtype=carried).numpy().dtype
    if array.stype != "numpy.ndarray":
        raise StateError(f"{what} must be a NumPy array, got '{array.stype[:40]}'")
    found_shape, fortran, found_kind, start = _header(array.data, what)
    if found_shape != tuple(shape):
        raise StateError(f"{what} must have shape {list(shape)}, got {list(found_shape[:8])}")
    if found_kind != kind:
        raise StateError(f"{what} must be {kind}, got {found_kind}")
    if len(array.data) - start != math.prod(shape) * kind.itemsize:
        raise StateError(f"{what} must have {math.prod(shape) * kind.itemsize} bytes, got {len(array.data) - start}")
    # A copy, because the bytes of a message may not be written to.
    flat = np.frombuffer(array.data, dtype=kind, offset=start).copy()
    shaped = flat.reshape(found_shape, order="F" if fortran else "C")
    return torch.from_numpy(np.ascontiguousarray(shaped).reshape(found_shape)).to(dtype)


def _header(data: bytes, what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}")
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, kind = parse(stream, max_header_size=MAX_HEADER)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise StateError(f"{what} has a header that cannot be read") from error
    return shape, fortran, kind, stream.tell()
