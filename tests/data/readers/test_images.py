"""Image files of any kind that Pillow reads."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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


def test_image_files_have_one_or_three_channels():
    with pytest.raises(DataError, match="takes images of 4 channels"):
        check_takes_images((4, 8, 8))
