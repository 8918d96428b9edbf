"""Batches of inputs that a model gets as they are: token ids, or several tensors."""

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from fedbe.core.devices import to_device
from fedbe.core.inputs import Batch, count_of, map_batch, tensors_of
from fedbe.data.dataset import Dataset, Shape, is_plain, shape_of
from fedbe.data.loader import Augment, BatchLoader, rows_at
from fedbe.errors import SettingError


class PlainLoader:
    """Gathers batches and changes nothing. It has the interface of `BatchLoader`.

    Args:
        data: a `Dataset`, or its inputs alone: a tensor, or a tuple or dict of tensors [N, …].

    Attributes:
        mean, std: empty, because nothing is normalised.
        augment: None.

    Example:
        >>> PlainLoader({"ids": torch.tensor([[1], [2]])}).batch(torch.tensor([1]))
        {'ids': tensor([[2]])}
    """

    augment = None

    def __init__(self, data: Dataset | Batch) -> None:
        self._inputs = data.inputs if isinstance(data, Dataset) else data
        self._rows: Tensor | None = None  # the subset that `select` chose
        self.mean = self.std = torch.empty(0)

    def __len__(self) -> int:
        return count_of(self._inputs) if self._rows is None else len(self._rows)

    @property
    def shape(self) -> Shape:
        """The shape of one input; by position or name if there are several tensors."""
        return shape_of(self._inputs)

    def select(self, index: Tensor) -> Self:
        """A loader of the examples at `index` (int64). It shares the data and copies none."""
        subset = copy.copy(self)
        subset._rows = index if self._rows is None else self._rows[index]
        return subset

    def compact(self) -> Self:
        """A loader of the same examples that holds no others: a copy, if they are a part of the data."""
        rows = self._rows
        if rows is None:
            return self
        other = copy.copy(self)
        other._inputs, other._rows = map_batch(lambda tensor: tensor[rows], self._inputs), None
        return other

    def in_order(self, order: Tensor) -> Self:
        """A loader of the examples at `order`, as from `select`, for batches of consecutive ones.

        On a device the order is copied there once, and no batch brings its indices.
        """
        epoch = self.select(order)
        assert epoch._rows is not None, "`select` sets them"
        epoch._rows = to_device(epoch._rows, tensors_of(self._inputs)[0].device)
        return epoch

    def like(self, data: Dataset | Batch) -> Self:
        """A loader of other data."""
        return type(self)(data)

    def placed(self, move: Callable[[Tensor], Tensor]) -> Self:
        """A loader whose data is where `move` puts it, such as on a device. Batches are then made there."""
        other = copy.copy(self)
        other._inputs = map_batch(move, self._inputs)
        return other

    def share_(self) -> Self:
        """Move the data into shared memory, in place. Worker processes then read it without a copy."""
        for tensor in (*tensors_of(self._inputs), *(() if self._rows is None else (self._rows,))):
            tensor.share_memory_()
        return self

    def batch(self, index: Tensor | slice, generator: torch.Generator | None = None) -> Batch:  # noqa: ARG002
        """The inputs at `index`, int64 [B] on the host; of a loader from `in_order`: a slice."""
        rows = rows_at(index, self._rows)
        return map_batch(lambda tensor: tensor.index_select(0, to_device(rows, tensor.device)), self._inputs)


Loader = BatchLoader | PlainLoader


def make_loader(
    data: Dataset | Batch,
    *,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    augment: Augment | None = None,
) -> Loader:
    """A loader for any inputs: normalised batches of images and vectors; token ids and several tensors as they are.

    Args:
        data: a data set, or its inputs.
        mean: as in `BatchLoader`, for images and vectors.
        std: as in `BatchLoader`, for images and vectors.
        augment: as in `BatchLoader`, for images only.

    Raises:
        SettingError: `augment` for inputs that are not images.
    """
    inputs = data.inputs if isinstance(data, Dataset) else data
    if isinstance(inputs, Tensor) and not is_plain(inputs):
        return BatchLoader(inputs, mean=mean, std=std, augment=augment)
    if augment is not None:
        raise SettingError("`augment` crops and flips images, but these inputs are not images; leave it out")
    return PlainLoader(data)
