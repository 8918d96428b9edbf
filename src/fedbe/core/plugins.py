"""Models and data sets of the user, named as module:function."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbe.errors import FedBEError


def load_function(path: str, error: type[FedBEError]) -> Callable[..., Any]:
    """Import the function that `path` names as module:function, or raise an `error`.

    Modules in the current directory can be imported, as with `python -m`.
    """
    module, _, name = path.partition(":")
    folder = os.getcwd()  # noqa: PTH109
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as problem:  # a user's module can raise anything when it is imported
        raise error(f"'{path}' must name a function as module:function, but {problem}") from problem
    if not callable(function):
        raise error(f"'{path}' must name a function as module:function, but is a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def call_function(path: str, error: type[FedBEError], **arguments: Any) -> Any:
    """Call the function that `path` names. An exception in it becomes an `error` that names the function."""
    function = load_function(path, error)
    try:
        return function(**arguments)
    except Exception as problem:
        raise error(f"'{path}' failed with {type(problem).__name__}: {problem}") from problem


def source_digest(path: str) -> str:
    """A digest of the source file of a function that was loaded before; `path` itself if there is no file."""
    module = sys.modules[path.partition(":")[0]]
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else path
