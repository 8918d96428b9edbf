"""Atomic writes, and locks against a second process."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from fedbe.errors import BusyError, FedBEError, RunError


def open_no_follow(path: Path, mode: Literal["ab", "wb"]) -> IO[bytes]:
    """Open a file for writing at its end, or from its start. A link of that name is an OSError, not written through."""
    start = os.O_APPEND if mode == "ab" else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | start, 0o666), mode)


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until the content is on the disk. A link or file of that name is replaced."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(handle, "wb") as file:
        write_and_sync(file, content)


def write_and_sync(file: IO[bytes], content: bytes) -> None:
    """Write to an open file and wait until the content is on the disk."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes, error: type[FedBEError] = RunError) -> None:
    """Replace a file in one step: after a crash it is either the old one or the new one. A failure is an `error`."""
    if not path.name:
        raise error(f"cannot write {path}: it is a folder, not a file")
    part = path.with_name(f".{path.name}.part")
    try:
        write_synced(part, content)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as problem:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise error(f"cannot write {path} ({problem.strerror}); an older file of that name is unchanged") from problem


def make_folder(folder: Path, error: type[FedBEError] = RunError) -> None:
    """Create a folder and its parents, unless they exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise error(f"cannot create {folder}: {problem.strerror}") from problem


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, so that no second process trains the run."""
    try:
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(handle, "w")
    except OSError as error:
        raise RunError(f"cannot write in {folder}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{folder} is being trained by another process; if that was just stopped, try again in a minute"
            ) from None
        except OSError as error:
            raise RunError(f"cannot lock {folder} ({error.strerror}): use a folder on another disk") from error
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked child may have the file open


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one step."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line and wait until it is on the disk."""
    try:
        is_new = not path.exists()
        with open_no_follow(path, "ab") as file:
            write_and_sync(file, (json.dumps(value) + "\n").encode())
        if is_new:
            sync_folder(path.parent)
    except OSError as problem:
        raise RunError(f"cannot write {path} ({problem.strerror})") from problem


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in the folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
