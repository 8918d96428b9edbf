import shutil
from pathlib import Path

import pytest
from PIL import Image

from fedbe.data import load_task
from fedbe.errors import DataError

pytestmark = pytest.mark.usefixtures("unofficial")


def assert_right(task):
    assert task.train.classes == ("blue thing, azure", "red thing")  # sorted by id: n01, n02
    assert task.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert task.train.inputs.shape == (6, 64, 64, 3)
    assert task.test.labels.tolist() == [1, 0]
    for part in (task.train, task.test):
        for image, label in zip(part.inputs, part.labels, strict=True):
            red, _, blue = image.float().mean((0, 1)).tolist()
            assert (red > blue) == (label == 1)


def test_directory(tmp_path, tiny_tree):
    tiny_tree(tmp_path / "tiny-imagenet-200")
    assert_right(load_task("tiny-imagenet", root=tmp_path))


def test_official_zip(tmp_path, tiny_tree):
    tiny_tree(tmp_path / "work" / "tiny-imagenet-200")
    archive = shutil.make_archive(str(tmp_path / "tiny-imagenet-200"), "zip", tmp_path / "work")
    assert_right(load_task(Path(archive)))
    assert_right(load_task("tiny-imagenet", root=tmp_path))


def test_a_grey_image_gets_three_channels(tmp_path, tiny_tree):
    tree = tmp_path / "tiny-imagenet-200"
    tiny_tree(tree)
    Image.new("L", (64, 64), 100).save(tree / "train" / "n01" / "images" / "n01_1.JPEG", "JPEG")
    grey = load_task("tiny-imagenet", root=tmp_path).train.inputs[1]
    assert grey.shape == (64, 64, 3)
    assert (grey == grey[..., :1]).all()


@pytest.mark.parametrize("path", ["wnids.txt", "words.txt", "val/val_annotations.txt", "val/images/val_1.JPEG"])
def test_error_names_the_missing_file(tmp_path, tiny_tree, path):
    tree = tmp_path / "tiny-imagenet-200"
    tiny_tree(tree)
    (tree / path).unlink()
    with pytest.raises(DataError, match=f"has no {path}"):
        load_task("tiny-imagenet", root=tmp_path)


def test_truncated_or_binary_lists(tmp_path, tiny_tree):
    tree = tmp_path / "tiny-imagenet-200"
    tiny_tree(tree)
    ids = sorted((tree / "wnids.txt").read_text().split())
    (tree / "words.txt").write_text(ids[0])  # without names, the id is the name
    assert load_task("tiny-imagenet", root=tmp_path).train.classes == tuple(ids)
    (tree / "words.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"words\.txt is not a text file"):
        load_task("tiny-imagenet", root=tmp_path)
    (tree / "words.txt").write_text("")
    (tree / "val" / "val_annotations.txt").write_text("val_0.JPEG")
    with pytest.raises(DataError, match=r"has no val/images/val_0\.JPEG"):
        load_task("tiny-imagenet", root=tmp_path)


def test_error_names_the_image_of_another_size(tmp_path, tiny_tree):
    tree = tmp_path / "tiny-imagenet-200"
    tiny_tree(tree)
    Image.new("RGB", (65, 64)).save(tree / "val" / "images" / "val_0.JPEG", "JPEG")
    with pytest.raises(DataError, match=r"val_0\.JPEG must have.*got 65 × 64"):
        load_task("tiny-imagenet", root=tmp_path)


def test_error_names_the_unreadable_image(tmp_path, tiny_tree):
    tree = tmp_path / "tiny-imagenet-200"
    tiny_tree(tree)
    (tree / "train" / "n02" / "images" / "n02_0.JPEG").write_bytes(b"not a jpeg")
    with pytest.raises(DataError, match=r"n02_0\.JPEG is not a readable image"):
        load_task("tiny-imagenet", root=tmp_path)


def test_an_image_that_is_named_twice_is_refused(tmp_path, tiny_tree):
    """A list of one name, a million times, would need gigabytes."""
    tree = tmp_path / "tiny-imagenet-200"
    tiny_tree(tree)
    with (tree / "val" / "val_annotations.txt").open("a") as file:
        file.write("val_0.JPEG\tn01\n")
    with pytest.raises(DataError, match="must name each image of Tiny-ImageNet once"):
        load_task("tiny-imagenet", root=tmp_path)
