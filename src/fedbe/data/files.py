"""Files that are written whole or not at all."""

import os
from pathlib import Path

from fedbe.errors import DataError


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def write_file(path: Path, content: bytes) -> None:
    """Replace `path` in one step: a reader, or a crash, sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    try:
        write_synced(part, content)
        part.replace(path)
    except OSError as problem:
        part.unlink(missing_ok=True)
        raise DataError(f"cannot write {path} ({problem.strerror}); choose another place") from problem
