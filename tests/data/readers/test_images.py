"""Image files of any kind that Pillow reads."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbe.data import load_task
from fedbe.data.readers.images import eight_bit
from fedbe.errors import DataError
from fedbe.experiment.saved_model import check_takes_images, read_image


def test_sixteen_bits_become_eight(tmp_path: Path) -> None:
    deep = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    with Image.open(tmp_path / "deep.png") as image:
        assert np.asarray(eight_bit(image)).tolist() == [[0, 1, 128, 255]]
    assert read_image(tmp_path / "deep.png", (1, 1, 4)).flatten().tolist() == [0, 1, 128, 255]


def test_eight_bits_stay_as_they_are() -> None:
    image = Image.new("RGB", (2, 2), (1, 2, 3))
    assert eight_bit(image) is image


def test_a_damaged_image_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    Image.new("L", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[20] ^= 255  # in the header, which a checksum covers
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not an image that can be read"):
        read_image(path, (1, 8, 8))


@pytest.mark.parametrize("name", ["x.png", "x.eps"])
def test_a_file_for_ghostscript_is_not_opened(name: str, tmp_path: Path) -> None:
    """Pillow goes by the content, and would start a program to read it."""
    path = tmp_path / name
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(DataError, match="is not an image that can be read"):
        read_image(path, (3, 8, 8))


def test_image_files_have_one_or_three_channels():
    with pytest.raises(DataError, match="takes images of 4 channels"):
        check_takes_images((4, 8, 8))


def test_a_model_that_takes_huge_images_is_refused():
    """Pooling makes any size fit the weights, and each picture would be resized to it."""
    with pytest.raises(DataError, match="40000 × 40000 pixels, more than 50,000,000"):
        check_takes_images((3, 40_000, 40_000))


def test_a_set_of_empty_images_is_refused_before_it_is_read(tmp_path):
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(2):
            Image.new("1", (5000, 5000)).save(tmp_path / label / f"{i}.png")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"4 images of 100,000,000 bytes in files of \d+,\d+, more than 67,108,864"):
        load_task(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
