"""`load_task`: read any data set, by name, by path, or from a Python object."""

import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fedbe.core import plugins, random
from fedbe.data import adapters, embedded
from fedbe.data.catalogue import DATASETS, check_official, require_local_path
from fedbe.data.dataset import Dataset, Task
from fedbe.data.readers import tables
from fedbe.data.splits import remaining, representative
from fedbe.errors import DataError, nearest

FILE_KINDS: Mapping[str, Callable[[Path], Dataset | Task]] = {
    "folder": adapters.from_folder,
    "npz": adapters.from_npz,
    "csv": tables.read,
    "parquet": tables.read,
}
FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def dataset_names() -> tuple[str, ...]:
    """The names that `load_task` reads without a path.

    >>> dataset_names()[:3]
    ('digits', 'swissroll', 'cifar10')
    """
    return tuple(DATASETS)


def is_function(source: str) -> bool:
    """Whether `load_task` would call a function of the user, "module:function", for this source."""
    has_known_prefix = source.partition(":")[0] in {*FILE_KINDS, *DATASETS}
    return bool(FUNCTION_PATH.fullmatch(source)) and not has_known_prefix and not Path(source).exists()


def load_task(source: Any, *, root: Path | None = None, seed: int = 0) -> Task:
    """Read training and test data.

    Where a source has no test part, a stratified fifth is held out. That fifth depends on `seed`.

    Args:
        source: one of

            - "digits", "cifar10", …: a name from `dataset_names()`
            - "cifar10:PATH": a named data set at your own path, a directory or an archive
            - "folder:PATH": one folder of images for each class
            - "npz:PATH": arrays
            - "csv:PATH", "parquet:PATH": a table (`fedbe.data.readers.tables`)
            - "module:function": a function that returns any of these, or (inputs, labels)
            - a path: an official directory or archive with its official name, an .npz, .csv or .parquet, or class
              folders
            - an object: a torch `Dataset`, a Hugging Face `Dataset` or `DatasetDict`, a `flwr-datasets` partitioner,
              a `Task`, a `Dataset`, or (inputs, labels)
        root: the data directory; default: FEDBE_DATA, else the user's cache directory.
        seed: seed of the held-out fifth, and of the points of "swissroll".

    Returns:
        The task, all of it in memory.

    Raises:
        DataError: if the source is unknown, missing, damaged or of the wrong shape.

    Example:
        >>> task = load_task("digits")
        >>> len(task.train), len(task.test), tuple(task.train.inputs.shape[1:])
        (1438, 359, (8, 8, 1))
    """
    data = load_data(source, root=root, seed=seed)
    return data if isinstance(data, Task) else hold_out(data, seed)


def load_data(source: Any, *, root: Path | None = None, seed: int = 0) -> Dataset | Task:
    """Read a source of `load_task` as it is: a `Task` if it has a test part, else a `Dataset`."""
    return _from_text(source, root, seed) if isinstance(source, str | PathLike) else adapters.from_object(source)


def _from_text(source: str | PathLike[str], root: Path | None, seed: int) -> Dataset | Task:
    text = str(source)
    if text == "digits":
        return embedded.digits()
    if text == "swissroll":
        return embedded.swissroll(seed)
    if text in DATASETS:
        path = require_local_path(text, root)
        check_official(text, path)
        return _read(text, path)
    kind, colon, rest = text.partition(":")
    if colon and rest and kind in {*FILE_KINDS, *DATASETS}:
        return _from_path(kind, Path(rest))
    file, _ = tables.split_options(Path(text))  # a table may have options behind its path
    if Path(text).exists() or (file.exists() and _kind_of(file) in ("csv", "parquet")):
        return _from_path(_kind_of(file), Path(text))
    if is_function(text):
        return adapters.from_object(plugins.call_function(text, DataError))
    raise DataError(f"'{text}' is neither a known data set nor an existing path: {nearest(text, DATASETS)}")


def _kind_of(path: Path) -> str:
    """The kind of source at `path`: a data set if the name is an official one, else by the suffix."""
    for name, info in DATASETS.items():
        if path.resolve().name in {Path(official).name for official in info.paths if "/" not in official}:
            return name
    suffix = path.suffix.removeprefix(".")
    return suffix if suffix in FILE_KINDS else "folder"


def _from_path(kind: str, path: Path) -> Dataset | Task:
    if not tables.split_options(path)[0].exists():
        raise DataError(f"{path} does not exist; check the path")
    return FILE_KINDS[kind](path) if kind in FILE_KINDS else _read(kind, path)


def _read(name: str, path: Path) -> Task:
    read = DATASETS[name].read
    if read is None:
        raise DataError(f"{name} comes with fedbe and has no path; write just '{name}'")
    return read(name, path)


def hold_out(data: Dataset, seed: int) -> Task:
    """Hold out a fifth of `data` as test data, stratified where each example has one class; train on the rest."""
    if len(data) < 5:
        raise DataError(f"{data.name} must have 5 examples or more to hold out a fifth, but has {len(data)}")
    test = representative(data.labels, len(data) // 5, random.generator(seed, role="hold-out"))
    return Task(data.subset(remaining(len(data), test)), data.subset(test))
