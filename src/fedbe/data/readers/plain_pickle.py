"""Reads the "python" layout of CIFAR without unpickling: nothing in the file is ever imported or called.

The file is a pickle, so a program for a small stack machine. `pickletools` splits it into operations; here only
those that build plain values and one-byte arrays have a meaning, and every other operation is refused.
"""

import io
import pickletools
from typing import Any

import numpy as np

from fedbe.errors import DataError

RECONSTRUCT = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
GLOBALS = {*RECONSTRUCT, "numpy ndarray", "numpy dtype"}
PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "INT",
    "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES",
    "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = {"PROTO", "FRAME"}
MARK = object()


class _Name(str):
    """A global that the file names. It stays a name."""


class _Dtype(str):
    """numpy.dtype(code), as its code."""


class _Array:
    """An array under construction; `value` once its state came."""

    value: np.ndarray[Any, np.dtype[np.uint8]] | None = None


def read_plain(content: bytes, name: str) -> Any:
    """The dict, list, number, text or uint8 array that a plain pickle spells out; anything else is refused."""
    try:
        return _finished(_run(content), {})
    except DataError as problem:
        raise DataError(f"{name} is not a plain batch file: {problem}") from problem
    except Exception as problem:
        raise DataError(f"{name} is damaged or cut short ({problem}); download it again") from problem


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(io.BytesIO(content)):
        code = operation.name
        if code == "STOP":
            return stack.pop()
        if code in PLAIN:
            stack.append(argument)
        elif code in CONSTANTS:
            stack.append(CONSTANTS[code])
        elif code in TUPLES:
            count = TUPLES[code]
            parts = tuple(stack[len(stack) - count :])
            del stack[len(stack) - count :]
            stack.append(parts)
        elif code in {"BINPUT", "LONG_BINPUT"}:
            memo[argument] = stack[-1]
        elif code == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif code in {"BINGET", "LONG_BINGET"}:
            stack.append(memo[argument])
        elif code not in IGNORED:
            _build(code, argument, stack)
    raise ValueError("no end")


def _build(code: str, argument: Any, stack: list[Any]) -> None:
    """The operations that make or fill a container, and the three that make an array."""
    if code == "MARK":
        stack.append(MARK)
    elif code == "EMPTY_DICT":
        stack.append({})
    elif code == "EMPTY_LIST":
        stack.append([])
    elif code == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif code == "APPEND":
        value = stack.pop()
        stack[-1].append(value)
    elif code == "APPENDS":
        values = _since_mark(stack)
        stack[-1].extend(values)
    elif code == "SETITEM":
        value, key = stack.pop(), stack.pop()
        stack[-1][key] = value
    elif code == "SETITEMS":
        values = _since_mark(stack)
        stack[-1].update(zip(values[::2], values[1::2], strict=True))
    elif code == "GLOBAL":
        stack.append(_name(argument))
    elif code == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        stack.append(_made(function, arguments))
    elif code == "BUILD":
        state = stack.pop()
        _fill(stack[-1], state)
    else:
        raise DataError(f"it uses the pickle operation {code}, which is refused")


def _since_mark(stack: list[Any]) -> list[Any]:
    at = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is MARK)  # each value is looked at once in its life
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _name(argument: str) -> _Name:
    if argument not in GLOBALS:
        raise DataError(f"it asks for '{argument.replace(' ', '.')}', which is refused")
    return _Name(argument)


def _made(function: Any, arguments: Any) -> _Dtype | _Array:
    if isinstance(function, _Name) and function in RECONSTRUCT and arguments[0] == "numpy ndarray":
        return _Array()
    if isinstance(function, _Name) and function == "numpy dtype" and arguments[0] in {"u1", b"u1"}:
        return _Dtype("u1")
    raise DataError("it makes an object other than an array of bytes, which is refused")


def _fill(target: Any, state: Any) -> None:
    """numpy's states: of a dtype (one-byte types need none of it), of an array (version, shape, dtype, order, data)."""
    if isinstance(target, _Dtype):
        return
    if not isinstance(target, _Array):
        raise DataError("it sets the state of an object other than an array, which is refused")
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, _Dtype):
        raise DataError("its array is not of bytes")
    raw = data.encode("latin-1") if isinstance(data, str) else data
    target.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _finished(value: Any, done: dict[int, Any]) -> Any:
    """The value with arrays in place of their construction, and every byte string as text.

    A list that the file names many times is finished once (`done`, by identity), so that a small file of lists of
    lists of the same list cannot ask for endless work.
    """
    if isinstance(value, dict | list | tuple):
        if id(value) not in done:
            if isinstance(value, dict):
                done[id(value)] = {_finished(key, done): _finished(part, done) for key, part in value.items()}
            else:
                done[id(value)] = [_finished(part, done) for part in value]
        return done[id(value)]
    if isinstance(value, _Array):
        return value.value
    return value.decode("latin-1") if isinstance(value, bytes) else value
