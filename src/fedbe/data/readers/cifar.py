"""CIFAR-10 and CIFAR-100 in both official layouts, "binary" and "python", from a directory or an archive.

A binary record is one label byte (CIFAR-10) or two (CIFAR-100: coarse, fine), then 1,024 red, 1,024 green and
1,024 blue bytes, row by row. A python batch is a dict with `data` uint8 [n, 3072] in the same order, and labels.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

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
class Layout:
    """Names of the files in one of the official layouts."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    key: str  # of the labels in a python batch
    label_bytes: int  # before the pixels in a binary record; the last one counts


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = {
    "cifar10": {
        "binary": Layout(tuple(f"{b}.bin" for b in BATCHES), ("test_batch.bin",), "labels", 1),
        "python": Layout(BATCHES, ("test_batch",), "labels", 1),
    },
    "cifar100": {
        "binary": Layout(("train.bin",), ("test.bin",), "fine_labels", 2),
        "python": Layout(("train",), ("test",), "fine_labels", 2),
    },
}


def read(name: str, place: Path) -> Task:
    """The set `name` ("cifar10" or "cifar100") from a directory or archive in either layout."""
    layouts = LAYOUTS[name]
    every = {f for layout in layouts.values() for f in (*layout.train, *layout.test)}
    found = read_files(place, lambda path: PurePosixPath(path).name in every)
    files = {PurePosixPath(path).name: content for path, content in found.items()}
    for kind, layout in layouts.items():
        if layout.train[0] in files:
            return _task(name, place, kind, layout, files)
    first = " or ".join(layout.train[0] for layout in layouts.values())
    raise DataError(f"{place} must hold {name} in an official layout, with {first}, but has neither")


def _task(name: str, place: Path, kind: str, layout: Layout, files: dict[str, bytes]) -> Task:
    missing = [file for file in (*layout.train, *layout.test) if file not in files]
    if missing:
        raise DataError(f"{place} lacks {', '.join(missing)} of {name}; download it again")
    parse = _parse_binary if kind == "binary" else _parse_python

    def part(names: tuple[str, ...]) -> Dataset:
        batches = [parse(layout, files[file], str(place / file)) for file in names]
        labels = torch.from_numpy(np.concatenate([batch[0] for batch in batches]).astype(np.int64))
        planes = torch.from_numpy(np.concatenate([batch[1] for batch in batches])).view(-1, 3, 32, 32)
        return Dataset(name, planes.permute(0, 2, 3, 1).contiguous(), labels, CLASSES[name])

    return Task(part(layout.train), part(layout.test))


def _parse_binary(layout: Layout, content: bytes, name: str) -> tuple[Bytes, Bytes]:
    record = layout.label_bytes + PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{name} must be whole records of {record} bytes, but has {len(content)} bytes; download it again"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return rows[:, layout.label_bytes - 1], rows[:, layout.label_bytes :]


def _parse_python(layout: Layout, content: bytes, name: str) -> tuple[Bytes, Bytes]:
    batch: Any = read_plain(content, name)
    labels, pixels = (batch.get(layout.key), batch.get("data")) if isinstance(batch, dict) else (None, None)
    named = isinstance(labels, list) and all(isinstance(n, int) and 0 <= n <= 255 for n in labels)
    if not named or not isinstance(pixels, np.ndarray) or pixels.shape != (len(cast(list[int], labels)), PIXELS):
        raise DataError(f"{name} must hold `data` of [n, {PIXELS}] bytes and n `{layout.key}`; this is another file")
    return np.array(labels, dtype=np.uint8), pixels
