"""What methods share that cut one slice of every hidden layer by a rate; they differ in the channels they take.

Nets of their own that fit a device's budget, which FedDF and COMET give out, are such slices that share no weights.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.methods.averaging import Averaged, PartAveraging, Weight, send
from fedpmt.methods.base import Traits, acts, require
from fedpmt.models.structure import HIDDEN
from fedpmt.parts.depth import full
from fedpmt.parts.part import take
from fedpmt.parts.width import of_classes, thinned, without_buffers
from fedpmt.pricing.matching import rate_within
from fedpmt.training.messages import Task
from fedpmt.training.scaled import RATE, ScaledWork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from fedpmt.methods.base import Predictor, Round
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.training.messages import Client


HALVING = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Levels a to e of both papers."""


@dataclass(frozen=True)
class SliceAveraging(PartAveraging):
    """Each device trains a slice of rate r; every entry is averaged over the devices that trained it."""

    weight: Weight = "uniform"  # the mean counts devices, not samples
    rates: Literal["matched", "halving"] = "matched"  # r on the 0.01 grid, or the papers' a to e
    rate: float | None = None  # r, the same for all devices instead of one within the budget
    scaler: bool = True  # hidden outputs times 1 / r in training
    masked: bool = True  # masked cross-entropy: classes a device does not hold have logit 0
    clip: float | None = None  # the largest norm of a step's gradient
    norm: Literal["static", "averaged", "frozen"] = (
        "static"  # BatchNorm statistics: of data at the end, averaged, or as they are
    )

    @abstractmethod
    def channels(self, size: int, count: int, round: Round) -> np.ndarray:
        """I_l(t): which `count` of a layer's channels are in the slice, in order. Both sides know it from r and t."""

    def __post_init__(self) -> None:
        require(self, rate=(self.rate is None or 0 < self.rate <= 1, "> 0 and <= 1"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            needs_labels=self.masked,
            sums="entries",
            combines="overlap mean",
            finds_statistics=self.norm == "static",
            discloses="which classes it holds" if self.masked else "",
            budget=acts("device") if self.rate is None else {},
        )

    @property
    def local(self) -> ScaledWork:
        return ScaledWork("rate" if self.scaler else None, self.masked, self.clip, self.norm == "frozen")

    @property
    def name(self) -> str:
        """As messages call the method."""
        return type(self).__name__.lower()

    def rate_of(self, state: Averaged, client: Client, round: Round) -> float:
        """r_k: the largest rate within the device's budget, else the smallest there is."""
        if self.rate is not None:
            return self.rate
        among = HALVING if self.rates == "halving" else None
        return rate_within(lambda rate: client.fits(self.slice(state, rate, round)), among)

    def slice(self, state: Averaged, rate: float, round: Round) -> Part:
        """The sub-model of a rate; groups of one size are cut alike."""
        structure = state.structure
        axes = structure.require_axes(self.name)
        part = thinned(
            structure,
            axes,
            rate,
            HIDDEN,
            lambda size, count: self.channels(size, count, round),
            derivable=True,
        )
        return part if self.norm == "averaged" else without_buffers(structure, part)

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        return self.held(state, client, self.slice(state, self.rate_of(state, client, round), round))

    def held(self, state: Averaged, client: Client, part: Part) -> Part:
        """A row of the classifier is averaged over the devices that hold its class."""
        if not self.masked or client.label_counts is None:
            return part
        return of_classes(state.structure, part, client.label_counts.nonzero()[0])

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        rate = self.rate_of(state, client, round)
        part = self.held(state, client, self.slice(state, rate, round))
        return send(state.tensors, (part,), scalars={RATE: rate})

    def predictor(self, state: Averaged) -> Predictor:
        return replace(super().predictor(state), statistics="data" if self.norm == "static" else "stored")

    def predictors_by_width(self, state: Averaged) -> Mapping[str, Predictor]:
        """The leading channels at the papers' widths, scaled as they are in training."""
        structure, whole = state.structure, self.predictor(state)
        axes = structure.require_axes(self.name)
        found = {}
        for rate in HALVING if self.rate is None else sorted({1.0, self.rate}, reverse=True):
            part = thinned(structure, axes, rate)
            factors = self.local.factors(Task((part,), {}, {RATE: rate}), part, structure)
            cut = {name: take(whole.tensors[name], kept) for name, kept in part.sent.items()}
            tensors = {name: one * factors[name] if name in factors else one for name, one in cut.items()}
            found[f"{rate:g}"] = replace(whole, tensors=tensors)
        return found

    def neutral(self) -> Self:
        return replace(self, weight="samples", rate=1.0, masked=False, clip=None, norm="averaged")


def fitted(structure: Structure, rate: float, why: str) -> Part:
    """The net with ⌈r n_l⌉ of the n_l channels of every hidden layer; both sides know it from the rate."""
    if rate == 1:
        return full(structure)
    return thinned(structure, structure.require_axes(why), rate, derivable=True)


def rate_for(structure: Structure, fits: Callable[[Part], bool], why: str) -> float:
    """r: the largest rate whose net a device can afford, on the 0.01 grid."""
    return rate_within(lambda rate: fits(fitted(structure, rate, why)))
