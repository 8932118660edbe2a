"""Nets inside nets: leading corners of one model's tensors, with BatchNorm statistics of each. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedpmt.methods.averaging import Averaged, Weight, weight_of
from fedpmt.methods.base import Predictor
from fedpmt.parts.part import GLOBAL, WHOLE, Part, embedded, size, take, travelling_shapes
from fedpmt.parts.width import (
    corners,
    first_channels,
    hidden_groups,
    kept_count,
    narrow,
    without_buffers,
)
from fedpmt.training.local import LocalWork, Outcome
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fedpmt.methods.base import Prototype
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra
    from fedpmt.training.local import Job, PriceOf, Run
    from fedpmt.training.server import ServerOptimizer
    from fedpmt.types import Arrays, Payload, Tensors

CORNERS, STATISTICS = "corners", "statistics"


def statistics_of(level: int) -> str:
    """The name of the group in which BatchNorm statistics of a width travel; 1 is the narrowest."""
    return f"statistics {level}"


@dataclass(frozen=True)
class Nested:
    """The server's state: the global model w^t, and the BatchNorm statistics of each width."""

    model: Averaged
    statistics: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # empty without BatchNorm
    widest: int = 0  # the largest width that a device has trained, counted from 1; 0 before any reply

    @classmethod
    def first(cls, prototype: Prototype, nets: Sequence[Part]) -> Nested:
        """Before training every width has the statistics that the model came with."""
        buffers = prototype.structure.buffers
        statistics = {
            statistics_of(level): {name: take(prototype.tensors[name], net.sent[name]) for name in buffers}
            for level, net in enumerate(nets, start=1)
            if buffers
        }
        return cls(Averaged(prototype.structure, prototype.tensors), statistics)

    @property
    def structure(self) -> Structure:
        """The model's."""
        return self.model.structure

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The global model."""
        return self.model.tensors

    def payload(self, net: Part) -> Payload:
        """What a device needs to train this net and those inside it."""
        groups = [statistics_of(level) for level in range(1, len(net.inner) + 2)]
        return {
            MODEL: {name: take(self.tensors[name], kept) for name, kept in net.sent.items()},
            **{group: self.statistics[group] for group in groups if group in self.statistics},
        }

    def predictor(self, nets: Sequence[Part], level: int) -> Predictor:
        """The net of a level, counted from 1, with its own statistics.

        Channels that a narrower net does not have are zero, which is the same.
        """
        tensors = {**self.tensors, **self.statistics.get(statistics_of(len(nets)), {})}
        if level == len(nets):
            return Predictor("global", GLOBAL, tensors)
        return Predictor(
            "global", GLOBAL, embedded(self.cut(nets, level), nets[level - 1].sent, self.structure.shapes)
        )

    def cut(self, nets: Sequence[Part], level: int) -> dict[str, Tensor]:
        """The tensors of the net of a level, counted from 1, with its own statistics."""
        sent, own = nets[level - 1].sent, self.statistics.get(statistics_of(level), {})
        return {
            name: own[name] if name in own else take(self.tensors[name], kept) for name, kept in sent.items()
        }

    def by_width(self, nets: Sequence[Part], shares: Sequence[float]) -> dict[str, Predictor]:
        """The net of every level, by its share of the channels."""
        return {
            f"{share:g}": Predictor("global", GLOBAL, self.cut(nets, level))
            for level, share in enumerate(shares, start=1)
        }


def nested(structure: Structure, shares: Mapping[str, float], method: str) -> tuple[Part, ...]:
    """A net for each share of the hidden channels, by name, narrowest first, each with the narrower ones inside it.

    Only weights come back in it: statistics travel by width, in groups of their own. Groups whose leading channels
    are not the corner of every tensor stay whole: heads whose queries, keys and values stand in one weight.
    """
    axes, nets = structure.require_axes(method), list[Part]()
    tiled = {axis.group for each in axes.tensors.values() for axis in each if axis.tiles > 1}
    cut = [group for group in hidden_groups(axes) if group.name not in tiled]
    for label, share in shares.items():
        kept = {group.name: first_channels(group.size, kept_count(group.size, share)) for group in cut}
        net = without_buffers(structure, narrow(structure, axes, kept, label, derivable=True))
        nets.append(replace(net, inner=tuple(nets)))
    return tuple(nets)


class NestedMean:
    """The mean of nets: every entry over those that have it, every width's statistics over those that train it."""

    def __init__(self, state: Nested, weight: Weight, mean: str) -> None:
        from fedpmt.aggregation import make_mean

        self._tensors = make_mean(state.tensors, "overlap", mean)
        self._statistics = {
            group: make_mean(tensors, "overlap", mean) for group, tensors in state.statistics.items()
        }
        self._state, self._weight, self._widest = state, weight, state.widest

    def add(self, net: Part, update: Tensors, payload: Payload, samples: int, discount: float) -> None:
        """A net that arrived, and what else did; statistics of wider ones are left out."""
        levels, weight = len(net.inner) + 1, weight_of(self._weight, samples)
        self._widest = max(self._widest, levels)
        self._tensors.add(net, update, weight, discount=discount)
        for level in range(1, levels + 1):
            group = statistics_of(level)
            if group in self._statistics:
                everything = dict.fromkeys(self._state.statistics[group], WHOLE)
                part = Part(GLOBAL, everything, everything, group)
                self._statistics[group].add(part, payload[group], weight, discount=discount)

    def result(self, server: ServerOptimizer) -> Nested:
        """The next state."""
        before = self._state.model
        tensors, moments = server.apply(self._tensors, before.structure.parameters, before.moments)
        statistics = {group: mean.result() for group, mean in self._statistics.items()}
        return Nested(Averaged(before.structure, tensors, moments), statistics, self._widest)


@dataclass(frozen=True)
class WidthsWork(LocalWork[None]):
    """What devices with nets inside nets share: each width's BatchNorm statistics go down and up by themselves."""

    def start(self, job: Job[None]) -> Run[None]:
        run = super().start(job)
        part = job.part
        run.memo[CORNERS] = [corners(job.model.structure, inner) for inner in part.inner]
        run.memo[STATISTICS] = [
            {name: tensor.clone() for name, tensor in job.task.tensors.get(statistics_of(level), {}).items()}
            for level in range(1, len(part.inner) + 2)
        ]
        return run

    def reply(self, run: Run[None]) -> tuple[Outcome, None]:
        groups = {}
        for level, statistics in enumerate(run.memo.get(STATISTICS, ()), start=1):
            group = statistics_of(level)
            if statistics:
                sent = run.task.tensors[group]
                groups[group] = {name: tensor - sent[name] for name, tensor in statistics.items()}
        return Outcome(groups), None

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        buffers = structure.buffers
        if not buffers:
            return part.extra
        nets = (*part.inner, part)
        sizes = [
            structure.bytes_each(name) * size(net.sent[name], structure.shapes[name])
            for net in nets
            for name in buffers
        ]
        answers = {
            statistics_of(level): travelling_shapes(
                {name: net.sent[name] for name in buffers}, structure.shapes
            )
            for level, net in enumerate(nets, start=1)
        }
        return replace(part.extra, task_bytes=sum(sizes), answers=answers)


def outputs_at(run: Run[None], level: int, inputs: Arrays) -> Any:
    """What the net of one of the widths gives; the last is the part's own."""
    tensors = run.tensors
    if level < len(run.part.inner):
        tensors = {name: tensors[name][corner] for name, corner in run.memo[CORNERS][level].items()}
    return run.forward({**tensors, **run.memo[STATISTICS][level]}, inputs)
