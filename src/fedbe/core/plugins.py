"""A user's own model or data, named as module:function."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbe.errors import FedBEError


def load_function(path: str, error: type[FedBEError]) -> Callable[..., Any]:
    """The function behind `path`; modules in the current directory are found, as `python -m` finds them."""
    module, _, name = path.partition(":")
    here = os.getcwd()  # noqa: PTH109
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as problem:  # whatever a user's module does when it is imported
        raise error(f"'{path}' must name a function as module:function, but {problem}") from problem
    if not callable(found):
        raise error(f"'{path}' must name a function as module:function, but is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def call_function(path: str, error: type[FedBEError], **arguments: Any) -> Any:
    """What the function behind `path` makes of these; its own failures are told by its name."""
    made = load_function(path, error)
    try:
        return made(**arguments)
    except Exception as problem:
        raise error(f"'{path}' failed with {type(problem).__name__}: {problem}") from problem


def source_digest(path: str) -> str:
    """A digest of the file that `path`, which has been loaded before, comes from; its name if there is no file."""
    module = sys.modules[path.partition(":")[0]]
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else path
