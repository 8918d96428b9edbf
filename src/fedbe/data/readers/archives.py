"""Files by name, out of a directory or straight out of an archive, without ever unpacking it to disk.

An archive is checked whole before one byte of it is used. Refused are names that leave the archive, links and
devices, too many members, too many bytes, and a compression that no real data reaches.
"""

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, NoReturn, cast

from fedbe.errors import DataError

MAX_MEMBERS = 300_000  # Tiny-ImageNet has 120,609
MAX_BYTES = 4 << 30  # Tiny-ImageNet has 0.3 GB, CIFAR 0.2 GB
MAX_RATIO = 200  # bytes unpacked for each byte packed; images reach 2, text 20
FREE_BYTES = 16 << 20  # below this a large ratio does no harm: a tar of a few small files is mostly zeros

# RuntimeError is a zip with a password, or with a compression that Python does not know.
BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError
)  # fmt: skip
COMPRESSED: dict[bytes, Callable[[Path, str], Any]] = {  # by how such a file begins
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}

Wanted = Callable[[str], bool]


def read_files(place: Path, wanted: Wanted) -> dict[str, bytes]:
    """The files under `place` (a directory, a zip or a tar) whose name is wanted, by name relative to it."""
    if place.is_dir():
        names = {path.relative_to(place).as_posix(): path for path in sorted(place.rglob("*")) if path.is_file()}
        return {name: path.read_bytes() for name, path in names.items() if wanted(name)}
    with _damage_named(place):
        if zipfile.is_zipfile(place):
            return _read_zip(place, wanted)
        return _read_tar(place, wanted)


@contextmanager
def _damage_named(place: Path) -> Iterator[None]:
    """Turn whatever a broken archive makes the standard library raise into one sentence."""
    try:
        yield
    except (DataError, FileNotFoundError, PermissionError):
        raise
    except BROKEN as problem:
        raise DataError(f"{place} is damaged or cut short ({problem}); download it again") from problem


def _read_zip(place: Path, wanted: Wanted) -> dict[str, bytes]:
    budget = _Budget(place)
    with zipfile.ZipFile(place) as archive:
        members = archive.infolist()
        for member in members:
            kind = member.external_attr >> 28  # the file type of Unix, 0 where the zip does not tell
            budget.check(member.filename, member.file_size, plain=kind in (0, 4, 8))
        return {m.filename: archive.read(m) for m in members if not m.is_dir() and wanted(m.filename)}


def _read_tar(place: Path, wanted: Wanted) -> dict[str, bytes]:
    budget, found = _Budget(place), {}
    with _unpacked(place) as whole, _tar(place, _Metered(whole, budget)) as archive:
        for member in archive:  # one by one: a bomb is refused at its name, before it is unpacked
            budget.check(member.name, member.size, plain=member.isfile() or member.isdir())
            if member.isfile() and wanted(member.name):
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                found[member.name] = content.read()
        # The checksum of gzip, bzip2 and xz stands at the end, after the last member, and is checked when met.
        assert archive.fileobj is not None  # it is open
        while archive.fileobj.read(1 << 20):
            pass
    return found


def _unpacked(place: Path) -> IO[bytes]:
    with place.open("rb") as file:
        begins = file.read(8)
    opener = next((opener for magic, opener in COMPRESSED.items() if begins.startswith(magic)), Path.open)
    return cast(IO[bytes], opener(place, "rb"))


def _tar(place: Path, content: "_Metered") -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=cast(IO[bytes], content), mode="r:")
    except tarfile.ReadError as problem:
        raise DataError(
            f"{place} must be a directory, a zip or a tar archive, but it is none of them or damaged"
        ) from problem


class _Metered:
    """A file that hands out no more than the budget: tarfile reads a long name whole, before it tells of it."""

    def __init__(self, content: IO[bytes], budget: "_Budget") -> None:
        self.seek, self.tell = content.seek, content.tell
        self._content, self._budget, self._read = content, budget, 0

    def read(self, size: int) -> bytes:
        if size > self._budget.most:
            self._budget.refuse()
        part = self._content.read(size)
        self._read += len(part)
        if self._read > self._budget.most:
            self._budget.refuse()
        return part


class _Budget:
    """What the members of one archive may add up to."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.members = 0
        self.bytes = 0
        self.most = min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * place.stat().st_size))

    def check(self, name: str, size: int, *, plain: bool) -> None:
        self.members += 1
        self.bytes += size
        if self.members > MAX_MEMBERS:
            raise DataError(f"{self.place} has more than {MAX_MEMBERS} members; this is no known data set")
        if self.bytes > self.most:
            self.refuse()
        if not plain:
            raise DataError(f"{self.place} holds a link or device, '{name}'; only plain files are accepted")
        path = PurePosixPath(name)
        # A drive or a backslash leaves the archive on Windows; refuse it everywhere.
        if path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive or "\\" in name:
            raise DataError(f"{self.place} holds a name that leaves the archive, '{name}'; it is refused")

    def refuse(self) -> NoReturn:
        raise DataError(
            f"{self.place} would unpack to more than {self.most} bytes from {self.place.stat().st_size}; "
            "this looks like a zip bomb and is refused"
        )
