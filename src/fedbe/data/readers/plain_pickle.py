"""Read the "python" format of CIFAR without unpickling: nothing in the file is imported or called.

The file is a pickle: a program for a small stack machine. `pickletools` splits it into operations. This module runs
only those that build plain values and arrays of bytes, and refuses every other operation.
"""

import io
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedbe.errors import DataError

RECONSTRUCT = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
GLOBALS = {*RECONSTRUCT, "numpy ndarray", "numpy dtype"}
PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "INT",
    "SHORT_BINBYTES", "BINBYTES", "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip
PYTHON_2_TEXTS = {"SHORT_BINSTRING", "BINSTRING"}  # bytes: the data of an array is a view of them, never a copy
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
IGNORED = {"PROTO", "FRAME"}
MARK = object()


class _GlobalName(str):
    """The name of a global. It is never resolved."""


class _Dtype(str):
    """The code of numpy.dtype(code)."""


class _Array:
    """An array under construction; `value` is set with its state."""

    value: np.ndarray[Any, np.dtype[np.uint8]] | None = None


def read_plain(content: bytes, name: str) -> Any:
    """Read a pickle of plain values.

    Returns:
        A dict, list, number, text, None or uint8 array. Tuples become lists, byte strings become texts.

    Raises:
        DataError: if the pickle has anything else, or is damaged.

    Example:
        >>> read_plain(bytes([0x80, 2, 0x5D, 0x4B, 7, 0x61, 0x2E]), "batch")
        [7]
    """
    try:
        return _finished(_run(content), {})
    except DataError as problem:
        raise DataError(f"{name} is not a plain batch file: {problem}") from problem
    except Exception as problem:
        raise DataError(f"{name} is damaged or cut short ({problem}); download it again") from problem


def _run(content: bytes) -> Any:
    machine = _Machine()
    for operation, argument, _ in pickletools.genops(io.BytesIO(content)):
        code = operation.name
        if code == "STOP":
            return machine.stack.pop()
        if code in PYTHON_2_TEXTS:
            machine.stack.append(str(argument).encode("latin-1"))
        elif code in PLAIN:
            machine.stack.append(argument)
        elif code in CONSTANTS:
            machine.stack.append(CONSTANTS[code])
        elif code in OPERATIONS:
            OPERATIONS[code](machine, argument)
        elif code not in IGNORED:
            raise DataError(f"it uses the pickle operation {code}, which is refused")
    raise ValueError("the STOP operation is missing")


class _Machine:
    """The pickle's stack machine, with the operations that fill containers, use the memo and build arrays."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[Any, Any] = {}

    def pop(self, size: int) -> list[Any]:
        """Remove the last `size` values, first pushed first."""
        return [self.stack.pop() for _ in range(size)][::-1]

    def pop_to_mark(self) -> list[Any]:
        """Remove the values after the last mark, and the mark."""
        mark = next(i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is MARK)
        values = self.stack[mark + 1 :]
        del self.stack[mark:]
        return values

    def put(self, key: Any) -> None:
        self.memo[key] = self.stack[-1]

    def extend_list(self, values: list[Any]) -> None:
        self.stack[-1].extend(values)

    def update_dict(self, keys_and_values: list[Any]) -> None:
        keys = keys_and_values[::2]
        if not all(isinstance(key, str | bytes | int) for key in keys):  # to hash nested tuples can take forever
            raise DataError("it has a dict whose keys are not texts or numbers")
        self.stack[-1].update(zip(keys, keys_and_values[1::2], strict=True))

    def push_global(self, name: str) -> None:
        if name not in GLOBALS:
            raise DataError(f"it asks for '{name.replace(' ', '.')}', which is refused")
        self.stack.append(_GlobalName(name))

    def call(self) -> None:
        function, arguments = self.pop(2)
        self.stack.append(_constructed(function, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        _set_state(self.stack[-1], state)


OPERATIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(MARK),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.pop(3))),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "BINPUT": lambda machine, key: machine.put(key),
    "LONG_BINPUT": lambda machine, key: machine.put(key),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "BINGET": lambda machine, key: machine.stack.append(machine.memo[key]),
    "LONG_BINGET": lambda machine, key: machine.stack.append(machine.memo[key]),
    "APPEND": lambda machine, _: machine.extend_list(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.extend_list(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.update_dict(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.update_dict(machine.pop_to_mark()),
    "GLOBAL": lambda machine, name: machine.push_global(name),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}


def _constructed(function: Any, arguments: Any) -> _Dtype | _Array:
    """The two calls that have a meaning: an empty array, and the dtype of bytes."""
    if isinstance(function, _GlobalName) and function in RECONSTRUCT and arguments[0] == "numpy ndarray":
        return _Array()
    if isinstance(function, _GlobalName) and function == "numpy dtype" and arguments[0] in {"u1", b"u1"}:
        return _Dtype("u1")
    raise DataError("it makes an object other than an array of bytes, which is refused")


def _set_state(target: Any, state: Any) -> None:
    """Set numpy's state: of an array (version, shape, dtype, order, data), or of a dtype, which bytes do not need."""
    if isinstance(target, _Dtype):
        return
    if not isinstance(target, _Array):
        raise DataError("it sets the state of an object other than an array, which is refused")
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, _Dtype):
        raise DataError("it has an array of another type than bytes")
    target.value = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def _finished(value: Any, done: dict[int, Any]) -> Any:
    """The value with arrays instead of `_Array`s, lists instead of tuples, and texts instead of byte strings.

    `done` has the finished values by identity. A container or text that the file uses many times is finished once, so
    a small file that repeats a large one cannot cause endless work or fill the memory.
    """
    if value is MARK:
        raise DataError("it has a list without an end")
    if isinstance(value, dict | list | tuple | bytes):
        if id(value) not in done:
            if isinstance(value, bytes):
                done[id(value)] = value.decode("latin-1")
            elif isinstance(value, dict):
                done[id(value)] = {_finished(key, done): _finished(part, done) for key, part in value.items()}
            else:
                done[id(value)] = [_finished(part, done) for part in value]
        return done[id(value)]
    return value.value if isinstance(value, _Array) else value
