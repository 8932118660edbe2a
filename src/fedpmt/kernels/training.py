"""A device's local round and an evaluation, one call each that holds no lock: threads scale with cores."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedpmt.kernels import library
from fedpmt.kernels.layout import (
    Net,
    fill,
    laid_out,
    own_buffers,
    read_back,
    rows_of,
    shapes_of,
)
from fedpmt.parts.depth import frozen_prefix, mask
from fedpmt.parts.part import Mask, take, within
from fedpmt.parts.width import corners

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedpmt.kernels.layout import Shape
    from fedpmt.kernels.rule import StepRule
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays, Examples, Tensors

Shapes: TypeAlias = "tuple[Shape, ...]"
BLOCK = 60
"""Samples at a time in an evaluation's forward pass."""


def available() -> bool:
    """Whether there is compiled code on this machine."""
    return library.library() is not None


def knows(model: LayeredModel, inputs: Arrays) -> bool:
    """Whether compiled code can run and train this model on inputs like these."""
    return shapes_of(model, model.initial(), inputs) is not None


@torch.no_grad()
def train(
    model: LayeredModel,
    part: Part,
    received: Tensors,
    data: Examples,
    orders: np.ndarray,
    *,
    batch: int,
    limit: int | None,
    cached: bool,
    rule: StepRule,
) -> tuple[dict[str, Tensor], float] | None:
    """Train one device for a whole local round on the cross-entropy of its labels.

    Args:
        model: The model that the part is cut from.
        part: What the device was sent and trains.
        received: The tensors it was sent, as it works with them.
        data: Its samples.
        orders: The samples of each epoch in the order in which they are used, as [epoch, sample].
        batch: Samples of a step.
        limit: Steps at most; None for all that the epochs have.
        cached: Whether the outputs of the frozen layers are computed once and kept.
        rule: What a step does.

    Returns:
        What the part trains, as it goes back to the server, and the mean loss over all steps; None where compiled
        code does not know this model, part or data.
    """
    draws = rule.draws
    widths = _widths(model, part, received, data, rule, inner=draws is not None)
    if widths is None:
        return None
    shapes, rate = widths[-1], rule.learning_rate
    steps = len(orders) * -(-len(data) // batch)
    steps = steps if limit is None else min(limit, steps)
    absent = None if rule.absent is None else np.ascontiguousarray(rule.absent, dtype=np.uint8)
    orders = np.ascontiguousarray(orders, dtype=np.int64)
    _check("orders", orders.shape == (len(orders), len(data)) and _within(orders, len(data)))
    _check("absent", absent is None or len(absent) == shapes[-1].own_outputs)
    if draws is not None:
        draws = np.ascontiguousarray(draws, dtype=np.int32)
        _check("draws", draws.ndim == 1 and len(draws) >= steps and _within(draws, len(widths)))

    nets = _nets(model, part, widths, received, rule)
    frozen = _frozen(model, part)
    plan = library.Plan(
        layers=len(shapes),
        frozen=frozen,
        cached=cached and frozen > 0,
        classes=shapes[-1].own_outputs,
        nets=len(nets),
        moving=rule.momentum != 0,
        nesterov=rule.nesterov,
        samples=len(data),
        epochs=len(orders),
        batch=batch,
        limit=steps,
        rate=rate,
        kept=1 - rate * rule.weight_decay - rate * rule.strength,
        momentum=rule.momentum,
        decay=rule.weight_decay + rule.strength,
        absent=None if absent is None else absent.ctypes.data,
    )
    rows, targets = rows_of(data.inputs, shapes[0]), np.ascontiguousarray(data.targets.numpy())
    mean_loss = library.compiled().fedpmt_train(
        ctypes.byref(plan),
        (library.Net * len(nets))(*(net.structure for net in nets)),
        ctypes.c_void_p(None if draws is None or len(nets) == 1 else draws.ctypes.data),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_void_p(orders.ctypes.data),
    )
    if mean_loss < 0:
        raise MemoryError("no memory for a device's local round")
    trained = read_back(shapes, nets[-1].weights, frozen, frozenset(received))
    for name, factor in rule.factors.items():
        if name in trained:
            trained[name].div_(factor)
    sent = {name: within(selection, part.sent[name]) for name, selection in part.trained.items()}
    return {name: take(trained[name], selection) for name, selection in sent.items()}, float(mean_loss)


@torch.no_grad()
def forward(model: LayeredModel, tensors: Tensors, inputs: Arrays) -> Tensor | None:
    """Run a model in evaluation mode; None where compiled code does not know it."""
    shapes = shapes_of(model, tensors, inputs)
    if shapes is None:
        return None
    net = Net(shapes, laid_out(shapes, tensors))
    rows = rows_of(cast("Tensor", inputs), shapes[0])
    outputs = np.empty((len(rows), shapes[-1].outputs), dtype=np.float32)
    done = library.compiled().fedpmt_forward(
        ctypes.byref(net.structure),
        ctypes.c_int32(len(shapes)),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_int64(len(rows)),
        ctypes.c_int64(BLOCK),
        ctypes.c_void_p(outputs.ctypes.data),
    )
    if not done:
        raise MemoryError("no memory for a forward pass")
    return torch.from_numpy(outputs)[:, : shapes[-1].own_outputs]


def _widths(
    model: LayeredModel, part: Part, received: Tensors, data: Examples, rule: StepRule, *, inner: bool
) -> list[Shapes] | None:
    """The shapes of the part, behind those of the ones inside it; None where compiled code cannot train them."""
    trained = mask(model.structure, part)
    if (
        not any(trained)
        or not all(trained[trained.index(1) :])
        or any(isinstance(selection, Mask) for selection in part.sent.values())
        or not _scales_layers(rule.factors, model)
        or not len(data)
        or (inner and part.inner and not all(trained))  # the frozen layers of each width are others
    ):
        return None
    cuts = [corners(model.structure, one) for one in part.inner if inner]
    nets = [{name: received[name][corner] for name, corner in cut.items()} for cut in cuts]
    found = [shapes_of(model, tensors, data.inputs) for tensors in (*nets, received)]
    known = [shapes for shapes in found if shapes is not None]
    if len(known) < len(found) or not _labelled(data.targets, known[-1][-1].own_outputs):
        return None
    # All widths read the same rows and know the same classes.
    ends = {(shapes[0].inputs, shapes[-1].own_outputs) for shapes in known}
    return known if len(ends) == 1 else None


def _labelled(targets: Arrays, classes: int) -> bool:
    """Whether targets are classes: any other label would be read as an address. Torch says what is wrong with it."""
    if not isinstance(targets, torch.Tensor) or targets.dtype != torch.int64 or targets.ndim != 1:
        return False
    return bool(((targets >= 0) & (targets < classes)).all())


def _scales_layers(factors: Mapping[str, float], model: LayeredModel) -> bool:
    """Whether weight and bias of each layer have one factor, as compiled code has one for both."""
    return all(
        len({factors.get(name, 1.0) for name in layer.parameters}) == 1 for layer in model.structure.layers
    )


def _frozen(model: LayeredModel, part: Part) -> int:
    """How many layers with weights come before the first that is trained."""
    before = model.modules_of(0, frozen_prefix(model.structure, part))
    return sum(isinstance(module, nn.Linear | nn.Conv2d) for _, module in before)


def _nets(
    model: LayeredModel, part: Part, widths: Sequence[Shapes], received: Tensors, rule: StepRule
) -> list[Net]:
    """Each width with its tensors in this thread's buffers; those inside the part are filled when they are drawn."""
    shift = _shift(received, rule)
    nets = []
    for place, shapes in enumerate(widths):
        gains = {shape.path: rule.factors.get(f"{shape.path}.weight", 1.0) ** 2 for shape in shapes}
        whole = place == len(widths) - 1
        name, own = ("", shift) if whole else (f" {place}", _cut(model, part.inner[place], shift))
        weights = own_buffers(shapes, f"weights{name}")
        velocity = own_buffers(shapes, f"velocity{name}") if rule.momentum else None
        if whole:
            fill(shapes, weights, _scaled(received, rule.factors))
            # The first step of all does not read them, but one that trains a corner of them leaves the rest for later.
            for array in (one for pair in velocity or () for one in pair if len(widths) > 1):
                array.fill(0)
        else:
            for shape, *pairs in zip(shapes, weights, velocity or weights, strict=True):
                for pair in pairs:
                    shape.clear_padding(*pair)
        nets.append(
            Net(shapes, weights, velocity, laid_out(shapes, own, f"shift{name}") if own else None, gains)
        )
    return nets


def _shift(received: Tensors, rule: StepRule) -> Tensors:
    """What every step adds to the gradient: constant - μ w, times η without momentum; empty if nothing.

    A tensor that the forward pass multiplies by s is trained as s times itself, and so is this.
    """
    if not rule.constant and not rule.strength:
        return {}
    rate = 1.0 if rule.momentum else rule.learning_rate
    shift: dict[str, Tensor] = {name: rate * one for name, one in rule.constant.items()}
    for name, one in received.items():
        if rule.strength:
            shift[name] = shift.get(name, 0) - rate * rule.strength * one
        elif name not in shift:
            shift[name] = torch.zeros_like(one)
    return _scaled(shift, rule.factors)


def _scaled(tensors: Tensors, factors: Mapping[str, float]) -> Tensors:
    return {name: one * factors[name] if name in factors else one for name, one in tensors.items()}


def _cut(model: LayeredModel, part: Part, tensors: Tensors) -> Tensors:
    cut = corners(model.structure, part)
    return {name: one[cut[name]] for name, one in tensors.items()}


def _within(indices: np.ndarray, count: int) -> bool:
    return indices.size == 0 or (int(indices.min()) >= 0 and int(indices.max()) < count)


def _check(name: str, fine: bool) -> None:
    """Refuse what would make compiled code read or write outside its arrays."""
    if not fine:
        raise ValueError(f"{name} has the wrong shape, or an index out of range")
