"""One training step of a part, as `training.local` runs it by autograd, with everything counted.

Operations are counted with two samples. Memory is measured with two and with four, and extrapolated: weights,
gradients and running statistics do not grow with the batch, activations do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedpmt.parts.depth import frozen_prefix, mask
from fedpmt.parts.part import WHOLE, place, take
from fedpmt.pricing.count import NoFastPath, OperationCounter, storage_of
from fedpmt.pricing.footprint import Footprint, Timeline
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays, Tensors

SAMPLES = 2
"""BatchNorm needs two samples to train; everything counted is linear in them."""


@dataclass(frozen=True)
class Measurement:
    """Multiply-adds of one sample, and the bytes that any number of samples hold."""

    forward: Mapping[str, float]  # by layer
    gradient: float  # weight gradients of the trained tensors
    backward: float  # gradient plus error signals
    step: Timeline  # of one training step: the gathered batch, activations, gradients, temporary buffers
    kept: int  # the operation of the step after which the backward pass begins
    prefix: Timeline | None  # of the frozen layers run for the cache; None where nothing is cached
    hidden_bytes: float = 0.0  # of one sample in the cache

    def activations(self, samples: int) -> int:
        """Bytes held when the backward pass of a batch begins, the batch included."""
        return self.step.at(self.kept, samples) if len(self.step.each) else 0

    @property
    def activations_each(self) -> float:
        """Bytes that each sample adds to these."""
        return float(self.step.each[self.kept]) if len(self.step.each) else 0.0


def two_samples(example: Arrays) -> Arrays:
    """The first samples of a batch, as tensors."""
    if isinstance(example, Mapping):
        return {name: two_samples(array) for name, array in example.items()}
    if len(example) < SAMPLES:
        raise SettingError(
            f"example: {len(example)} sample is too few to measure with; give at least {SAMPLES}"
        )
    if isinstance(example, Tensor):
        return example[:SAMPLES].detach().clone()
    array = np.array(example[:SAMPLES])
    return torch.from_numpy(array.astype("float32") if array.dtype == np.float64 else array)


def measure(
    model: LayeredModel, tensors: Tensors, part: Part, inputs: Arrays, *, cached: bool
) -> Measurement:
    """Run two samples through the part; `model` is in use meanwhile, `tensors` stay as they are."""
    structure = model.structure
    trains = [name for name in structure.parameters if name in part.trained]
    local = {name: _local(tensors[name], part, name).clone() for name in structure.tensors}
    for name in trains:
        local[name].requires_grad_()
    model.set_training([bool(on) for on in mask(structure, part)])
    cut = frozen_prefix(structure, part)
    if not model.composable or cut == len(structure.layers):
        cut = 0
    # Dropout draws from torch's global generator: it is put back, so that pricing never changes a run.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        counts = _count(model, local, trains, inputs, cut)
        few, many = (
            _hold(model, local, trains, gathered, cut, cached=cached) for gathered in (inputs, _twice(inputs))
        )
    numbers = (SAMPLES, 2 * SAMPLES)
    prefix = None
    if few.prefix is not None and many.prefix is not None:
        prefix = Timeline.through(few.prefix, many.prefix, numbers)
    step = Timeline.through(few.step, many.step, numbers)
    return Measurement(*counts, step, min(few.kept, len(step.each) - 1), prefix, few.hidden_bytes / SAMPLES)


def _count(
    model: LayeredModel, local: Tensors, trains: list[str], inputs: Arrays, cut: int
) -> tuple[dict[str, float], float, float]:
    """Multiply-adds of one sample: forward by layer, of the weight gradients, and of the whole backward pass."""
    structure = model.structure
    owners = {storage_of(tensor): name for name, tensor in local.items() if tensor.numel()}
    layer_of = {name: layer.name for layer in structure.layers for name in layer.tensors}
    first = structure.layers[0].name
    forward, backward = OperationCounter(owners, layer_of, first), OperationCounter(owners, layer_of, first)
    reached: list[str] = []
    with NoFastPath():
        with forward:
            outputs = _outputs(model, local, inputs, cut)
        if outputs.requires_grad:
            total = outputs.sum()
            with backward:
                gradients = torch.autograd.grad(total, [local[name] for name in trains], allow_unused=True)
            reached = [name for name, gradient in zip(trains, gradients, strict=True) if gradient is not None]
    return (
        {layer.name: forward.by_layer[layer.name] / SAMPLES for layer in structure.layers},
        sum(forward.by_tensor[name] for name in reached) / SAMPLES,
        backward.total / SAMPLES,
    )


@dataclass
class _Held:
    """Bytes held after each operation of a local round, by the number of samples, without the weights."""

    step: list[int]
    kept: int
    prefix: list[int] | None = None
    hidden_bytes: int = 0


def _hold(
    model: LayeredModel, local: Tensors, trains: list[str], data: Arrays, cut: int, *, cached: bool
) -> _Held:
    """Run the phases of a local round: the frozen layers for the cache, then one step on a gathered batch.

    The data itself does not count: a device has it anyway.
    """
    known = [*local.values(), *(data.values() if isinstance(data, Mapping) else [data])]
    before, hidden_bytes = None, 0
    if cached and cut:
        with Footprint(known) as running:
            data = model.prefix(cut, local, data)
        before, hidden_bytes = running.history, data.untyped_storage().nbytes()
        known.append(data)
    with Footprint(known) as step:
        batch = _gathered(data)
        outputs = model.suffix(cut, local, batch) if before else _outputs(model, local, batch, cut)
        kept = 0
        if outputs.requires_grad:
            # Like cross-entropy it keeps one number for each output, and any outputs will do.
            loss = torch.log_softmax(outputs, dim=-1).select(-1, 0).sum()
            del outputs
            kept = len(step.history) - 1
            gradients = torch.autograd.grad(loss, [local[name] for name in trains], allow_unused=True)
            del gradients
    return _Held(step.history if trains else [], kept, before, hidden_bytes)


def _outputs(model: LayeredModel, local: Tensors, inputs: Arrays, cut: int) -> Tensor:
    if cut:
        return model.suffix(cut, local, model.prefix(cut, local, inputs))
    return model.forward(local, inputs)


def _gathered(data: Arrays) -> Arrays:
    """A copy, as drawing a batch makes one."""
    if isinstance(data, Mapping):
        return {name: array.clone() for name, array in data.items()}
    return data.clone()


def _twice(data: Arrays) -> Arrays:
    if isinstance(data, Mapping):
        return {name: torch.cat([array, array]) for name, array in data.items()}
    return torch.cat([data, data])


def _local(tensor: Tensor, part: Part, name: str) -> Tensor:
    selection = part.sent.get(name, WHOLE)
    return place(take(tensor, selection), selection, tuple(tensor.shape))
