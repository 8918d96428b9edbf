"""A data set in memory: inputs, labels, the names of the classes.

Images stay uint8, as in the file. `fedbe.data.make_loader` turns them into a model's input.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedbe.core.inputs import Batch, count_of, map_batch, tensors_of
from fedbe.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled examples in memory.

    Attributes:
        name: the name for messages and reports.
        inputs: uint8 [N, H, W, C] for images; float32 [N, D] for vectors; int64 [N, …] for token ids; or several
            tensors [N, …] in a tuple or a dict, which a model gets as they are.
        labels: int64 [N], or [N, …] if each position has a class (segmentation), each in 0 … len(classes) − 1.
        classes: the class names, in the order of the labels.
        client_ids: int64 [N], the client of each example, for the split "column"; or None.

    Raises:
        DataError: if shapes, types or values do not fit this description.
    """

    name: str
    inputs: Batch
    labels: Tensor
    classes: tuple[str, ...]
    client_ids: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_inputs()
        count = count_of(self.inputs)
        for field, values in (("labels", self.labels), ("client_ids", self.client_ids)):
            shape = (count,) if values is None or field == "client_ids" else (count, *values.shape[1:])
            if values is not None and (values.dtype != torch.int64 or values.shape != shape):
                raise DataError(
                    f"{self.name}: `{field}` must be int64 of shape [{count}], one for each input, got "
                    f"{_describe(values)}"
                )
        if count and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise DataError(
                f"{self.name}: labels of {len(self.classes)} classes must be 0 … {len(self.classes) - 1}, "
                f"got {int(self.labels.min())} … {int(self.labels.max())}"
            )

    def _check_inputs(self) -> None:
        if not is_plain(self.inputs):
            are_images(self.inputs, f"{self.name}: inputs")
        tensors = tensors_of(self.inputs)
        if not tensors or len({len(tensor) for tensor in tensors}) > 1:
            raise DataError(f"{self.name}: inputs must be one or more tensors of one length")
        if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors):
            raise DataError(f"{self.name}: inputs must be finite, but some are NaN or infinite; clean them first")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def tensor(self) -> Tensor:
        """The inputs, where they are one tensor; a DataError where they are several."""
        if not isinstance(self.inputs, Tensor):
            raise DataError(f"{self.name} has several tensors as inputs, but one tensor is needed here")
        return self.inputs

    def subset(self, index: Tensor, name: str | None = None) -> "Dataset":
        """A copy of the examples at `index` (int64), in that order; `name` defaults to this data set's name."""
        ids = None if self.client_ids is None else self.client_ids[index]
        inputs = map_batch(lambda tensor: tensor.index_select(0, index), self.inputs)
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
        if isinstance(self.inputs, dict):
            sha256.update(repr(list(self.inputs)).encode())
        ids = () if self.client_ids is None else (self.client_ids,)
        for tensor in (*tensors_of(self.inputs), self.labels, *ids):
            sha256.update(_describe(tensor).encode())
            sha256.update(tensor.contiguous().numpy().data)
        return sha256.hexdigest()


@dataclass(frozen=True, eq=False)
class Task:
    """A classification task: training data and test data.

    Attributes:
        train: what is split among the server and the clients.
        test: what every model is tested on.

    Raises:
        DataError: if the two parts differ in input shape or classes.
    """

    train: Dataset
    test: Dataset

    def __post_init__(self) -> None:
        shapes = shape_of(self.train.inputs), shape_of(self.test.inputs)
        if shapes[0] != shapes[1]:
            raise DataError(
                f"{self.train.name}: training and test inputs must have one shape, got {shape_text(shapes[0])} and "
                f"{shape_text(shapes[1])}"
            )
        if self.train.classes != self.test.classes:
            raise DataError(f"{self.train.name}: training and test data must have the same classes")


# The shape of one input; by position or name if there are several tensors.
Shape = tuple[int, ...] | tuple[tuple[int, ...], ...] | dict[str, tuple[int, ...]]


def shape_of(inputs: Batch) -> Shape:
    """The shape of one input, as it is in memory.

    >>> shape_of({"ids": torch.zeros(5, 2), "mask": torch.zeros(5, 3)})
    {'ids': (2,), 'mask': (3,)}
    """
    if isinstance(inputs, dict):
        return {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(tuple(tensor.shape[1:]) for tensor in inputs)
    return tuple(inputs.shape[1:])


def is_plain(inputs: Batch) -> bool:
    """Whether a model gets these inputs as they are: token ids (int64), or several tensors."""
    return not isinstance(inputs, Tensor) or inputs.dtype == torch.int64


def are_images(inputs: Batch, what: str = "inputs") -> bool:
    """True for uint8 [N, H, W, C] images, False for float32 [N, D] vectors; a DataError for anything else."""
    if not isinstance(inputs, Tensor) or (inputs.dtype, inputs.dim()) not in ((torch.uint8, 4), (torch.float32, 2)):
        received = _describe(inputs) if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        raise DataError(f"{what} must be uint8 [N, H, W, C] images or float32 [N, D] vectors, got {received}")
    return inputs.dim() == 4


def shape_text(shape: Shape) -> str:
    """A shape for messages."""
    return str(shape) if isinstance(shape, dict) else str(list(shape))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
