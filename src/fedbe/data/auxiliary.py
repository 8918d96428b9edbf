"""Unlabeled images for the server from another data set, made to fit the task."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedbe.core import random
from fedbe.data.dataset import Task
from fedbe.data.sources import load_task
from fedbe.errors import DataError, SettingError

# Images that two sets share, pixel for pixel, as places in (training images, then test images). CIFAR-10 test 1492
# is CIFAR-100 train 49797, CIFAR-10 test 9345 is CIFAR-100 test 2203, CIFAR-10 train 3021 is CIFAR-100 test 2224.
SHARED = {
    ("cifar10", "cifar100"): (49_797, 50_000 + 2_203, 50_000 + 2_224),
    ("cifar100", "cifar10"): (3_021, 50_000 + 1_492, 50_000 + 9_345),
}
GREY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green, blue (ITU-R 601), as Pillow uses
CHUNK = 4096  # images resized at once, so that memory stays small


def unlabeled(
    source: Any,
    *,
    size: int | None,
    like: tuple[int, int, int],
    seed: int,
    task: str,
    root: Path | None = None,
) -> Tensor:
    """`size` images of `source` (all, if None) as uint8 [size, H, W, C] of the task's shape `like` = (C, H, W).

    The first of its training images, shuffled by `seed`, then of its test images: a smaller size is a part of a larger
    one, and as long as they suffice all are training images, as in the paper. Images that `source` shares with the
    task's data are left out.
    """
    foreign = load_task(source, root=root, seed=seed)
    name = foreign.train.name
    if name == task:
        raise SettingError(
            f"unlabeled images from {name} itself would hold its test images; use the split's `server` part"
        )
    if foreign.train.inputs.dim() != 4:
        raise DataError(f"unlabeled data must be images, but {name} has vectors")
    keep = torch.ones(len(foreign.train) + len(foreign.test), dtype=torch.bool)
    shared = torch.tensor(SHARED.get((task, name), ()), dtype=torch.int64)
    keep[shared[shared < len(keep)]] = False
    count = int(keep.sum())
    if size is not None and not 1 <= size <= count:
        raise SettingError(f"`size` must be 1 … {count}, the number of images in {name}, got {size}")
    draw = random.generator(seed, role="unlabeled")
    parts = torch.split(torch.arange(len(keep)), [len(foreign.train), len(foreign.test)])
    order = torch.cat([part[torch.randperm(len(part), generator=draw)] for part in parts])
    return fit(_gather(foreign, order[keep[order]][:size]), like)


def _gather(task: Task, places: Tensor) -> Tensor:
    """The images at `places` in (training images, then test images), without a copy of all of them."""
    images = torch.empty(len(places), *task.train.inputs.shape[1:], dtype=torch.uint8)
    first = places < len(task.train)
    images[first] = task.train.inputs[places[first]]
    images[~first] = task.test.inputs[places[~first] - len(task.train)]
    return images


def fit(images: Tensor, like: tuple[int, int, int]) -> Tensor:
    """Images uint8 [N, h, w, c] at the size and number of channels of `like` = (C, H, W): uint8 [N, H, W, C].

    Size by bilinear interpolation that averages over what it shrinks; grey from colour by luminance.
    """
    channels, height, width = like
    if images.shape[3] != channels:
        images = _recolour(images, channels)
    if images.shape[1:3] == (height, width):
        return images
    sized = [
        interpolate(
            part.permute(0, 3, 1, 2), (height, width), mode="bilinear", align_corners=False, antialias=True
        ).permute(0, 2, 3, 1)
        for part in torch.split(images, CHUNK)
    ]
    return torch.cat(sized).contiguous()


def _recolour(images: Tensor, channels: int) -> Tensor:
    if images.shape[3] == 1:
        return images.expand(-1, -1, -1, channels).contiguous()
    if images.shape[3] == 3 and channels == 1:
        weights = torch.tensor(GREY_WEIGHTS)
        return torch.cat([(p.float() @ weights).round().to(torch.uint8) for p in torch.split(images, CHUNK)])[..., None]
    raise DataError(f"images with {images.shape[3]} channels cannot be made to fit a task with {channels}")
