"""The paper's ConvNet, from the TensorFlow tutorial: three convolutions and two fully connected layers."""

from torch import Tensor, nn

from fedbe.errors import SettingError
from fedbe.models.shapes import image_shape


class ConvNet(nn.Module):
    """conv 3×3 (32) – pool – conv 3×3 (64) – pool – conv 3×3 (64) – [extra × conv 3×3 (64), padded] – 64 – classes.

    The convolutions have no padding; each is followed by ReLU. ReLU comes after the pooling: max(0, ·) and max-pooling
    commute, so the values are the same, for a quarter of the elements.

    Args:
        classes: number of outputs.
        shape: (C, H, W) of one input, at least 18 × 18 pixels.
        extra_layers: padded convolutions before the fully connected layers, for the study of depth.
    """

    def __init__(self, classes: int, shape: tuple[int, ...], extra_layers: int = 0) -> None:
        super().__init__()
        channels, height, width = image_shape(shape, 18, "ConvNet")
        if extra_layers < 0:
            raise SettingError(f"`extra_layers` must be >= 0, got {extra_layers}")
        layers: list[nn.Module] = [
            nn.Conv2d(channels, 32, 3), nn.MaxPool2d(2), nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, 3), nn.ReLU(inplace=True),
        ]  # fmt: skip
        for _ in range(extra_layers):
            layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True)]
        convolutions = nn.Sequential(*layers)
        flat = 64 * _remaining_side(height) * _remaining_side(width)
        self.features = nn.Sequential(convolutions, nn.Flatten(), nn.Linear(flat, 64), nn.ReLU(inplace=True))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        out: Tensor = self.head(self.features(x))
        return out


def _remaining_side(size: int) -> int:
    """Pixels of one side after the unpadded convolutions and poolings.

    >>> _remaining_side(32)
    4
    """
    return ((size - 2) // 2 - 2) // 2 - 2
