"""The choice between batch and group normalisation."""

from torch import nn

from fedbe.errors import SettingError, nearest

NORMS = ("batch", "group")


def norm_layer(kind: str, channels: int) -> nn.Module:
    """BatchNorm2d, or GroupNorm with the largest number of groups up to 8 that divides the channels."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        groups = next(g for g in (8, 4, 2, 1) if channels % g == 0)
        return nn.GroupNorm(groups, channels)
    raise SettingError(f"unknown norm '{kind}': {nearest(kind, NORMS)}")
