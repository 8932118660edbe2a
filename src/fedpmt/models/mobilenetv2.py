"""MobileNetV2 (Sandler et al., CVPR 2018, https://arxiv.org/abs/1801.04381), laid out as torchvision publishes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fedpmt.models.weights import load_strictly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

IMAGENET_CLASSES = 1000
STEM, LAST = 32, 1280  # channels of the first and the last convolution
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2 of the paper: expansion t, channels c, number of blocks n, stride s of the first one."""


class Convolution(nn.Sequential):
    """A convolution without bias, its norm, and ReLU6."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        padding = (kernel - 1) // 2
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class Block(nn.Module):
    """An inverted residual: expand, convolve each channel by itself, project."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.skips = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([Convolution(inputs, hidden, kernel=1)] if expansion > 1 else []),
            Convolution(hidden, hidden, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Add the input where the shapes allow it."""
        found: Tensor = self.conv(images)
        return images + found if self.skips else found


class MobileNetV2(nn.Module):
    """The net at width 1.

    Args:
        classes: Number of outputs.
        size: Images are scaled to this height and width first; None leaves them as they are.
    """

    def __init__(self, classes: int = IMAGENET_CLASSES, size: int | None = None) -> None:
        super().__init__()
        self.resize = nn.Identity() if size is None else nn.Upsample(size=(size, size), mode="bilinear")
        layers: list[nn.Module] = [Convolution(3, STEM, stride=2)]
        channels = STEM
        for expansion, outputs, blocks, stride in STAGES:
            for number in range(blocks):
                layers.append(Block(channels, outputs, stride if number == 0 else 1, expansion))
                channels = outputs
        layers.append(Convolution(channels, LAST, kernel=1))
        self.features = nn.Sequential(*layers)
        # torchvision drops out a fifth here; local rounds are too short to need it. The place keeps the file's names.
        self.classifier = nn.Sequential(nn.Identity(), nn.Linear(LAST, classes))
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        return self.classifier(self.features(self.resize(images)).mean((2, 3)))  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    """Draw weights as torchvision does."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)
        nn.init.zeros_(module.bias)


def build(pretrained: Mapping[str, Tensor] | None, classes: int, size: int | None = None) -> MobileNetV2:
    """Make the net, with a new classifier on the pretrained features where there are any.

    Norms use each batch's statistics where they are trained: those of ImageNet's larger images fit small ones badly.
    """
    model = MobileNetV2(classes if pretrained is None else IMAGENET_CLASSES, size)
    if pretrained is not None:
        load_strictly(model, pretrained, "the weights of MobileNetV2")
        model.classifier[1] = nn.Linear(LAST, classes)
        _initialise(model.classifier[1])
    return model
