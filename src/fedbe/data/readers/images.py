"""Helpers for image files of any kind that Pillow reads."""

import numpy as np
from PIL import Image

# What Pillow raises for a file that is not an image, is truncated or is damaged.
UNREADABLE_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def is_deep(mode: str) -> bool:
    """Whether this Pillow mode is a grey image with more than eight bits per pixel."""
    return mode.startswith("I")


def eight_bit(image: Image.Image) -> Image.Image:
    """The image with eight bits per channel. Pillow's conversion would turn every 16-bit value above 255 white."""
    if not is_deep(image.mode):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
