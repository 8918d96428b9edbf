import importlib.util
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedbe.data import load_task
from fedbe.data.readers.cifar import CLASSES
from fedbe.errors import DataError

pytestmark = pytest.mark.usefixtures("unofficial")

STEMS = {"cifar10": ("cifar-10-batches-bin", "data_batch_1"), "cifar100": ("cifar-100-binary", "train")}


def pickled_batch():
    """The function that makes "python" batches in the test of their reader."""
    spec = importlib.util.spec_from_file_location("plain", Path(__file__).with_name("test_plain_pickle.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.batch


def to_python_layout(folder, name, made):
    batch = pickled_batch()
    folder.mkdir(parents=True)
    for stem, (labels, images) in made.items():
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), 3072)
        key = "labels" if name == "cifar10" else "fine_labels"
        (folder / stem).write_bytes(batch(labels.tolist(), rows, key))


def assert_same(task, name, made):
    train = [stem for stem in made if "test" not in stem]
    test = next(stem for stem in made if "test" in stem)
    assert np.array_equal(task.train.inputs.numpy(), np.concatenate([made[stem][1] for stem in train]))
    assert task.train.labels.tolist() == np.concatenate([made[stem][0] for stem in train]).tolist()
    assert np.array_equal(task.test.inputs.numpy(), made[test][1])
    assert task.test.labels.tolist() == made[test][0].tolist()
    assert task.train.classes == CLASSES[name]


@pytest.mark.parametrize("name", STEMS)
def test_binary_format_from_the_data_directory(tmp_path, monkeypatch, cifar_binary, name):
    made = cifar_binary(tmp_path / STEMS[name][0], name)
    monkeypatch.setenv("FEDBE_DATA", str(tmp_path))
    assert_same(load_task(name), name, made)
    assert_same(load_task(name, root=tmp_path), name, made)


@pytest.mark.parametrize("name", STEMS)
def test_python_format(tmp_path, cifar_binary, name):
    made = cifar_binary(tmp_path / "binary", name)
    folder = tmp_path / f"{'cifar-10-batches-py' if name == 'cifar10' else 'cifar-100-python'}"
    to_python_layout(folder, name, made)
    assert_same(load_task(name, root=tmp_path), name, made)


@pytest.mark.parametrize("batch_format", ["binary", "python"])
def test_official_archive(tmp_path, cifar_binary, batch_format):
    folder = tmp_path / "work" / f"cifar-10-batches-{'bin' if batch_format == 'binary' else 'py'}"
    made = cifar_binary(tmp_path / "work" / "cifar-10-batches-bin", "cifar10")
    if batch_format == "python":
        to_python_layout(folder, "cifar10", made)
    archive = tmp_path / f"cifar-10-{batch_format}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    assert_same(load_task(archive), "cifar10", made)  # by its official name
    assert_same(load_task("cifar10", root=tmp_path), "cifar10", made)  # in the data directory
    assert_same(load_task(f"cifar10:{archive}"), "cifar10", made)  # with an explicit name


def test_a_truncated_batch_is_refused(tmp_path, cifar_binary):
    cifar_binary(tmp_path / "cifar-10-batches-bin", "cifar10")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin must be whole records"):
        load_task("cifar10", root=tmp_path)


def test_error_names_the_missing_batch(tmp_path, cifar_binary):
    cifar_binary(tmp_path / "cifar-10-batches-bin", "cifar10")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"has no data_batch_4"):
        load_task("cifar10", root=tmp_path)


def test_another_directory_is_refused(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(DataError, match="official format"):
        load_task("cifar10", root=tmp_path)


def test_a_label_out_of_range_is_refused(tmp_path, cifar_binary):
    cifar_binary(tmp_path / "cifar-10-batches-bin", "cifar10")
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(bytes([10]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"labels of 10 classes .*0 … 9"):
        load_task("cifar10", root=tmp_path)


def test_a_python_file_with_other_content_is_refused(tmp_path, cifar_binary):
    made = cifar_binary(tmp_path / "binary", "cifar10")
    to_python_layout(tmp_path / "cifar-10-batches-py", "cifar10", made)
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"\x80\x02}.")
    with pytest.raises(DataError, match=r"data_batch_2 must have `data`"):
        load_task("cifar10", root=tmp_path)
    labels, images = made["data_batch_2"]
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(
        pickled_batch()([256, *labels.tolist()[1:]], images.reshape(len(images), 3072), "labels")
    )
    with pytest.raises(DataError, match=r"data_batch_2 must have `data`"):
        load_task("cifar10", root=tmp_path)


def test_16px_images_are_means_of_four_pixels(tmp_path, cifar_binary):
    made = cifar_binary(tmp_path / "cifar-10-batches-bin", "cifar10")
    task = load_task("cifar10-16px", root=tmp_path)
    labels, images = made["test_batch"]
    assert task.test.inputs.shape == (4, 16, 16, 3)
    assert task.test.labels.tolist() == labels.tolist()
    block = images[2, 6:8, 10:12, 1].astype(int)
    assert int(task.test.inputs[2, 3, 5, 1]) == (block.sum() + 2) // 4
