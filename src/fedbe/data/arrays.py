"""A `Dataset` from arrays or tensors: common shapes of inputs, labels of any kind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbe.core.inputs import Batch, as_batch, tensors_of
from fedbe.data.dataset import Dataset, Task, is_plain
from fedbe.errors import DataError, SettingError

MAX_DIGITS = 4000
MAX_CLASSES = 100_000  # more distinct labels than this are a mistake
ROUNDING = 0.1  # of a float16 times 255
IGNORED = -100  # what torch's losses and Hugging Face's collators call a position without a label


def from_arrays(
    name: str, inputs: Any, labels: Any, classes: Iterable[str] | None = None, client_ids: Any = None
) -> Dataset:
    """A data set from arrays or tensors.

    Args:
        name: the name of the data set.
        inputs: see `as_inputs`.
        labels: one for each input, integers or texts; or integers [N, …], one for each position.
        classes: class names in the order of the integers; default: the distinct labels, in ascending order.
        client_ids: one id for each input, integers or any values that can be sorted; or None.

    Example:
        >>> from_arrays("mine", np.zeros((4, 2)), [1, 2, 2, 1]).classes
        ('1', '2')
    """
    numbers, names = _numbered(
        as_array(labels, name, "labels"), None if classes is None else tuple(map(str, classes)), name
    )
    batch = as_inputs(inputs, name)
    _refuse_multi_label(numbers, batch, name)
    return Dataset(name, batch, numbers, names, _client_ids(client_ids, name))


def make_task(train: Dataset, test: Dataset) -> Task:
    """A task of two parts whose classes were found in their labels: a class may be missing from one of them."""
    if train.classes == test.classes:
        return Task(train, test)
    names = tuple(sorted({*train.classes, *test.classes}, key=class_order))
    return Task(with_classes(train, names), with_classes(test, names))


def class_order(name: str) -> tuple[int, int, str]:
    """Numbers by value, then texts. Python reads no number of more digits than MAX_DIGITS."""
    is_number = len(name) <= MAX_DIGITS and name.removeprefix("-").isdecimal()
    return (0, int(name), "") if is_number else (1, 0, name)


def with_classes(data: Dataset, names: Sequence[str]) -> Dataset:
    """The data set with more classes, or its classes in another order."""
    numbers = torch.tensor([names.index(name) for name in data.classes])
    return Dataset(data.name, data.inputs, numbers[data.labels], tuple(names), data.client_ids)


def _numbered(
    labels: np.ndarray[Any, Any], classes: tuple[str, ...] | None, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as class indices int64 [N, …], and the class names."""
    are_texts = labels.dtype.kind == "U" or (
        labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels.flat)
    )
    if not (are_texts or labels.dtype.kind in "iub") or not labels.size:
        raise DataError(
            f"{name}: labels must be integers or texts, one class for each input (single-label classification), "
            f"got {labels.dtype} {list(labels.shape)}"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:  # a column, as Keras stores it
        labels = labels[:, 0]
    if are_texts:  # objects stay objects: NumPy's own texts are all as long as the longest one
        return _from_texts(labels, classes, name)
    if classes is not None:
        return torch.from_numpy(labels.astype(np.int64)), classes
    values, indices = np.unique(labels, return_inverse=True)
    if IGNORED in values:
        raise DataError(
            f"{name}: labels must be classes, but some are {IGNORED}, which only losses know: give what they mark a "
            "class of its own"
        )
    if len(values) > MAX_CLASSES:
        raise DataError(f"{name}: labels must have at most {MAX_CLASSES} distinct values, got {len(values)}")
    return torch.from_numpy(indices.reshape(labels.shape).astype(np.int64)), tuple(map(str, values.tolist()))


def _refuse_multi_label(labels: Tensor, inputs: Batch, name: str) -> None:
    """Zeros and ones [N, K] are several classes at once, unless the inputs have K positions (words of a text)."""
    if labels.dim() != 2 or not labels.numel() or int(labels.max()) > 1:
        return
    if is_plain(inputs) and any(labels.shape[1] in tensor.shape[1:] for tensor in tensors_of(inputs)):
        return
    if bool((labels.sum(1) == 1).all()):
        advice = "these are one-hot, so pass their argmax"
    else:
        advice = "several classes at once (multi-label) are not supported"
    raise DataError(
        f"{name}: labels {list(labels.shape)} of zeros and ones do not fit, because fedbe is for single-label "
        f"classification (one class for each input): {advice}"
    )


def _from_texts(
    labels: np.ndarray[Any, Any], classes: tuple[str, ...] | None, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    try:
        texts = [str(text) for text in labels.ravel().tolist()]
    except ValueError as problem:  # characters that are not valid
        raise DataError(f"{name}: labels must be valid texts ({problem})") from problem
    names = tuple(sorted(set(texts))) if classes is None else classes
    if unknown := sorted(set(texts) - set(names)):
        raise DataError(f"{name}: the label '{unknown[0]}' is not one of the classes {', '.join(names[:10])}")
    number = {text: i for i, text in enumerate(names)}
    numbers = torch.tensor([number[text] for text in texts], dtype=torch.int64)
    return numbers.view(labels.shape), names


def _several(values: Any, name: str) -> Batch:
    try:
        return as_batch(numbers_as_arrays(values, name), f"{name}: inputs")
    except SettingError as problem:
        raise DataError(str(problem)) from problem


def numbers_as_arrays(values: Any, name: str) -> Any:
    """A mapping or tuple whose lists of numbers, as tokenizers return them, are arrays."""
    if isinstance(values, Mapping):
        return {key: as_array(v, name, f"'{key}'") if isinstance(v, list) else v for key, v in values.items()}
    return tuple(as_array(v, name) if isinstance(v, list) else v for v in values)


def stacked(values: Iterable[Any], name: str, what: str = "inputs") -> np.ndarray[Any, Any]:
    """N arrays of one shape as one array [N, …].

    Args:
        values: tensors or array-likes.
        name: the name of the data set, for the error.
        what: what the arrays are, for the error.

    Raises:
        DataError: there are none, or their shapes differ.

    Example:
        >>> stacked([[1, 2], [3, 4], [5, 6]], "mine").shape
        (3, 2)
    """
    arrays = [as_array(value, name, what) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1:
        received = f"{list(shapes[0])} and {list(shapes[1])}" if shapes else "none"
        raise DataError(f"{name}: all {what} must have one shape, got {received}; pad or resize them first")
    return np.stack(arrays)


def as_array(values: Any, name: str, what: str = "inputs") -> np.ndarray[Any, Any]:
    """A NumPy array of a tensor or an array-like; bfloat16, which NumPy does not have, becomes float32.

    Args:
        values: a tensor or an array-like.
        name: the name of the data set, for the error.
        what: what the values are, for the error.

    Raises:
        DataError: the values have no common shape, like lists of several lengths.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except ValueError as problem:
        raise DataError(f"{name}: all {what} must have one shape, got several lengths; pad or cut them") from problem


def _client_ids(values: Any, name: str) -> Tensor | None:
    """Ids as int64; values that are not integers are numbered in sorted order."""
    if values is None:
        return None
    ids = np.asarray(values)
    if ids.dtype.kind == "u" and ids.size and int(ids.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{name}: client ids must be below 2^63, got {ids.max()}: number the clients from 0")
    try:
        numbers = ids if ids.dtype.kind in "iu" else np.unique(ids, return_inverse=True)[1]
    except TypeError as problem:
        raise DataError(f"{name}: client ids must be numbers or texts, got {ids.dtype}") from problem
    return torch.from_numpy(numbers.astype(np.int64))


def as_inputs(values: Any, name: str) -> Batch:
    """Convert common shapes and types to uint8 [N, H, W, C] images, float32 [N, D] vectors or int64 [N, D] token ids.

    Two axes are vectors; integers of 32 or 64 bits are token ids (fedbe's own networks read them as numbers). Several
    tensors in a tuple or dict stay as they are. Three axes are grey images of 8 bits. Images with four axes may have
    their channels first: the second axis is 1 or 3, and the last is not. Images may be uint8, or floats in [0, 1].

    Example:
        >>> as_inputs(np.zeros((5, 3, 8, 8)), "mine").shape
        torch.Size([5, 8, 8, 3])
    """
    if isinstance(values, Mapping | tuple):
        return _several(values, name)
    values = as_array(values, name)
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"{name}: inputs must be numbers of at most 64 bits, got {values.dtype}")
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    tensor = torch.as_tensor(np.require(native, requirements="W"))  # a DataFrame's arrays are read-only, torch warns
    if tensor.dim() == 2:
        is_tokens = values.dtype.kind in "iu" and values.dtype.itemsize >= 4
        return tensor.to(torch.int64 if is_tokens else torch.float32)
    if tensor.dim() == 3:
        _refuse_sequences(tensor, name)
        tensor = tensor[..., None]
    if tensor.dim() != 4:
        raise DataError(f"{name}: inputs must have 2, 3 or 4 axes (number first), got {list(tensor.shape)}")
    if tensor.shape[1] in {1, 3} and tensor.shape[-1] not in {1, 3}:
        tensor = tensor.permute(0, 2, 3, 1)
    return _to_bytes(tensor, name).contiguous()


def _refuse_sequences(images: Tensor, name: str) -> None:
    """Floats [N, T, C] may be sequences of measurements, and as images they would lose all but 8 bits."""
    if not images.is_floating_point():
        return
    scaled = 255 * images
    if bool(((images >= 0) & (images <= 1) & ((scaled - scaled.round()).abs() > ROUNDING)).any()):
        raise DataError(
            f"{name}: inputs with three axes are grey images of 8 bits, but these floats have more: pass sequences as "
            "{'x': array} (the name is your model's argument), and images as [N, H, W, 1]"
        )


def _to_bytes(images: Tensor, name: str) -> Tensor:
    if images.is_floating_point():
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise DataError(
                f"{name}: images of floats must be in [0, 1], fedbe normalises them itself; "
                "pass sequences as {'x': array}"
            )
        return (images * 255).round().to(torch.uint8)
    if images.dtype != torch.uint8:
        raise DataError(f"{name}: images must be uint8 or floats in [0, 1], got {images.dtype}")
    return images
