"""CIFAR-10 and CIFAR-100 in both official formats, "binary" and "python", from a directory or an archive.

A binary record has one label byte (CIFAR-10) or two (CIFAR-100: coarse, fine), then 1,024 red, 1,024 green and
1,024 blue bytes, row by row. A python batch is a dict with `data` uint8 [n, 3072] in the same order, and labels.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers.archives import read_by_name
from fedbe.data.readers.plain_pickle import read_plain
from fedbe.errors import DataError

PIXELS = 3 * 32 * 32
CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple motorcycle mountain mouse mushroom oak orange orchid otter palm pear pickup_truck pine plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
    turtle wardrobe whale willow wolf woman worm
"""
CLASSES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": tuple(CIFAR100_CLASSES.split()),
}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BatchFormat:
    """The batches of one data set. In the binary format their file names end in ".bin".

    Attributes:
        train: file names of the training batches, without the ending.
        test: file name of the test batch, without the ending.
        key: the key of the labels in a python batch.
        label_bytes: label bytes before the pixels in a binary record; the last one is the label.
    """

    train: tuple[str, ...]
    test: str
    key: str
    label_bytes: int


FORMATS = {
    "cifar10": BatchFormat(tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "labels", 1),
    "cifar100": BatchFormat(("train",), "test", "fine_labels", 2),
}


def read(name: str, path: Path) -> Task:
    """Read "cifar10" or "cifar100" from a directory or archive in either format."""
    batch_format = FORMATS[name]
    first, *others = (*batch_format.train, batch_format.test)
    files = read_by_name(path, {batch + ending for batch in (first, *others) for ending in ("", ".bin")})
    if f"{first}.bin" in files:
        ending, parse = ".bin", _parse_binary
    elif first in files:
        ending, parse = "", _parse_python
    else:
        raise DataError(f"{path} must have {name} in an official format, with {first}.bin or {first}, but has neither")
    if missing := [batch + ending for batch in others if batch + ending not in files]:
        raise DataError(f"{path} has no {', '.join(missing)} of {name}; download it again")

    def part(*batches: str) -> Dataset:
        parsed = [parse(batch_format, files[b + ending], str(path / (b + ending))) for b in batches]
        labels = torch.from_numpy(np.concatenate([batch[0] for batch in parsed]).astype(np.int64))
        planes = torch.from_numpy(np.concatenate([batch[1] for batch in parsed])).view(-1, 3, 32, 32)
        return Dataset(name, planes.permute(0, 2, 3, 1).contiguous(), labels, CLASSES[name])

    return Task(part(*batch_format.train), part(batch_format.test))


def read_16px(name: str, path: Path) -> Task:
    """Read CIFAR-10 and average each 2 × 2 pixels: images of 16 × 16, for a search that must be cheap."""
    task = read("cifar10", path)
    return Task(_halved(task.train, name), _halved(task.test, name))


def _halved(data: Dataset, name: str) -> Dataset:
    count, height, width, channels = data.tensor.shape
    blocks = data.tensor.view(count, height // 2, 2, width // 2, 2, channels).to(torch.int16)
    means = (blocks.sum(dim=(2, 4)) + 2) // 4  # rounded
    return Dataset(name, means.to(torch.uint8), data.labels, data.classes)


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
