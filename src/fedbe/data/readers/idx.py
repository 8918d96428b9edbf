"""MNIST and Fashion-MNIST in the IDX format: a big-endian header, then bytes; with or without gzip."""

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
MOST_BYTES = 1 << 30  # of one file; MNIST's largest has 47 MB


def read(name: str, place: Path) -> Task:
    """The set `name` from a directory with the four official files, as they come (.gz) or unpacked."""

    def part(prefix: str) -> Dataset:
        images = parse(_content(name, place, f"{prefix}-images-idx3-ubyte"), 3, str(place / prefix))
        labels = parse(_content(name, place, f"{prefix}-labels-idx1-ubyte"), 1, str(place / prefix))
        return Dataset(
            name,
            torch.from_numpy(images[..., None].copy()),
            torch.from_numpy(labels.astype(np.int64)),
            CLASSES[name],
        )

    return Task(part("train"), part("t10k"))


def parse(content: bytes, dimensions: int, name: str) -> NDArray[np.uint8]:
    """Bytes 0, 0, 8 (uint8), d; then d sizes of 4 bytes; then the values.

    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1, "labels").tolist()
    [7, 9]
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{name}: not an IDX file of {dimensions} dimensions of bytes; download it again")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{name}: the IDX header promises {math.prod(shape)} bytes but {len(content) - start} follow; "
            "download it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(name: str, place: Path, file: str) -> bytes:
    plain, packed = place / file, place / f"{file}.gz"
    if plain.is_file():
        return plain.read_bytes()
    if not packed.is_file():
        raise DataError(f"{place} lacks {file}.gz of {name}; get it with `fedbe data get {name}`")
    try:
        with gzip.open(packed) as stream:
            content = stream.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{packed} is damaged or cut short ({problem}); download it again") from problem
    if len(content) > MOST_BYTES:
        raise DataError(f"{packed} unpacks to more than {MOST_BYTES} bytes and is refused")
    return content
