"""Checks of input shapes."""

from fedbe.errors import SettingError


def image_shape(shape: tuple[int, ...], smallest: int, model: str) -> tuple[int, int, int]:
    """Check that a convolutional network can take inputs of this shape; return it."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise SettingError(
            f"{model} needs images [channels, height, width] of at least {smallest} x {smallest}, got {list(shape)}"
        )
    return shape[0], shape[1], shape[2]
