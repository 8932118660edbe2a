"""Nets inside nets on the server: one model, and the BatchNorm statistics of each of its widths. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedpmt.methods.base import Predictor
from fedpmt.parts.part import GLOBAL, WHOLE, Part, embedded, take
from fedpmt.parts.width import thinned, without_buffers
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fedpmt.methods.base import Prototype
    from fedpmt.models.structure import Structure
    from fedpmt.types import Payload, Tensors


@dataclass(frozen=True)
class Nested:
    """The server's state: the global model w^t, and the BatchNorm statistics of each width."""

    structure: Structure
    tensors: Mapping[str, Tensor]
    statistics: Mapping[str, Mapping[str, Tensor]]  # empty for a net without BatchNorm
    widest: int = 0  # the largest width that a device has trained, counted from 1; 0 before any reply

    @classmethod
    def first(cls, prototype: Prototype, nets: Sequence[Part]) -> Nested:
        """Before training every width has the statistics that the model came with."""
        from fedpmt.training.widths import statistics_of

        buffers = prototype.structure.buffers
        statistics = {
            statistics_of(level): {name: take(prototype.tensors[name], net.sent[name]) for name in buffers}
            for level, net in enumerate(nets, start=1)
            if buffers
        }
        return cls(prototype.structure, prototype.tensors, statistics)

    def payload(self, net: Part) -> Payload:
        """What a device needs to train this net and those inside it."""
        from fedpmt.training.widths import statistics_of

        groups = [statistics_of(level) for level in range(1, len(net.inner) + 2)]
        return {
            MODEL: {name: take(self.tensors[name], kept) for name, kept in net.sent.items()},
            **{group: self.statistics[group] for group in groups if group in self.statistics},
        }

    def predictor(self, nets: Sequence[Part], level: int) -> Predictor:
        """The net of a level, counted from 1, with its own statistics.

        Channels that a narrower net does not have are zero, which is the same.
        """
        from fedpmt.training.widths import statistics_of

        tensors = {**self.tensors, **self.statistics.get(statistics_of(len(nets)), {})}
        if level == len(nets):
            return Predictor("global", GLOBAL, tensors)
        sent, own = nets[level - 1].sent, self.statistics.get(statistics_of(level), {})
        cut = {name: own[name] if name in own else take(tensors[name], kept) for name, kept in sent.items()}
        return Predictor("global", GLOBAL, embedded(cut, sent, self.structure.shapes))


def nested(structure: Structure, shares: Mapping[str, float], method: str) -> tuple[Part, ...]:
    """A net for each share of the hidden channels, by name, narrowest first, each with the narrower ones inside it.

    Only weights come back in it: statistics travel by width, in groups of their own.
    """
    axes, nets = structure.require_axes(method), list[Part]()
    for label, share in shares.items():
        net = without_buffers(structure, thinned(structure, axes, share, derivable=True))
        nets.append(replace(net, label=label, inner=tuple(nets)))
    return tuple(nets)


class NestedMean:
    """The mean of nets: every entry over those that have it, every width's statistics over those that train it."""

    def __init__(self, state: Nested) -> None:
        from fedpmt.aggregation import CoverageMean

        self._tensors = CoverageMean(state.tensors)
        self._statistics = {group: CoverageMean(tensors) for group, tensors in state.statistics.items()}
        self._state, self._widest = state, state.widest

    def add(self, net: Part, weights: Tensors, payload: Payload, weight: float) -> None:
        """A net that arrived, and what else did; statistics of wider ones are left out."""
        from fedpmt.training.widths import statistics_of

        levels = len(net.inner) + 1
        self._widest = max(self._widest, levels)
        self._tensors.add(net, weights, weight)
        for level in range(1, levels + 1):
            group = statistics_of(level)
            if group in self._statistics:
                everything = dict.fromkeys(self._state.statistics[group], WHOLE)
                part = Part(GLOBAL, everything, everything, group)
                self._statistics[group].add(part, payload[group], weight)

    def result(self) -> Nested:
        """The next state."""
        statistics = {group: mean.result() for group, mean in self._statistics.items()}
        return Nested(self._state.structure, self._tensors.result(), statistics, self._widest)
