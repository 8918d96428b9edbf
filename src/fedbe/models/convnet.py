"""The paper's ConvNet, from the TensorFlow tutorial: three convolutions and two fully connected layers."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedbe.errors import SettingError
from fedbe.models.shapes import image_shape

MAX_EXTRA_LAYERS = 100  # the paper has 18; a model file could announce any number, and building them takes time


class ConvNet(nn.Module):
    """conv 3×3 (32) – pool – conv 3×3 (64) – pool – conv 3×3 (64) – [extra × conv 3×3 (64), padded] – 64 – classes.

    The convolutions have no padding; each is followed by ReLU. ReLU comes after the pooling: max(0, ·) and max-pooling
    commute, so the values are the same, for a quarter of the elements.

    Args:
        classes: number of outputs.
        shape: (C, H, W) of one input, at least 18 × 18 pixels; 4 × 4 with padding.
        extra_layers: padded convolutions before the fully connected layers, for the study of depth.
        widths: channels of the three convolutions.
        padding: pixels around the input of each convolution, 0 or 1.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, ...],
        extra_layers: int = 0,
        widths: Sequence[int] = (32, 64, 64),
        padding: int = 0,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(shape, 18 - 14 * min(padding, 1), "ConvNet")
        if not 0 <= extra_layers <= MAX_EXTRA_LAYERS:
            raise SettingError(f"`extra_layers` must be in [0, {MAX_EXTRA_LAYERS}], got {extra_layers}")
        if len(widths) != 3 or min(widths) < 1 or padding not in (0, 1):
            raise SettingError(
                f"`widths` must be three numbers >= 1 and `padding` 0 or 1, got {list(widths)} and {padding}"
            )
        first, second, third = widths
        layers: list[nn.Module] = [
            nn.Conv2d(channels, first, 3, padding=padding), nn.MaxPool2d(2), nn.ReLU(inplace=True),
            nn.Conv2d(first, second, 3, padding=padding), nn.MaxPool2d(2), nn.ReLU(inplace=True),
            nn.Conv2d(second, third, 3, padding=padding), nn.ReLU(inplace=True),
        ]  # fmt: skip
        for _ in range(extra_layers):
            layers += [nn.Conv2d(third, third, 3, padding=1), nn.ReLU(inplace=True)]
        convolutions = nn.Sequential(*layers)
        flat = third * _remaining_side(height, padding) * _remaining_side(width, padding)
        self.features = nn.Sequential(convolutions, nn.Flatten(), nn.Linear(flat, 64), nn.ReLU(inplace=True))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        out: Tensor = self.head(self.features(x))
        return out


def _remaining_side(size: int, padding: int) -> int:
    """Pixels of one side after the three convolutions and two poolings.

    >>> _remaining_side(32, 0), _remaining_side(16, 1)
    (4, 4)
    """
    lost = 2 - 2 * padding  # by one convolution
    return ((size - lost) // 2 - lost) // 2 - lost
