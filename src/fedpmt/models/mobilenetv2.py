"""MobileNetV2 (Sandler et al., CVPR 2018, https://arxiv.org/abs/1801.04381), laid out as torchvision publishes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import nn
from torch.nn import functional

from fedpmt.models.weights import load_strictly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Norm: TypeAlias = type[nn.BatchNorm2d]
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


class FixedNorm(nn.BatchNorm2d):
    """Batch normalisation that uses its stored statistics in training, too, and never changes them."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the stored mean and variance."""
        return functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


class Convolution(nn.Sequential):
    """A convolution without bias, its norm, and ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, norm: Norm, kernel: int = 3, stride: int = 1, groups: int = 1
    ) -> None:
        padding = (kernel - 1) // 2
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
            norm(outputs),
            nn.ReLU6(inplace=True),
        )


class Block(nn.Module):
    """An inverted residual: expand, convolve each channel by itself, project."""

    def __init__(self, inputs: int, outputs: int, norm: Norm, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.skips = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([Convolution(inputs, hidden, norm, kernel=1)] if expansion > 1 else []),
            Convolution(hidden, hidden, norm, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            norm(outputs),
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
        norm: The class of the norms.
    """

    def __init__(
        self, classes: int = IMAGENET_CLASSES, size: int | None = None, norm: Norm = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.resize = nn.Identity() if size is None else nn.Upsample(size=(size, size), mode="bilinear")
        layers: list[nn.Module] = [Convolution(3, STEM, norm, stride=2)]
        channels = STEM
        for expansion, outputs, blocks, stride in STAGES:
            for number in range(blocks):
                layers.append(Block(channels, outputs, norm, stride if number == 0 else 1, expansion))
                channels = outputs
        layers.append(Convolution(channels, LAST, norm, kernel=1))
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

    Norms of pretrained features keep their statistics, so that they do the same where a device trains them and where it
    freezes them.
    """
    if pretrained is None:
        return MobileNetV2(classes, size)
    model = MobileNetV2(IMAGENET_CLASSES, size, FixedNorm)
    load_strictly(model, pretrained, "the weights of MobileNetV2")
    model.classifier[1] = nn.Linear(LAST, classes)
    _initialise(model.classifier[1])
    return model
