"""Parts by depth: the last layers of the model (the paper's masks Ξ_i), other runs of layers, first ones with exits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.parts.part import GLOBAL, WHOLE, Part
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from fedpmt.models.structure import Structure

LEVEL_ID_BYTES = 1


def full(structure: Structure, model: str = GLOBAL) -> Part:
    """The whole model, sent and trained; the same part each time, so that it is priced once."""
    if (full, model) not in structure.memo:
        everything = dict.fromkeys(structure.tensors, WHOLE)
        structure.memo[full, model] = Part(model, everything, everything, "full")
    made: Part = structure.memo[full, model]
    return made


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


EXITS = "exits"
"""Where heads on inner layers stand in a net that has some: `exits.2` is the one behind the second layer."""

ALL_EXITS = "all exits"
"""The whole model with all of them."""


def exit_name(end: int) -> str:
    """The head behind this number of layers."""
    return f"{EXITS}.{end}"


def until(end: int) -> str:
    """The net that ends behind this number of layers."""
    return f"until {end}"


def even_ends(layers: int, count: int) -> tuple[int, ...]:
    """Where all but the last of `count` prefixes end that grow evenly; the classifier belongs to the last one.

    >>> even_ends(14, 4), even_ends(3, 2), even_ends(3, 1)
    ((3, 6, 9), (1,), ())
    """
    return tuple(level * (layers - 1) // count for level in range(1, count))


def exit_of(name: str) -> int | None:
    """The exit that a tensor belongs to, by the number of layers before it; None for those of the model itself."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == EXITS else None


def exits_in(structure: Structure) -> tuple[int, ...]:
    """The exits of a net, first layer first."""
    found = {exit_of(name) for name in structure.tensors}
    return tuple(sorted(end for end in found if end is not None))


def with_exits(
    structure: Structure, exits: Collection[int], model: str, label: str, layers: int | None = None
) -> Part:
    """The first layers of a net, or all of them, with these of its exits, sent and trained."""
    kept = [name for layer in structure.layers[:layers] for name in layer.tensors]
    sent = dict.fromkeys((name for name in kept if exit_of(name) in (None, *exits)), WHOLE)
    return Part(model, sent, sent, label, LEVEL_ID_BYTES)


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
