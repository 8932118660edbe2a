"""A chain's forward pass in compiled code as one node of autograd's graph: any loss on it has a fast way back."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fedpmt.kernels.chains import fits, is_chain
from fedpmt.kernels.native import Pass, library, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.kernels.native import Shape
    from fedpmt.models.layered import LayeredModel
    from fedpmt.types import Arrays, Tensors

KEPT = 16
"""Passes that a thread keeps for the next batch, since new memory costs more than what is done with it."""


def graphed(model: LayeredModel, first: int = 0) -> Callable[[Tensors, Arrays], Tensor]:
    """The forward pass from layer `first` on: compiled code's where it knows the chain, else the model's own."""
    own = partial(model.suffix, first) if first else model.forward
    if library() is None or not is_chain(model, first):
        return own
    names = [name for layer in model.structure.layers[first:] for name in layer.tensors]
    found: dict[tuple[torch.Size, ...], tuple[Shape, ...] | None] = {}

    def forward(tensors: Tensors, inputs: Arrays) -> Tensor:
        used = [tensors[name] for name in names]
        if (
            not isinstance(inputs, Tensor)
            or not len(inputs)
            or inputs.requires_grad
            or not torch.is_grad_enabled()
            or any(one.dtype != torch.float32 or one.device.type != "cpu" for one in (inputs, *used))
        ):
            return own(tensors, inputs)
        sizes = (inputs.shape[1:], *(tensor.shape for tensor in used))
        if sizes not in found:
            shapes = shapes_of(model, tensors, inputs, first) if fits(model, inputs, first) else None
            found[sizes] = None if shapes is None else tuple(shapes)
        known = found[sizes]
        if known is None:
            return own(tensors, inputs)
        outputs: Tensor = _Chain.apply(known, names, inputs, *used)  # type: ignore[no-untyped-call]
        return outputs

    return forward


class _Chain(Function):
    @staticmethod
    def forward(
        ctx: Any, shapes: tuple[Shape, ...], names: Sequence[str], inputs: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.names, ctx.run = names, _taken(shapes, len(inputs))
        outputs: Tensor = ctx.run.outputs(dict(zip(names, tensors, strict=True)), inputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        wanted = dict(zip(ctx.names, ctx.needs_input_grad[3:], strict=True))
        gradients = ctx.run.gradients(error, frozenset(name for name, on in wanted.items() if on))
        _given_back(ctx.run)
        ctx.run = None
        return (None, None, None, *(gradients.get(name) for name in ctx.names))


class _Own(threading.local):
    """A thread's passes that nobody uses, the last used first."""

    def __init__(self) -> None:
        self.free: list[Pass] = []


_own = _Own()


def _taken(shapes: tuple[Shape, ...], batch: int) -> Pass:
    """A pass for so many samples."""
    for place, one in enumerate(_own.free):
        if one.shapes == shapes and one.batch >= batch:
            del _own.free[place]
            return one
    return Pass(shapes, batch)


def _given_back(one: Pass) -> None:
    _own.free.insert(0, one)
    del _own.free[KEPT:]  # what a round before needed
