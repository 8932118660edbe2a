"""A chain's forward pass in compiled code as one node of autograd's graph: any loss on it has a fast way back."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fedpmt.kernels.layout import Net, is_chain, rows_of, shapes_of
from fedpmt.kernels.library import LANES, compiled, library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.kernels.layout import Shape
    from fedpmt.models.layered import LayeredModel
    from fedpmt.types import Arrays, Tensors

KEPT = 16
"""Passes that a thread keeps for the next batch, since new memory costs more than what is done with it."""


def differentiable(model: LayeredModel, first: int = 0) -> Callable[[Tensors, Arrays], Any]:
    """Give the forward pass from layer `first` on: compiled code's where it knows the chain, else the model's own.

    Autograd can go back through either to the tensors, from any loss.
    """
    own = partial(model.suffix, first) if first else model.forward
    if library() is None or not is_chain(model, first):
        return own
    names = [name for layer in model.structure.layers[first:] for name in layer.tensors]
    found: dict[tuple[torch.Size, ...], tuple[Shape, ...] | None] = {}

    def forward(tensors: Tensors, inputs: Arrays) -> Any:
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
            found[sizes] = shapes_of(model, tensors, inputs, first)
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


class Pass:
    """A forward pass that can be gone backward: weights in the layout of the compiled code, and room for a batch."""

    def __init__(self, shapes: Sequence[Shape], batch: int) -> None:
        self.shapes, self.batch = tuple(shapes), batch
        self._compiled, self._count = compiled(), ctypes.c_int32(len(shapes))
        self._net = Net(self.shapes)
        net = ctypes.byref(self._net.structure)
        self._work = ctypes.c_void_p(self._compiled.fedpmt_prepare(net, self._count, ctypes.c_int64(batch)))
        if not self._work:
            raise MemoryError("no memory for a batch")
        self._chain = net, self._work, self._count

    def __del__(self) -> None:
        if getattr(self, "_work", None):
            self._compiled.fedpmt_release(self._work, self._count)

    def outputs(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """What comes out, no more than `batch` samples; each of them is kept as the way back needs it."""
        self._net.give(tensors)
        last = self.shapes[-1]
        rows = rows_of(inputs, self.shapes[0])
        # The way back reads whole vectors, to behind the last window.
        self._rows = np.zeros(rows.size + LANES, dtype=np.float32)
        self._rows[: rows.size] = rows.ravel()
        made = np.empty((len(inputs), last.outputs), dtype=np.float32)
        self._compiled.fedpmt_outputs(
            *self._chain,
            ctypes.c_void_p(self._rows.ctypes.data),
            ctypes.c_int64(len(inputs)),
            ctypes.c_void_p(made.ctypes.data),
        )
        self._net.given.clear()
        return torch.from_numpy(made)[:, : last.own_outputs]

    def gradients(self, error: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
        """Of these tensors, once: they take the place of the weights."""
        last = self.shapes[-1]
        wide = np.zeros((len(error), last.outputs), dtype=np.float32)
        wide[:, : last.own_outputs] = error.numpy()
        found = self._net.train({}, names)
        self._compiled.fedpmt_gradients(
            *self._chain,
            ctypes.c_void_p(self._rows.ctypes.data),
            ctypes.c_int64(len(wide)),
            ctypes.c_void_p(wide.ctypes.data),
        )
        return found
