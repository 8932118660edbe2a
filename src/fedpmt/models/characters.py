"""Nets that predict the next character of a text: a logit for each character of the alphabet at each place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


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
