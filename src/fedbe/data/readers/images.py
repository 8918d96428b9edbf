"""Helpers for image files."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from fedbe.errors import DataError

# What Pillow raises for a file that is not an image, is truncated or is damaged.
UNREADABLE_IMAGE = (
    OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning
)  # fmt: skip
# Others are refused whatever the file is called: for EPS, Pillow starts Ghostscript, which runs programs.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
MAX_PIXELS = 50_000_000  # of one image: larger ones are photographs to be resized first, or bombs
MAX_BYTES_RATIO = 200  # bytes of pixels for each byte of the files of a set; photographs reach 100, drawings 50
FREE_BYTES = 64 << 20  # so many are always read


def is_image_file(path: Path) -> bool:
    """Whether the name is that of an image. Hidden files are not: macOS writes `._photo.png` next to `photo.png`."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def open_image(source: Path | IO[bytes]) -> Image.Image:
    """Open an image of one of the `FORMATS`, without decoding it.

    A file of a few kB can announce gigabytes: those are a ValueError.
    """
    image = Image.open(source, formats=FORMATS)
    width, height = image.size
    if width * height > MAX_PIXELS:
        image.close()
        raise ValueError(f"{width} × {height} pixels are more than {MAX_PIXELS}")
    return image


def check_set(files: Sequence[Path], pixel_bytes: int, name: str) -> None:
    """Refuse a set of images whose pixels need far more memory than its files: empty images take no space in them."""
    file_bytes = sum(file.stat().st_size for file in files)
    limit = max(FREE_BYTES, MAX_BYTES_RATIO * file_bytes)
    if pixel_bytes > limit:
        raise DataError(
            f"{name} has {len(files)} images of {pixel_bytes:,} bytes in files of {file_bytes:,}, more than {limit:,}: "
            "this looks like a bomb; resize the images"
        )


def is_deep(mode: str) -> bool:
    """Whether this Pillow mode is a grey image with more than eight bits per pixel."""
    return mode.startswith("I")


def eight_bit(image: Image.Image) -> Image.Image:
    """The image with eight bits per channel. Pillow's conversion would turn every 16-bit value above 255 white."""
    if not is_deep(image.mode):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
