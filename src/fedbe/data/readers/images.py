"""Helpers for image files of any kind that Pillow reads."""

from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

# What Pillow raises for a file that is not an image, is truncated or is damaged.
UNREADABLE_IMAGE = (
    OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning
)  # fmt: skip
MAX_PIXELS = 50_000_000  # of one image: larger ones are photographs to be resized first, or bombs


def open_image(source: Path | IO[bytes]) -> Image.Image:
    """Open an image without decoding it. A file of a few kB can announce gigabytes: those are a ValueError."""
    image = Image.open(source)
    width, height = image.size
    if width * height > MAX_PIXELS:
        image.close()
        raise ValueError(f"{width} × {height} pixels are more than {MAX_PIXELS}")
    return image


def is_deep(mode: str) -> bool:
    """Whether this Pillow mode is a grey image with more than eight bits per pixel."""
    return mode.startswith("I")


def eight_bit(image: Image.Image) -> Image.Image:
    """The image with eight bits per channel. Pillow's conversion would turn every 16-bit value above 255 white."""
    if not is_deep(image.mode):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
