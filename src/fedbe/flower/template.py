"""A new Flower app: a copy of examples/flower."""

import shutil
from pathlib import Path

from fedbe.errors import RunError


def source() -> Path:
    """The example: inside the installed package, or in the repository that this module was loaded from."""
    here = Path(__file__).parent
    packed = here / "example"
    return packed if packed.is_dir() else here.parents[2] / "examples" / "flower"


def write(folder: Path) -> None:
    """Write the app into a folder that does not exist yet or is empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists already and is not an empty folder: choose another name")
    ignore = shutil.ignore_patterns("__pycache__", "certs", "state", "runs")
    try:
        shutil.copytree(source(), folder, ignore=ignore, dirs_exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}") from error
