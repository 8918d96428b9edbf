"""A data set in memory: one tensor of inputs, one tensor of labels, the names of the classes.

Images stay uint8, as in the file. `fedbe.data.BatchLoader` turns them into a model's input.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedbe.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled examples in memory.

    Attributes:
        name: the name for messages and reports.
        inputs: uint8 [N, H, W, C] for images, float32 [N, D] for vectors.
        labels: int64 [N], each in 0 … len(classes) − 1.
        classes: the class names, in the order of the labels.
        client_ids: int64 [N], the client of each example, for the split "column"; or None.

    Raises:
        DataError: if shapes, types or values do not fit this description.
    """

    name: str
    inputs: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    client_ids: Tensor | None = None

    def __post_init__(self) -> None:
        if not are_images(self.inputs, f"{self.name}: inputs") and not bool(torch.isfinite(self.inputs).all()):
            raise DataError(f"{self.name}: inputs must be finite, but some are NaN or infinite; clean them first")
        count = len(self.inputs)
        for field, values in (("labels", self.labels), ("client_ids", self.client_ids)):
            if values is not None and (values.dtype != torch.int64 or values.shape != (count,)):
                raise DataError(
                    f"{self.name}: `{field}` must be int64 of shape [{count}], one for each input, got "
                    f"{_describe(values)}"
                )
        if count and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise DataError(
                f"{self.name}: labels of {len(self.classes)} classes must be 0 … {len(self.classes) - 1}, "
                f"got {int(self.labels.min())} … {int(self.labels.max())}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Tensor, name: str | None = None) -> "Dataset":
        """A copy of the examples at `index` (int64), in that order; `name` defaults to this data set's name."""
        ids = None if self.client_ids is None else self.client_ids[index]
        inputs = self.inputs.index_select(0, index)
        return Dataset(name or self.name, inputs, self.labels[index], self.classes, ids)

    def digest(self) -> str:
        """SHA-256 (hex) over shape, type and bytes of inputs, labels and client ids. Names do not count.

        >>> a = Dataset("a", torch.zeros(2, 3), torch.tensor([0, 1]), ("x", "y"))
        >>> b = Dataset("b", torch.zeros(2, 3), torch.tensor([1, 0]), ("x", "y"))
        >>> a.digest() == a.digest(), a.digest() == b.digest()
        (True, False)
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sha256 = hashlib.sha256()
        for tensor in (self.inputs, self.labels, *(() if self.client_ids is None else (self.client_ids,))):
            sha256.update(_describe(tensor).encode())
            sha256.update(tensor.contiguous().numpy().data)
        return sha256.hexdigest()


@dataclass(frozen=True, eq=False)
class Task:
    """A classification task: training data and test data.

    Raises:
        DataError: if the two parts differ in input shape or classes.
    """

    train: Dataset
    test: Dataset

    def __post_init__(self) -> None:
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            raise DataError(
                f"{self.train.name}: training and test inputs must have one shape, got "
                f"{list(self.train.inputs.shape[1:])} and {list(self.test.inputs.shape[1:])}"
            )
        if self.train.classes != self.test.classes:
            raise DataError(f"{self.train.name}: training and test data must have the same classes")


def are_images(inputs: Tensor, what: str = "inputs") -> bool:
    """True for uint8 [N, H, W, C] images, False for float32 [N, D] vectors; a DataError for anything else."""
    if (inputs.dtype, inputs.dim()) not in ((torch.uint8, 4), (torch.float32, 2)):
        raise DataError(f"{what} must be uint8 [N, H, W, C] images or float32 [N, D] vectors, got {_describe(inputs)}")
    return inputs.dim() == 4


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
