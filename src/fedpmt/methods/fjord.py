"""FjORD: Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered
Dropout", 2021.

Widths p are nested: p keeps the first ⌈p n_l⌉ channels of every hidden layer. A device gets its largest affordable
width p_max and trains a width p <= p_max drawn anew for every batch, the same in all layers (ordered dropout). Every
entry is averaged over the devices that hold it, each counting its samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.methods.base import Method, Predictor, Round, Setup, Step
from fedpmt.methods.nested import Nested, NestedMean, nested
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.pricing.budget import largest
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedpmt.methods.base import Action
    from fedpmt.models.structure import Structure
    from fedpmt.resources import Resource
    from fedpmt.training.local import LocalWork


@dataclass(frozen=True)
class FjORD(Method[Nested, None]):
    """Ordered dropout, with and without self-distillation."""

    needs_speeds = True

    weight: Literal["samples", "uniform"] = "samples"  # a_k = |D_k|, or 1
    sizes: int = 5  # |P|: p in {1/5, .., 1}; counted by integers, so that no two widths differ by rounding
    distil: bool = False  # p_max teaches p, at the price of both (the paper's KD)

    def __post_init__(self) -> None:
        self.require(sizes=(self.sizes >= 1, "at least one width"))

    def widths(self, structure: Structure) -> tuple[Part, ...]:
        """The parts of all p, narrowest first, each with the narrower ones inside."""
        shares = [level / self.sizes for level in range(1, self.sizes + 1)]
        return nested(structure, {f"p {share:.2f}": share for share in shares}, "fjord")

    def init(self, setup: Setup) -> Nested:
        prototype = setup.prototypes[GLOBAL]
        return Nested.first(prototype, self.widths(prototype.structure))

    def assign(self, state: Nested, client: Client, round: Round) -> Task:
        """p_max: the largest width whose mean cost over its draws is within the budget."""
        structure = state.structure
        part = largest(self.widths(structure), self.fits(client, structure, round.price))
        return Task((part,), state.payload(part))

    @property
    def combines(self) -> str:
        return "overlap mean"

    def action(self, resource: Resource) -> Action:
        """By the expected cost of its draws; what is sent and held is of the widest."""
        return "device"

    def local(self) -> LocalWork[None]:
        from fedpmt.training.nested import NestedWork

        return NestedWork(self.distil)

    def aggregate(self, state: Nested, replies: Iterable[Reply], round: Round) -> Step[Nested]:
        mean = NestedMean(state)
        for reply in replies:
            weight = reply.samples if self.weight == "samples" else 1
            mean.add(reply.part, reply.tensors[MODEL], reply.tensors, weight)
        return Step(mean.result())

    def predictor(self, state: Nested) -> Predictor:
        """The net of the widest p that anybody has trained: p = 1, if a budget pays for it."""
        return state.predictor(self.widths(state.structure), state.widest or self.sizes)

    def neutral(self) -> Self:
        return replace(self, weight="samples", sizes=1, distil=False)
