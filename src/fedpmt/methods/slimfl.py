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
from typing import TYPE_CHECKING, Self

from fedpmt.methods.averaging import PLAIN, Weight
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, acts, require
from fedpmt.methods.nested import Nested, NestedMean, WidthsWork, nested, outputs_at
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.parts.width import corners
from fedpmt.pricing.matching import largest
from fedpmt.pricing.meter import upload_bytes
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.server import REPLACE, ServerOptimizer
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra
    from fedpmt.training.local import Job, LocalWork, PriceOf, Run
    from fedpmt.types import Examples


@dataclass(frozen=True)
class Superposition(WidthsWork):
    """Superposition training: one step along g = w_1 Σ g_narrow + w_2 g_full.

    A narrow net is the leading corner of the part's own tensors, so all gradients fall into one place. It learns
    from what the full net says (in-place distillation), and that one from the labels.
    """

    narrow_weight: float  # w_1
    full_weight: float  # w_2
    distill: bool

    def start(self, job: Job[None]) -> Run[None]:
        if self.narrower(job.part) and self.distill and not job.site.objective.plain:
            raise SettingError("slimfl.distill = 'true' needs classes and cross-entropy as the loss")
        return super().start(job)

    def narrower(self, part: Part) -> tuple[Part, ...]:
        """The nets inside the part that are trained with it."""
        return part.inner if self.narrow_weight else ()

    def loss(self, run: Run[None], batch: Examples) -> Tensor:
        from torch.nn import functional

        from fedpmt.training.objective import class_rows

        objective, targets = run.site.objective, batch.targets
        outputs = outputs_at(run, len(run.part.inner), batch.inputs)
        loss = self.full_weight * objective.loss(outputs, targets)
        for level in range(len(self.narrower(run.part))):
            narrow = outputs_at(run, level, batch.inputs)
            if self.distill:
                # Without `detach` the full net would learn to please the narrow ones.
                said = class_rows(outputs, targets)[0].detach().softmax(dim=-1)
                step = functional.cross_entropy(class_rows(narrow, targets)[0], said)
            else:
                step = objective.loss(narrow, targets)
            loss = loss + self.narrow_weight * step
        return loss

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """Every net runs forward and backward, its activations held until the one update."""
        others = [price(net) for net in self.narrower(part)]
        return replace(
            super().extra(part, price, structure),
            step=sum(other.operations - other.update for other in others),
            memory_bytes=sum(other.memory.activations for other in others),
        )


class DecodedFold(Fold[Nested]):
    """The mean of what the server decodes of each superposed signal."""

    def __init__(self, method: SlimFL, state: Nested, round: Round) -> None:
        self._method, self._structure, self._round = method, state.structure, round
        self._mean = NestedMean(state, method.weight, method.mean)
        self._counts = dict.fromkeys((net.label for net in method.nets(state.structure)), 0)
        self._delivered = 0
        self._fading = dict[int, "np.random.Generator"]()

    def add(self, reply: Reply) -> None:
        messages = (*reply.part.inner, reply.part)
        # On a clock of events a device may reply twice before the server steps: each signal fades by itself.
        fading = self._fading.setdefault(reply.device, self._round.rng("fading", reply.device))
        decoded = self._method.decoded(fading.exponential(), len(messages))
        for net in messages[:decoded]:
            self._counts[net.label] += 1
        if not decoded:
            return
        net, structure = messages[decoded - 1], self._structure
        corner = corners(structure, net)
        update = {name: tensor[corner[name]] for name, tensor in reply.update.items()}
        self._mean.add(net, update, reply.tensors, reply.samples, reply.discount)
        net = replace(net, extra=self._method.local.extra(net, self._round.price, structure))
        self._delivered += upload_bytes(net, structure)

    def finish(self, server: Server) -> Step[Nested]:
        metrics = {f"decoded_{label}": float(count) for label, count in self._counts.items()}
        state = self._mean.result(self._method.server)
        return Step(state, {**metrics, "delivered_bytes": float(self._delivered)})


@dataclass(frozen=True)
class SlimFL(Method[Nested, None]):
    """Superposition training and superposition coding."""

    weight: Weight = "samples"

    slim_widths: str = "0.5,1"  # shares of the channels, smallest first
    narrow_weight: float = 1.0  # w_1, of the gradients of narrower nets
    full_weight: float = 1.0  # w_2, of the widest net's
    distill: bool = True  # narrower nets learn from the widest one, else from the labels
    power: float = 0.8  # λ, the share of the power that goes into LH
    rate: float = 1.0  # u / W, bits per second and hertz of each message
    noise: float = 0.1  # σ² d^a / P
    fit: bool = False  # a device trains and sends only the widths within its budget
    evaluated: float = 1.0  # the width that is tested
    mean: str = PLAIN
    server: ServerOptimizer = REPLACE

    def __post_init__(self) -> None:
        widths = self.widths()
        if list(widths) != sorted(set(widths)) or widths[-1] != 1 or not widths[0] > 0:
            raise SettingError(
                "slimfl.slim_widths must be growing shares > 0 that end with 1, such as 0.5,1 "
                f"(got {self.slim_widths})"
            )
        if self.evaluated not in widths:
            raise SettingError.unknown("slimfl.evaluated", self.evaluated, [f"{width:g}" for width in widths])
        require(
            self,
            narrow_weight=(self.narrow_weight >= 0, ">= 0"),
            full_weight=(self.full_weight > 0, "> 0"),
            power=(0 < self.power < 1, "> 0 and < 1"),
            rate=(0 < self.rate < math.inf, "> 0 and finite"),
            noise=(0 <= self.noise < math.inf, ">= 0 and finite"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            sums="entries",
            combines="overlap mean",
            discounts=True,
            budget=acts("device") if self.fit else {},
        )

    @property
    def local(self) -> LocalWork[None]:
        return Superposition(self.narrow_weight, self.full_weight, self.distill)

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
        return largest(nets, client.fits) if self.fit else nets[-1]

    def assign(self, state: Nested, client: Client, round: Round) -> Task:
        net = self.part(state, client, round)
        return Task((net,), state.payload(net))

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

    def fold(self, state: Nested, round: Round) -> Fold[Nested]:
        return DecodedFold(self, state, round)

    def predictor(self, state: Nested) -> Predictor:
        """The net at the width to be tested."""
        return state.predictor(self.nets(state.structure), self.widths().index(self.evaluated) + 1)

    def predictors_by_width(self, state: Nested) -> Mapping[str, Predictor]:
        """The net of every width."""
        return state.by_width(self.nets(state.structure), self.widths())

    def neutral(self) -> Self:
        best = (1 + self.threshold) / (2 + self.threshold)  # λ*, where both messages need the same channel
        return replace(
            self, narrow_weight=0.0, full_weight=1.0, power=best, noise=0.0, fit=False, evaluated=1.0
        )
