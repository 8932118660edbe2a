"""Parts by depth: the last layers of the model (the paper's masks Ξ_i)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.parts.part import GLOBAL, WHOLE, Part
from fedpmt.types import SettingError

if TYPE_CHECKING:
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
