"""Models as a user writes them: classes with a forward pass of their own, the same ones for ours and for every peer.

Runs in the environment of any peer that trains PyTorch modules, so it needs nothing of fedpmt.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLASSES = 10
VOCABULARY, TOKENS = 4000, 32
"""Of the texts that BERT reads."""


class FullyConnected(nn.Module):
    """The paper's net on MNIST without convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 400)
        self.fc2 = nn.Linear(400, 300)
        self.fc3 = nn.Linear(300, 200)
        self.fc4 = nn.Linear(200, 100)
        self.out = nn.Linear(100, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits."""
        hidden = F.relu(self.fc1(images.flatten(1)))
        hidden = F.relu(self.fc2(hidden))
        hidden = F.relu(self.fc3(hidden))
        hidden = F.relu(self.fc4(hidden))
        return self.out(hidden)


class ConvolutionalMnist(nn.Module):
    """The paper's convolutional net on MNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 128)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        return self.out(F.relu(self.fc1(hidden.flatten(1))))


class ConvolutionalCifar(nn.Module):
    """The paper's convolutional net on CIFAR-10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.fc1 = nn.Linear(32 * 5 * 5, 500)
        self.fc2 = nn.Linear(500, 300)
        self.out = nn.Linear(300, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return self.out(F.relu(self.fc2(hidden)))


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, as in ResNets for CIFAR."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Add what the convolutions find to the shortcut."""
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet(nn.Module):
    """ResNet-14 for 32x32 images, with GroupNorm, which suits federated averaging better than BatchNorm."""

    def __init__(self, blocks: int = 2, channels: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, channels[0])
        self.blocks = nn.ModuleList()
        before = channels[0]
        for stage, count in enumerate(channels):
            for number in range(blocks):
                self.blocks.append(Block(before, count, stride=2 if stage and not number else 1))
                before = count
        self.head = nn.Linear(before, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits."""
        hidden = F.relu(self.norm(self.conv(images)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=(2, 3)))


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Let each token attend to all."""
        samples, count, width = tokens.shape
        qkv = self.qkv(tokens).reshape(samples, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(samples, count, width))


class Encoder(nn.Module):
    """A transformer block with its norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend, then transform each token."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.fc2(F.gelu(self.fc1(self.norm2(tokens))))


class VisionTransformer(nn.Module):
    """A small ViT for 32x32 images: patches of 4x4 pixels, a class token and learned positions."""

    def __init__(self, width: int = 64, depth: int = 6, heads: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Encoder(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits."""
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


@contextmanager
def without(package: str) -> Iterator[None]:
    """Hide a package from imports: BERT needs no images, and a torchvision built for another torch would stop it."""
    known = package in sys.modules
    if not known:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not known:
            del sys.modules[package]


def bert() -> nn.Module:
    """Make a BERT classifier of four layers, as transformers publishes it."""
    with without("torchvision"):
        from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(  # type: ignore[call-arg, unused-ignore]
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=TOKENS,
        num_labels=CLASSES,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "fcnn-mnist": FullyConnected,
    "cnn-mnist": ConvolutionalMnist,
    "cnn-cifar10": ConvolutionalCifar,
    "resnet": ResNet,
    "vit": VisionTransformer,
    "bert": bert,
}
