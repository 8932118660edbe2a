"""Local work on a net and the narrower ones inside it: leading corners of its tensors, with statistics of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedpmt.parts.part import size, travelling_shapes
from fedpmt.parts.width import corners
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.training.local import LocalWork, Outcome, Rng, Run, Site

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part, Shapes
    from fedpmt.training.messages import Task
    from fedpmt.types import Arrays, Examples

CORNERS, STATISTICS = "corners", "statistics"


def statistics_of(level: int) -> str:
    """The name of the group in which BatchNorm statistics of a width travel; 1 is the narrowest."""
    return f"statistics {level}"


@dataclass(frozen=True)
class WidthsWork(LocalWork[None]):
    """What methods with nets inside nets share: each width's BatchNorm statistics go down and up by themselves."""

    def start(self, site: Site, task: Task, part: Part, own: None, data: Examples, rng: Rng) -> Run:
        run = super().start(site, task, part, own, data, rng)
        structure = site.models[part.model].structure
        run.memo[CORNERS] = [corners(structure, inner) for inner in part.inner]
        run.memo[STATISTICS] = [
            {name: tensor.clone() for name, tensor in task.tensors.get(statistics_of(level), {}).items()}
            for level in range(1, len(part.inner) + 2)
        ]
        return run

    def reply(self, run: Run, own: None, data: Examples) -> tuple[Outcome, None]:
        outcome, _ = super().reply(run, own, data)
        groups = {
            statistics_of(level): statistics
            for level, statistics in enumerate(run.memo[STATISTICS], start=1)
            if statistics
        }
        return replace(outcome, tensors={**outcome.tensors, **groups}), None

    def download_bytes(self, part: Part, structure: Structure) -> int:
        return super().download_bytes(part, structure) + statistics_bytes(part, structure)

    def upload(self, part: Part, structure: Structure) -> dict[str, Shapes]:
        buffers = structure.buffers
        statistics = {
            statistics_of(level): travelling_shapes(
                {name: one.sent[name] for name in buffers}, structure.shapes
            )
            for level, one in enumerate((*part.inner, part), start=1)
            if buffers
        }
        return {**super().upload(part, structure), **statistics}


def statistics_bytes(part: Part, structure: Structure) -> int:
    """The BatchNorm statistics of all widths of a part."""
    return FLOAT_BYTES * sum(
        size(one.sent[name], structure.shapes[name])
        for one in (*part.inner, part)
        for name in structure.buffers
    )


def outputs_at(run: Run, level: int, inputs: Arrays) -> Tensor:
    """What the net of one of the widths gives; the last is the part's own."""
    tensors = run.tensors
    if level < len(run.part.inner):
        tensors = {name: tensors[name][corner] for name, corner in run.memo[CORNERS][level].items()}
    return run.forward({**tensors, **run.memo[STATISTICS][level]}, inputs)
