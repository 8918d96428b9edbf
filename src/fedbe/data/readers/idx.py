"""MNIST and Fashion-MNIST in the IDX format, with or without gzip: a big-endian header, then bytes."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedbe.data.dataset import Dataset, Task
from fedbe.errors import DataError

CLASSES = {
    "mnist": tuple(str(digit) for digit in range(10)),
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
MAX_FILE_BYTES = 1 << 27  # MNIST's largest file has 47 MB


def read(name: str, path: Path) -> Task:
    """Read "mnist" or "fashion-mnist" from a directory with the four official files, gzipped or not."""

    def part(prefix: str) -> Dataset:
        images = parse(_content(name, path, f"{prefix}-images-idx3-ubyte"), 3, str(path / prefix))
        labels = parse(_content(name, path, f"{prefix}-labels-idx1-ubyte"), 1, str(path / prefix))
        return Dataset(
            name,
            torch.from_numpy(images[..., None].copy()),
            torch.from_numpy(labels.astype(np.int64)),
            CLASSES[name],
        )

    return Task(part("train"), part("t10k"))


def parse(content: bytes, dimensions: int, name: str) -> NDArray[np.uint8]:
    """Parse an IDX file of bytes: 0, 0, 8 (uint8), d; then d sizes of 4 bytes each; then the values.

    Args:
        content: the file, decompressed.
        dimensions: the expected d.
        name: the name for messages.

    Example:
        >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1, "labels").tolist()
        [7, 9]
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{name} is not an IDX file of bytes with {dimensions} dimensions; download it again")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
    if 0 in shape:
        raise DataError(f"{name}: the IDX header announces an empty array; download it again")
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{name}: the IDX header announces {math.prod(shape)} bytes, but {len(content) - start} follow; "
            "download it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(name: str, path: Path, file: str) -> bytes:
    plain, packed = path / file, path / f"{file}.gz"
    if plain.is_file():
        return plain.read_bytes()
    if not packed.is_file():
        raise DataError(f"{path} has no {file}.gz of {name}; get it with `fedbe data get {name}`")
    try:
        with gzip.open(packed) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{packed} is damaged or cut short ({problem}); download it again") from problem
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{packed} unpacks to more than {MAX_FILE_BYTES} bytes and is refused")
    return content
