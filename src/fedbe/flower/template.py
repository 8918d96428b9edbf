"""A new Flower app: a copy of examples/flower."""

import shutil
from pathlib import Path

from fedbe.errors import RunError


def source_folder() -> Path:
    """The folder of the example: in the installed package, or in the repository of this module."""
    package = Path(__file__).parent
    installed = package / "example"
    return installed if installed.is_dir() else package.parents[2] / "examples" / "flower"


def write_app(folder: Path) -> None:
    """Copy the example into a folder that does not exist or is empty. RunError if that is not possible."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists already and is not an empty folder: choose another name")
    ignore = shutil.ignore_patterns("__pycache__", "certs", "state", "runs")
    try:
        shutil.copytree(source_folder(), folder, ignore=ignore, dirs_exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}") from error
