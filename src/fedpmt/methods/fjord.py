"""FjORD: Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered
Dropout", 2021.

Widths p are nested: p keeps the first ⌈p n_l⌉ channels of every hidden layer. A device gets its largest affordable
width p_max and trains a width p <= p_max drawn anew for every batch, the same in all layers (ordered dropout). Every
entry is averaged over the devices that hold it, each counting its samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from fedpmt.methods.averaging import PLAIN, Weight
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, acts, require
from fedpmt.methods.nested import CORNERS, Nested, NestedMean, WidthsWork, nested, outputs_at
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.pricing.matching import largest
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.training.server import REPLACE, ServerOptimizer
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra
    from fedpmt.training.local import Job, LocalWork, PriceOf, Run
    from fedpmt.types import Examples

DRAWS = "width"
"""The generator of the widths that a device draws, one for each batch."""


@dataclass(frozen=True)
class OrderedDropout(WidthsWork):
    """Draws a width p for each batch, of those inside the part and its own, and trains that corner of the tensors.

    Nothing outside the corner moves in that step, by decay or momentum either. With `distil` the part's own width is
    trained in every step and teaches the narrower one (self-distillation), both in one step on the sum:

        ℓ = CE(f_{p_max}(x), y) + CE(f_p(x), softmax f_{p_max}(x)), the second without a gradient into its target

    Each width has BatchNorm statistics of its own.
    """

    distil: bool = False

    def start(self, job: Job[None]) -> Run[None]:
        if self.distil and not job.site.objective.plain:
            raise SettingError("fjord.distil = 'true' needs cross-entropy as the loss")
        run = super().start(job)
        run.memo[DRAWS] = job.rng(DRAWS)
        return run

    def loss(self, run: Run[None], batch: Examples) -> Tensor:
        from torch.nn import functional

        from fedpmt.training.objective import class_rows

        inner = len(run.part.inner)
        drawn = int(run.memo[DRAWS].integers(inner + 1)) if inner else 0
        objective = run.site.objective.loss
        if not self.distil:
            run.corner = run.memo[CORNERS][drawn] if drawn < inner else {}
            return objective(outputs_at(run, drawn, batch.inputs), batch.targets)
        teacher = outputs_at(run, inner, batch.inputs)
        loss = objective(teacher, batch.targets)
        if drawn == inner:
            return loss  # it would teach itself what it knows: that gradient is zero
        pupil, _ = class_rows(outputs_at(run, drawn, batch.inputs), batch.targets)
        said = class_rows(teacher, batch.targets)[0].detach().softmax(dim=-1)
        return loss + functional.cross_entropy(pupil, said)

    def compiled(self, job: Job[None]) -> StepRule | None:
        if self.distil:
            return None
        steps = job.site.settings.steps(len(job.data), job.task.steps)
        rng, widths = job.rng(DRAWS), len(job.part.inner) + 1
        draws = [int(rng.integers(widths)) for _ in range(steps)] if widths > 1 else None
        return job.rule(draws=None if draws is None else np.array(draws, dtype=np.int32))

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """The mean over the widths; with distillation the widest in every step, and a narrower one as well."""
        extra = super().extra(part, price, structure)
        if not part.inner:
            return extra
        inner, count = [price(one) for one in part.inner], len(part.inner) + 1
        if self.distil:
            step = sum(one.operations - one.update for one in inner) / count
            held = max(one.memory.activations for one in inner)
            return replace(extra, step=step, memory_bytes=held)
        # Every width is drawn as often: on average a step is this much cheaper than one of the widest.
        widest = price(part).operations
        return replace(extra, step=(sum(one.operations for one in inner) + widest) / count - widest)


class WidthsFold(Fold[Nested]):
    """The mean of all nets."""

    def __init__(self, method: FjORD, state: Nested) -> None:
        self._server, self._mean = method.server, NestedMean(state, method.weight, method.mean)

    def add(self, reply: Reply) -> None:
        self._mean.add(reply.part, reply.update, reply.tensors, reply.samples, reply.discount)

    def finish(self, server: Server) -> Step[Nested]:
        return Step(self._mean.result(self._server))


@dataclass(frozen=True)
class FjORD(Method[Nested, None]):
    """Ordered dropout, with and without self-distillation."""

    weight: Weight = "samples"
    sizes: int = 5  # |P|: p in {1/5, .., 1}; counted by integers, so that no two widths differ by rounding
    distil: bool = False  # p_max teaches p, at the price of both (the paper's KD)
    mean: str = PLAIN
    server: ServerOptimizer = REPLACE

    def __post_init__(self) -> None:
        require(self, sizes=(self.sizes >= 1, ">= 1"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            combines="overlap mean",
            discounts=True,
            # Without distillation a step moves a corner of a tensor, which optimizers of a user's own cannot.
            optimizers=None if self.distil else ("sgd", "adam", "adamw"),
            # By the expected cost of its draws; what is sent and held is of the widest.
            budget=acts("device"),
        )

    @property
    def local(self) -> LocalWork[None]:
        return OrderedDropout(self.distil)

    def widths(self, structure: Structure) -> tuple[Part, ...]:
        """The parts of all p, narrowest first, each with the narrower ones inside."""
        return nested(structure, {f"p {share:.2f}": share for share in self.shares}, "fjord")

    @property
    def shares(self) -> list[float]:
        """P, narrowest first."""
        return [level / self.sizes for level in range(1, self.sizes + 1)]

    def init(self, setup: Setup) -> Nested:
        prototype = setup.prototypes[GLOBAL]
        return Nested.first(prototype, self.widths(prototype.structure))

    def assign(self, state: Nested, client: Client, round: Round) -> Task:
        """p_max: the largest width whose mean cost over its draws is within the budget."""
        part = largest(self.widths(state.structure), client.fits)
        return Task((part,), state.payload(part))

    def fold(self, state: Nested, round: Round) -> Fold[Nested]:
        return WidthsFold(self, state)

    def predictor(self, state: Nested) -> Predictor:
        """The net of the widest p that anybody has trained: p = 1, if a budget pays for it."""
        return state.predictor(self.widths(state.structure), state.widest or self.sizes)

    def predictors_by_width(self, state: Nested) -> Mapping[str, Predictor]:
        """The net of every p."""
        return state.by_width(self.widths(state.structure), self.shares)

    def neutral(self) -> Self:
        return replace(self, weight="samples", sizes=1, distil=False)
