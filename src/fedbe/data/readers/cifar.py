"""CIFAR-10 and CIFAR-100 in both official formats, "binary" and "python", from a directory or an archive.

A binary record has one label byte (CIFAR-10) or two (CIFAR-100: coarse, fine), then 1,024 red, 1,024 green and
1,024 blue bytes, row by row. A python batch is a dict with `data` uint8 [n, 3072] in the same order, and labels.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers.archives import read_files
from fedbe.data.readers.plain_pickle import read_plain
from fedbe.errors import DataError

PIXELS = 3 * 32 * 32
CLASSES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
        "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
        "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup",
        "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house",
        "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man",
        "maple", "motorcycle", "mountain", "mouse", "mushroom", "oak", "orange", "orchid", "otter", "palm",
        "pear", "pickup_truck", "pine", "plain", "plate", "poppy", "porcupine", "possum", "rabbit",
        "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
        "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
        "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe",
        "whale", "willow", "wolf", "woman", "worm",
    ),
}  # fmt: skip

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BatchFormat:
    """One of the official formats.

    Attributes:
        train: file names of the training batches.
        test: file names of the test batches.
        key: the key of the labels in a python batch.
        label_bytes: label bytes before the pixels in a binary record; the last one is the label.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]
    key: str
    label_bytes: int


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
FORMATS = {
    "cifar10": {
        "binary": BatchFormat(tuple(f"{b}.bin" for b in BATCHES), ("test_batch.bin",), "labels", 1),
        "python": BatchFormat(BATCHES, ("test_batch",), "labels", 1),
    },
    "cifar100": {
        "binary": BatchFormat(("train.bin",), ("test.bin",), "fine_labels", 2),
        "python": BatchFormat(("train",), ("test",), "fine_labels", 2),
    },
}


def read(name: str, path: Path) -> Task:
    """Read "cifar10" or "cifar100" from a directory or archive in either format.

    Raises:
        DataError: if files are missing or damaged.
    """
    formats = FORMATS[name]
    wanted = {file for batch_format in formats.values() for file in (*batch_format.train, *batch_format.test)}
    members = read_files(path, lambda file: PurePosixPath(file).name in wanted)
    files = {PurePosixPath(file).name: content for file, content in members.items()}
    for kind, batch_format in formats.items():
        if batch_format.train[0] in files:
            return _task(name, path, kind, batch_format, files)
    first = " or ".join(batch_format.train[0] for batch_format in formats.values())
    raise DataError(f"{path} must have {name} in an official format, with {first}, but has neither")


def _task(name: str, path: Path, kind: str, batch_format: BatchFormat, files: dict[str, bytes]) -> Task:
    missing = [file for file in (*batch_format.train, *batch_format.test) if file not in files]
    if missing:
        raise DataError(f"{path} has no {', '.join(missing)} of {name}; download it again")
    parse = _parse_binary if kind == "binary" else _parse_python

    def part(names: tuple[str, ...]) -> Dataset:
        batches = [parse(batch_format, files[file], str(path / file)) for file in names]
        labels = torch.from_numpy(np.concatenate([batch[0] for batch in batches]).astype(np.int64))
        planes = torch.from_numpy(np.concatenate([batch[1] for batch in batches])).view(-1, 3, 32, 32)
        return Dataset(name, planes.permute(0, 2, 3, 1).contiguous(), labels, CLASSES[name])

    return Task(part(batch_format.train), part(batch_format.test))


def _parse_binary(batch_format: BatchFormat, content: bytes, name: str) -> tuple[Bytes, Bytes]:
    record = batch_format.label_bytes + PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{name} must be whole records of {record} bytes, but has {len(content)} bytes; download it again"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return rows[:, batch_format.label_bytes - 1], rows[:, batch_format.label_bytes :]


def _parse_python(batch_format: BatchFormat, content: bytes, name: str) -> tuple[Bytes, Bytes]:
    batch: Any = read_plain(content, name)
    labels, pixels = (batch.get(batch_format.key), batch.get("data")) if isinstance(batch, dict) else (None, None)
    if not _are_byte_labels(labels) or not isinstance(pixels, np.ndarray) or pixels.shape != (len(labels), PIXELS):
        raise DataError(
            f"{name} must have `data` of [n, {PIXELS}] bytes and n `{batch_format.key}`; this is another file"
        )
    return np.array(labels, dtype=np.uint8), pixels


def _are_byte_labels(labels: Any) -> TypeGuard[list[int]]:
    return isinstance(labels, list) and all(isinstance(label, int) and 0 <= label <= 255 for label in labels)
