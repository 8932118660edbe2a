"""Small nets of ready tasks: for the motion of a phone, for the next character of a text, and for 32 x 32 images.

The last is a ResNet (He et al., CVPR 2016, section 4.2, https://arxiv.org/abs/1512.03385) with GroupNorm: batch norms
suit federated learning badly, as their statistics are those of one device's few classes (Hsieh et al., ICML 2020,
https://arxiv.org/abs/1910.00189).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def motion_cnn(channels: int = 6, classes: int = 6) -> nn.Sequential:
    """Make a net of three convolutions over time and two linear layers, for windows of 128 steps."""
    modules: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv1d(channels, 32, 9, padding=4),
        act1=nn.ReLU(),
        pool1=nn.MaxPool1d(4),
        conv2=nn.Conv1d(32, 64, 5, padding=2),
        act2=nn.ReLU(),
        pool2=nn.MaxPool1d(4),
        conv3=nn.Conv1d(64, 64, 3, padding=1),
        act3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc=nn.Linear(64 * 8, 100),
        act4=nn.ReLU(),
        out=nn.Linear(100, classes),
    )
    return nn.Sequential(modules)


class CharacterLSTM(nn.Module):
    """Two LSTMs on embedded characters, as in LEAF (Caldas et al., 2018, https://arxiv.org/abs/1812.01097)."""

    def __init__(self, alphabet: int, embedding: int = 8, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, embedding)
        self.first = nn.LSTM(embedding, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:
        """Predict from (texts, places): (texts, places, alphabet)."""
        hidden, _ = self.first(self.embedding(characters))
        hidden, _ = self.second(hidden)
        return self.out(hidden)  # type: ignore[no-any-return]


class CausalBlock(nn.Module):
    """Attention to earlier places, then two linear layers, each on normed inputs and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend, then map each place."""
        normed = self.norm1(hidden)
        query, key, value = (
            each(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix(mixed.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.widen(self.norm2(hidden)))
        return hidden + self.narrow(wide)  # type: ignore[no-any-return]


class CharacterTransformer(nn.Module):
    """A small GPT."""

    def __init__(
        self, alphabet: int, places: int = 80, width: int = 96, heads: int = 4, blocks: int = 3
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.places = nn.Parameter(torch.zeros(places, width))
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:
        """Predict from (texts, places): (texts, places, alphabet)."""
        hidden = self.embedding(characters) + self.places[: characters.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.norm(hidden))  # type: ignore[no-any-return]


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
