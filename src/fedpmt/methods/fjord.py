"""FjORD: Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered
Dropout", 2021.

Widths p are nested: p keeps the first ⌈p n_l⌉ channels of every hidden layer. A device gets its largest affordable
width p_max and trains a width p <= p_max drawn anew for every batch, the same in all layers (ordered dropout). Every
entry is averaged over the devices that hold it, each counting its samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.complexity.budget import largest
from fedpmt.methods.base import Method, Predictor, Round, Setup, Step
from fedpmt.submodel.part import GLOBAL, WHOLE, Part, embedded, take
from fedpmt.submodel.width import HIDDEN, thinned, without_buffers
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL, SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from fedpmt.allowance import Resource
    from fedpmt.methods.base import Action
    from fedpmt.models.structure import Structure
    from fedpmt.training.local import LocalWork


@dataclass(frozen=True)
class Nested:
    """The server's state: the global model w^t, and the BatchNorm statistics of each width."""

    structure: Structure
    tensors: Mapping[str, Tensor]
    statistics: Mapping[str, Mapping[str, Tensor]]  # empty for a net without BatchNorm
    widest: int = 0  # the largest width that a device has trained, counted from 1; 0 before any reply


@dataclass(frozen=True)
class FjORD(Method[Nested, None]):
    """Ordered dropout, with and without self-distillation."""

    needs_speeds = True

    weight: Literal["samples", "uniform"] = "samples"  # a_k = |D_k|, or 1
    sizes: int = 5  # |P|: p in {1/5, .., 1}; counted by integers, so that no two widths differ by rounding
    distil: bool = False  # p_max teaches p, at the price of both (the paper's KD)

    def __post_init__(self) -> None:
        if self.sizes < 1:
            raise SettingError(f"fjord.sizes = '{self.sizes}' is refused: at least one width is needed")

    def widths(self, structure: Structure) -> tuple[Part, ...]:
        """The parts of all p, narrowest first, each with the narrower ones inside."""
        axes = structure.require_axes("fjord")
        parts: list[Part] = []
        for level in range(1, self.sizes + 1):
            part = thinned(structure, axes, level / self.sizes, HIDDEN, derivable=True)
            # Statistics travel by width, in groups of their own.
            part = replace(without_buffers(structure, part), label=f"p {level / self.sizes:.2f}")
            parts.append(replace(part, inner=tuple(parts)))
        return tuple(parts)

    def init(self, setup: Setup) -> Nested:
        from fedpmt.training.nested import buffers_of, statistics_of

        prototype = setup.prototypes[GLOBAL]
        buffers = buffers_of(prototype.structure)
        statistics = {
            statistics_of(level): {name: take(prototype.tensors[name], part.sent[name]) for name in buffers}
            for level, part in enumerate(self.widths(prototype.structure), start=1)
            if buffers
        }
        return Nested(prototype.structure, prototype.tensors, statistics)

    def assign(self, state: Nested, client: Client, round: Round) -> Task:
        """p_max: the largest width whose mean cost over its draws is within the budget."""
        from fedpmt.training.nested import statistics_of

        structure = state.structure
        part = largest(self.widths(structure), self.fits(client, structure, round.price))
        groups = [statistics_of(level) for level in range(1, len(part.inner) + 2)]
        return Task(
            (part,),
            {
                MODEL: {name: take(state.tensors[name], kept) for name, kept in part.sent.items()},
                **{group: state.statistics[group] for group in groups if group in state.statistics},
            },
        )

    def action(self, resource: Resource) -> Action:
        """By the expected cost of its draws; what is sent and held is of the widest."""
        return "device"

    def local(self) -> LocalWork[None]:
        from fedpmt.training.nested import NestedWork

        return NestedWork(self.distil)

    def aggregate(self, state: Nested, replies: Iterable[Reply], round: Round) -> Step[Nested]:
        """Every entry over those with p_max >= its width, every width's statistics over those that train it."""
        from fedpmt.aggregation import CoverageMean

        mean = CoverageMean(state.tensors)
        means = {group: CoverageMean(tensors) for group, tensors in state.statistics.items()}
        widest = state.widest
        for reply in replies:
            widest = max(widest, len(reply.part.inner) + 1)
            weight = reply.samples if self.weight == "samples" else 1
            mean.add(reply.part, reply.tensors[MODEL], weight)
            for group in reply.tensors.keys() & means.keys():
                everything = dict.fromkeys(state.statistics[group], WHOLE)
                means[group].add(Part(GLOBAL, everything, everything, group), reply.tensors[group], weight)
        statistics = {group: one.result() for group, one in means.items()}
        return Step(Nested(state.structure, mean.result(), statistics, widest))

    def predictor(self, state: Nested) -> Predictor:
        """The net of the widest p that anybody has trained, with its own statistics: p = 1, if a budget pays for it.

        Channels beyond it have learnt nothing. They are zero here, which is the narrower net.
        """
        from fedpmt.training.nested import statistics_of

        level = state.widest or self.sizes
        tensors = {**state.tensors, **state.statistics.get(statistics_of(self.sizes), {})}
        if level == self.sizes:
            return Predictor("global", GLOBAL, tensors)
        part, own = self.widths(state.structure)[level - 1], state.statistics.get(statistics_of(level), {})
        cut = {
            name: own[name] if name in own else take(tensors[name], kept) for name, kept in part.sent.items()
        }
        return Predictor("global", GLOBAL, embedded(cut, part.sent, state.structure.shapes))

    def neutral(self) -> Self:
        return replace(self, weight="samples", sizes=1, distil=False)
