"""Read files by name from a directory, a zip or a tar, without unpacking to disk.

A whole archive is checked before its contents are returned. It is refused if it has a name that leaves the archive, a
link or a device, too many members, too many bytes, or a compression ratio that real data does not reach.
"""

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Container
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, NoReturn, cast

from fedbe.errors import DataError

MAX_MEMBERS = 300_000  # Tiny-ImageNet has 120,609
MAX_BYTES = 4 << 30  # Tiny-ImageNet has 0.3 GB, CIFAR 0.2 GB
MAX_RATIO = 200  # unpacked bytes per packed byte; images reach 2, text 20
FREE_BYTES = 16 << 20  # below this any ratio is accepted: a tar of a few small files is mostly zeros

# RuntimeError is a zip with a password, or with a compression that Python does not support; MemoryError an xz whose
# header asks for gigabytes.
BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError,
    MemoryError,
)  # fmt: skip
COMPRESSED: dict[bytes, Callable[[Path, str], Any]] = {  # by the first bytes of the file
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}

NameFilter = Callable[[str], bool]


def read_files(path: Path, wanted: NameFilter) -> dict[str, bytes]:
    """Read the wanted files under `path`.

    Args:
        path: a directory, a zip or a tar (plain, gzip, bzip2 or xz).
        wanted: called with each file's name, relative to `path`; True to read it.

    Returns:
        Name -> content.

    Raises:
        DataError: if `path` is not an archive, is damaged, or is refused (see above).
    """
    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
        return {name: file.read_bytes() for name, file in files.items() if wanted(name)}
    try:
        return _read_zip(path, wanted) if zipfile.is_zipfile(path) else _read_tar(path, wanted)
    except (DataError, FileNotFoundError, PermissionError):
        raise
    except BROKEN as problem:
        raise DataError(f"{path} is damaged or cut short ({problem}); download it again") from problem


def read_by_name(path: Path, names: Container[str]) -> dict[str, bytes]:
    """Read the files that have one of these names, in any folder under `path`: name -> content."""
    files = read_files(path, lambda file: PurePosixPath(file).name in names)
    return {PurePosixPath(file).name: content for file, content in files.items()}


def _read_zip(path: Path, wanted: NameFilter) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        members = checked_members(path, archive)
        return {m.filename: read_member(archive, m) for m in members if not m.is_dir() and wanted(m.filename)}


def checked_members(path: Path, archive: zipfile.ZipFile, limit: int = 0) -> list[zipfile.ZipInfo]:
    """The members of a zip, after a check of all of them: see above. `limit` bytes are always allowed."""
    budget, members = _Budget(path), archive.infolist()
    budget.limit = max(budget.limit, limit)
    for member in members:
        if not member.filename:
            raise DataError(f"{path} has a member without a name and is damaged; download it again")
        kind = member.external_attr >> 28  # the Unix file type; 0 if the zip has none
        budget.check(member.filename, member.file_size, plain=kind in (0, 4, 8))
    return members


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The content of a member of a zip. A member that unpacks to more than it announces is cut, not unpacked whole."""
    if member.compress_type in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):  # Python cannot unpack a part of these
        raise DataError(f"{archive.filename} uses a rare compression for '{member.filename}'; pack it again")
    with archive.open(member) as content:
        return content.read(member.file_size)


def _read_tar(path: Path, wanted: NameFilter) -> dict[str, bytes]:
    budget, files = _Budget(path), {}
    with _decompressed(path) as stream, _tar(path, _LimitedReader(stream, budget)) as archive:
        for member in archive:  # one by one: a bomb is refused at its header, before it is unpacked
            budget.check(member.name, member.size, plain=member.isfile() or member.isdir())
            if member.isfile() and wanted(member.name):
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                files[member.name] = content.read()
        # The checksum of gzip, bzip2 and xz is after the last member. Read to the end, so that it is checked.
        assert archive.fileobj is not None  # it is open
        while archive.fileobj.read(1 << 20):
            pass
    return files


def _decompressed(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        first = file.read(8)
    opener = next((opener for magic, opener in COMPRESSED.items() if first.startswith(magic)), Path.open)
    return cast(IO[bytes], opener(path, "rb"))


def _tar(path: Path, content: "_LimitedReader") -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=cast(IO[bytes], content), mode="r:")
    except tarfile.ReadError as problem:
        raise DataError(
            f"{path} must be a directory, a zip or a tar archive, but it is none of these, or it is damaged"
        ) from problem


class _LimitedReader:
    """A file that returns no more bytes than the budget: tarfile reads a long name whole, before we can check it."""

    def __init__(self, content: IO[bytes], budget: "_Budget") -> None:
        self.seek, self.tell = content.seek, content.tell
        self._content, self._budget, self._read = content, budget, 0

    def read(self, size: int) -> bytes:
        if size > self._budget.limit:
            self._budget.refuse()
        part = self._content.read(size)
        self._read += len(part)
        if self._read > self._budget.limit:
            self._budget.refuse()
        return part


class _Budget:
    """The number and total size of one archive's members, checked against the limits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members = 0
        self.bytes = 0
        self.limit = min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * path.stat().st_size))

    def check(self, name: str, size: int, *, plain: bool) -> None:
        self.members += 1
        self.bytes += size
        if self.members > MAX_MEMBERS:
            raise DataError(f"{self.path} has more than {MAX_MEMBERS} members; known data sets have fewer")
        if self.bytes > self.limit:
            self.refuse()
        if not plain:
            raise DataError(f"{self.path} has a link or device, '{name}'; only plain files are accepted")
        member = PurePosixPath(name)
        # A drive or a backslash leaves the archive on Windows; refuse them everywhere.
        if member.is_absolute() or ".." in member.parts or PureWindowsPath(name).drive or "\\" in name:
            raise DataError(f"{self.path} has a name that leaves the archive, '{name}'; it is refused")

    def refuse(self) -> NoReturn:
        raise DataError(
            f"{self.path} would unpack from {self.path.stat().st_size} to more than {self.limit} bytes; "
            "this looks like a zip bomb and is refused"
        )
