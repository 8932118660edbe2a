"""A device's local round in compiled code, for local work that is no more than SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.nn import functional

from fedpmt import kernels
from fedpmt.kernels import StepRule
from fedpmt.training.local import LocalSettings, LocalWork, Outcome, Pull, local_tensors
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from fedpmt.parts.part import Part
    from fedpmt.training.local import Rng, Site
    from fedpmt.training.messages import Task
    from fedpmt.types import Examples


def step_rule(work: LocalWork[Any], site: Site, task: Task, part: Part, own: Any) -> StepRule | None:
    """What a step of this work does; None where that is more than a rule can say."""
    if not work.fast:
        return None
    settings, structure = site.settings, site.models[part.model].structure
    pull = work.pulled(site, task, part, own) or Pull()
    return StepRule(
        settings.learning_rate,
        settings.momentum,
        settings.nesterov,
        settings.weight_decay,
        work.factors(task, part, structure),
        work.absent(part, structure),
        pull.constant,
        pull.strength,
    )


def train_compiled(
    work: LocalWork[Any], site: Site, task: Task, part: Part, own: Any, data: Examples, rng: Rng
) -> tuple[Outcome, Any] | None:
    """Do what `local.train` does, within rounding; None where compiled code does not know this work or model."""
    rule = step_rule(work, site, task, part, own)
    if rule is None:
        return None
    model, settings = site.models[part.model], site.settings
    order, steps = rng("order"), steps_taken(settings, len(data), task.steps)
    found = kernels.train(
        model,
        part,
        local_tensors(task, part, model.structure),
        data,
        np.array([order.permutation(len(data)) for _ in range(settings.epochs)]).reshape(-1, len(data)),
        batch=settings.batch,
        limit=task.steps,
        cached=settings.prefix == "cache",
        rule=rule,
        draws=drawn_widths(part, steps, rng) if part.inner else None,
        loss=site.objective.loss,
    )
    if found is None:
        return None
    tensors, loss = found
    return work.concluded(Outcome({MODEL: tensors}, metrics={"train_loss": loss}), site, task, own, steps)


def why_not_compiled(
    work: LocalWork[Any], site: Site, task: Task, part: Part, own: Any, data: Examples
) -> str | None:
    """What keeps a local round from compiled code that knows the model; None where it does not know it."""
    if not kernels.knows(site.models[part.model], data.inputs):
        return None
    if step_rule(work, site, task, part, own) is None:
        return "its local steps with these settings"
    if site.objective.loss is not functional.cross_entropy:
        return "this loss"
    return f"parts like '{part.label}'"


def drawn_widths(part: Part, steps: int, rng: Rng) -> np.ndarray:
    """For each step one of the parts inside, or the part itself: the very draws of the local loop."""
    widths, count = rng("width"), len(part.inner) + 1
    return np.array([widths.integers(count) for _ in range(steps)], dtype=np.int32)


def steps_taken(settings: LocalSettings, samples: int, limit: int | None) -> int:
    """How many steps a local round has."""
    steps = settings.epochs * -(-samples // settings.batch)
    return steps if limit is None else min(steps, limit)
