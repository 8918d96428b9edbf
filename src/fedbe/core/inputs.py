"""Inputs of a model: any object that makes a batch from indices.

`fedbe.data`'s `BatchLoader` is one. `as_inputs` makes one from tensors, arrays, a torch `Dataset` or a `DataLoader`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedbe.core.devices import to_device
from fedbe.errors import SettingError

# What a model takes: one tensor [N, …]; several in a tuple, as positional arguments; or in a dict, by argument name.
Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Augmentation = Callable[[Any, torch.Generator], Any]  # (batch, generator) -> batch
LABEL_NAMES = ("label", "labels")  # entries of a dict that are not inputs


@runtime_checkable
class Inputs(Protocol):
    """J inputs of a model, given out in batches."""

    def __len__(self) -> int:
        """J, the number of inputs."""

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """The inputs at `index` [N]: one tensor [N, …], or a tuple or dict of such tensors.

        With a generator they are augmented, and all random draws come from it. Without one they are plain.
        """


def tensors_of(batch: Batch) -> tuple[Tensor, ...]:
    """The tensors of a batch, in their order."""
    if isinstance(batch, Tensor):
        return (batch,)
    return tuple(batch.values()) if isinstance(batch, dict) else batch


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with the function applied to each of its tensors.

    Example:
        >>> map_batch(lambda t: t + 1, {"ids": torch.tensor([1]), "mask": torch.tensor([0])})
        {'ids': tensor([2]), 'mask': tensor([1])}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: function(tensor) for name, tensor in batch.items()}
    return tuple(map(function, batch))


def count_of(batch: Batch) -> int:
    """N, the number of examples in a batch."""
    return len(tensors_of(batch)[0])


class OrderedInputs(Protocol):
    """The inputs of one epoch, in its order."""

    def batch(self, index: slice, generator: torch.Generator | None = None) -> Batch:
        """The inputs at these positions of the order; see `Inputs.batch`."""


@runtime_checkable
class Orderable(Protocol):
    """Inputs that take the order of an epoch to their device as a whole, so that no batch waits for its indices."""

    def in_order(self, order: Tensor) -> OrderedInputs:
        """The inputs at `order`, int64 on the host."""


def in_order(inputs: Inputs, order: Tensor) -> OrderedInputs:
    """The inputs in the order of an epoch. On a device the order is copied there once, not batch by batch.

    Args:
        inputs: All inputs.
        order: The positions of inputs, int64 on the host.

    Example:
        >>> epoch = in_order(TensorInputs(torch.tensor([5, 6, 7])), torch.tensor([2, 0, 1]))
        >>> epoch.batch(slice(0, 2))
        tensor([7, 5])
    """
    return inputs.in_order(order) if isinstance(inputs, Orderable) else _ByIndex(inputs, order)


class _ByIndex:
    """An epoch of inputs that are given out by index."""

    def __init__(self, inputs: Inputs, order: Tensor) -> None:
        self._inputs, self._order = inputs, order

    def batch(self, index: slice, generator: torch.Generator | None = None) -> Batch:
        return self._inputs.batch(self._order[index], generator)


class TensorInputs:
    """Inputs in memory: one tensor, or several.

    Args:
        tensor: The inputs [J, …], or a tuple or dict of such tensors.
        augment: A function (batch, generator) -> batch of the same kind; default: no augmentation.
    """

    def __init__(self, tensor: Batch, augment: Augmentation | None = None) -> None:
        self.tensor, self._augment = tensor, augment

    def __len__(self) -> int:
        return count_of(self.tensor)

    def on(self, device: torch.device) -> "TensorInputs":
        """The inputs on a device, where batches are then gathered. With an augmentation they stay where they are.

        An augmentation draws from a generator of the CPU, and its author had tensors of the CPU in mind.
        """
        return self if self._augment else TensorInputs(map_batch(lambda tensor: tensor.to(device), self.tensor))

    def in_order(self, order: Tensor) -> OrderedInputs:
        """The inputs in the order of an epoch, which is copied to their device."""
        return _ByIndex(self, to_device(order, tensors_of(self.tensor)[0].device))

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """The inputs at `index`, augmented if there is an augmentation and a generator."""
        batch = map_batch(lambda tensor: tensor[to_device(index, tensor.device)], self.tensor)
        if self._augment is None or generator is None:
            return batch
        return _checked_augmentation(self._augment(batch, generator), len(index))


def _checked_augmentation(augmented: Any, count: int) -> Batch:
    try:
        tensors = tensors_of(augmented)
        fits = bool(tensors) and all(isinstance(t, Tensor) and t.ndim and len(t) == count for t in tensors)
    except TypeError:
        fits = False
    if not fits:
        received = list(augmented.shape) if isinstance(augmented, Tensor) else type(augmented).__name__
        raise SettingError(f"`augment` must return a batch of {count} inputs, got {received}")
    return augmented  # type: ignore[no-any-return]


class SubsetInputs:
    """Some of the inputs of another object, without a copy.

    Args:
        inputs: All inputs.
        index: Which of them, int64 [N].
    """

    def __init__(self, inputs: Inputs, index: Tensor) -> None:
        self._inputs, self._index = inputs, index

    def __len__(self) -> int:
        return len(self._index)

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> Batch:
        """The inputs at `index` of the subset."""
        return self._inputs.batch(self._index[index], generator)


def hold_out(count: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The indices of `count` inputs to learn from, and those to hold out, both ascending.

    Args:
        count: the number of inputs, at least two unless `share` is 0.
        share: the part to hold out, drawn at random; at least one input, and not all. 0: none.
        generator: the source of the draw.

    Raises:
        SettingError: if there are too few inputs for both.

    Example:
        >>> learned, held_out = hold_out(20, 0.1, torch.Generator().manual_seed(0))
        >>> len(learned), len(held_out), sorted([*learned.tolist(), *held_out.tolist()]) == list(range(20))
        (18, 2, True)
    """
    if not share:
        return torch.arange(count), torch.arange(0)
    if count < 2:
        raise SettingError(f"to hold some out, two unlabeled inputs or more are needed, got {count}")
    size = min(max(1, round(share * count)), count - 1)
    order = torch.randperm(count, generator=generator)
    return order[size:].sort().values, order[:size].sort().values


def as_inputs(source: Any, augment: Augmentation | None = None, name: str = "unlabeled") -> Inputs:
    """Make `Inputs` from what a user gives.

    Args:
        source: One of

            - a tensor or NumPy array [J, …]; or several in a tuple (positional arguments of the model) or in a dict
              (arguments by name);
            - a map-style Dataset, a list or a DataLoader. Of an item that is a tuple or a list, the first entry is the
              input and the rest is ignored; of a dict, "label" and "labels" are ignored. It is read once into memory,
              so its random transforms are drawn once;
            - `Inputs`, which are returned as they are.
        augment: A function (batch, generator) -> batch, for everything except `Inputs`.
        name: How an error message calls `source`.

    Raises:
        SettingError: The source is empty, not finite or of another type, or `augment` cannot be used.

    Example:
        >>> as_inputs(torch.tensor([[1.0], [2.0], [3.0]])).batch(torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
        >>> as_inputs({"ids": torch.tensor([[1], [2]]), "mask": torch.tensor([[0], [1]])}).batch(torch.tensor([1]))
        {'ids': tensor([[2]]), 'mask': tensor([[1]])}
    """
    if augment is not None and not callable(augment):
        raise SettingError(f"`augment` must be a function (batch, generator) -> batch, got {augment!r}")
    if isinstance(source, Inputs):
        if augment is not None:
            raise SettingError("`augment` needs tensors or a Dataset: Inputs augment by themselves")
        if not len(source):
            raise SettingError(f"`{name}` is empty")
        return source
    return TensorInputs(_checked(_read(source, name), name), augment)


def _read(source: Any, name: str) -> Batch:
    """All inputs of a source as one batch."""
    if isinstance(source, DataLoader):
        return _join([_input_of(batch) for batch in source], name, torch.cat)
    if isinstance(source, Tensor | np.ndarray | Mapping | tuple):
        return as_batch(source, name)
    if isinstance(source, Sized) and hasattr(source, "__getitem__") and not isinstance(source, str | bytes):
        return _join([_input_of(source[i]) for i in range(len(source))], name, torch.stack)
    raise SettingError(
        f"`{name}` must be tensors, arrays, a map-style Dataset, a DataLoader or Inputs, got {type(source).__name__}"
    )


def _input_of(item: Any) -> Any:
    return item[0] if isinstance(item, tuple | list) and len(item) else item


def as_batch(value: Any, name: str) -> Batch:
    """A tensor or array as it is; a tuple or dict of them without labels. A read-only array is copied.

    `name` is for messages.

    Raises:
        SettingError: Something else is among them.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        # Arrays of a DataFrame are read-only: they are copied, because torch warns of memory that it cannot write.
        return torch.from_numpy(np.require(np.ascontiguousarray(value), requirements="W"))
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        kept = {str(key): part for key, part in value.items() if key not in LABEL_NAMES}
        return {key: _one_tensor(part, f"{name}: '{key}'") for key, part in kept.items()}
    if isinstance(value, tuple):
        return tuple(_one_tensor(part, name) for part in value)
    raise SettingError(f"`{name}` must be a tensor, got {type(value).__name__}: add a transform")


def _one_tensor(value: Any, name: str) -> Tensor:
    batch = as_batch(value, name)
    if not isinstance(batch, Tensor):
        raise SettingError(f"`{name}` must be a tensor, got {type(value).__name__}")
    return batch


def _join(items: Sequence[Any], name: str, join: Callable[[list[Tensor]], Tensor]) -> Batch:
    """Stack items, or concatenate batches, tensor by tensor."""
    if not items:
        return torch.empty(0)
    rows = [as_batch(item, f"{name}[{i}]") for i, item in enumerate(items)]
    shapes = [_item_shapes(row, join is torch.cat) for row in rows]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise SettingError(
                f"`{name}`[{i}] has shape {_text(shape)}, the first has {_text(shapes[0])}: "
                "all inputs must have one shape"
            )
    joined = [join(list(parts)) for parts in zip(*map(tensors_of, rows), strict=True)]
    first = rows[0]
    if isinstance(first, dict):
        return dict(zip(first, joined, strict=True))
    return joined[0] if isinstance(first, Tensor) else tuple(joined)


def _item_shapes(row: Batch, is_batch: bool) -> dict[Any, list[int]]:
    """The shape of one input, by name or position; of a batch, without its first axis."""
    named = row if isinstance(row, dict) else dict(enumerate(tensors_of(row)))
    return {key: list(tensor.shape[1:] if is_batch else tensor.shape) for key, tensor in named.items()}


def _text(shapes: dict[Any, list[int]]) -> str:
    return str(shapes[0]) if list(shapes) == [0] else str(shapes)


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


def _checked(batch: Batch, name: str) -> Batch:
    tensors = tensors_of(batch)
    if not tensors:
        raise SettingError(f"`{name}` has no tensors")
    for tensor in tensors:
        _check_tensor(tensor, name)
    if len({len(tensor) for tensor in tensors}) > 1:
        lengths = ", ".join(str(len(tensor)) for tensor in tensors)
        raise SettingError(f"`{name}` must have tensors of one length, got {lengths}")
    return map_batch(Tensor.detach, batch)


def _check_tensor(tensor: Tensor, name: str) -> None:
    if tensor.ndim < 1 or not len(tensor):
        raise SettingError(f"`{name}` must be a tensor [J, …] with J > 0, got shape {list(tensor.shape)}")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise SettingError(f"`{name}` must be a dense tensor with data")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise SettingError(f"`{name}` must be finite, but holds NaN or infinite values")
