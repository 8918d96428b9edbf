import gzip

import numpy as np
import pytest

from fedbe.data import load_task
from fedbe.errors import DataError

pytestmark = pytest.mark.usefixtures("unofficial")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_four_files(tmp_path, idx_files, name, packed):
    made = idx_files(tmp_path / name, packed)
    task = load_task(name, root=tmp_path)
    for part, prefix in ((task.train, "train"), (task.test, "t10k")):
        assert np.array_equal(part.inputs.numpy()[..., 0], made[prefix][1])
        assert part.labels.tolist() == made[prefix][0].tolist()
    assert len(task.train.classes) == 10


def test_the_directory_of_torchvision_is_used(tmp_path, idx_files):
    idx_files(tmp_path / "MNIST" / "raw", packed=False)
    assert len(load_task("mnist", root=tmp_path).train) == 6


def test_error_names_the_missing_file(tmp_path, idx_files):
    idx_files(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"has no t10k-labels-idx1-ubyte"):
        load_task("mnist", root=tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda raw: gzip.compress(gzip.decompress(raw)[:-1]), "announces 4704 bytes, but 4703 follow"),
        (lambda raw: gzip.compress(gzip.decompress(raw) + b"x"), "announces 4704 bytes, but 4705 follow"),
        (lambda raw: gzip.compress(b"\0\0\x09\x03" + gzip.decompress(raw)[4:]), "not an IDX file"),
        (lambda raw: gzip.compress(raw[:0]), "not an IDX file"),
        (lambda raw: raw[:-20], "damaged or cut short"),
        (lambda raw: b"junk" + raw, "damaged or cut short"),
    ],
)
def test_damaged_files_are_errors(tmp_path, idx_files, change, sentence):
    idx_files(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=sentence):
        load_task("mnist", root=tmp_path)


def test_a_gzip_bomb_is_refused(tmp_path, idx_files):
    idx_files(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(1 + (1 << 27)), 1))
    with pytest.raises(DataError, match="more than 134217728 bytes and is refused"):
        load_task("mnist", root=tmp_path)
