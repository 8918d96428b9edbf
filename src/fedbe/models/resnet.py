"""ResNet-20/32/44/56, the CIFAR networks of He et al. (2016): 6n + 2 layers, widths 16, 32, 64."""

from torch import Tensor, nn
from torch.nn import functional

from fedbe.errors import SettingError
from fedbe.models.norm_layers import norm_layer
from fedbe.models.shapes import image_shape


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters: strided and zero-padded where the width grows."""

    def __init__(self, before: int, after: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, after)
        self.stride, self.grown = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] -> [B, after, H / stride, W / stride]."""
        out = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        if self.grown:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grown))
        return functional.relu(out + x, inplace=True)


class ResNet(nn.Module):
    """A ResNet for CIFAR.

    Args:
        depth: 20, 32, 44 or 56, or any other 6n + 2.
        classes: number of outputs.
        shape: (C, H, W) of one input, at least 8 × 8 pixels.
        norm: "batch" or "group".
    """

    def __init__(self, depth: int, classes: int, shape: tuple[int, ...], norm: str = "batch") -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise SettingError(f"`depth` must be 6n + 2 with n >= 1, got {depth}")
        channels = image_shape(shape, 8, "ResNet")[0]
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False), norm_layer(norm, 16), nn.ReLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        before = 16
        for width in (16, 32, 64):
            for i in range((depth - 2) // 6):
                blocks.append(Block(before, width, 2 if i == 0 and width > 16 else 1, norm))
                before = width
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        out: Tensor = self.head(self.features(self.stem(x)))
        return out
