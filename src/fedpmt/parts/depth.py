"""Parts by depth: the last layers of the model (the paper's masks Ξ_i), and other runs of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.parts.part import GLOBAL, WHOLE, Part
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.models.structure import Structure

LEVEL_ID_BYTES = 1


def full(structure: Structure, model: str = GLOBAL) -> Part:
    """The whole model, sent and trained."""
    everything = dict.fromkeys(structure.tensors, WHOLE)
    return Part(model, everything, everything, "full")


def suffix(structure: Structure, frozen: int, label: str) -> Part:
    """The whole model is sent; all but the first `frozen` layers are trained: f_k = [0, .., 0, 1, .., 1]."""
    return block(structure, frozen, len(structure.layers), label)


def block(structure: Structure, first: int, last: int, label: str) -> Part:
    """The whole model is sent; the layers `first` to `last - 1` are trained."""
    layers = structure.layers[first:last]
    trained = dict.fromkeys((name for layer in layers for name in layer.tensors), WHOLE)
    return Part(GLOBAL, dict.fromkeys(structure.tensors, WHOLE), trained, label, LEVEL_ID_BYTES)


def suffixes(structure: Structure, count: int) -> tuple[Part, ...]:
    """The masks Ξ_1 to Ξ_|I|, smallest first: depth i freezes the first |I| - i layers.

    This gives the paper's splits: |I| = 2 freezes the first layer or none, |I| = |L| goes down to
    the classifier alone.
    """
    layers = len(structure.layers)
    if not 1 <= count <= layers:
        raise SettingError(
            f"depths = {count} is refused: this model has {layers} layers, so 1 to {layers} depths"
        )
    return tuple(suffix(structure, count - depth, f"depth {depth}") for depth in range(1, count + 1))


def runs(structure: Structure, count: int) -> tuple[tuple[Part, ...], ...]:
    """All blocks of neighbouring layers, by the layer they begin with, shortest first.

    With `count` depths there are as many places to begin at: the last of them holds all further layers, as the mask of
    depth 1 does. The longest block of each place is a mask.
    """
    edges = (*range(count), len(structure.layers))
    return tuple(
        tuple(
            block(structure, edges[first], edges[last], _name(edges[first], edges[last], count, first, last))
            for last in range(first + 1, count + 1)
        )
        for first in range(count)
    )


def _name(begin: int, end: int, count: int, first: int, last: int) -> str:
    if last == count:
        return f"depth {count - first}"
    return f"layer {end}" if end == begin + 1 else f"layers {begin + 1}-{end}"


def longest(blocks: Sequence[Part], fits: Callable[[Part], bool]) -> int:
    """Return the number of the longest of these blocks that fits, counted from 1; 0 where none does."""
    return next((place for place in range(len(blocks), 0, -1) if fits(blocks[place - 1])), 0)


def windows(blocks: Sequence[Sequence[Part]], fits: Callable[[Part], bool]) -> list[Part]:
    """Return windows that follow one another from the first layer to the last, each as long as fits.

    A layer that does not even fit alone is left out; where none does, it is the last layer.
    """
    found, first = list[Part](), 0
    while first < len(blocks):
        length = longest(blocks[first], fits)
        found += blocks[first][length - 1 : length]
        first += max(1, length)
    return found or [blocks[-1][0]]


def maximal(blocks: Sequence[Sequence[Part]], fits: Callable[[Part], bool]) -> list[Part]:
    """Return the blocks that fit and are inside no other that does; where none fits, the last layer."""
    found, end = list[Part](), 0
    for first, beginning in enumerate(blocks):
        length = longest(beginning, fits)
        if first + length > end and length:
            found.append(beginning[length - 1])
            end = first + length
    return found or [blocks[-1][0]]
