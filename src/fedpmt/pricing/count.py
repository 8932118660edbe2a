"""Multiply-adds of whatever torch really runs, and which parameter each of them read.

Only products of matrices count (fully connected, convolution, attention, recurrent cells);
activations, pooling, norms and bias adds do not.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedpmt.models.tracing import Watching

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

aten = torch.ops.aten


def storage_of(tensor: Tensor) -> int:
    """What a tensor and all of its views have in common; sparse tensors have nothing of the kind."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


class OperationCounter(Watching):
    """Counts multiply-adds while it is entered, by the tensor and by the layer they belong to.

    `owners` maps the storage of each parameter to its name, `layers` the name to its layer. A product
    without a parameter (attention scores) belongs to the layer whose parameter was read last.
    """

    def __init__(self, owners: Mapping[int, str], layers: Mapping[str, str], first: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_tensor: Counter[str] = Counter()
        self.by_layer: Counter[str] = Counter()
        self._owners, self._layers, self._layer = owners, layers, first

    @property
    def total(self) -> int:
        """All multiply-adds so far."""
        return sum(self.by_layer.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        # The weight among the parameters it read: a bias is smaller.
        read = [tensor for tensor in tensors if storage_of(tensor) in self._owners]
        weight = max(read, key=Tensor.numel, default=None)
        name = "" if weight is None else self._owners[storage_of(weight)]
        if name in self._layers:
            self._layer = self._layers[name]
        formula = FORMULAS.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            work = formula(args, result)
            self.by_layer[self._layer] += work
            if name:
                self.by_tensor[name] += work
        return result


def _product(left: Tensor, right: Tensor) -> int:
    # [.., i, j] x [.., j, k]: as many as entries on the left, for each column on the right
    return left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _convolution(args: tuple[Any, ...], result: Tensor) -> int:
    inputs, weight, transposed = args[0], args[1], args[6]
    positions = inputs if transposed else result
    # n^x · m_l² positions, at each of them every weight once; a grouped weight is already the smaller one
    return int(inputs.shape[0] * math.prod(positions.shape[2:]) * weight.numel())


def _convolution_backward(args: tuple[Any, ...], _: Any) -> int:
    errors, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    positions = inputs if transposed else errors
    # Error signal and weight gradient each take as many as the forward pass, where they are wanted.
    once = inputs.shape[0] * math.prod(positions.shape[2:]) * weight.numel()
    return int(once * (wanted[0] + wanted[1]))


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    # scores Q Kᵀ, then scores · V
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    return scores * (query.shape[-1] + value.shape[-1])


def _recurrent(args: tuple[Any, ...], _: Any) -> int:
    # every step of every sample reads the input's and the state's weights once
    return int(args[0].shape[0] * args[0].shape[1] * (args[1].numel() + args[2].numel()))


FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.mm: lambda args, _: _product(args[0], args[1]),
    aten.bmm: lambda args, _: _product(args[0], args[1]),
    aten.mv: lambda args, _: _product(args[0], args[1]),
    aten.dot: lambda args, _: _product(args[0], args[1]),
    aten.addmm: lambda args, _: _product(args[1], args[2]),
    aten.addmv: lambda args, _: _product(args[1], args[2]),
    aten.baddbmm: lambda args, _: _product(args[1], args[2]),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: lambda args, _: _attention(*args[:3]),
    # Each of the two products has two gradients. That the kernel computes the scores once more, to save
    # memory, is not counted: the unfused operations, which the same layer may take in another mode, do not.
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args, _: 2 * _attention(*args[1:4]),
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: lambda args, _: 2 * _recurrent(args, _),
}
