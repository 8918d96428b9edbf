"""Tiny-ImageNet in its official folder structure, from a directory or the official zip.

    wnids.txt                                    200 ids, one per line
    words.txt                                    id <tab> names, for all of ImageNet
    train/<id>/images/<id>_<number>.JPEG         500 images of 64 × 64 per class
    val/images/val_<number>.JPEG                 10,000 images, and their classes in
    val/val_annotations.txt                      file <tab> id <tab> box

Training images are sorted by class and name. The official `test` part has no labels, so `val` is the test data.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers.archives import read_files
from fedbe.data.readers.images import UNREADABLE_IMAGE, open_image
from fedbe.errors import DataError

FOLDER = "tiny-imagenet-200/"
SIDE = 64


def read(name: str, path: Path) -> Task:
    """Read Tiny-ImageNet from its directory or zip."""
    members = read_files(path, lambda file: not file.removeprefix(FOLDER).startswith("test/"))
    files = {file.removeprefix(FOLDER): content for file, content in members.items()}
    ids = sorted(_lines(files, "wnids.txt", path))
    words = dict(line.partition("\t")[::2] for line in _lines(files, "words.txt", path))
    classes = tuple(words.get(wnid) or wnid for wnid in ids)

    train = [(file, file.split("/")[1]) for file in sorted(files) if _is_image(file, "train/")]
    boxes = [line.partition("\t") for line in _lines(files, "val/val_annotations.txt", path)]
    test = [(f"val/images/{file}", rest.partition("\t")[0]) for file, _, rest in boxes]
    train_images, train_labels = _part(files, train, ids, path)
    test_images, test_labels = _part(files, test, ids, path)
    return Task(Dataset(name, train_images, train_labels, classes), Dataset(name, test_images, test_labels, classes))


def _part(
    files: dict[str, bytes], listing: Sequence[tuple[str, str]], ids: Sequence[str], path: Path
) -> tuple[Tensor, Tensor]:
    """Images and labels of a listing of (file, class id)."""
    label = {wnid: number for number, wnid in enumerate(ids)}
    missing = [file for file, wnid in listing if wnid not in label or file not in files]
    if missing or not listing:
        raise DataError(f"{path} has no {missing[0] if missing else 'images'} of Tiny-ImageNet; download it again")
    if len({file for file, _ in listing}) < len(listing):
        raise DataError(f"{path} must name each image of Tiny-ImageNet once; download it again")
    images = np.empty((len(listing), SIDE, SIDE, 3), np.uint8)  # a list of 100,000 arrays would double the memory
    for number, (file, _) in enumerate(listing):
        images[number] = _pixels(files[file], path / file)
    return torch.from_numpy(images), torch.tensor([label[wnid] for _, wnid in listing])


def _lines(files: dict[str, bytes], file: str, path: Path) -> list[str]:
    if file not in files:
        raise DataError(f"{path} must have Tiny-ImageNet in its official structure, but has no {file}")
    try:
        return [line for line in files[file].decode().splitlines() if line.strip()]
    except UnicodeDecodeError as problem:
        raise DataError(f"{path / file} is not a text file ({problem}); download the data set again") from problem


def _is_image(file: str, folder: str) -> bool:
    return file.startswith(folder) and file.lower().endswith((".jpeg", ".jpg"))


def _pixels(content: bytes, path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        image = open_image(BytesIO(content))
        if image.size == (SIDE, SIDE):
            return np.asarray(image.convert("RGB"))  # some images are grey; this gives them three channels
    except UNREADABLE_IMAGE as problem:
        raise DataError(f"{path} is not a readable image ({problem}); download the data set again") from problem
    raise DataError(f"{path} must have {SIDE} × {SIDE} pixels, got {image.size[0]} × {image.size[1]}")
