import gzip
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from fedbe.data import apt_download
from fedbe.errors import DataError


def content(files):
    """The tar that is in a .deb."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"./usr/share/datasets/fashion-mnist/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return memory.getvalue()


@pytest.fixture
def apt_makes(monkeypatch):
    """Replace apt-get and dpkg-deb by a package with these files; returns the list of commands."""
    commands = []

    def install(files, deb="dataset-fashion-mnist_0.0_all.deb"):
        def run(command, cwd, **_):
            commands.append(command)
            if command[0] == "dpkg-deb":
                Path(cwd, "content.tar").write_bytes(content(files))
            elif deb:
                Path(cwd, deb).write_bytes(b"deb")

        monkeypatch.setattr(apt_download.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(apt_download.subprocess, "run", run)
        return commands

    return install


def test_the_official_files_are_unpacked(apt_makes):
    commands = apt_makes({"t10k-labels-idx1-ubyte.gz": gzip.compress(b"abc"), "copyright": b"MIT"})
    assert apt_download.fashion_mnist() == {"t10k-labels-idx1-ubyte": b"abc"}
    assert commands == [
        ["apt-get", "download", "-qq", "dataset-fashion-mnist"],
        ["dpkg-deb", "--fsys-tarfile", "dataset-fashion-mnist_0.0_all.deb"],
    ]


def test_a_damaged_package_is_an_error(apt_makes):
    apt_makes({"t10k-labels-idx1-ubyte.gz": b"no gzip"})
    with pytest.raises(DataError, match="dataset-fashion-mnist has a damaged file"):
        apt_download.fashion_mnist()


def test_what_can_go_wrong_with_apt_is_one_sentence(apt_makes, monkeypatch):
    apt_makes({}, deb=None)
    with pytest.raises(DataError, match="wrote no archive"):
        apt_download.fashion_mnist()

    def fails(command, **_):
        raise subprocess.CalledProcessError(100, command)

    monkeypatch.setattr(apt_download.subprocess, "run", fails)
    with pytest.raises(DataError, match="`apt-get download -qq dataset-fashion-mnist` failed"):
        apt_download.fashion_mnist()
    monkeypatch.setattr(apt_download.shutil, "which", lambda _: None)
    with pytest.raises(DataError, match="apt-get is not installed"):
        apt_download.fashion_mnist()
