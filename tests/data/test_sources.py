import subprocess
import sys
from pathlib import Path

import pytest

from fedbe.data import dataset_names, load_task
from fedbe.data.catalogue import DATASETS, data_root
from fedbe.errors import DataError


def test_dataset_names():
    assert dataset_names() == (
        "digits", "swissroll", "cifar10", "cifar10-16px", "cifar100", "tiny-imagenet", "mnist", "fashion-mnist",
    )  # fmt: skip


def test_a_mistyped_name_gets_a_hint():
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        load_task("cifar-10")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tiny-imagenet", "mnist", "fashion-mnist"])
def test_a_missing_data_set_error_says_how_to_get_it(tmp_path, name):
    with pytest.raises(DataError, match=f"`fedbe data get {name}`"):
        load_task(name, root=tmp_path)


def test_embedded_data_sets_have_no_path(tmp_path):
    with pytest.raises(DataError, match="digits comes with fedbe"):
        load_task(f"digits:{tmp_path}")


def test_data_root_is_the_argument_then_the_variable_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBE_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path) == tmp_path
    assert data_root() == tmp_path / "variable"
    monkeypatch.delenv("FEDBE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root().parts[-2:] == ("fedbe", "data")


def test_every_hash_is_a_sha256():
    hashes = [remote.sha256 for info in DATASETS.values() for remote in info.remotes]
    hashes += [sha256 for info in DATASETS.values() for sha256 in info.file_hashes.values()]
    assert len(hashes) == 12 + 22  # CIFAR-10 twice: cifar10-16px reads the same files
    assert all(len(sha256) == 64 and int(sha256, 16) for sha256 in hashes)


@pytest.mark.e2e
def test_importing_the_package_stays_light():
    heavy = "matplotlib sklearn pooch plotly typer rich platformdirs"
    code = f"import sys, fedbe.data; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_official_names_are_recognised_at_any_path(tmp_path, cifar_binary):
    folder = tmp_path / "deep" / "cifar-10-batches-bin"
    cifar_binary(folder, "cifar10")
    assert load_task(Path(folder)).train.name == "cifar10"
