"""Fixtures: small data sets in the official formats, and access to the real data."""

import gzip
import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbe.data import load_task, sources
from fedbe.data.catalogue import local_path

CIFAR_FILES = {
    "cifar10": [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"],
    "cifar100": ["train", "test"],
}


@pytest.fixture
def unofficial(monkeypatch):
    """Data sets that a test makes are accepted, although they are not the official ones."""
    monkeypatch.setattr(sources, "check_official", lambda *_: None)


@pytest.fixture
def real():
    """`load_task` for a data set in FEDBE_DATA; without it the test is skipped with a reason."""

    def load_real(name):
        if not os.environ.get("FEDBE_DATA") or local_path(name) is None:
            pytest.skip(f"FEDBE_DATA has no {name}; get it with `fedbe data get {name}`")
        return load_task(name)

    return load_real


@pytest.fixture
def cifar_binary():
    """Write a small data set in the binary format; returns {stem: (labels, images [n, 32, 32, 3])}."""

    def make(folder: Path, name: str, count: int = 4):
        folder.mkdir(parents=True)
        random, made = np.random.default_rng(0), {}
        for stem in CIFAR_FILES[name]:
            labels = random.integers(0, 10, count).astype(np.uint8)
            images = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
            records = []
            for label, image in zip(labels, images, strict=True):
                coarse = bytes([19]) if name == "cifar100" else b""
                records.append(coarse + bytes([label]) + image.transpose(2, 0, 1).tobytes())
            (folder / f"{stem}.bin").write_bytes(b"".join(records))
            made[stem] = labels, images
        return made

    return make


@pytest.fixture
def idx_files():
    """Write four IDX files; returns {prefix: (labels, images [n, 28, 28])}."""

    def make(folder: Path, packed: bool = True):
        folder.mkdir(parents=True)
        random, made = np.random.default_rng(1), {}
        for prefix, count in (("train", 6), ("t10k", 3)):
            labels = random.integers(0, 10, count).astype(np.uint8)
            images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            contents = {
                "images-idx3": struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + images.tobytes(),
                "labels-idx1": struct.pack(">HBBI", 0, 8, 1, count) + labels.tobytes(),
            }
            for kind, content in contents.items():
                path = folder / f"{prefix}-{kind}-ubyte{'.gz' if packed else ''}"
                path.write_bytes(gzip.compress(content) if packed else content)
            made[prefix] = labels, images
        return made

    return make


@pytest.fixture
def tiny_tree():
    """Write a Tiny-ImageNet with two classes, each with three training images and one test image."""

    def make(folder: Path):
        ids = {"n02": (200, 30, 30), "n01": (30, 30, 200)}
        for wnid, colour in ids.items():
            (folder / "train" / wnid / "images").mkdir(parents=True)
            for number in range(3):
                path = folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
                path.write_bytes(jpeg(colour))
        (folder / "val" / "images").mkdir(parents=True)
        (folder / "test" / "images").mkdir(parents=True)
        (folder / "test" / "images" / "test_0.JPEG").write_bytes(b"not an image; never read")
        lines = []
        for number, (wnid, colour) in enumerate(ids.items()):
            (folder / "val" / "images" / f"val_{number}.JPEG").write_bytes(jpeg(colour))
            lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t63\t63\n")
        (folder / "val" / "val_annotations.txt").write_text("".join(lines))
        (folder / "wnids.txt").write_text("n02\nn01\n")
        (folder / "words.txt").write_text("n01\tblue thing, azure\nn02\tred thing\nn99\tunused\n")

    return make


def jpeg(colour):
    memory = io.BytesIO()
    mode = "RGB" if isinstance(colour, tuple) else "L"
    Image.new(mode, (64, 64), colour).save(memory, "JPEG", quality=95)
    return memory.getvalue()
