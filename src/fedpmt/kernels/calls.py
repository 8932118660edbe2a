"""The calls of compiled code: a device's local round, an evaluation, and the server's sums of replies.

Each is one call that holds no lock, so that threads scale with cores. Sums are to the bits of torch.
"""

from __future__ import annotations

import ctypes
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from fedpmt.kernels import library
from fedpmt.kernels.layout import Net, own_net, rows_of, shapes_of
from fedpmt.parts.part import Mask, take, within
from fedpmt.parts.width import corners
from fedpmt.types import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedpmt.kernels import StepRule
    from fedpmt.kernels.layout import Shape
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays, Examples, Tensors

Shapes: TypeAlias = "tuple[Shape, ...]"
BLOCK = 60
"""Samples at a time in an evaluation's forward pass."""

SLICE = 2**18
"""Entries that a core is given at a time in a sum of large tensors."""

WORTHWHILE = 2**22
"""Entries of all replies together, below which a sum is taken by one core: starting threads would take longer."""

PLAIN = {(torch.float32, "cpu", True)}
"""Type, device and contiguity of the tensors that sums are taken of."""


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
    changes: bool = False,
) -> tuple[dict[str, Tensor], float, int] | None:
    """Train one device for a whole local round on the cross-entropy of its labels.

    Args:
        model: The model that the part is cut from.
        part: What the device was sent and trains.
        received: The tensors it was sent, as it works with them.
        data: Its samples.
        orders: The samples of each epoch in the order in which they are used, as [epoch, sample]: each once.
        batch: Samples of a step.
        limit: Steps at most; None for all that the epochs have.
        cached: Whether the outputs of the frozen layers are computed once and kept.
        rule: What a step does.
        changes: Whether what training changed is wanted instead of what it led to.

    Returns:
        What the part trains, as it goes back to the server, the mean loss over all steps, and their number; None where
        compiled code does not know this model, part or data.
    """
    everything = data.whole if isinstance(data, Rows) else data
    widths = _widths(model, part, received, everything.inputs, rule)
    found = None if widths is None else _samples(data, widths[-1])
    if widths is None or found is None:
        return None
    inputs, labels, places = found
    shapes, rate, samples = widths[-1], rule.learning_rate, len(data)
    steps = len(orders) * -(-samples // batch)
    steps = steps if limit is None else min(limit, steps)
    orders = np.ascontiguousarray(orders, dtype=np.int64)
    absent = None if rule.absent is None else np.ascontiguousarray(rule.absent, dtype=np.uint8)
    draws = None if rule.draws is None else np.ascontiguousarray(rule.draws, dtype=np.int32)
    for name, indices, count, fine in (
        ("orders", orders, samples, orders.shape == (len(orders), samples)),
        ("rows", places, len(labels), True),
        ("absent", absent, 2, absent is None or len(absent) == shapes[-1].own_outputs),
        ("draws", draws, len(widths), draws is None or (draws.ndim == 1 and len(draws) >= steps)),
    ):
        # Else compiled code would read or write outside its arrays.
        if not fine or (
            indices is not None and indices.size and not 0 <= indices.min() <= indices.max() < count
        ):
            raise ValueError(f"{name} has the wrong shape, or an index out of range")
    # Outputs of frozen layers are computed in the first epoch's order, for all epochs.
    if len(orders) > 1 and np.bincount(orders[0], minlength=samples).max() > 1:
        raise ValueError("orders must have each sample once in an epoch")

    frozen = next(
        place for place, shape in enumerate(shapes) if any(name in part.trained for name in shape.names)
    )
    nets, trained = _nets(model, part, widths, received, rule, frozen)
    plan = library.Plan(
        layers=len(shapes),
        frozen=frozen,
        cached=cached and frozen > 0,
        classes=shapes[-1].own_outputs,
        nets=len(nets),
        moving=rule.momentum != 0,
        nesterov=rule.nesterov,
        changes=changes and not rule.factors,
        samples=samples,
        epochs=len(orders),
        batch=batch,
        limit=steps,
        rate=rate,
        kept=1 - rate * rule.weight_decay - rate * rule.strength,
        momentum=rule.momentum,
        decay=rule.weight_decay + rule.strength,
        absent=None if absent is None else absent.ctypes.data,
    )
    mean_loss = library.compiled().fedpmt_train(
        ctypes.byref(plan),
        (library.Net * len(nets))(*(net.structure for net in nets)),
        ctypes.c_void_p(None if draws is None or len(nets) == 1 else draws.ctypes.data),
        ctypes.c_void_p(inputs.ctypes.data),
        ctypes.c_void_p(labels.ctypes.data),
        ctypes.c_void_p(None if places is None else places.ctypes.data),
        ctypes.c_void_p(orders.ctypes.data),
    )
    nets[-1].given.clear()
    if mean_loss < 0:
        raise MemoryError("no memory for a device's local round")
    for name, factor in rule.factors.items():
        if name in trained:
            trained[name].div_(factor)
    if changes and rule.factors:
        trained = {name: one.sub_(received[name]) for name, one in trained.items()}
    sent = {name: within(selection, part.sent[name]) for name, selection in part.trained.items()}
    return {name: take(trained[name], selection) for name, selection in sent.items()}, float(mean_loss), steps


@torch.no_grad()
def forward(model: LayeredModel, tensors: Tensors, inputs: Arrays) -> Tensor | None:
    """Run a model in evaluation mode; None where compiled code does not know it."""
    shapes = shapes_of(model, tensors, inputs)
    if shapes is None:
        return None
    net = own_net(shapes)
    net.give(tensors, frozen=len(shapes))
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
    net.given.clear()
    if not done:
        raise MemoryError("no memory for a forward pass")
    return torch.from_numpy(outputs)[:, : shapes[-1].own_outputs]


def _widths(
    model: LayeredModel, part: Part, received: Tensors, inputs: Arrays, rule: StepRule
) -> list[Shapes] | None:
    """The shapes of the part, behind those of the ones inside it; None where compiled code cannot train them."""
    inner = part.inner if rule.draws is not None else ()
    cuts = [corners(model.structure, one) for one in inner]
    nets = [{name: received[name][corner] for name, corner in cut.items()} for cut in cuts]
    found = [shapes_of(model, tensors, inputs) for tensors in (*nets, received)]
    known = [shapes for shapes in found if shapes is not None]
    if len(known) < len(found):
        return None
    first, last = known[-1][0], known[-1][-1]
    # All widths read the same rows and know the same classes; what is frozen would be another in each of them.
    ends = {(shapes[0].inputs, shapes[-1].own_outputs) for shapes in known}
    able = (
        bool(part.trained)
        and (not inner or part.trained.keys() == received.keys())
        and ends == {(first.inputs, last.own_outputs)}
        and not any(isinstance(selection, Mask) for selection in part.sent.values())
    )
    return known if able else None


def _samples(data: Examples, shapes: Shapes) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Inputs, labels, and where in them the samples are; None where a label names no class.

    Samples that lie in a larger array, as the first layer reads them, are read where they are. A label that names no
    class would be read as an address: torch says what is wrong with it.
    """
    first, places = shapes[0], None
    if isinstance(data, Rows):
        whole = data.whole.inputs
        layout = torch.channels_last if first.convolution else torch.contiguous_format
        padded = not first.convolution and whole[:1].numel() != first.inputs
        if whole.is_contiguous(memory_format=layout) and not padded:
            places, data = np.ascontiguousarray(data.rows, dtype=np.int64), data.whole
    targets = data.targets
    if not isinstance(targets, torch.Tensor) or (targets.dtype, targets.ndim) != (torch.int64, 1):
        return None
    labels = np.ascontiguousarray(targets.numpy())
    used = labels if places is None else labels[places]
    fine = used.size and 0 <= used.min() <= used.max() < shapes[-1].own_outputs
    return (rows_of(data.inputs, first), labels, places) if fine else None


def _nets(
    model: LayeredModel, part: Part, widths: Sequence[Shapes], received: Tensors, rule: StepRule, frozen: int
) -> tuple[list[Net], dict[str, Tensor]]:
    """Each width in this thread's memory, those inside the part still without weights; room for what is trained."""
    shift = _shift(received, rule) if rule.constant or rule.strength else {}
    nets = [own_net(shapes, f"{place}") for place, shapes in enumerate(widths[:-1])]
    whole, moving = own_net(widths[-1]), rule.momentum != 0
    whole.give(_scaled(received, rule.factors) if rule.factors else received, frozen)
    for net, inner in zip(nets, part.inner, strict=False):
        net.train(rule.factors, moving=moving, shift=_cut(model, inner, shift))
    fixed = received.keys() - part.trained.keys()
    trained = whole.train(rule.factors, part.trained, fixed=fixed, moving=moving, shift=shift)
    if nets:
        # A step writes all of a width that it trains but the padding, and of the velocity of the whole a corner alone.
        whole.clear(weights=False)
        for net in nets:
            net.clear(weights=True)
    return [*nets, whole], trained


def _shift(received: Tensors, rule: StepRule) -> Tensors:
    """What every step adds to the gradient: constant - μ w, times η without momentum.

    A tensor that the forward pass multiplies by s is trained as s times itself, and so is this.
    """
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


def fold(sums: Tensor, replies: Sequence[Tensor], shares: Sequence[float], *, fresh: bool) -> bool:
    """Add Σ share reply to `sums`, or to zero where it is `fresh`, in this order for any number of cores.

    Returns:
        Whether it was done: False where compiled code is not there or does not know these tensors.
    """
    compiled, tensors = library.library(), (sums, *replies)
    if compiled is None or {(one.dtype, one.device.type, one.is_contiguous()) for one in tensors} != PLAIN:
        return False
    factors, count = (ctypes.c_float * len(shares))(*shares), len(replies)
    calls = []
    length = sums.numel()
    each = SLICE if count * length >= WORTHWHILE else max(1, length)
    for first in range(0, length, each):
        total, *others = (ctypes.c_void_p(tensor.data_ptr() + 4 * first) for tensor in tensors)
        slices, entries = (ctypes.c_void_p * count)(*others), min(each, length - first)
        sizes = ctypes.c_int32(count), ctypes.c_int64(entries), ctypes.c_int32(fresh)
        calls.append((total, slices, factors, *sizes))
    if len(calls) == 1:
        compiled.fedpmt_fold(*calls[0])
    else:
        # Made anew each time: threads that are kept would be missing in a process that is forked later.
        with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as cores:
            for done in [cores.submit(compiled.fedpmt_fold, *call) for call in calls]:
                done.result()
    return True


def step(
    weights: Sequence[Tensor], replies: Sequence[Tensor], shares: Sequence[float], divisors: Sequence[float]
) -> list[Tensor] | None:
    """Take w + share reply / divisor of each tensor in one call, to the bits of `fold`, a division and a sum.

    Returns:
        The new weights: None where compiled code is not there or does not know these tensors.
    """
    compiled, tensors = library.library(), (*weights, *replies)
    if compiled is None or {(one.dtype, one.device.type, one.is_contiguous()) for one in tensors} != PLAIN:
        return None
    # NumPy's memory, for the reason given where sums are made.
    new = [torch.from_numpy(np.empty(tuple(one.shape), dtype=np.float32)) for one in weights]
    count = len(new)
    pointers, floats = ctypes.c_void_p * count, ctypes.c_float * count
    compiled.fedpmt_step(
        *(pointers(*(one.data_ptr() for one in group)) for group in (new, weights, replies)),
        floats(*shares),
        floats(*divisors),
        (ctypes.c_int64 * count)(*(one.numel() for one in new)),
        ctypes.c_int32(count),
    )
    return new


def add_at(
    sums: Tensor, covers: Tensor, axes: Sequence[np.ndarray | None], values: Tensor, weight: float
) -> bool:
    """Add `values` to `sums`, and `weight` to `covers`, at the positions that `axes` list (None: all of them).

    Returns:
        Whether it was done: False where compiled code is not there or does not know these tensors.
    """
    compiled, tensors = library.library(), (sums, covers, values)
    if compiled is None or {(one.dtype, one.device.type, one.is_contiguous()) for one in tensors} != PLAIN:
        return False
    shape = tuple(sums.shape)
    pairs = zip(shape, axes, strict=True)
    within = all(kept is None or bool(((kept >= 0) & (kept < full)).all()) for full, kept in pairs)
    if not shape or not within or any(kept is not None for kept in axes[2:]):
        return False
    rows = _places(axes[0], shape[0])
    if len(axes) > 1 and axes[1] is not None:
        columns, inner = _places(axes[1], shape[1]), math.prod(shape[2:])
    else:  # whole rows, each of them one run
        columns, inner = _places(None, 1), math.prod(shape[1:])
    if values.numel() != len(rows) * len(columns) * inner:
        return False
    compiled.fedpmt_add_at(
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_void_p(covers.data_ptr()),
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_float(weight),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(columns.ctypes.data),
        ctypes.c_int64(len(columns)),
        ctypes.c_int64(math.prod(shape[1:])),
        ctypes.c_int64(inner),
    )
    return True


def _places(kept: np.ndarray | None, full: int) -> np.ndarray:
    return np.arange(full, dtype=np.int64) if kept is None else np.ascontiguousarray(kept, dtype=np.int64)
