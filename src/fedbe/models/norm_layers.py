"""Batch or group normalisation, by name."""

from torch import nn

from fedbe.errors import check_option

NORMS = ("batch", "group")


def norm_layer(kind: str, channels: int) -> nn.Module:
    """A BatchNorm2d ("batch"), or a GroupNorm ("group") with 8 groups, or 4, 2 or 1 if 8 does not divide `channels`."""
    check_option("norm", kind, NORMS)
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = next(g for g in (8, 4, 2, 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)
