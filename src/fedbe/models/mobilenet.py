"""MobileNetV2 (Sandler et al. 2018) for small images: the published blocks with fewer strides at the start."""

from torch import Tensor, nn

from fedbe.models.norm_layers import norm_layer
from fedbe.models.shapes import image_shape

# expansion, width, blocks, stride: Table 2 of the MobileNetV2 paper.
BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _conv(before: int, after: int, size: int, norm: str, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, size, stride, padding=size // 2, groups=groups, bias=False)
    return [conv, norm_layer(norm, after), nn.ReLU6(inplace=True)]


class InvertedResidual(nn.Module):
    """Expand by 1×1, filter by depth-wise 3×3, project by 1×1 without a non-linearity; shortcut if shapes are equal."""

    def __init__(self, before: int, after: int, stride: int, expansion: int, norm: str) -> None:
        super().__init__()
        inner = before * expansion
        layers = _conv(before, inner, 1, norm) if expansion > 1 else []
        layers += _conv(inner, inner, 3, norm, stride, groups=inner)
        layers += [nn.Conv2d(inner, after, 1, bias=False), norm_layer(norm, after)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] -> [B, after, H / stride, W / stride]."""
        out: Tensor = self.layers(x)
        return x + out if self.shortcut else out


class MobileNetV2(nn.Module):
    """MobileNetV2 with fewer halvings for small images.

    ImageNet's five halvings would shrink a small image to one pixel. Images of up to 32 pixels skip the first two
    (32 → 4 at the end), images of up to 64 pixels skip the first (64 → 4). The parameters are the same for all sizes.

    Args:
        classes: number of outputs.
        shape: (C, H, W) of one input, at least 16 × 16 pixels.
        norm: "batch" or "group".
    """

    def __init__(self, classes: int, shape: tuple[int, ...], norm: str = "batch") -> None:
        super().__init__()
        channels, height, width = image_shape(shape, 16, "MobileNetV2")
        side = max(height, width)
        stem_stride = 1 if side <= 64 else 2
        skipped_width = 24 if side <= 32 else None  # the stage of this width gets stride 1
        layers = _conv(channels, 32, 3, norm, stem_stride)
        before = 32
        for expansion, after, blocks, stride in BLOCKS:
            first = 1 if after == skipped_width else stride
            for i in range(blocks):
                layers.append(InvertedResidual(before, after, first if i == 0 else 1, expansion, norm))
                before = after
        layers += _conv(before, 1280, 1, norm)
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
        self.head = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        out: Tensor = self.head(self.features(x))
        return out
