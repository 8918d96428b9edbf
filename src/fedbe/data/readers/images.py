"""Image files that people have."""

import numpy as np
from PIL import Image

# What Pillow raises for a file that is none, is cut off or has a broken part.
UNREADABLE_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def is_deep(mode: str) -> bool:
    """Is this Pillow's name for grey images of more than eight bits?"""
    return mode.startswith("I")


def eight_bit(image: Image.Image) -> Image.Image:
    """The same image with eight bits a pixel: of sixteen, Pillow itself would turn all above 255 into white."""
    if not is_deep(image.mode):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
