"""The user's own data: class folders, an .npz, a function, a torch or a Hugging Face data set.

Each adapter returns a `Dataset`, or a `Task` if the source has a test part.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers.images import UNREADABLE_IMAGE, eight_bit, is_deep
from fedbe.errors import DataError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
GREY_MODES = {"1", "L"}
KERAS_NAMES = {"x_train": "inputs", "y_train": "labels", "x_test": "test_inputs", "y_test": "test_labels"}
MAX_CLASSES = 100_000  # without class names; a larger label is a mistake


def from_folder(path: Path) -> Dataset | Task:
    """Read PATH/<class>/<image>, or PATH/train/<class>/<image> and PATH/test/<class>/<image>.

    All images must have one size. If all of them are grey, the data set is grey, else it is RGB.
    """
    if (path / "train").is_dir() and (path / "test").is_dir():
        return Task(_class_folders(path / "train", path.name), _class_folders(path / "test", path.name))
    data = _class_folders(path, path.name)
    if empty := set(range(len(data.classes))) - set(data.labels.tolist()):
        raise DataError(f"{path / data.classes[min(empty)]} has no images, so it is not a class; remove it")
    return data


def _class_folders(path: Path, name: str) -> Dataset:
    folders = _visible_folders(path) if path.is_dir() else []
    files_by_class = [_image_files(folder) for folder in folders]
    files = list(chain.from_iterable(files_by_class))
    if not files:
        raise DataError(f"{path} must have one folder of images for each class, but there are no such images")
    mode = _common_mode(files)
    pixels = np.stack([_pixels(file, mode) for file in files])
    labels = torch.arange(len(folders)).repeat_interleave(torch.tensor([len(group) for group in files_by_class]))
    return Dataset(name, as_inputs(pixels, name), labels, tuple(folder.name for folder in folders))


def _visible_folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _common_mode(files: Sequence[Path]) -> str:
    """Pillow's mode for all of these images, "L" or "RGB"; raises if their sizes differ. Decodes no image."""
    modes, sizes = set(), {}
    for file in files:
        with _opened(file) as image:
            modes.add(image.mode)
            sizes[image.size] = file
    if len(sizes) > 1:
        (size_a, file_a), (size_b, file_b) = list(sizes.items())[:2]
        raise DataError(
            f"all images must have one size, but {file_a} has {size_a[0]} × {size_a[1]} and {file_b} has "
            f"{size_b[0]} × {size_b[1]} pixels; resize them first"
        )
    return "L" if all(mode in GREY_MODES or is_deep(mode) for mode in modes) else "RGB"


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except UNREADABLE_IMAGE as problem:
        raise DataError(f"{path} is not a readable image ({problem}); remove or replace it") from problem


def _pixels(path: Path, mode: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with _opened(path) as image:
        return np.asarray(eight_bit(image).convert(mode))


def from_npz(path: Path) -> Dataset | Task:
    """Read an .npz with the arrays `inputs` and `labels`.

    Optional arrays: `test_inputs` and `test_labels`, `classes` (names), `clients` (client ids). The names of Keras,
    `x_train`, `y_train`, `x_test`, `y_test`, are accepted too. Arrays of objects (pickles) are refused.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {KERAS_NAMES.get(key, key): archive[key] for key in archive.files}
        # Here, because texts with invalid characters fail only when they become Python strings.
        classes = np.ravel(arrays["classes"]).tolist() if "classes" in arrays else None
    except Exception as problem:  # numpy, zipfile and zlib raise many kinds of errors on a damaged file
        raise DataError(f"{path} is not an .npz of plain arrays ({problem})") from problem
    if not {"inputs", "labels"} <= set(arrays) or ("test_inputs" in arrays) != ("test_labels" in arrays):
        names = ", ".join(arrays) or "nothing"
        raise DataError(
            f"{path} must have `inputs` and `labels`, and `test_inputs` and `test_labels` together or not at all, "
            f"but has {names}"
        )
    train = from_arrays(path.stem, arrays["inputs"], arrays["labels"], classes, arrays.get("clients"))
    if "test_inputs" not in arrays:
        return train
    return Task(train, from_arrays(path.stem, arrays["test_inputs"], arrays["test_labels"], train.classes))


def from_torch(data: Any, name: str) -> Dataset:
    """Read a map-style torch data set of (input, label) pairs; inputs are tensors, arrays or Pillow images."""
    pairs = [data[index] for index in range(len(data))]
    if not pairs or not isinstance(pairs[0], tuple | list) or len(pairs[0]) < 2:
        got = f"a {type(pairs[0]).__name__}" if pairs else "nothing"
        raise DataError(f"{name} must have (input, label) pairs, got {got}")
    labels = np.array([int(pair[1]) for pair in pairs])
    return from_arrays(name, _stacked([pair[0] for pair in pairs], name), labels, getattr(data, "classes", None))


def from_hugging_face(data: Any, name: str) -> Dataset:
    """Read a table with `features`: the column with class names is the label, the first other column the input.

    Of several label columns (coarse and fine) the one with the most classes is used. The column `client_id`, if
    there is one, gives the ids for the split "column".
    """
    label_columns = [column for column, feature in data.features.items() if hasattr(feature, "names")]
    input_columns = [column for column in data.features if column not in {*label_columns, "client_id"}]
    if not label_columns or not input_columns:
        columns = ", ".join(data.features)
        raise DataError(f"{name} must have a column with class names and an input column, but has {columns}")
    label = max(label_columns, key=lambda column: len(data.features[column].names))
    client_ids = np.array(list(data["client_id"])) if "client_id" in data.features else None
    inputs = _stacked(data[input_columns[0]], name)
    return from_arrays(name, inputs, np.array(list(data[label])), data.features[label].names, client_ids)


def _stacked(values: Iterable[Any], name: str) -> np.ndarray[Any, Any]:
    arrays = [_array(value) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1:
        got = f"{list(shapes[0])} and {list(shapes[1])}" if shapes else "none"
        raise DataError(f"{name}: all inputs must have one shape, got {got}; resize them first")
    return np.stack(arrays)


def _array(values: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of a tensor or an array-like; bfloat16, which NumPy does not have, becomes float32."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def from_arrays(
    name: str, inputs: Any, labels: Any, classes: Iterable[str] | None = None, client_ids: Any = None
) -> Dataset:
    """A data set from arrays or tensors.

    Args:
        name: the name of the data set.
        inputs: see `as_inputs`.
        labels: integers, one for each input.
        classes: class names; default: the numbers 0 … max(labels).
        client_ids: one id for each input, integers or any values that can be sorted; or None.

    Example:
        >>> from_arrays("mine", np.zeros((4, 2)), [0, 1, 1, 0]).classes
        ('0', '1')
    """
    label_array = _array(labels)
    if label_array.dtype.kind not in "iu" or not label_array.size:
        raise DataError(f"{name}: labels must be integers, got {label_array.dtype} {list(label_array.shape)}")
    label_tensor = torch.from_numpy(label_array.astype(np.int64)).flatten()
    if classes is None:
        largest = int(label_tensor.max())
        if largest >= MAX_CLASSES:
            raise DataError(f"{name}: labels must be below {MAX_CLASSES} if there are no class names, got {largest}")
        classes = map(str, range(largest + 1))
    names = tuple(map(str, classes))
    return Dataset(name, as_inputs(_array(inputs), name), label_tensor, names, _client_ids(client_ids, name))


def _client_ids(values: Any, name: str) -> Tensor | None:
    """Ids as int64; values that are not integers are numbered in sorted order."""
    if values is None:
        return None
    ids = np.asarray(values)
    try:
        numbers = ids if ids.dtype.kind in "iu" else np.unique(ids, return_inverse=True)[1]
    except TypeError as problem:
        raise DataError(f"{name}: client ids must be numbers or texts, got {ids.dtype}") from problem
    return torch.from_numpy(numbers.astype(np.int64))


def as_inputs(values: np.ndarray[Any, Any], name: str) -> Tensor:
    """Convert common shapes and types to uint8 [N, H, W, C] images or float32 [N, D] vectors.

    Two axes are vectors. Three axes are grey images. Images with four axes may have their channels first: the second
    axis is 1 or 3, and the last is not. Images may be uint8, or floats in [0, 1].

    Example:
        >>> as_inputs(np.zeros((5, 3, 8, 8)), "mine").shape
        torch.Size([5, 8, 8, 3])
    """
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"{name}: inputs must be numbers of at most 64 bits, got {values.dtype}")
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    tensor = torch.as_tensor(native)
    if tensor.dim() == 2:
        return tensor.to(torch.float32)
    if tensor.dim() == 3:
        tensor = tensor[..., None]
    if tensor.dim() != 4:
        raise DataError(f"{name}: inputs must have 2, 3 or 4 axes (number first), got {list(tensor.shape)}")
    if tensor.shape[1] in {1, 3} and tensor.shape[-1] not in {1, 3}:
        tensor = tensor.permute(0, 2, 3, 1)
    return _to_bytes(tensor, name).contiguous()


def _to_bytes(images: Tensor, name: str) -> Tensor:
    if images.is_floating_point():
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise DataError(f"{name}: images of floats must be in [0, 1]; fedbe normalises them itself")
        return (images * 255).round().to(torch.uint8)
    if images.dtype != torch.uint8:
        raise DataError(f"{name}: images must be uint8 or floats in [0, 1], got {images.dtype}")
    return images


def from_object(data: Any) -> Dataset | Task:
    """Read a Python object: a `Dataset`, `Task`, torch or Hugging Face data set, mapping or (inputs, labels).

    A mapping, for example a Hugging Face `DatasetDict`, has the keys "train" and, optionally, "test".
    """
    name = type(data).__name__.lower()
    if isinstance(data, Dataset | Task):
        return data
    if isinstance(data, Mapping):
        return _from_mapping(data)
    if hasattr(data, "features"):
        return from_hugging_face(data, name)
    if isinstance(data, Sequence) and len(data) == 2:
        return from_arrays("arrays", *data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return from_torch(data, name)
    raise DataError(
        f"cannot read data from {type(data).__name__}; give a name, a path, a torch or Hugging Face data set"
    )


def _from_mapping(data: Mapping[str, Any]) -> Dataset | Task:
    if "train" not in data:
        raise DataError(f"a mapping must have the key 'train' (and 'test'), got {', '.join(map(str, data)) or 'none'}")
    parts = [from_object(data[part]) for part in ("train", "test") if part in data]
    for part in parts:
        if not isinstance(part, Dataset):
            raise DataError("the parts of a mapping must be data sets, but one of them has a test part itself")
    return Task(*parts) if len(parts) == 2 else parts[0]  # type: ignore[arg-type]
