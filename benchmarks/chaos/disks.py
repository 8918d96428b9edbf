"""Disks that fail: full, read-only, or without power before everything was written."""

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.chaos.common import LastRound, Tally, new_run, reference_run, train
from fedbe.core import files
from fedbe.errors import FedBEError
from fedbe.experiment import checkpoint, run_folder, saved_model

METHODS = ("fedavg", "fedbe+scaffold", "1-ensemble", "fedavgm")
PAGE = 512  # bytes that a disk writes whole or not at all
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@contextmanager
def failing(at: int) -> Iterator[None]:
    """The n-th write, sync or rename fails, as on a full disk."""
    calls = 0
    real_fsync, real_replace, real_write = os.fsync, Path.replace, files.write_and_sync

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def fsync(handle: int) -> None:
        step()
        real_fsync(handle)

    def replace(path: Path, target: Path) -> Path:
        step()
        return real_replace(path, target)

    def write(file: IO[bytes], content: bytes) -> None:
        if calls + 1 == at:  # half of it is on the disk
            file.write(content[: len(content) // 2])
            file.flush()
        step()
        real_write(file, content)

    os.fsync, Path.replace, files.write_and_sync = fsync, replace, write  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        os.fsync, Path.replace, files.write_and_sync = real_fsync, real_replace, real_write  # type: ignore[method-assign]


_watches: list[Callable[[str, Any], None]] = []
_hooked = False


def _hook(event: str, arguments: Any) -> None:
    for watch in _watches:
        watch(event, arguments)


@contextmanager
def _watching(watch: Callable[[str, Any], None]) -> Iterator[None]:
    """Call a function with every audit event of Python: before files are opened, renamed, removed …"""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # it cannot be removed again
        _hooked = True
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def _flags(event: str, arguments: Any) -> int:
    """The flags of a file that is being opened; 0 for other events."""
    return arguments[2] if event == "open" and isinstance(arguments[2], int) else 0


def _path(arguments: Any) -> str:
    """The path of an event; empty for a file that is already open."""
    return os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""


@contextmanager
def read_only(root: Path, start: int = 1) -> Iterator[None]:
    """From the n-th change on, nothing below `root` can be changed: the file system has become read-only."""
    changes = 0

    def watch(event: str, arguments: Any) -> None:
        nonlocal changes
        changing = event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir")
        if not changing and not _flags(event, arguments) & WRITING:
            return
        path = _path(arguments)
        if path.startswith(str(root)) or (changing and not path.startswith("/")):
            changes += 1
            if changes >= start:
                raise OSError(errno.EROFS, "Read-only file system", path)

    with _watching(watch):
        yield


class PowerFailure(BaseException):
    """The machine has no power. Not an Exception, so that nothing handles it."""


class Disk:
    """What of a folder a power failure leaves: all that was synced, and any part of the rest.

    A sync of a file keeps its content, a sync of a folder its names, as POSIX has it. Of everything else each name and
    each page is the old one or the new one, at random. A file that was opened to be written over may also be empty.

    Args:
        root: the folder; what is in it now is safe.
        at: the power fails at this sync, counted from 1.
        survivors: the folder that receives what is left.
        draw: decides what of the unsynced content is left.
    """

    def __init__(self, root: Path, at: int, survivors: Path, draw: random.Random) -> None:
        self.root, self.at, self.survivors, self.draw = root, at, survivors, draw
        self.syncs = 0
        self._contents: dict[int, bytes] = {}  # by inode
        self._names: dict[int, dict[str, int]] = {}
        self._emptied: set[int] = set()
        self._handles: list[int] = []  # so that no inode is used again
        for folder, _, names in os.walk(root):
            for path in (Path(folder), *(Path(folder, name) for name in names)):
                handle = os.open(path, os.O_RDONLY)
                self._keep(handle)
                os.close(handle)

    def _keep(self, handle: int) -> None:
        self._handles.append(os.dup(handle))
        inode = os.fstat(handle).st_ino
        if Path(f"/proc/self/fd/{handle}").is_dir():
            self._names[inode] = {entry.name: entry.inode() for entry in os.scandir(handle)}
        else:
            self._contents[inode] = Path(f"/proc/self/fd/{handle}").read_bytes()
            self._emptied.discard(inode)

    def _note_truncation(self, event: str, arguments: Any) -> None:
        path = _path(arguments) if _flags(event, arguments) & os.O_TRUNC else ""
        if path and Path(path).exists():
            self._emptied.add(Path(path).stat().st_ino)

    @contextmanager
    def powered(self) -> Iterator[None]:
        """Count syncs, and fail at the chosen one; at the end of the block at the latest."""
        real = os.fsync

        def fsync(handle: int) -> None:
            self.syncs += 1
            if self.syncs == self.at:
                self._fail()
                raise PowerFailure
            real(handle)
            self._keep(handle)

        os.fsync = fsync  # type: ignore[assignment]
        try:
            with _watching(self._note_truncation):
                yield
            self._fail()
        except PowerFailure:
            pass
        finally:
            os.fsync = real
            for handle in self._handles:
                os.close(handle)

    def _fail(self) -> None:
        self._restore(self.root.stat().st_ino, self.root, self.survivors)

    def _restore(self, inode: int, now: Path | None, target: Path) -> None:
        """Write what is left of a file or folder, which is still at the path `now` or was removed."""
        if (now is not None and not now.is_dir()) or (now is None and inode not in self._names):
            new = now.read_bytes() if now is not None else self._contents.get(inode, b"")
            old = b"" if inode in self._emptied and self.draw.random() < 0.5 else self._contents.get(inode, b"")
            target.write_bytes(self._torn(old, new))
            return
        target.mkdir()
        current = {} if now is None else {entry.name: entry.inode() for entry in os.scandir(now)}
        synced = self._names.get(inode, {})
        for name in sorted({*current, *synced}):
            chosen = self.draw.choice([current.get(name), synced.get(name)])
            if chosen is not None:
                still_there = now / name if now is not None and current.get(name) == chosen else None
                self._restore(chosen, still_there, target / name)

    def _torn(self, old: bytes, new: bytes) -> bytes:
        if old == new:
            return new
        size = len(self.draw.choice([old, new]))
        pages = range(0, size, PAGE)
        kind = self.draw.randrange(3)
        sources = [(old, new)[kind] if kind < 2 else self.draw.choice([old, new]) for _ in pages]
        return b"".join(source[at : at + PAGE].ljust(PAGE, b"\0") for at, source in zip(pages, sources, strict=True))[
            :size
        ]


def full(count: int, root: Path) -> Tally:
    """The n-th write of a run fails, for every n; then the run is resumed."""
    tally = Tally()
    for method in METHODS[: max(1, count)]:
        reference = reference_run(root, method)
        for at in range(1, count // len(METHODS) + 1):
            tally.tried += 1
            folder = new_run(root / "full", method)
            with failing(at):
                tally.disturb(lambda folder=folder: train(folder))  # type: ignore[misc]
            tally.finish(folder, reference)
    return tally


def read_only_disks(count: int, root: Path, methods: tuple[str, ...] = METHODS) -> Tally:
    """A file system becomes read-only at the n-th change, for every n. What is finished stays readable."""
    tally = Tally()
    for number in range(count):
        method = methods[number % len(methods)]
        reference = reference_run(root, method)
        tally.tried += 1
        folder = new_run(root / "read-only", method)
        with read_only(root, 1 + number // len(methods)):
            tally.disturb(lambda folder=folder: train(folder))  # type: ignore[misc]
            tally.disturb(lambda folder=folder: run_folder.read_rounds(folder))  # type: ignore[misc]
            saved_model.load_trained_model(reference)
        tally.finish(folder, reference)
    return tally


def power_failures(count: int, draw: random.Random, root: Path, methods: tuple[str, ...] = METHODS) -> Tally:
    """The power fails at every sync of a run, once more while it is resumed; then it is resumed to its end.

    Nothing that was reported may be lost: a round whose end was reported has a checkpoint, and a run that ended is
    complete.
    """
    tally = Tally()
    syncs = dict.fromkeys(methods, 0)
    while tally.tried < count:
        for method in methods:
            reference = reference_run(root, method)
            at = tally.tried // len(methods) % (syncs[method] + 1) + 1 if syncs[method] else 10**9
            syncs[method] = max(syncs[method], _power_failure(at, method, reference, draw, root, tally))
    return tally


def _power_failure(at: int, method: str, reference: Path, draw: random.Random, root: Path, tally: Tally) -> int:
    """One trial; returns the number of syncs before the power failed."""
    tally.tried += 1
    lost = tally.lost
    first, second, third = (root / f"power-{i}" for i in (1, 2, 3))
    first.mkdir(parents=True)
    disk, last = Disk(first, at, second, draw), LastRound()
    with disk.powered():
        train(new_run(first / "run", method), callback=last)
    tally.lost += _is_lost(second / "run", last.number, finished=disk.syncs < at)
    if (second / "run").exists() and tally.lost == lost:
        again = Disk(second, draw.randint(1, 4), third, draw)
        with again.powered():
            tally.disturb(lambda: train(second / "run", callback=last))
        tally.lost += _is_lost(third / "run", last.number, finished=again.syncs < again.at)
        if tally.lost == lost:
            tally.finish(third / "run", reference)
    for folder in (first, second, third):
        shutil.rmtree(folder, ignore_errors=True)
    return disk.syncs


def _is_lost(folder: Path, round: int, finished: bool) -> bool:
    """Whether anything is missing of what was reported before the power failed."""
    if not folder.exists():
        return round > 0
    try:
        if finished and not run_folder.is_done(folder):
            return True
        state = checkpoint.latest(folder) if round else None
    except FedBEError:
        return True
    return round > 0 and (state is None or state.round < round)
