"""Inputs of a model: any object that makes a batch from indices.

`fedbe.data`'s `BatchLoader` is one. `as_inputs` makes one from a plain tensor or a torch `Dataset`.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedbe.errors import SettingError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


@runtime_checkable
class Inputs(Protocol):
    """J inputs of a model, given out in batches."""

    def __len__(self) -> int:
        """J, the number of inputs."""

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The inputs at `index` [N] as one tensor [N, …].

        With a generator they are augmented, and all random draws come from it. Without one they are plain.
        """


class TensorInputs:
    """Inputs in one tensor.

    Args:
        tensor: The inputs [J, …].
        augment: A function (batch [N, …], generator) -> batch [N, …]; default: no augmentation.
    """

    def __init__(self, tensor: Tensor, augment: Augmentation | None = None) -> None:
        self.tensor, self._augment = tensor, augment

    def __len__(self) -> int:
        return len(self.tensor)

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The inputs at `index`, augmented if there is an augmentation and a generator."""
        batch = self.tensor[index.to(self.tensor.device)]
        if self._augment is None or generator is None:
            return batch
        augmented = self._augment(batch, generator)
        if not isinstance(augmented, Tensor) or not augmented.ndim or len(augmented) != len(batch):
            received = list(augmented.shape) if isinstance(augmented, Tensor) else type(augmented).__name__
            raise SettingError(f"`augment` must return a batch of {len(batch)} inputs, got {received}")
        return augmented


def as_inputs(
    source: "Inputs | Tensor | Dataset[object]", augment: Augmentation | None = None, name: str = "unlabeled"
) -> Inputs:
    """Make `Inputs` from what a user gives.

    Args:
        source: A tensor [J, …]; a map-style Dataset of tensors, or of tuples that begin with a tensor; or `Inputs`,
            which are returned as they are. A Dataset is read once into one tensor, so its random transforms are
            drawn once.
        augment: A function (batch, generator) -> batch, for a tensor or a Dataset.
        name: How an error message calls `source`.

    Raises:
        SettingError: The source is empty, not finite or of another type, or `augment` cannot be used.

    Example:
        >>> as_inputs(torch.tensor([[1.0], [2.0], [3.0]])).batch(torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    if augment is not None and not callable(augment):
        raise SettingError(f"`augment` must be a function (batch, generator) -> batch, got {augment!r}")
    if isinstance(source, Tensor):
        return TensorInputs(_checked(source, name), augment)
    if isinstance(source, Inputs):
        if augment is not None:
            raise SettingError("`augment` needs a tensor or a Dataset: Inputs augment by themselves")
        if not len(source):
            raise SettingError(f"`{name}` is empty")
        return source
    if isinstance(source, Sized) and hasattr(source, "__getitem__") and not isinstance(source, Mapping | str | bytes):
        return TensorInputs(_checked(_stack(source, name), name), augment)
    raise SettingError(f"`{name}` must be a tensor, a map-style Dataset or Inputs, got {type(source).__name__}")


def batches(count: int, size: int, order: Tensor | None = None) -> Iterator[Tensor]:
    """Split `count` examples into batches of `size`.

    A last batch of one joins the batch before it, because BatchNorm cannot be trained on one example. With a `size` of
    1 all batches stay as they are.

    Args:
        count: The number of examples.
        size: The number of examples in a batch; >= 1.
        order: The indices in the order to use [count]; default: 0, 1, …

    Returns:
        An iterator over index tensors. Together they contain every index once.

    Example:
        >>> [b.tolist() for b in batches(5, 2)]
        [[0, 1], [2, 3, 4]]
    """
    order = torch.arange(count) if order is None else order
    parts = list(torch.split(order, size))
    if size > 1 and len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts


def _stack(source: Sized, name: str) -> Tensor:
    rows: list[Tensor] = []
    for i in range(len(source)):
        item = source[i]  # type: ignore[index]
        first = item[0] if isinstance(item, tuple | list) else item
        if not isinstance(first, Tensor):
            raise SettingError(f"`{name}`[{i}] must be a tensor, got {type(first).__name__}: add a transform")
        if rows and first.shape != rows[0].shape:
            raise SettingError(
                f"`{name}`[{i}] has shape {list(first.shape)}, the first has {list(rows[0].shape)}: "
                "all inputs must have one shape"
            )
        rows.append(first)
    return torch.stack(rows) if rows else torch.empty(0)


def _checked(tensor: Tensor, name: str) -> Tensor:
    if tensor.ndim < 1 or not len(tensor):
        raise SettingError(f"`{name}` must be a tensor [J, …] with J > 0, got shape {list(tensor.shape)}")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise SettingError(f"`{name}` must be a dense tensor with data")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise SettingError(f"`{name}` must be finite, but holds NaN or infinite values")
    return tensor.detach()
