"""Check of input shapes."""

from fedbe.errors import SettingError


def image_shape(shape: tuple[int, ...], smallest: int, model: str) -> tuple[int, int, int]:
    """Return `shape` as (C, H, W); its sides must have at least `smallest` pixels."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise SettingError(
            f"{model} needs images [channels, height, width] of at least {smallest} x {smallest}, got {list(shape)}"
        )
    return shape[0], shape[1], shape[2]
