"""ResNet for 32 x 32 images (He et al., CVPR 2016, section 4.2, https://arxiv.org/abs/1512.03385), with GroupNorm.

Batch norms suit federated learning badly: their statistics are those of one device's few classes (Hsieh et al., ICML
2020, https://arxiv.org/abs/1910.00189).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = (16, 32, 64)
GROUPS = 4


class Block(nn.Module):
    """Two convolutions and a skip; the skip is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Add what is learned to the skip."""
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.skip(images))


class ResNet(nn.Module):
    """A stem, three stages of blocks with 16, 32 and 64 channels, and a classifier: 6 `blocks` + 2 layers.

    Args:
        classes: Number of outputs.
        blocks: Blocks of each stage; 1 makes ResNet-8, 3 makes ResNet-20.
    """

    def __init__(self, classes: int = 10, blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False), nn.GroupNorm(GROUPS, WIDTHS[0]), nn.ReLU()
        )
        layers, channels = list[nn.Module](), WIDTHS[0]
        for stage, outputs in enumerate(WIDTHS):
            for number in range(blocks):
                layers.append(Block(channels, outputs, 2 if stage and number == 0 else 1))
                channels = outputs
        self.blocks = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        return self.classifier(self.blocks(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]
