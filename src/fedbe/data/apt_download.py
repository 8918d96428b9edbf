"""Fashion-MNIST from Debian's package `dataset-fashion-mnist`, which has the four official files, compressed again.

npm's package `fashion-mnist` is not used: 5,657 of its 70,000 images are not the official ones (docs/data.md).
"""

import gzip
import shutil
import subprocess
import tempfile
from pathlib import Path

from fedbe.data.readers.archives import read_by_name
from fedbe.errors import DataError

PACKAGE = "dataset-fashion-mnist"
FILES = {f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")}
TIMEOUT_SECONDS = 900


def fashion_mnist() -> dict[str, bytes]:
    """The four official files of Fashion-MNIST, without gzip. The caller checks the hashes.

    Raises:
        DataError: if apt is missing or fails, or the package is damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        packed = read_by_name(_content(Path(folder)), FILES)
    try:
        return {name.removesuffix(".gz"): gzip.decompress(content) for name, content in packed.items()}
    except (OSError, EOFError, ValueError) as problem:
        raise DataError(f"{PACKAGE} has a damaged file ({problem})") from problem


def _content(folder: Path) -> Path:
    """Download the package into `folder` with apt, which needs no root for it; returns its content, a tar."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DataError(f"{tool} is not installed")
    _run(["apt-get", "download", "-qq", PACKAGE], folder)
    archives = list(folder.glob("*.deb"))
    if not archives:
        raise DataError(f"`apt-get download {PACKAGE}` wrote no archive")
    content = folder / "content.tar"
    with content.open("wb") as out:
        _run(["dpkg-deb", "--fsys-tarfile", archives[0].name], folder, out.fileno())
    return content


def _run(command: list[str], folder: Path, stdout: int = subprocess.DEVNULL) -> None:
    try:
        subprocess.run(
            command, cwd=folder, check=True, stdout=stdout, stderr=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS
        )
    except (subprocess.SubprocessError, OSError) as problem:
        raise DataError(f"`{' '.join(command)}` failed ({problem})") from problem
