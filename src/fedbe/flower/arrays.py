"""Convert between Flower's ArrayRecord and named tensors.

Records arrive from the network, so they are read without numpy.load. The header is parsed within a size limit and
compared with the model and with the number of bytes received. Only then are the bytes read. No memory is allocated
on the word of a header.

NumPy has no bfloat16: such tensors travel as float32, which represents every bfloat16 exactly, and are cast back.
Extras (SCAFFOLD's control variates) travel in the same record under a prefix.
"""

import ast
import math
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedbe.core.layout import Layout
from fedbe.core.state import ModelState
from fedbe.errors import StateError

PREFIX = "fedbe/"  # no module uses names that start like this
LENGTH_BYTES = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}  # .npy version: bytes of the header's length field
MAX_HEADER = 10_000  # bytes of a .npy header; numpy's own limit for untrusted files
ArraySpec = Mapping[str, tuple[torch.Size, torch.dtype]]  # name -> shape and dtype


def to_record(state: Mapping[str, Tensor], extras: Mapping[str, Mapping[str, Tensor]] | None = None) -> ArrayRecord:
    """Put a `state_dict` and, under a prefix, named extras into one ArrayRecord.

    Use it instead of `ArrayRecord(state_dict)` where the model may be bfloat16, which Flower refuses.

    Args:
        state: the `state_dict` of a module.
        extras: name of the extra -> one tensor for each parameter name. Default: none.

    Returns:
        A record that `from_record` reads.

    Example:
        >>> sorted(to_record({"w": torch.zeros(2)}, {"control": {"w": torch.ones(2)}}))
        ['fedbe/control/w', 'w']
    """
    flat = dict(state)
    for extra, tensors in (extras or {}).items():
        flat |= {f"{PREFIX}{extra}/{name}": tensor for name, tensor in tensors.items()}
    return ArrayRecord({name: Array(_to_numpy(tensor)) for name, tensor in flat.items()})


def from_record(record: ArrayRecord, model: nn.Module) -> dict[str, Tensor]:
    """Read the `state_dict` of a model from a record; extras are left out, frozen parameters are the model's own.

    Args:
        record: a record from `to_record`, or one that Flower made of a `state_dict`.
        model: a module with the expected names, shapes and dtypes. It is not changed.

    Returns:
        New tensors for `model.load_state_dict`.

    Raises:
        StateError: a name is missing or unknown, or an array has another shape or dtype or cannot be read.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> state = from_record(to_record(model.state_dict()), model)
        >>> torch.equal(state["weight"], model.weight)
        True
    """
    layout = Layout(model)
    return layout.with_frozen(read_state(split_extras(record)[0], layout, "the record"))


def pack_state(arrays: Mapping[str, Array], layout: Layout, what: str) -> ModelState:
    """The model in a record. StateError if it does not fit the layout; `what` names it.

    It is `layout.pack(read_state(…))` without copies: the state shares the bytes of the message.
    """
    arrays = _by_name(arrays, layout)
    return layout.gather(view_arrays(arrays, _complete_spec(arrays, layout), what), what)


def pack_params(arrays: Mapping[str, Array], layout: Layout, what: str) -> Tensor:
    """A vector [P] from arrays that have one number for each parameter, such as SCAFFOLD's control variates."""
    return layout.pack_params(view_arrays(arrays, params_spec(layout), what), what)


def is_positional(arrays: Mapping[str, Array], layout: Layout) -> bool:
    """Whether a record was made of a plain list of arrays: its names are "0", "1", … in the order of the state."""
    return len(arrays) in {len(layout.keys), len(layout.all_keys)} and all(n == str(i) for i, n in enumerate(arrays))


def with_positions(record: ArrayRecord) -> ArrayRecord:
    """The record as Flower makes it of a plain list of arrays."""
    return ArrayRecord({str(i): array for i, array in enumerate(record.values())})


def with_frozen(record: ArrayRecord, frozen: Mapping[str, Array], layout: Layout) -> ArrayRecord:
    """The record with frozen parameters where a complete `state_dict` has them; the record itself if there are none."""
    if not frozen:
        return record
    every = {**record, **frozen}
    return ArrayRecord({name: every[name] for name in layout.all_keys if name in every})


def frozen_arrays(record: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
    """The frozen parameters that a record has."""
    return {name: array for name, array in _by_name(record, layout).items() if name in layout.frozen}


def _by_name(arrays: Mapping[str, Array], layout: Layout) -> Mapping[str, Array]:
    names = layout.keys if len(arrays) == len(layout.keys) else layout.all_keys
    return dict(zip(names, arrays.values(), strict=True)) if is_positional(arrays, layout) else arrays


def state_spec(layout: Layout) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every entry of a model's `state_dict`."""
    by_name = {s.name: (s.shape, s.dtype) for s in (*layout.params, *layout.buffers)} | layout.counters
    return {name: by_name[layout.aliases.get(name, name)] for name in layout.keys}


def read_state(arrays: Mapping[str, Array], layout: Layout, what: str) -> dict[str, Tensor]:
    """The tensors of a model that travel. StateError if they do not fit the layout; `what` names them.

    Flower's own clients send complete states. Frozen parameters among them must be the layout's; they are left out.
    """
    arrays = _by_name(arrays, layout)
    tensors = read_arrays(arrays, _complete_spec(arrays, layout), what)
    layout.check_fixed(tensors, what)
    return {name: tensors[name] for name in layout.keys}


def _complete_spec(arrays: Mapping[str, Array], layout: Layout) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The spec of a state, with the frozen parameters that the arrays have."""
    return state_spec(layout) | {n: (t.shape, t.dtype) for n, t in layout.frozen.items() if n in arrays}


def params_spec(layout: Layout) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of an extra that has one number for each parameter."""
    return {s.name: (s.shape, layout.dtype) for s in layout.params}


def split_extras(record: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Split a record into the model's arrays and the extras by name."""
    model: dict[str, Array] = {}
    extras: dict[str, dict[str, Array]] = {}
    for key, array in record.items():
        if not key.startswith(PREFIX):
            model[key] = array
            continue
        extra, _, name = key.removeprefix(PREFIX).partition("/")
        extras.setdefault(extra, {})[name] = array
    return model, extras


def read_arrays(arrays: Mapping[str, Array], spec: ArraySpec, what: str) -> dict[str, Tensor]:
    """Tensors of exactly the names, shapes and dtypes in `spec`. StateError if the arrays differ; `what` names them."""
    return {n: t.clone(memory_format=torch.contiguous_format) for n, t in view_arrays(arrays, spec, what).items()}


def view_arrays(arrays: Mapping[str, Array], spec: ArraySpec, what: str) -> dict[str, Tensor]:
    """As `read_arrays`, without copies: the tensors share the bytes of the message and must not be changed."""
    check_names(arrays, spec, what)
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing writes to it
        for name, (shape, dtype) in spec.items():
            tensors[name] = torch.from_numpy(_read_array(arrays[name], shape, dtype, f"{what}: '{name}'")).to(dtype)
    return tensors


def check_names(arrays: Mapping[str, Array], spec: ArraySpec, what: str) -> None:
    """StateError unless the arrays have exactly the names in `spec`."""
    if missing := [name for name in spec if name not in arrays]:
        raise StateError(f"{what} does not fit the model: '{missing[0]}' is missing ({len(missing)} in total)")
    if unknown := [name for name in arrays if name not in spec]:
        raise StateError(f"{what} does not fit the model: unknown name {unknown[0][:80]!r} ({len(unknown)} in total)")


def _to_numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def _read_array(array: Array, shape: torch.Size, dtype: torch.dtype, what: str) -> Any:
    """The numbers as a NumPy array, a read-only view of the message."""
    sent_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    numpy_dtype = torch.empty(0, dtype=sent_dtype).numpy().dtype
    if array.stype != "numpy.ndarray":
        raise StateError(f"{what} must be a NumPy array, got {array.stype[:40]!r}")
    received_shape, fortran_order, descr, start = _parse_header(array.data, what)
    if received_shape != tuple(shape):
        raise StateError(f"{what} must have shape {list(shape)}, got {list(received_shape[:8])}")
    if descr != numpy_dtype.str:
        raise StateError(f"{what} must be {numpy_dtype} ('{numpy_dtype.str}'), got {descr[:20]!r}")
    expected_bytes, received_bytes = math.prod(shape) * numpy_dtype.itemsize, len(array.data) - start
    if received_bytes != expected_bytes:
        raise StateError(f"{what} must have {expected_bytes} bytes, got {received_bytes}")
    flat = np.frombuffer(array.data, dtype=numpy_dtype, offset=start)
    return flat.reshape(received_shape, order="F" if fortran_order else "C")


def _parse_header(data: bytes, what: str) -> tuple[tuple[int, ...], bool, str, int]:
    """Shape, whether the order is Fortran's, the dtype's `descr`, and the offset of the numbers.

    NumPy's parser is not used: it builds a dtype from untrusted text, and some of these crash the process.
    """
    try:
        begin = 8 + LENGTH_BYTES[data[:8]]
        start = begin + int.from_bytes(data[8:begin], "little")
        if start > min(len(data), MAX_HEADER):
            raise ValueError("the header is too long")
        return *_parse_fields(bytes(data[begin:start])), start
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, KeyError, AttributeError) as error:
        raise StateError(f"{what} has an unreadable header") from error


@lru_cache(maxsize=1024)  # the headers of all clients are the same
def _parse_fields(text: bytes) -> tuple[tuple[int, ...], bool, str]:
    header = ast.literal_eval(text.decode("latin1"))
    shape, fortran_order, descr = header.pop("shape"), header.pop("fortran_order"), header.pop("descr")
    valid_shape = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 2**63 for size in shape)
    if header or not valid_shape or not isinstance(fortran_order, bool) or not isinstance(descr, str):
        raise ValueError("the header has an unexpected form")
    return shape, fortran_order, descr
