"""`load`, the one door to every data set: known by name, at a path, or handed over as an object."""

import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fedbe.core import random
from fedbe.data import adapters, embedded
from fedbe.data.catalogue import DATASETS, find
from fedbe.data.dataset import Dataset, Task
from fedbe.data.splits import stratified
from fedbe.errors import DataError, nearest

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def known() -> tuple[str, ...]:
    """The names that `load` understands without a path."""
    return tuple(DATASETS)


def is_function(source: str) -> bool:
    """Whether `load` would call a function of the user's."""
    known_kind = source.partition(":")[0] in {"folder", "npz", *DATASETS}
    return bool(FUNCTION.fullmatch(source)) and not known_kind and not Path(source).exists()


def load_task(source: Any, *, root: Path | None = None, seed: int = 0) -> Task:
    """Training and test data from `source`.

    "digits", "cifar10", …   a known name; the real ones from `root`, FEDBE_DATA or the user's cache directory
    "cifar10:PATH"           a known set at a path of your own, directory or archive
    "folder:PATH"            class folders of images
    "npz:PATH"               arrays
    "module:function"        a function that returns any of these, or (inputs, labels)
    a path                   an official directory or archive by its official name, an .npz, or class folders
    an object                a torch `Dataset`, a Hugging Face `Dataset` or `DatasetDict`, a `Task`, a `Dataset`

    Where a source has no test part, a stratified fifth is held out, as a function of `seed`.

    >>> task = load_task("digits")
    >>> len(task.train), len(task.test), tuple(task.train.inputs.shape[1:])
    (1438, 359, (8, 8, 1))
    """
    found = _from_text(source, root, seed) if isinstance(source, str | PathLike) else adapters.from_object(source)
    return found if isinstance(found, Task) else hold_out(found, seed)


def _from_text(source: str | PathLike[str], root: Path | None, seed: int) -> Dataset | Task:
    text = str(source)
    if text == "digits":
        return embedded.digits()
    if text == "swissroll":
        return embedded.swissroll(seed)
    if text in DATASETS:
        return _read(text, find(text, root))
    kind, colon, rest = text.partition(":")
    if colon and rest and kind in {"folder", "npz", *DATASETS}:
        return _from_path(kind, Path(rest))
    if Path(text).exists():
        return _from_path(_kind_of(Path(text)), Path(text))
    if is_function(text):
        return adapters.from_object(adapters.from_function(text))
    raise DataError(f"'{text}' is neither a known data set nor a path that exists: {nearest(text, DATASETS)}")


def _kind_of(path: Path) -> str:
    """Which source a path is: an official name tells, else its suffix."""
    for name, entry in DATASETS.items():
        if path.resolve().name in {Path(place).name for place in entry.places if "/" not in place}:
            return name
    return "npz" if path.suffix == ".npz" else "folder"


def _from_path(kind: str, path: Path) -> Dataset | Task:
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path")
    if kind == "folder":
        return adapters.from_folder(path)
    if kind == "npz":
        return adapters.from_npz(path)
    return _read(kind, path)


def _read(name: str, place: Path) -> Task:
    read = DATASETS[name].read
    if read is None:
        raise DataError(f"{name} comes with fedbe and is read from no path; say just '{name}'")
    return read(name, place)


def hold_out(data: Dataset, seed: int) -> Task:
    """A stratified fifth as test data, the rest to train on."""
    if len(data) < 5:
        raise DataError(f"{data.name} must have 5 examples or more to hold out a fifth, but has {len(data)}")
    test = stratified(data.labels, len(data) // 5, random.generator(seed, role="hold-out"))
    train = torch.ones(len(data), dtype=torch.bool).index_fill_(0, test, False).nonzero().flatten()
    return Task(data.subset(train), data.subset(test))
