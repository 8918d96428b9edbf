"""Tiny-ImageNet in its official folder layout, from a directory or the official zip.

    wnids.txt                                    200 ids, one a line
    words.txt                                    id <tab> names, for all of ImageNet
    train/<id>/images/<id>_<number>.JPEG         500 images of 64 × 64 a class
    val/images/val_<number>.JPEG                 10,000 images, and their classes in
    val/val_annotations.txt                      file <tab> id <tab> box

Training images are sorted by class and name. The part called `test` there has no labels, so `val` is the test data.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers.archives import read_files
from fedbe.data.readers.images import UNREADABLE_IMAGE
from fedbe.errors import DataError

FOLDER = "tiny-imagenet-200/"
SIDE = 64


def read(name: str, place: Path) -> Task:
    """Tiny-ImageNet from its directory or zip."""
    found = read_files(place, lambda path: not path.removeprefix(FOLDER).startswith("test/"))
    files = {path.removeprefix(FOLDER): content for path, content in found.items()}
    ids = sorted(_lines(files, "wnids.txt", place))
    words = dict(line.partition("\t")[::2] for line in _lines(files, "words.txt", place))
    classes = tuple(words.get(wnid) or wnid for wnid in ids)
    label = {wnid: number for number, wnid in enumerate(ids)}

    train = [(path, path.split("/")[1]) for path in sorted(files) if _is_image(path, "train/")]
    boxes = [line.partition("\t") for line in _lines(files, "val/val_annotations.txt", place)]
    test = [(f"val/images/{file}", rest.partition("\t")[0]) for file, _, rest in boxes]

    def part(listing: Sequence[tuple[str, str]]) -> Dataset:
        unknown = [path for path, wnid in listing if wnid not in label or path not in files]
        if unknown or not listing:
            raise DataError(f"{place} lacks {unknown[0] if unknown else 'images'} of {name}; download it again")
        images = np.empty((len(listing), SIDE, SIDE, 3), np.uint8)  # a list of 100,000 arrays would double it
        for number, (path, _) in enumerate(listing):
            images[number] = _pixels(files[path], place / path)
        labels = torch.tensor([label[wnid] for _, wnid in listing])
        return Dataset(name, torch.from_numpy(images), labels, classes)

    return Task(part(train), part(test))


def _lines(files: dict[str, bytes], path: str, place: Path) -> list[str]:
    if path not in files:
        raise DataError(f"{place} must hold Tiny-ImageNet in its official layout, but lacks {path}")
    try:
        return [line for line in files[path].decode().splitlines() if line.strip()]
    except UnicodeDecodeError as problem:
        raise DataError(f"{place / path} is no text ({problem}); download the set again") from problem


def _is_image(path: str, under: str) -> bool:
    return path.startswith(under) and path.lower().endswith((".jpeg", ".jpg"))


def _pixels(content: bytes, path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        # Some of the images are grey; convert makes them three channels like the rest.
        pixels = np.asarray(Image.open(BytesIO(content)).convert("RGB"))
    except UNREADABLE_IMAGE as problem:
        raise DataError(f"{path} is not a readable image ({problem}); download the set again") from problem
    if pixels.shape != (SIDE, SIDE, 3):
        raise DataError(f"{path} must have {SIDE} × {SIDE} pixels, got {pixels.shape[1]} × {pixels.shape[0]}")
    return pixels
