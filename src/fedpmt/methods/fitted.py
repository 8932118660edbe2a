"""Nets of their own that fit a device's budget: the same architecture with fewer channels, sharing no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.parts.depth import full
from fedpmt.parts.width import thinned
from fedpmt.pricing.matching import rate_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part


def fitted(structure: Structure, rate: float, why: str) -> Part:
    """The net with ⌈r n_l⌉ of the n_l channels of every hidden layer; both sides know it from the rate."""
    if rate == 1:
        return full(structure)
    return thinned(structure, structure.require_axes(why), rate, derivable=True)


def rate_for(structure: Structure, fits: Callable[[Part], bool], why: str) -> float:
    """r: the largest rate whose net a device can afford, on the 0.01 grid."""
    return rate_within(lambda rate: fits(fitted(structure, rate, why)))
