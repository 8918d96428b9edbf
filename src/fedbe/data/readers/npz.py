"""Arrays in an .npz, which is a zip of .npy files. Sizes are checked before any memory is taken."""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbe.data.readers.archives import checked_members, read_member

MAX_HEADER = 10_000  # bytes of a .npy header; numpy's own limit for untrusted files


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays by name, without their suffix.

    Raises:
        DataError: if the archive looks like a bomb.
        Exception: of many kinds, if it is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        members = checked_members(path, archive, limit=path.stat().st_size)  # of any size, if it is not compressed
        return {m.filename.removesuffix(".npy"): parse(read_member(archive, m), m.filename) for m in members}


def parse(content: bytes, name: str) -> np.ndarray[Any, Any]:
    """The array in the content of a .npy file: its header is checked before memory is allocated.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.arange(3))
        >>> parse(file.getvalue(), "numbers")
        array([0, 1, 2])
    """
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran_order, dtype = readers[version](stream, max_header_size=MAX_HEADER)
    if dtype.hasobject:
        raise ValueError(f"'{name}' has Python objects, which are not read")
    start, count = stream.tell(), math.prod(shape)
    if not dtype.itemsize:  # any number of these takes no space in the file
        raise ValueError(f"'{name}' has values without bytes ({dtype}), which are not read")
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(content) - start:
        raise ValueError(f"'{name}' announces {count * dtype.itemsize} bytes and has {len(content) - start}")
    if not count:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(content, dtype, count, start)
    return flat.reshape(shape, order="F" if fortran_order else "C").copy()
