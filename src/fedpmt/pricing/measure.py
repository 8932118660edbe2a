"""One training step of a part, as `training.local` runs it by autograd, with everything counted.

Operations are counted with two samples. Memory is measured with two and with four, and extrapolated: weights,
gradients and running statistics do not grow with the batch, activations do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedpmt.models.precision import Prefix, computing
from fedpmt.models.tracing import NoFastPath
from fedpmt.models.trees import map_tensors, tensors_in
from fedpmt.parts.part import WHOLE, frozen_prefix, left_out, mask, place, take
from fedpmt.pricing.count import Footprint, OperationCounter, Timeline, storage_of
from fedpmt.types import SettingError, one_line_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import FrozenPrecision, TrainedPrecision
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays, Tensors

BASE = ""
"""What runs before the first layer, and is never trained."""

SAMPLES = 2
"""BatchNorm needs two samples to train; everything counted is linear in them."""


@dataclass(frozen=True)
class Block:
    """Frozen layers that run together where those before a cut are streamed."""

    first: int
    last: int  # not in it
    running: Timeline
    given: float  # bytes of one sample that it runs on; a sample itself is there anyway
    made: float  # bytes of one sample that it gives


@dataclass(frozen=True)
class Measurement:
    """Multiply-adds of one sample, and the bytes that any number of samples hold."""

    forward: Mapping[str, float]  # by layer, and of the base
    gradient: float  # weight gradients of the trained tensors
    backward: float  # gradient plus error signals
    step: Timeline  # of one training step: the gathered batch, activations, gradients, temporary buffers
    kept: int  # the operation of the step after which the backward pass begins
    prefix: Timeline | None  # of the frozen layers run for the cache; None where nothing is cached
    hidden_bytes: float = 0.0  # of one sample in the cache
    base: Timeline | None = None  # the same of a base before these layers, whose outputs are kept over rounds
    base_bytes: float = 0.0
    blocks: tuple[Block, ...] = ()  # of the frozen layers, where they are streamed

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
    model: LayeredModel,
    tensors: Tensors,
    part: Part,
    inputs: Arrays,
    *,
    cached: bool,
    keeps_base: bool = False,
    streamed: bool = False,
    precision: TrainedPrecision = "fp32",
    frozen_precision: FrozenPrecision = "fp32",
) -> Measurement:
    """Run two samples through the part; `model` is in use meanwhile, `tensors` stay as they are."""
    structure = model.structure
    trains = [name for name in structure.parameters if name in part.trained]
    local = {name: _local(tensors[name], part, name).clone() for name in structure.tensors}
    for name in trains:
        local[name].requires_grad_()
    model.set_training([bool(on) for on in mask(structure, part)], left_out=left_out(structure, part))
    cut = frozen_prefix(structure, part)
    halves = cut if model.can_cut(cut) else None
    # Dropout draws from torch's global generator: it is put back, so that pricing never changes a run.
    with (
        one_line_errors("model: a training step on two samples"),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
    ):
        # Operations are the same in any precision, and only weights as they are tell whose they are.
        plain = None if halves is None else Prefix(model, halves, local)
        counts = _count(model, local, trains, inputs, plain)
        # A kept base is all of the prefix, or runs before it.
        base = Prefix.of(model, 0, {}, frozen_precision) if keeps_base and halves else None
        cached = cached or (keeps_base and halves == 0) or streamed
        prefix = (
            None
            if halves is None
            else Prefix.of(model, halves, local, frozen_precision, base, streamed=streamed)
        )
        few, many = (
            _hold(model, local, trains, gathered, prefix, cached=cached, precision=precision)
            for gathered in (inputs, _twice(inputs))
        )
    numbers = (SAMPLES, 2 * SAMPLES)

    def lines(less: list[int] | None, more: list[int] | None) -> Timeline | None:
        return None if less is None or more is None else Timeline.through(less, more, numbers)

    step = Timeline.through(few.step, many.step, numbers)
    kept = min(few.kept, len(step.each) - 1)
    hidden, below = few.hidden_bytes / SAMPLES, few.base_bytes / SAMPLES
    blocks = tuple(_join(less, more, numbers) for less, more in zip(few.blocks, many.blocks, strict=True))
    return Measurement(
        *counts, step, kept, lines(few.prefix, many.prefix), hidden, lines(few.base, many.base), below, blocks
    )


def _join(few: _HeldBlock, many: _HeldBlock, numbers: tuple[int, int]) -> Block:
    line = Timeline.through(few.running, many.running, numbers)
    return Block(few.first, few.last, line, few.given / SAMPLES, few.made / SAMPLES)


def _count(
    model: LayeredModel, local: Tensors, trains: list[str], inputs: Arrays, prefix: Prefix | None
) -> tuple[dict[str, float], float, float]:
    """Multiply-adds of one sample: forward by layer, of the weight gradients, and of the whole backward pass."""
    structure = model.structure
    tensors = {**model.fixed(), **local}
    owners = {storage_of(tensor): name for name, tensor in tensors.items() if tensor.numel()}
    names = [*(layer.name for layer in structure.layers), BASE]
    layer_of = {name: names[place] for name, place in model.layout.owners.items()}
    first = BASE if model.layout.base else names[0]
    forward, backward = OperationCounter(owners, layer_of, first), OperationCounter(owners, layer_of, first)
    reached: list[str] = []
    with NoFastPath():
        with forward:
            outputs = _outputs(model, local, inputs, prefix)
        answers = [one for one in tensors_in(outputs) if one.requires_grad]
        if answers:
            total = _total([one.sum() for one in answers])
            with backward:
                gradients = torch.autograd.grad(total, [local[name] for name in trains], allow_unused=True)
            reached = [name for name, gradient in zip(trains, gradients, strict=True) if gradient is not None]
    return (
        {name: forward.by_layer[name] / SAMPLES for name in names},
        sum(forward.by_tensor[name] for name in reached) / SAMPLES,
        backward.total / SAMPLES,
    )


@dataclass
class _HeldBlock:
    """The same of a block of frozen layers, and the bytes that it takes and gives."""

    first: int
    last: int
    running: list[int]
    given: int
    made: int


@dataclass
class _Held:
    """Bytes held after each operation of a local round, by the number of samples, without the weights."""

    step: list[int]
    kept: int
    prefix: list[int] | None = None
    hidden_bytes: int = 0
    base: list[int] | None = None
    base_bytes: int = 0
    blocks: Sequence[_HeldBlock] = ()


def _hold(
    model: LayeredModel,
    local: Tensors,
    trains: list[str],
    data: Arrays,
    prefix: Prefix | None,
    *,
    cached: bool,
    precision: TrainedPrecision,
) -> _Held:
    """Run the phases of a local round: the frozen layers for the cache, then one step on a gathered batch.

    The data itself does not count: a device has it anyway. Nor do rounded weights, which replace those received.
    """
    base = prefix.base if prefix else None
    rounded = [*(prefix.tensors.values() if prefix else ()), *(base.tensors.values() if base else ())]
    known = [*local.values(), *model.base().values(), *tensors_in(data), *rounded]
    first = second = None
    first_bytes = second_bytes = 0
    if base is not None:
        first, first_bytes, data = _keep(base, data, known)
    blocks = _stream(prefix, data, known) if prefix is not None and prefix.streamed else ()
    if cached and prefix is not None:
        second, second_bytes, data = _keep(replace(prefix, streamed=False), data, known)
    with Footprint(known) as step:
        batch = map_tensors(data, torch.clone)  # as drawing a batch makes one
        with computing(precision, batch):
            outputs = (
                _outputs(model, local, batch, prefix)
                if second is None or prefix is None
                else model.suffix(prefix.cut, local, prefix.restore(batch))
            )
            answers = [one for one in tensors_in(outputs) if one.requires_grad]
            # Like cross-entropy it keeps one number for each output, and any outputs will do.
            losses = [torch.log_softmax(one, dim=-1).select(-1, 0).sum() for one in answers]
        kept_at = 0
        if answers:
            loss = _total(losses)
            del outputs, answers, losses
            kept_at = len(step.history) - 1
            gradients = torch.autograd.grad(loss, [local[name] for name in trains], allow_unused=True)
            del gradients
    held = step.history if trains else []
    return _Held(held, kept_at, second, second_bytes, first, first_bytes, blocks)


def _stream(prefix: Prefix, data: Arrays, known: list[Tensor]) -> list[_HeldBlock]:
    """Run frozen layers block by block."""
    found: list[_HeldBlock] = []
    given: Arrays | None = None
    size = 0
    for block in prefix.blocks():
        with Footprint([*known, *block.tensors.values(), *tensors_in(given)]) as running:
            given = block.run(data, given)
        made = _storage_bytes(given)
        found.append(_HeldBlock(block.first, block.cut, running.history, size, made))
        size = made
    return found


def _keep(prefix: Prefix, data: Arrays, known: list[Tensor]) -> tuple[list[int], int, Arrays]:
    """Run frozen layers: the bytes held meanwhile and afterwards, and what enters the others; that is known then."""
    with Footprint(known) as running:
        kept = prefix.run(data)
    known += tensors_in(kept)
    return running.history, _storage_bytes(kept), prefix.entry(kept, data)


def _storage_bytes(kept: Arrays) -> int:
    return sum(one.untyped_storage().nbytes() for one in tensors_in(kept))


def _outputs(model: LayeredModel, local: Tensors, inputs: Arrays, prefix: Prefix | None) -> Any:
    if prefix is None:
        return model.forward(local, inputs)
    return model.suffix(prefix.cut, local, prefix.enter(inputs))


def _total(numbers: list[Tensor]) -> Tensor:
    first, *others = numbers
    return sum(others, start=first)


def _twice(data: Arrays) -> Arrays:
    return map_tensors(data, lambda array: torch.cat([array, array]))


def _local(tensor: Tensor, part: Part, name: str) -> Tensor:
    selection = part.sent.get(name, WHOLE)
    return place(take(tensor, selection), selection, tuple(tensor.shape))
