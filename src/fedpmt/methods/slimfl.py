"""SlimFL: Baek et al., "Joint Superposition Coding and Training for Federated Learning over Multi-Width Neural
Networks", 2022.

Every device trains a slimmable net at all its widths together (superposition training). It sends the narrow net
and what the wider one adds to it, LH and RH, as one superposed signal; the better its channel, the more is decoded:

    LH  iff  λ g / ((1 - λ) g + σ²) >= u',   RH  iff  LH, and (1 - λ) g / σ² >= u',   u' = 2^(u/W) - 1

with a power gain g ~ Exp(1) of each device and round, and σ² the noise over the mean power received. The server
averages each message over the devices it was decoded from. More than two widths are coded alike: each message
gets the share λ of the power that is left, the last one the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from fedpmt.methods.base import ABOVE_0, FROM_0, Method, Predictor, Step, Sums
from fedpmt.methods.nested import Nested, NestedMean, nested
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.parts.width import corners
from fedpmt.pricing.budget import largest
from fedpmt.training.messages import Task
from fedpmt.types import MODEL, SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedpmt.methods.base import Action, Round, Setup
    from fedpmt.models.structure import Structure
    from fedpmt.resources import Resource
    from fedpmt.training.local import LocalWork
    from fedpmt.training.messages import Client, Reply


@dataclass(frozen=True)
class SlimFL(Method[Nested, None]):
    """Superposition training and superposition coding."""

    sums: ClassVar[Sums] = "entries"

    weight: Literal["samples", "uniform"] = "samples"  # a_k = |D_k|, or 1

    slim_widths: str = "0.5,1"  # shares of the channels, smallest first
    narrow_weight: float = 1.0  # w_1, of the gradients of narrower nets
    full_weight: float = 1.0  # w_2, of the widest net's
    distill: bool = True  # narrower nets learn from the widest one, else from the labels
    power: float = 0.8  # λ, the share of the power that goes into LH
    rate: float = 1.0  # u / W, bits per second and hertz of each message
    noise: float = 0.1  # σ² d^a / P
    fit: bool = False  # a device trains and sends only the widths within its budget
    evaluated: float = 1.0  # the width that is tested

    def __post_init__(self) -> None:
        widths = self.widths()
        if list(widths) != sorted(set(widths)) or widths[-1] != 1 or not widths[0] > 0:
            raise SettingError(
                f"slimfl.slim_widths = '{self.slim_widths}' is refused: "
                "shares above 0 that grow and end with 1 are needed, such as 0.5,1"
            )
        if self.evaluated not in widths:
            raise SettingError.unknown("slimfl.evaluated", self.evaluated, [f"{width:g}" for width in widths])
        self.require(
            narrow_weight=(self.narrow_weight >= 0, FROM_0),
            full_weight=(self.full_weight > 0, ABOVE_0),
            power=(0 < self.power < 1, "a share between 0 and 1"),
            rate=(0 < self.rate < math.inf, ABOVE_0),
            noise=(0 <= self.noise < math.inf, FROM_0),
        )

    def widths(self) -> tuple[float, ...]:
        """The shares, smallest first."""
        try:
            return tuple(float(width) for width in self.slim_widths.split(","))
        except ValueError:
            return (0.0,)

    def init(self, setup: Setup) -> Nested:
        prototype = setup.prototypes[GLOBAL]
        return Nested.first(prototype, self.nets(prototype.structure))

    def nets(self, structure: Structure) -> tuple[Part, ...]:
        """The slimmable net at every width, smallest first, each with the narrower ones inside it."""
        return nested(structure, {f"{width:g}x": width for width in self.widths()}, "slimfl")

    def part(self, state: Nested, client: Client, round: Round) -> Part:
        """The whole net, or with `fit` as much of it as the budget pays for."""
        nets = self.nets(state.structure)
        return largest(nets, self.fits(client, state.structure, round.price)) if self.fit else nets[-1]

    def assign(self, state: Nested, client: Client, round: Round) -> Task:
        net = self.part(state, client, round)
        return Task((net,), state.payload(net))

    @property
    def combines(self) -> str:
        return "overlap mean"

    def action(self, resource: Resource) -> Action:
        return "device" if self.fit else "none"

    def local(self) -> LocalWork[None]:
        from fedpmt.training.superposed import SlimWork

        return SlimWork(self.narrow_weight, self.full_weight, self.distill)

    @property
    def threshold(self) -> float:
        """u', the ratio of signal to noise and interference that a message needs."""
        return math.exp2(self.rate) - 1

    def margins(self, messages: int) -> tuple[float, ...]:
        """λ_i - u' Σ_{j > i} λ_j: message i is decoded, after those before it, where g times this is u' σ² or more."""
        margins, rest = [], 1.0
        for _ in range(messages - 1):
            share, rest = self.power * rest, (1 - self.power) * rest
            margins.append(share - self.threshold * rest)
        return (*margins, rest)

    def decoded(self, gain: float, messages: int) -> int:
        """How many messages, from LH on, come through a channel of this power gain."""
        for place, margin in enumerate(self.margins(messages)):
            if margin <= 0 or gain * margin < self.threshold * self.noise:
                return place
        return messages

    def chance(self, wanted: int, messages: int) -> float:
        """The probability that the first `wanted` messages are decoded: exp(-q / min margin), q = u' σ²."""
        least = min(self.margins(messages)[:wanted])
        return math.exp(-self.threshold * self.noise / least) if least > 0 else 0.0

    def aggregate(self, state: Nested, replies: Iterable[Reply], round: Round) -> Step[Nested]:
        mean, structure = NestedMean(state), state.structure
        counts, delivered = dict.fromkeys((net.label for net in self.nets(structure)), 0), 0
        for reply in replies:
            messages = (*reply.part.inner, reply.part)
            decoded = self.decoded(round.rng("fading", reply.device).exponential(), len(messages))
            for net in messages[:decoded]:
                counts[net.label] += 1
            if not decoded:
                continue
            net, corner = messages[decoded - 1], corners(structure, messages[decoded - 1])
            weights = {name: tensor[corner[name]] for name, tensor in reply.tensors[MODEL].items()}
            mean.add(net, weights, reply.tensors, reply.samples if self.weight == "samples" else 1)
            delivered += self.local().upload_bytes(net, structure)
        metrics = {f"decoded_{label}": float(count) for label, count in counts.items()}
        return Step(mean.result(), {**metrics, "delivered_bytes": float(delivered)})

    def predictor(self, state: Nested) -> Predictor:
        """The net at the width to be tested."""
        return state.predictor(self.nets(state.structure), self.widths().index(self.evaluated) + 1)

    def neutral(self) -> Self:
        best = (1 + self.threshold) / (2 + self.threshold)  # λ*, where both messages need the same channel
        return replace(
            self, narrow_weight=0.0, full_weight=1.0, power=best, noise=0.0, fit=False, evaluated=1.0
        )
