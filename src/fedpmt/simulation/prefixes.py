"""Outputs of frozen layers that devices keep over rounds, for as long as these layers have hardly moved.

The server knows the weights with which a device's outputs were made. While each frozen layer l has moved by at most the
tolerance ε since then,

    max_l ‖w_l - w_l'‖ / ‖w_l'‖ <= ε,

it sends the device those weights w' again, for which the device has the outputs, and the device trains on them. A
device that has lost its outputs makes them again of the same weights, so the bits never depend on what is held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedpmt.simulation.cohort import account
from fedpmt.training.kept import outputs_made_of
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from fedpmt.simulation.cohort import Assignment
    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.types import Tensors


@dataclass(frozen=True)
class KeptPrefixes:
    """Whose outputs devices hold."""

    rounds: dict[int, int] = field(default_factory=dict)  # device -> the round in which it made them
    layers: dict[int, int] = field(default_factory=dict)  # device -> the number of layers they are of
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # round -> what they were made with


def movement(before: Tensors, after: Tensors, names: Iterable[str]) -> float:
    """How far a layer has moved, relative to where it was.

    >>> import torch
    >>> movement({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 4.5])}, ["w"])
    0.1
    """
    moved = size = 0.0
    for name in names:
        start = before[name].double()
        moved += float((after[name].double() - start).square().sum())
        size += float(start.square().sum())
    if moved == 0:
        return 0.0
    return math.sqrt(moved / size) if size else math.inf


def reuse_prefixes(
    federation: Federation, progress: Progress, assignments: Sequence[Assignment]
) -> list[Assignment]:
    """Send the earlier weights to devices whose outputs may be used once more; these do not run the layers again."""
    kept, tolerance = progress.prefixes or KeptPrefixes(), federation.settings.prefix_tolerance or 0.0
    model, known = federation.problem.model, dict[tuple[int, int], bool]()
    found = []
    for one in assignments:
        device, groups = one.device.id, outputs_made_of(model, one.part)
        made = kept.rounds.get(device)
        if not one.able or made is None or kept.layers[device] != len(groups):
            found.append(one)
            continue
        before, sent = kept.weights[made], one.task.tensors[MODEL]
        if (made, len(groups)) not in known:
            moved = [movement(before, sent, names) for names in groups]
            # Weights that are no numbers have moved, whatever the tolerance.
            known[made, len(groups)] = all(far <= tolerance for far in moved)
        found.append(_reuse(federation, one, groups, made, before) if known[made, len(groups)] else one)
    return found


def _reuse(
    federation: Federation,
    one: Assignment,
    groups: Sequence[Sequence[str]],
    made: int,
    before: Tensors,
) -> Assignment:
    earlier = {name: before[name] for names in groups for name in names}
    task = replace(one.task, tensors={**one.task.tensors, MODEL: {**one.task.tensors[MODEL], **earlier}})
    taken = account(federation, one.device, task, one.part, one.samples, one.plan, reuses=True)
    return replace(one, task=task, usage=taken.usage, seconds=taken.seconds, made=made)


def keep_prefixes(federation: Federation, progress: Progress, arrived: Iterable[Assignment]) -> KeptPrefixes:
    """Write down what devices hold after a round; outputs of a reply that did not count are thrown away."""
    kept = progress.prefixes or KeptPrefixes()
    rounds, layers, weights = dict(kept.rounds), dict(kept.layers), dict(kept.weights)
    made = dict[str, "Tensor"]()
    for one in arrived:
        groups = outputs_made_of(federation.problem.model, one.part)
        if one.made is None and groups:
            sent = one.task.tensors[MODEL]
            made |= {name: sent[name] for names in groups for name in names}
            rounds[one.device.id], layers[one.device.id] = progress.rounds, len(groups)
    if made:
        weights[progress.rounds] = made
    # What nobody holds outputs of is forgotten.
    held = set(rounds.values())
    return KeptPrefixes(rounds, layers, {number: one for number, one in weights.items() if number in held})
