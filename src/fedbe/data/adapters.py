"""The user's own data: a folder of class folders, an .npz, a function, a torch or a Hugging Face data set.

Each becomes a `Dataset`, or a `Task` where the source brings a test part of its own.
"""

import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedbe.core import plugins
from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers.images import UNREADABLE_IMAGE, eight_bit, is_deep
from fedbe.errors import DataError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
GREY = {"1", "L"}
# What numpy raises on a file that is no .npz of plain arrays; RuntimeError is a password.
NO_NPZ = (
    OSError, ValueError, EOFError, AttributeError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error
)  # fmt: skip


def from_folder(place: Path) -> Dataset | Task:
    """PATH/<class>/<image>, or PATH/train/<class>/<image> and PATH/test/<class>/<image>.

    All images must have one size. They become grey if all of them are, else red, green and blue.
    """
    if (place / "train").is_dir() and (place / "test").is_dir():
        return Task(_class_folders(place / "train", place.name), _class_folders(place / "test", place.name))
    found = _class_folders(place, place.name)
    if unseen := set(range(len(found.classes))) - set(found.labels.tolist()):
        raise DataError(f"{place / found.classes[min(unseen)]} holds no image, so it is no class: remove it")
    return found


def _class_folders(place: Path, name: str) -> Dataset:
    inside = sorted(place.iterdir()) if place.is_dir() else []
    folders = [path for path in inside if path.is_dir() and not path.name.startswith(".")]  # no .ipynb_checkpoints
    files = [(path, label) for label, folder in enumerate(folders) for path in _images(folder)]
    if not files:
        raise DataError(f"{place} must hold one folder of images for each class, but no such image is there")
    heads = [_head(path) for path, _ in files]
    sizes = {size: path for (_, size), (path, _) in zip(heads, files, strict=True)}
    if len(sizes) > 1:
        (one, a), (other, b) = list(sizes.items())[:2]
        raise DataError(
            f"all images must have one size, but {a} has {one[0]} × {one[1]} and {b} has {other[0]} × {other[1]} "
            "pixels; resize them first"
        )
    mode = "L" if all(mode in GREY or is_deep(mode) for mode, _ in heads) else "RGB"
    pixels = np.stack([_pixels(path, mode) for path, _ in files])
    labels = torch.tensor([label for _, label in files])
    return Dataset(name, as_inputs(pixels, name), labels, tuple(folder.name for folder in folders))


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except UNREADABLE_IMAGE as problem:
        raise DataError(f"{path} is not a readable image ({problem}); remove or replace it") from problem


def _head(path: Path) -> tuple[str, tuple[int, int]]:
    """Mode and size of an image, without decoding it."""
    with _opened(path) as image:
        return image.mode, image.size


def _pixels(path: Path, mode: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with _opened(path) as image:
        return np.asarray(eight_bit(image).convert(mode))


def from_npz(place: Path) -> Dataset | Task:
    """`inputs` and `labels`; optional `test_inputs` and `test_labels`, `classes` (names), `clients` (ids).

    The names of Keras, `x_train`, `y_train`, `x_test`, `y_test`, do as well. No array of objects is read.
    """
    keras = {"x_train": "inputs", "y_train": "labels", "x_test": "test_inputs", "y_test": "test_labels"}
    try:
        with place.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {keras.get(key, key): archive[key] for key in archive.files}
    except NO_NPZ as problem:
        raise DataError(f"{place} is not an .npz of plain arrays ({problem})") from problem
    if not {"inputs", "labels"} <= set(arrays) or ("test_inputs" in arrays) != ("test_labels" in arrays):
        has = ", ".join(arrays) or "nothing"
        raise DataError(f"{place} must hold `inputs` and `labels`, and both or none for the test, but holds {has}")
    classes = arrays["classes"].tolist() if "classes" in arrays else None
    train = from_arrays(place.stem, arrays["inputs"], arrays["labels"], classes, arrays.get("clients"))
    if "test_inputs" not in arrays:
        return train
    return Task(train, from_arrays(place.stem, arrays["test_inputs"], arrays["test_labels"], train.classes))


def from_function(path: str) -> Any:
    """The result of `module:function`, called without arguments: whatever `load` takes, or (inputs, labels)."""
    return plugins.call_function(path, DataError)


def from_torch(data: Any, name: str) -> Dataset:
    """A map-style torch data set of (input, label) pairs: tensors, arrays or Pillow images."""
    pairs = [data[index] for index in range(len(data))]
    if not pairs or not isinstance(pairs[0], tuple | list) or len(pairs[0]) < 2:
        got = f"a {type(pairs[0]).__name__}" if pairs else "nothing"
        raise DataError(f"{name} must hold (input, label) pairs, got {got}")
    labels = np.array([int(pair[1]) for pair in pairs])
    return from_arrays(name, _stacked([pair[0] for pair in pairs], name), labels, getattr(data, "classes", None))


def from_hugging_face(data: Any, name: str) -> Dataset:
    """A table with `features`: the column with class names is the label, the first other column the input.

    Of several (coarse and fine) labels the finest counts. A column `client_id` gives the ids for the split "column".
    """
    labels = [column for column, kind in data.features.items() if hasattr(kind, "names")]
    inputs = [column for column in data.features if column not in {*labels, "client_id"}]
    if not labels or not inputs:
        columns = ", ".join(data.features)
        raise DataError(f"{name} must have a column with class names and an input column, but has {columns}")
    label = max(labels, key=lambda column: len(data.features[column].names))
    clients = np.array(list(data["client_id"])) if "client_id" in data.features else None
    values = _stacked(data[inputs[0]], name)
    return from_arrays(name, values, np.array(list(data[label])), data.features[label].names, clients)


def _stacked(values: Iterable[Any], name: str) -> np.ndarray[Any, Any]:
    arrays = [_array(value) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1:
        got = f"{list(shapes[0])} and {list(shapes[1])}" if shapes else "none"
        raise DataError(f"{name}: all inputs must have one shape, got {got}; resize them first")
    return np.stack(arrays)


def _array(values: Any) -> np.ndarray[Any, Any]:
    """An array of what a tensor or anything like an array holds; numpy has no bfloat16."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def from_arrays(
    name: str, inputs: Any, labels: Any, classes: Iterable[str] | None = None, clients: Any = None
) -> Dataset:
    """A data set of arrays or tensors; without `classes` they are numbered 0 … max(labels)."""
    given = _array(labels)
    if given.dtype.kind not in "iu" or not given.size:
        raise DataError(f"{name}: labels must be whole numbers, got {given.dtype} {list(given.shape)}")
    label = torch.from_numpy(given.astype(np.int64)).flatten()
    names = [str(number) for number in range(int(label.max()) + 1)] if classes is None else map(str, classes)
    return Dataset(name, as_inputs(_array(inputs), name), label, tuple(names), _client_ids(clients))


def _client_ids(values: Any) -> Tensor | None:
    """Ids of any kind that sorts; those that are no whole numbers are numbered in their order."""
    if values is None:
        return None
    ids = np.asarray(values)
    numbers = ids if ids.dtype.kind in "iu" else np.unique(ids, return_inverse=True)[1]
    return torch.from_numpy(numbers.astype(np.int64))


def as_inputs(values: np.ndarray[Any, Any], name: str) -> Tensor:
    """uint8 [N, H, W, C] or float32 [N, D] from the shapes and types that people have.

    Images may lack the channel axis, have it first (when it is 1 or 3 and the last is not), or be floats in [0, 1].

    >>> as_inputs(np.zeros((5, 3, 8, 8)), "mine").shape
    torch.Size([5, 8, 8, 3])
    """
    if values.dtype.kind not in "biuf":
        raise DataError(f"{name}: inputs must be numbers, got {values.dtype}")
    tensor = torch.as_tensor(np.ascontiguousarray(values))
    if tensor.dim() == 2:
        return tensor.to(torch.float32)
    if tensor.dim() == 3:
        tensor = tensor[..., None]
    if tensor.dim() != 4:
        raise DataError(f"{name}: inputs must have 2, 3 or 4 axes (number first), got {list(tensor.shape)}")
    if tensor.shape[1] in {1, 3} and tensor.shape[-1] not in {1, 3}:
        tensor = tensor.permute(0, 2, 3, 1)
    if tensor.is_floating_point():
        if not bool(((tensor >= 0) & (tensor <= 1)).all()):
            raise DataError(f"{name}: images of floats must lie in [0, 1]; leave normalisation to fedbe")
        tensor = (tensor * 255).round().to(torch.uint8)
    if tensor.dtype != torch.uint8:
        raise DataError(f"{name}: images must be uint8 or floats in [0, 1], got {tensor.dtype}")
    return tensor.contiguous()


def from_object(data: Any) -> Dataset | Task:
    """Whatever a caller or a function hands over."""
    name = type(data).__name__.lower()
    if isinstance(data, Dataset | Task):
        return data
    if isinstance(data, Mapping):
        if "train" not in data:
            raise DataError(
                f"a mapping must have the key 'train' (and 'test'), got {', '.join(map(str, data)) or 'none'}"
            )
        parts = [from_object(data[part]) for part in ("train", "test") if part in data]
        assert all(isinstance(part, Dataset) for part in parts)
        return Task(*parts) if len(parts) == 2 else parts[0]  # type: ignore[arg-type]
    if hasattr(data, "features"):
        return from_hugging_face(data, name)
    if isinstance(data, Sequence) and len(data) == 2:
        return from_arrays("arrays", *data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return from_torch(data, name)
    raise DataError(
        f"cannot read data from {type(data).__name__}; give a name, a path, a torch or Hugging Face data set"
    )
