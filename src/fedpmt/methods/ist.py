"""IST: Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", 2022.

Each round the hidden neurons of every layer are dealt at random to the devices that are asked, each to one of them.
A device trains the sub-net of its own neurons; inputs and classes are everybody's. As no two sub-nets overlap, the
server puts the trained weights back where they came from; only the classifier's bias is shared, and averaged. A
weight between neurons of two devices rests until a deal brings them together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import Traits, acts, require
from fedpmt.parts.width import (
    disjoint_channels,
    first_channels,
    hidden_groups,
    kept_count,
    narrow,
    without_buffers,
)
from fedpmt.pricing.matching import rate_within
from fedpmt.training.scaled import ScaledWork

if TYPE_CHECKING:
    from fedpmt.methods.base import Predictor, Round
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Client


@dataclass(frozen=True)
class IST(PartAveraging):
    """Disjoint random sub-nets."""

    subnets: int | None = (
        2  # S, how many sub-nets a deal makes; None, as in the paper: one for each device asked
    )
    scaling: bool = True  # hidden outputs times n / m in training, for the neurons that are elsewhere
    norm: Literal["static", "averaged", "frozen"] = (
        "static"  # BatchNorm statistics: of data at the end, averaged, or as they are
    )

    def __post_init__(self) -> None:
        require(self, subnets=(self.subnets is None or self.subnets >= 1, ">= 1"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            sums="entries",
            combines="overlap mean",
            finds_statistics=self.norm == "static",
            budget=acts("device"),
            needs_round="it deals out neurons to all devices of a round",
        )

    @property
    def local(self) -> LocalWork[Any]:
        return ScaledWork("outputs" if self.scaling else None, frozen_norms=self.norm == "frozen")

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        """The device's piece of this round's deal, or the first of it that the budget pays for."""
        structure = state.structure
        axes = structure.require_axes("ist")
        place = round.cohort.index(client.id) if client.id in round.cohort else client.id
        pieces = self.subnets or max(1, len(round.cohort))
        # One generator for all: every device sees the same deal.
        rng = round.rng("deal")
        dealt = {
            group.name: disjoint_channels(group.size, pieces, rng)[place % pieces]
            for group in hidden_groups(axes)
        }

        def counts(rate: float) -> dict[str, int]:
            """How many channels of the piece a rate leaves, by group."""
            return {
                name: min(len(piece), kept_count(axes.groups[name].size, rate))
                for name, piece in dealt.items()
            }

        def cut(rate: float) -> Part:
            """As large as the piece cut at a rate; a price does not ask which channels they are."""
            leading = {name: first_channels(len(dealt[name]), count) for name, count in counts(rate).items()}
            return self.alone(structure, narrow(structure, axes, leading, f"keep {rate:.2f}"))

        rate = rate_within(lambda rate: client.fits(cut(rate)))
        left = counts(rate)
        # Cut in the order dealt: of sorted pieces weak devices would never train the last channels.
        kept = {name: np.sort(piece[: left[name]]) for name, piece in dealt.items()}
        whole = all(left[name] == len(piece) for name, piece in dealt.items())
        label = f"1 of {pieces} subnets" + ("" if whole else f", keep {rate:.2f}")
        return self.alone(structure, narrow(structure, axes, kept, label))

    def alone(self, structure: Structure, part: Part) -> Part:
        """A part as it is trained: only statistics that are averaged come back."""
        return part if self.norm == "averaged" else without_buffers(structure, part)

    def predictor(self, state: Averaged) -> Predictor:
        return replace(super().predictor(state), statistics="data" if self.norm == "static" else "stored")

    def neutral(self) -> Self:
        return replace(self, subnets=1, norm="averaged")
