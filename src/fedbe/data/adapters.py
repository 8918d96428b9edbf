"""The user's own data: class folders, an .npz, a function, a torch or a Hugging Face data set.

Each adapter returns a `Dataset`, or a `Task` if the source has a test part.
"""

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedbe.core.inputs import LABEL_NAMES, as_batch
from fedbe.core.inputs import as_inputs as stack_inputs
from fedbe.data.arrays import (
    as_array,
    as_inputs,
    from_arrays,
    make_task,
    numbers_as_arrays,
    stacked,
)
from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers import npz, tables
from fedbe.data.readers.images import UNREADABLE_IMAGE, check_set, eight_bit, is_deep, is_image_file, open_image
from fedbe.errors import DataError, SettingError

GREY_MODES = {"1", "L"}
KNOWN_NAMES = {
    **dict.fromkeys(("x", "X", "x_train", "X_train", "data"), "inputs"),
    **dict.fromkeys(("y", "y_train", "label", "target"), "labels"),
    **dict.fromkeys(("x_test", "X_test"), "test_inputs"),
    "y_test": "test_labels",
}
TOKEN_NAMES = ("input_ids", "attention_mask", "token_type_ids")  # arguments of Hugging Face's models


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
    mode, (width, height) = _common_form(files)
    shape = (len(files), height, width, *((3,) if mode == "RGB" else ()))
    check_set(files, math.prod(shape), name)
    pixels = np.empty(shape, np.uint8)
    for image, file in zip(pixels, files, strict=True):
        image[...] = _pixels(file, mode)
    labels = torch.arange(len(folders)).repeat_interleave(torch.tensor([len(group) for group in files_by_class]))
    return Dataset(name, as_inputs(pixels, name), labels, tuple(folder.name for folder in folders))


def _visible_folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_image_file(path))


def _common_form(files: Sequence[Path]) -> tuple[str, tuple[int, int]]:
    """Pillow's mode, "L" or "RGB", and the size of these images; raises if sizes differ. Decodes no image."""
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
    return "L" if all(mode in GREY_MODES or is_deep(mode) for mode in modes) else "RGB", next(iter(sizes))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with open_image(path) as image:
            yield image
    except UNREADABLE_IMAGE as problem:
        raise DataError(f"{path} is not a readable image ({problem}); remove or replace it") from problem


def _pixels(path: Path, mode: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with _opened(path) as image:
        return np.asarray(eight_bit(image).convert(mode))


def from_npz(path: Path) -> Dataset | Task:
    """Read an .npz with the arrays `inputs` and `labels`.

    Optional arrays: `test_inputs` and `test_labels`, `classes` (names), `clients` (client ids). `X` and `y`, and the
    names of Keras, `x_train`, `y_train`, `x_test`, `y_test`, are accepted too. Instead of `inputs` there may be
    `input_ids`, `attention_mask` and `token_type_ids`, with `test_input_ids` and so on. Arrays of objects (pickles) are
    refused.
    """
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not an .npz file; write it with numpy.savez")
    try:
        arrays: dict[str, Any] = {KNOWN_NAMES.get(key, key): value for key, value in npz.read_arrays(path).items()}
        # Here, because texts with invalid characters fail only when they become Python strings.
        classes = np.ravel(arrays["classes"]).tolist() if "classes" in arrays else None
    except DataError:
        raise
    except Exception as problem:  # numpy, zipfile and zlib raise many kinds of errors on a damaged file
        raise DataError(f"{path} is not an .npz of plain arrays ({problem})") from problem
    for part in ("", "test_"):
        if tokens := {name: arrays[part + name] for name in TOKEN_NAMES if part + name in arrays}:
            arrays[f"{part}inputs"] = tokens
    if not {"inputs", "labels"} <= set(arrays) or ("test_inputs" in arrays) != ("test_labels" in arrays):
        names = ", ".join(arrays) or "nothing"
        raise DataError(
            f"{path} must have `inputs` and `labels`, and `test_inputs` and `test_labels` together or not at all, "
            f"but has {names}"
        )
    train = from_arrays(path.stem, arrays["inputs"], arrays["labels"], classes, arrays.get("clients"))
    if "test_inputs" not in arrays:
        return train
    return make_task(train, from_arrays(path.stem, arrays["test_inputs"], arrays["test_labels"], classes))


def from_torch(data: Any, name: str) -> Dataset:
    """Read a map-style torch data set of (input, label) pairs, or of dicts with the label under "label" or "labels".

    Inputs are tensors, arrays, Pillow images, or tuples or dicts of tensors. Labels are integers or texts, or tensors
    with one class for each position.
    """
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        raise DataError(
            "cannot read a DataFrame, because it does not say which column is the label: pass "
            "(frame[INPUTS].to_numpy(), frame[LABEL].to_numpy()), or write it with `to_csv`"
        )
    pairs = [_pair(data[index], name) for index in range(len(data))]
    if not pairs:
        raise DataError(f"{name} must have (input, label) pairs, got nothing")
    labels = stacked([label for _, label in pairs], name, "labels")
    if labels.ndim > 1 and pairs[0][1] is not None and labels.shape[1:] == (1,):
        labels = labels[:, 0]
    return from_arrays(name, _gather([value for value, _ in pairs], name), labels, getattr(data, "classes", None))


def _pair(item: Any, name: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping) and (labels := [key for key in LABEL_NAMES if key in item]):
        return {key: value for key, value in item.items() if key != labels[0]}, item[labels[0]]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"{name} must have (input, label) pairs, got a {type(item).__name__}")
    return item[0], item[1]


def _gather(values: list[Any], name: str) -> Any:
    """One array of all inputs, or a tuple or dict of tensors."""
    if not isinstance(values[0], Mapping | tuple):
        return stacked(values, name)
    try:
        rows = [as_batch(numbers_as_arrays(value, name), f"{name}: inputs") for value in values]
        return stack_inputs([(row,) for row in rows], name=name).tensor  # type: ignore[attr-defined]
    except SettingError as problem:
        raise DataError(str(problem)) from problem


def from_hugging_face(data: Any, name: str) -> Dataset:
    """Read a table with `features`.

    The label is the column called label, labels, target, class or y, else the one with class names; of several
    columns with class names (coarse and fine) the one with the most classes. The inputs are `input_ids`,
    `attention_mask` and `token_type_ids` where they exist, else the first other column; if that has one number in each
    row, all other columns are inputs, as in a CSV table. The column `client_id` or `client`, if there is one, gives the
    ids for the split "column".
    """
    class_names = {column: feature.names for column, feature in data.features.items() if hasattr(feature, "names")}
    finest_first = sorted(class_names, key=lambda column: -len(class_names[column]))
    labels = [column for column in tables.LABELS if column in data.features][:1] or finest_first
    clients = [column for column in tables.CLIENTS if column in data.features][:1]
    inputs = [column for column in data.features if column not in {*labels, *clients}]
    if not labels or not inputs:
        columns = ", ".join(data.features)
        raise DataError(
            f"{name} must have a label column (called {', '.join(tables.LABELS)}, or with class names) and an input "
            f"column, but has {columns}; rename one with `rename_column`"
        )
    label_values, *ids = (
        tables.complete(as_array(list(data[column]), name, column), column, name) for column in (labels[0], *clients)
    )
    tokens = {column: stacked(data[column], name) for column in TOKEN_NAMES if column in data.features}
    return from_arrays(
        name,
        tokens or _numbers(data, sorted(inputs, key=lambda column: column in class_names), name),
        label_values,
        class_names.get(labels[0]),
        ids[0] if ids else None,
    )


def _numbers(data: Any, columns: Sequence[str], name: str) -> Any:
    """The first column, or all of them if it has one value in each row."""
    first = columns[0]
    values = stacked(data[first], name)
    if values.dtype.kind in "US":
        raise DataError(f"{name}: the column '{first}' has texts; tokenize them first (`input_ids`)")
    if values.ndim == 1:
        return tables.encoded({column: stacked(data[column], name) for column in columns}, name)
    # Hugging Face gives arrays of bytes as lists of numbers.
    return values.astype(np.uint8) if _value_type(data.features[first]) == "uint8" else values


def _value_type(feature: Any) -> str | None:
    """The type of the numbers in a column: of Array3D itself, of nested lists that of the innermost feature."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return getattr(feature, "dtype", None)


class _OneTable:
    """Several Hugging Face tables one after the other: their texts become inputs together, so in the same way."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.features, self._parts = parts[0].features, parts
        for part in parts:
            if part.features != self.features:
                raise DataError(
                    f"all parts of a data set must have the same columns, types and class names, got {self.features} "
                    f"and {part.features}; change them with `cast`"
                )

    def __getitem__(self, column: str) -> list[Any]:
        return list(chain.from_iterable(part[column] for part in self._parts))


def from_partitioner(partitioner: Any) -> Dataset:
    """Read a partitioner of `flwr-datasets`: its partitions are the clients of the split "column"."""
    parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    sizes = torch.tensor([len(part) for part in parts])
    joined = from_hugging_face(_OneTable(parts), "partitions")
    return replace(joined, client_ids=torch.arange(len(parts)).repeat_interleave(sizes))


def from_object(data: Any) -> Dataset | Task:
    """Read a Python object: a `Dataset`, `Task`, torch or Hugging Face data set, mapping or (inputs, labels).

    A mapping, for example a Hugging Face `DatasetDict`, has the keys "train" and, optionally, "test". A pair of pairs
    (inputs, labels), as in Keras, is training and test data.
    """
    name = type(data).__name__.lower()
    if isinstance(data, Dataset | Task):
        return data
    if isinstance(data, Mapping):
        return _from_mapping(data)
    if hasattr(data, "load_partition") and hasattr(data, "num_partitions"):
        return from_partitioner(data)
    if hasattr(data, "features"):
        return from_hugging_face(data, name)
    if isinstance(data, Sequence) and len(data) == 2:
        return _from_pair(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return from_torch(data, name)
    raise DataError(
        f"cannot read data from {type(data).__name__}; give a name, a path, a torch or Hugging Face data set"
    )


def _from_pair(data: Sequence[Any]) -> Dataset | Task:
    """(inputs, labels); or a pair of them, of which the second is the test part."""
    if all(isinstance(part, tuple) and len(part) == 2 for part in data):
        return make_task(*(from_arrays("arrays", *part) for part in data))
    return from_arrays("arrays", *data)


def _from_mapping(data: Mapping[str, Any]) -> Dataset | Task:
    names = [part for part in ("train", "test") if part in data]
    if "train" not in data or len(data) > len(names):
        raise DataError(
            f"a mapping must have the key 'train' (and 'test'), got {', '.join(map(str, data)) or 'none'}; choose, "
            "like {'train': data['train'], 'test': data['validation']}"
        )
    values = [data[name] for name in names]
    if all(hasattr(value, "features") for value in values):
        joined = from_hugging_face(_OneTable(values), type(values[0]).__name__.lower())
        cuts = torch.split(torch.arange(len(joined)), [len(value) for value in values])
        parts: list[Dataset | Task] = [joined.subset(index) for index in cuts]
    else:
        parts = [from_object(value) for value in values]
    for part in parts:
        if not isinstance(part, Dataset):
            raise DataError("the parts of a mapping must be data sets, but one of them has a test part itself")
    return make_task(*parts) if len(parts) == 2 else parts[0]  # type: ignore[arg-type]
