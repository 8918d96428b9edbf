"""Files that are written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from fedbe.errors import RunError


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` in one step: a reader, or a crash, sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}; what was there before is unharmed") from error


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def append_line(path: Path, value: Any) -> None:
    """Add one JSON line and wait until it is on the disk."""
    try:
        with path.open("ab") as file:
            file.write((json.dumps(value) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder last through a power cut (where folders can be synced)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
