"""Batches: gathered, augmented and normalised as one tensor, in the memory layout that a model reads.

There is no Python loop over single examples. A crop copies whole pixel rows from a padded batch, through a view in
which a row may start at any pixel. So augmentation costs little more than normalisation.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbe.core.devices import to_device
from fedbe.data.dataset import Dataset, are_images
from fedbe.errors import DataError, SettingError

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Augment:
    """Random crop and flip: mirror half of the images, pad with zeros on each side, crop to the original size.

    The corner of the crop is uniform over (2·pad + 1)² positions. The paper's text pads 2 pixels, its released
    code 4.

    Attributes:
        pad: pixels of padding on each side.
        flip: mirror each image with probability 1/2.

    Raises:
        SettingError: if `pad` is negative.
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise SettingError(f"`pad` must be 0 or more pixels, got {self.pad}")


def channel_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel (images, scaled to [0, 1]) or each dimension (vectors).

    A constant channel gets deviation 1, so that it is normalised to 0 and not to NaN.

    Args:
        inputs: uint8 [N, H, W, C] or float32 [N, D].

    Returns:
        Mean and deviation, float32 [C] or [D] each.

    Example:
        >>> mean, std = channel_statistics(torch.tensor([[[[0], [255]]]], dtype=torch.uint8))
        >>> mean.item(), std.item()
        (0.5, 0.5)
    """
    if not len(inputs):
        raise DataError("mean and deviation need at least one example, got none")
    if inputs.dtype == torch.uint8:
        mean, variance = _image_statistics(inputs)
    else:
        variance, mean = torch.var_mean(inputs.double(), dim=0, correction=0)
    std = variance.sqrt()
    return mean.float(), torch.where(std > 0, std, 1.0).float()


def _image_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all pixels: integer sums, exact in float64, a few images at a time."""
    channels, count = images.shape[3], images[..., 0].numel()
    total, squares = torch.zeros(2, channels, dtype=torch.float64)
    for part in torch.split(images, 512):
        rows = part.reshape(len(part) * part.shape[1], -1).double()
        total += rows.sum(0).view(-1, channels).sum(0)
        squares += rows.square_().sum(0).view(-1, channels).sum(0)
    # Python integers are exact: a constant channel has variance 0, not a rounding error.
    pairs = [(int(t), int(s)) for t, s in zip(total, squares, strict=True)]
    variance = [(count * s - t * t) / (255 * count) ** 2 for t, s in pairs]
    return total / (255 * count), torch.tensor(variance, dtype=torch.float64)


class BatchLoader:
    """Makes normalised batches of one data set: (x / 255 − mean) / std for images, (x − mean) / std for vectors.

    Args:
        data: a `Dataset`, or its inputs alone: uint8 [N, H, W, C] or float32 [N, D].
        mean: the mean of each channel, after scaling to [0, 1]; default: computed from `data`.
        std: the standard deviation of each channel; default: computed from `data`.
        augment: random crop and flip for images; used only by calls of `batch` with a generator.
        dtype: the floating type of the batches.

    Raises:
        DataError: if `data` has another shape or type, or no examples to compute `mean` and `std` from.
        SettingError: if another argument does not fit.

    Example:
        >>> loader = BatchLoader(torch.tensor([[1.0], [3.0]]))
        >>> loader.batch(torch.tensor([1, 0])).flatten().tolist()
        [1.0, -1.0]
    """

    def __init__(
        self,
        data: Dataset | Tensor,
        *,
        mean: Tensor | None = None,
        std: Tensor | None = None,
        augment: Augment | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        given = data.inputs if isinstance(data, Dataset) else data
        images = are_images(given)
        assert isinstance(given, Tensor), "checked by `are_images`"
        inputs: Tensor = given
        if augment is not None and not images:
            raise SettingError("`augment` crops and flips images, but these inputs are vectors; leave it out")
        if mean is None or std is None:
            data_mean, data_std = channel_statistics(inputs)
            mean, std = data_mean if mean is None else mean, data_std if std is None else std
        self._inputs = inputs.contiguous()
        self._rows: Tensor | None = None  # the subset that `select` chose
        self.mean = _per_channel("mean", mean, inputs.shape[-1])
        self.std = _per_channel("std", std, inputs.shape[-1])
        self.augment = augment
        self.dtype = _floating(dtype)
        # Normalisation is one multiply-add, x / (255·std) − mean / std, for a whole row of pixels.
        width, unit = (self._inputs.shape[2], 255) if images else (1, 1)
        self._scale = (1 / (unit * self.std.double())).float().repeat(width)
        self._shift = (-self.mean.double() / self.std.double()).float().repeat(width)

    def __len__(self) -> int:
        return len(self._inputs if self._rows is None else self._rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one model input: (C, H, W) or (D,)."""
        if self._inputs.dim() == 2:
            return (self._inputs.shape[1],)
        _, height, width, channels = self._inputs.shape
        return (channels, height, width)

    def select(self, index: Tensor) -> Self:
        """A loader of the examples at `index` (int64). It shares the pixels and copies none."""
        subset = copy.copy(self)
        subset._rows = index if self._rows is None else self._rows[index]
        return subset

    def compact(self) -> Self:
        """A loader of the same examples that holds no others: a copy, if they are a part of the data."""
        if self._rows is None:
            return self
        other = copy.copy(self)
        other._inputs, other._rows = self._inputs[self._rows], None
        return other

    def in_order(self, order: Tensor) -> Self:
        """A loader of the examples at `order`, as from `select`, for batches of consecutive ones.

        On a device the order is copied there once, and no batch brings its indices.
        """
        epoch = self.select(order)
        assert epoch._rows is not None, "`select` sets them"
        epoch._rows = to_device(epoch._rows, self._inputs.device)
        return epoch

    def like(self, data: Dataset | Tensor) -> Self:
        """A loader of other data with this loader's mean, deviation, augmentation and dtype."""
        return type(self)(data, mean=self.mean, std=self.std, augment=self.augment, dtype=self.dtype)

    def to(self, dtype: torch.dtype) -> Self:
        """A loader of the same data with batches in another floating type."""
        other = copy.copy(self)
        other.dtype = _floating(dtype)
        return other

    def placed(self, move: Callable[[Tensor], Tensor]) -> Self:
        """A loader whose data is where `move` puts it, such as on a device. Batches are then made there."""
        other = copy.copy(self)
        other._inputs, other._scale, other._shift = move(self._inputs), move(self._scale), move(self._shift)
        return other

    def share_(self) -> Self:
        """Move the data into shared memory, in place. Worker processes then read it without a copy."""
        self._inputs.share_memory_()  # type: ignore[no-untyped-call]
        if self._rows is not None:
            self._rows.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def batch(self, index: Tensor | slice, generator: torch.Generator | None = None) -> Tensor:
        """One normalised batch.

        Args:
            index: int64 [B], the examples; on the host, also if the data is on a device. Of a loader from `in_order`: a
                slice.
            generator: if given, and `augment` is set, images are augmented with draws from it.

        Returns:
            [B, C, H, W] in channels-last memory format, or [B, D].
        """
        rows = rows_at(index, self._rows)
        if self._inputs.dim() == 2:
            return self._normalise(_gather(self._inputs, rows))
        if generator is None or self.augment is None or not len(rows):
            pixels = _gather(self._inputs, rows)
        else:
            pixels = _crop_and_flip(self._inputs, rows, self.augment, generator)
        count, height, width, channels = len(rows), *self._inputs.shape[1:]
        lines = self._normalise(pixels.view(count * height, width * channels))
        return lines.view(count, height, width, channels).permute(0, 3, 1, 2)

    def _normalise(self, values: Tensor) -> Tensor:
        # Always compute in float32, so that bfloat16 is rounded once. In place, because the page faults of a second
        # buffer cost more than the arithmetic.
        normal = values.to(torch.float32, copy=True)
        return torch.addcmul(self._shift, normal, self._scale, out=normal).to(self.dtype)


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise SettingError(f"`dtype` must be a floating type such as torch.bfloat16, got {dtype}")
    return dtype


def _per_channel(name: str, values: Tensor, channels: int) -> Tensor:
    values = torch.as_tensor(values, dtype=torch.float32).flatten()
    if values.numel() != channels:
        raise SettingError(f"`{name}` must have one value for each of {channels} channels, got {values.numel()}")
    if not bool(torch.isfinite(values).all()) or (name == "std" and bool((values <= 0).any())):
        raise SettingError(f"`{name}` must be finite{' and > 0' * (name == 'std')}, got {values.tolist()}")
    return values


def rows_at(index: Tensor | slice, rows: Tensor | None) -> Tensor:
    """The rows of the data at `index` of a loader whose examples are `rows`; None for all."""
    if rows is not None:
        return rows[index]
    assert isinstance(index, Tensor), "a slice is for a loader from `in_order`"
    return index


def _gather(values: Tensor, rows: Tensor) -> Tensor:
    """The rows of a tensor on any device; `rows` are there or on the host."""
    return values.index_select(0, to_device(rows, values.device))


def _crop_and_flip(inputs: Tensor, rows: Tensor, augment: Augment, generator: torch.Generator) -> Tensor:
    """Images `rows` of uint8 [N, H, W, C], mirrored with probability 1/2, padded, cropped: [B, H, W, C].

    One draw for each image chooses one of the (2·pad + 1)² corners, and whether to mirror.
    """
    (_, height, width, channels), count, pad = inputs.shape, len(rows), augment.pad
    corners = (2 * pad + 1) ** 2
    draws = torch.randint(corners * (1 + augment.flip), (count,), generator=generator).numpy()
    mirrored, corner = np.divmod(draws, corners)
    # Index arithmetic uses NumPy: for few numbers its calls cost a third of torch's. The mirrored images go last,
    # so that mirroring is one operation on one slice. The crop restores the order.
    order = torch.from_numpy(mirrored.argsort(kind="stable"))
    plain = count - int(mirrored.sum())
    images = _gather(inputs, rows.index_select(0, to_device(order, rows.device)))
    padded = images.new_zeros(count, height + 2 * pad, width + 2 * pad, channels)
    inner = padded[:, pad : pad + height, pad : pad + width]
    inner[:plain] = images[:plain]
    inner[plain:] = images[plain:].flip(2)
    return _windows(padded, order.numpy().argsort(), np.divmod(corner, 2 * pad + 1), height, width)


def _windows(padded: Tensor, image: IntArray, corner: tuple[IntArray, IntArray], height: int, width: int) -> Tensor:
    """For each b, the [height, width] window of padded[image[b]] at (corner[0][b], corner[1][b]): [B, …, C]."""
    count, tall, wide, channels = padded.shape
    # Overlapping view: row k is the `width` pixels that start at pixel k.
    starts = padded.as_strided((count * tall * wide - width + 1, width * channels), (channels, 1))
    first = (image * tall + corner[0]) * wide + corner[1]
    lines = first[:, None] + np.arange(0, height * wide, wide)
    return _gather(starts, torch.from_numpy(lines.ravel())).view(count, height, width, channels)
