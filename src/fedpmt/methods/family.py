"""Rivals of FedPMT that differ from it in which layers a device trains and in how these are averaged.

Each is FedPMT with other values: none has a loop, a fold or a price of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpmt.methods.averaging import Weight
from fedpmt.methods.fedpmt import Average, Block, FedPMT


@dataclass(frozen=True)
class EmbracingFL(FedPMT):
    """Lee et al., 2024: as many layers at the output as a device has resources for, which is FedPMT's rule."""


@dataclass(frozen=True)
class FedOLF(FedPMT):
    """Niu et al., 2025: layers are frozen in order from the input on, which is FedPMT's rule."""


@dataclass(frozen=True)
class SALF(FedPMT):
    """Lang et al., 2024: a straggler sends the layers that its back-propagation has reached, last to first."""

    weight: Weight = "uniform"
    block: Block = "random-suffix"
    average: Average = "blend"


@dataclass(frozen=True)
class FedPart(FedPMT):
    """Wang et al., 2024: all devices train the same layer, from the first to the last."""

    block: Block = "cycle"


@dataclass(frozen=True)
class CoCoFL(FedPMT):
    """Pfeiffer et al., 2023: a random one of the largest blocks that fit; the others are frozen."""

    weight: Weight = "uniform"
    block: Block = "random-block"
    average: Average = "blend"


@dataclass(frozen=True)
class FedEL(FedPMT):
    """Zhang et al., 2025: a window of layers slides through the net."""

    block: Block = "window"
