"""MiniLM-L6 (Wang et al., NeurIPS 2020, https://arxiv.org/abs/2002.10957), laid out as BERT is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from fedpmt.models.weights import load_strictly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

WORDS, PLACES, TYPES = 30_522, 512, 2
WIDTH, HIDDEN, HEADS, LAYERS = 384, 1_536, 12, 6
HEAD_WIDTH = WIDTH // HEADS
EPSILON = 1e-12


class Embeddings(nn.Module):
    """The sum of what a word, its place and its sentence stand for, normed."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(PLACES, WIDTH)
        self.token_type_embeddings = nn.Embedding(TYPES, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)
        self.register_buffer("position_ids", torch.arange(PLACES)[None])

    def forward(self, words: Tensor) -> Tensor:
        """Embed texts of one sentence, (texts, words)."""
        places = self.position_embeddings.weight[: words.shape[1]]
        embedded = self.word_embeddings(words) + self.token_type_embeddings.weight[0] + places
        return self.LayerNorm(embedded)  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Attention of each word to all words that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: Tensor, there: Tensor) -> Tensor:
        """Mix the words' values."""
        query, key, value = (
            each(hidden).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=there)
        return mixed.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """A linear map whose result is added to the input of the block, and normed."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Add to what was there before."""
        return self.LayerNorm(self.dense(hidden) + before)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = SelfAttention(), Output(WIDTH)

    def forward(self, hidden: Tensor, there: Tensor) -> Tensor:
        """Attend."""
        return self.output(self.self(hidden, there), hidden)  # type: ignore[no-any-return]


class Intermediate(nn.Module):
    """The wide layer of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        """Widen."""
        return functional.gelu(self.dense(hidden))


class Layer(nn.Module):
    """One block of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = Attention(), Intermediate(), Output(HIDDEN)

    def forward(self, hidden: Tensor, there: Tensor) -> Tensor:
        """Attend, then map each word."""
        hidden = self.attention(hidden, there)
        return self.output(self.intermediate(hidden), hidden)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """All blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, hidden: Tensor, there: Tensor) -> Tensor:
        """Run the blocks."""
        for layer in self.layer:
            hidden = layer(hidden, there)
        return hidden


class Pooler(nn.Module):
    """A head of the published file that sentence embeddings do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)


class MiniLM(nn.Module):
    """The encoder: a vector for each word of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.encoder, self.pooler = Embeddings(), Encoder(), Pooler()
        self.apply(_initialise)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode texts, (texts, words, width)."""
        there = attention_mask[:, None, None, :].bool()
        return self.encoder(self.embeddings(input_ids), there)  # type: ignore[no-any-return]


class MiniLMClassifier(nn.Module):
    """The encoder with a linear head on the mean of a text's word vectors.

    Args:
        classes: Number of outputs.
        length: Only this many words of a text are read; None: all.
    """

    def __init__(self, classes: int, length: int | None = None) -> None:
        super().__init__()
        self.length, self.backbone, self.classifier = length, MiniLM(), nn.Linear(WIDTH, classes)
        _initialise(self.classifier)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Classify texts."""
        words, there = input_ids[:, : self.length], attention_mask[:, : self.length]
        hidden, counted = self.backbone(words, there), there[:, :, None].to(torch.float32)
        return self.classifier((hidden * counted).sum(1) / counted.sum(1).clamp(min=1))  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    """Draw weights as BERT does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, 0, 0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def build(
    pretrained: Mapping[str, Tensor] | None, classes: int, length: int | None = None
) -> MiniLMClassifier:
    """Make the classifier, on the pretrained encoder where there is one."""
    model = MiniLMClassifier(classes, length)
    if pretrained is not None:
        load_strictly(model.backbone, pretrained, "the weights of MiniLM")
    del model.backbone.pooler
    return model
