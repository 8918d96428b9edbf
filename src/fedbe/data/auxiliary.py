"""Unlabeled images for the server from another data set, converted to the task's shape."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedbe.core import random
from fedbe.data.catalogue import DATASETS
from fedbe.data.dataset import Task
from fedbe.data.sources import load_task
from fedbe.errors import DataError, SettingError

ORIGINS = {"cifar10-16px": "cifar10"}  # named sets that are made of the images of another one
# (task, other set): images of the other set that the task also has, pixel for pixel. An index counts the training
# images first, then the test images. CIFAR-10 test 1492 = CIFAR-100 train 49797, CIFAR-10 test 9345 = CIFAR-100
# test 2203, CIFAR-10 train 3021 = CIFAR-100 test 2224.
SHARED_IMAGES = {
    ("cifar10", "cifar100"): (49_797, 50_000 + 2_203, 50_000 + 2_224),
    ("cifar100", "cifar10"): (3_021, 50_000 + 1_492, 50_000 + 9_345),
}
GREY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green, blue (ITU-R 601), as Pillow uses
CHUNK = 4096  # images converted at once, to keep memory small


def load_unlabeled(
    source: Any,
    *,
    size: int | None,
    shape: tuple[int, int, int],
    seed: int,
    task: Task,
    root: Path | None = None,
) -> Tensor:
    """Read unlabeled images from another data set.

    The training images of `source` are shuffled by `seed`, then its test images; the first `size` of this sequence
    are taken. So a smaller size is a prefix of a larger one, and test images are used only after all training images.
    Images that `source` shares with the task are left out: of two named sets those that are known, else those that
    have the same pixels.

    Args:
        source: any source that `load_task` reads.
        size: how many images; None for all of them.
        shape: (C, H, W) of the task. Images are resized and recoloured to it.
        seed: seed of the shuffle.
        task: the task, with its own test data. `source` must not be the same data set.
        root: the data directory; default as in `load_task`.

    Returns:
        uint8 [size, H, W, C].

    Raises:
        SettingError: if `size` is out of range or `source` has no other images than the task.
        DataError: if `source` cannot be read, or has vectors or another number of channels.

    Example:
        >>> from fedbe.data import Dataset
        >>> photos = Dataset("photos", torch.zeros(5, 32, 32, 3, dtype=torch.uint8), torch.arange(5), tuple("abcde"))
        >>> load_unlabeled("digits", size=11, shape=(3, 32, 32), seed=0, task=Task(photos, photos)).shape
        torch.Size([11, 32, 32, 3])
    """
    other = load_task(source, root=root, seed=seed)
    name = other.train.name
    if not isinstance(other.train.inputs, Tensor) or other.train.inputs.dim() != 4:
        raise DataError(f"unlabeled data must be images, but {name} has vectors")
    keep = _not_shared(other, task)
    count = int(keep.sum())
    if not count:
        raise SettingError(
            f"unlabeled images from {name} would include the task's own test images; use the split's `server` part"
        )
    if size is not None and not 1 <= size <= count:
        raise SettingError(f"`size` must be 1 … {count}, the number of images in {name}, got {size}")
    draw = random.generator(seed, role="unlabeled")
    parts = torch.split(torch.arange(len(keep)), [len(other.train), len(other.test)])
    order = torch.cat([part[torch.randperm(len(part), generator=draw)] for part in parts])
    return match_shape(_gather(other, order[keep[order]][:size]), shape)


def _not_shared(other: Task, task: Task) -> Tensor:
    """For each image of `other`, training images first: whether the task does not have it, bool [N]."""
    keep = torch.ones(len(other.train) + len(other.test), dtype=torch.bool)
    name, task_name = (ORIGINS.get(data.train.name, data.train.name) for data in (other, task))
    if {name, task_name} <= DATASETS.keys():
        shared = torch.tensor(SHARED_IMAGES.get((task_name, name), ()), dtype=torch.int64)
        keep[shared[shared < len(keep)]] = False
        return keep & (name != task_name)
    if other.train.tensor.shape[1:] == task.train.tensor.shape[1:]:
        in_task = set(_pixels(task))
        keep = torch.tensor([pixels not in in_task for pixels in _pixels(other)], dtype=torch.bool)
    return keep


def _pixels(task: Task) -> Iterator[bytes]:
    """A short digest of each image, training images first."""
    for part in (task.train, task.test):
        for image in part.tensor.numpy():
            yield hashlib.blake2b(image.tobytes(), digest_size=16).digest()


def _gather(task: Task, index: Tensor) -> Tensor:
    """The images at `index` in (training images, then test images), without a copy of all images."""
    images = torch.empty(len(index), *task.train.tensor.shape[1:], dtype=torch.uint8)
    in_train = index < len(task.train)
    images[in_train] = task.train.tensor[index[in_train]]
    images[~in_train] = task.test.tensor[index[~in_train] - len(task.train)]
    return images


def match_shape(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Resize and recolour images uint8 [N, h, w, c] to `shape` = (C, H, W): uint8 [N, H, W, C].

    The size changes by bilinear interpolation with antialiasing. Grey is the luminance of the colours.
    """
    channels, height, width = shape
    if images.shape[3] != channels:
        images = _recolour(images, channels)
    if images.shape[1:3] == (height, width):
        return images
    resized = [
        interpolate(
            part.permute(0, 3, 1, 2), (height, width), mode="bilinear", align_corners=False, antialias=True
        ).permute(0, 2, 3, 1)
        for part in torch.split(images, CHUNK)
    ]
    return torch.cat(resized).contiguous()


def _recolour(images: Tensor, channels: int) -> Tensor:
    if images.shape[3] == 1:
        return images.expand(-1, -1, -1, channels).contiguous()
    if images.shape[3] == 3 and channels == 1:
        weights = torch.tensor(GREY_WEIGHTS)
        parts = [(part.float() @ weights).round().to(torch.uint8) for part in torch.split(images, CHUNK)]
        return torch.cat(parts)[..., None]
    raise DataError(f"images with {images.shape[3]} channels cannot be converted to {channels} channels")
