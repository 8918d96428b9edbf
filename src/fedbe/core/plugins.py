"""Models and data sets of the user, named as module:function.

A recipe is a text file that anybody may have written, and module:function can name anything that is installed. So only
modules below the current directory are imported, unless the user trusts the file (`--trust`, `trust()`).
"""

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbe.errors import FedBEError

trusts_all = False  # whether every module may be imported, in this process


def trust() -> None:
    """From now on import any module that a recipe names, in this process."""
    global trusts_all
    trusts_all = True


def load_function(path: str, error: type[FedBEError]) -> Callable[..., Any]:
    """Import the function that `path` names as module:function, or raise an `error`.

    Modules in the current directory can be imported, as with `python -m`; others only after `trust()`. The function
    itself must be defined there, too: a module may have imported others from anywhere.
    """
    module, _, name = path.partition(":")
    folder = os.getcwd()  # noqa: PTH109
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not trusts_all:
        _check_local(path, module.partition(".")[0], Path(folder).resolve(), error)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as problem:  # a user's module can raise anything when it is imported
        reason = f"{str(problem)[:1].lower()}{str(problem)[1:]}"  # Python's "No module named …" begins a sentence
        raise error(f"'{path}' must name a function as module:function, but {reason}") from problem
    if not callable(function):
        raise error(f"'{path}' must name a function as module:function, but is a {type(function).__name__}")
    if not trusts_all:
        _check_own(path, function, Path(folder).resolve(), error)
    return function  # type: ignore[no-any-return]


def _check_local(path: str, package: str, folder: Path, error: type[FedBEError]) -> None:
    """Refuse a module that is not part of the project in the current directory. Nothing is imported for that."""
    locations = _locations(package)
    if locations is None:
        return  # there is no such module, and importing it says so
    if not locations or not all(_is_project_file(Path(path).resolve(), folder) for path in locations):
        where = locations[0] if locations else "Python itself"
        raise error(
            f"'{path}' would run code from {where}, which is not below the current directory: give --trust if you "
            "trust the source of that name"
        )


def _locations(package: str) -> list[str] | None:
    """The folders and the file of a module, wherever the import system finds it; None if there is no such module.

    The path alone is not enough: editable installs, for example, add finders of their own.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: a loaded module without a spec, such as `__main__`
        spec = None
    if spec is None:
        module = sys.modules.get(package)
        file = getattr(module, "__file__", None)
        return None if module is None else [file] if file else []
    return [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else ())]


def _check_own(path: str, function: Any, folder: Path, error: type[FedBEError]) -> None:
    """Refuse a function that a module of the project has only imported, such as `run` of subprocess."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if hasattr(function, "__qualname__") else type(function)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    if file is None or not _is_project_file(Path(file).resolve(), folder):
        raise error(
            f"'{path}' is code of '{owner.__module__}', which is not below the current directory: write a function "
            "there that calls it, or give --trust if you trust the source of that name"
        )


def _is_project_file(file: Path, folder: Path) -> bool:
    """Whether a file is the project's own: below its folder, and not Python's own or installed, wherever that is."""
    installed = {"site-packages", "dist-packages"}
    return (
        file.is_relative_to(folder)
        and not installed.intersection(file.parts)
        and not any(file.is_relative_to(python) for python in _python_folders())
    )


@functools.cache
def _python_folders() -> tuple[Path, ...]:
    """Where Python's own modules and installed packages are: often below `/` or the home folder."""
    paths = sysconfig.get_paths()
    return tuple({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")})


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
