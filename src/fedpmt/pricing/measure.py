"""One forward and backward pass of a part, exactly as training runs it, with everything counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedpmt.parts.depth import frozen_prefix, mask
from fedpmt.parts.part import WHOLE, place, take
from fedpmt.pricing.count import NoFastPath, OperationCounter, storage_of
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays, Tensors

SAMPLES = 2
"""BatchNorm needs two samples to train; everything counted is linear in them."""


@dataclass(frozen=True)
class Measurement:
    """Multiply-adds and bytes of one sample."""

    forward: Mapping[str, float]  # by layer
    gradient: float  # weight gradients of the trained tensors
    backward: float  # gradient plus error signals
    activation_bytes: float  # saved for the backward pass, inputs and weights apart
    hidden_bytes: float  # the output of the frozen prefix, where the model can be run in halves
    prefix_bytes: float = (
        0.0  # input and output of the widest module of the frozen prefix, which live together
    )


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
    """Run two samples through the part; `model` is in use meanwhile, `tensors` stay as they are.

    A cached prefix's output is not counted among the activations: it is read from the cache.
    """
    structure = model.structure
    trains = [name for name in structure.parameters if name in part.trained]
    local = {name: _local(tensors[name], part, name).clone() for name in structure.tensors}
    for name in trains:
        local[name].requires_grad_()
    owners = {storage_of(tensor): name for name, tensor in local.items() if tensor.numel()}
    layer_of = {name: layer.name for layer in structure.layers for name in layer.tensors}
    first = structure.layers[0].name
    forward, backward = OperationCounter(owners, layer_of, first), OperationCounter(owners, layer_of, first)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    model.set_training([bool(on) for on in mask(structure, part)])
    cut = frozen_prefix(structure, part)
    hidden: Tensor | None = None
    # Dropout draws from torch's global generator: it is put back, so that pricing never changes a run.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), NoFastPath():
        with forward, saved_tensors_hooks(note, lambda tensor: tensor):
            if model.composable and 0 < cut < len(structure.layers):
                hidden = model.prefix(cut, local, inputs)
                outputs = model.suffix(cut, local, hidden)
            else:
                outputs = model.forward(local, inputs)
        reached: list[str] = []
        if outputs.requires_grad:
            total = outputs.sum()
            with backward:
                gradients = torch.autograd.grad(total, [local[name] for name in trains], allow_unused=True)
            reached = [name for name, gradient in zip(trains, gradients, strict=True) if gradient is not None]

    given = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    if cached and hidden is not None:
        given.append(hidden)
    apart = owners.keys() | {storage_of(tensor) for tensor in given}
    return Measurement(
        forward={layer.name: forward.by_layer[layer.name] / SAMPLES for layer in structure.layers},
        gradient=sum(forward.by_tensor[name] for name in reached) / SAMPLES,
        backward=backward.total / SAMPLES,
        activation_bytes=sum(size for storage, size in saved.items() if storage not in apart) / SAMPLES,
        hidden_bytes=hidden.untyped_storage().nbytes() / SAMPLES if hidden is not None else 0,
        prefix_bytes=_widest(model, cut, local, inputs) / SAMPLES if hidden is not None else 0,
    )


@torch.no_grad()
def _widest(model: LayeredModel, cut: int, tensors: Tensors, inputs: Arrays) -> float:
    """The most bytes that the input and output of one module of the prefix take together."""
    widest = 0
    sizes: list[int] = []
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, output: sizes.append(output.numel() * output.element_size())
        )
        for _, module in model.modules_of(0, cut)
    ]
    model.prefix(cut, tensors, inputs)
    for hook in hooks:
        hook.remove()
    for before, after in pairwise([0, *sizes]):
        widest = max(widest, before + after)
    return widest


def _local(tensor: Tensor, part: Part, name: str) -> Tensor:
    selection = part.sent.get(name, WHOLE)
    return place(take(tensor, selection), selection, tuple(tensor.shape))
