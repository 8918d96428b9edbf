"""A multi-layer perceptron."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedbe.errors import SettingError


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; images are flattened.

    Args:
        classes: number of outputs.
        shape: shape of one input.
        hidden: widths of the hidden layers; the paper's two-layer network has one.
    """

    def __init__(self, classes: int, shape: tuple[int, ...], hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        if any(width < 1 for width in hidden):
            raise SettingError(f"`hidden` must be widths >= 1, got {list(hidden)}")
        widths = [math.prod(shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of inputs [B, *shape]."""
        out: Tensor = self.head(self.features(x))
        return out
