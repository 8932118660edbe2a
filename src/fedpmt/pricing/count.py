"""What torch really runs, operation by operation: multiply-adds with the parameter that they read, and bytes alive.

Only products of matrices count (fully connected, convolution, attention, recurrent cells); activations, pooling, norms
and bias adds do not. A tensor counts from the operation that made it until its storage is freed. What an operation
allocates and frees inside is invisible from here; where it matters (`INSIDE`) it is computed from the shapes, so that a
price is the same on every machine. The formulas describe PyTorch on a CPU with 512-bit vectors.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedpmt.models.tracing import Watching
from fedpmt.models.trees import is_channels_last

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


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


BLOCK = 16
"""oneDNN lays the channels of images out in blocks of as many as a 512-bit vector holds."""


@dataclass(frozen=True)
class Timeline:
    """Bytes held after each operation, as a function of the number of samples: `fixed` + samples · `each`."""

    fixed: np.ndarray
    each: np.ndarray

    @classmethod
    def through(cls, few: Sequence[int], many: Sequence[int], counts: tuple[int, int]) -> Timeline:
        """Draw a straight line for each operation, through what it held with few and with many samples.

        A model that runs other operations for other inputs has no such lines; then only its peak has one.

        >>> line = Timeline.through([10, 70], [20, 75], (2, 4))
        >>> line.peak(2), line.peak(20)
        (70, 115)
        """
        if len(few) != len(many):
            few, many = [max(few, default=0)], [max(many, default=0)]
        low, high = np.array(few, dtype=float), np.array(many, dtype=float)
        each = (high - low) / (counts[1] - counts[0])
        return cls(low - counts[0] * each, each)

    def peak(self, samples: int) -> int:
        """The most bytes held at once."""
        return self._rounded((self.fixed + samples * self.each).max(initial=0.0))

    def at(self, index: int, samples: int) -> int:
        """Bytes held after one of the operations."""
        return self._rounded(self.fixed[index] + samples * self.each[index])

    @staticmethod
    def _rounded(size: float) -> int:
        return max(0, math.ceil(size))


class Footprint(Watching):
    """Writes down the bytes held after each operation while it is entered; `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self.history: list[int] = []
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._note(tensor, counts=False)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and look at what it made."""
        before = self.held
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self._note(one)
        inside = INSIDE.get(getattr(func, "overloadpacket", None))
        most = 0 if inside is None else inside(args, result)
        self.history.append(max(self.held, before + most))
        return result

    def _note(self, tensor: Tensor, *, counts: bool = True) -> None:
        if tensor.layout != torch.strided:
            return  # sparse tensors have no storage of their own
        storage = tensor.untyped_storage()
        # The address of a freed storage is soon another's; its entry is gone by then.
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes() if counts else 0

        def freed(_: Any) -> None:
            self.held -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.held += size


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's own entries, whatever storage they are in."""
    return tensor.numel() * tensor.element_size()


def _blocked(images: Tensor) -> int:
    """Bytes of a copy whose channels fill whole blocks."""
    channels = images.shape[1]
    return nbytes(images) // channels * (-(-channels // BLOCK) * BLOCK)


def _is_product(weight: Tensor, stride: Sequence[int]) -> bool:
    """Whether a convolution looks at single positions only; it is run as a matrix product then, in place."""
    return math.prod(weight.shape[2:]) == 1 and math.prod(stride) == 1


def _read_as_is(images: Tensor, weight: Tensor) -> bool:
    """Whether a convolution reads its inputs where they are: few channels, as those of pictures."""
    return images.shape[1] < BLOCK and math.prod(weight.shape[2:]) > 1


def _inside_convolution(args: tuple[Any, ...], outputs: Tensor) -> int:
    inputs, weight, stride = args[0], args[1], args[3]
    if _is_product(weight, stride) or not inputs.numel():
        return 0
    if is_channels_last(inputs):
        return nbytes(weight) + nbytes(outputs)
    copied = 0 if _read_as_is(inputs, weight) else _blocked(inputs)
    # The product of the copies is made first, then, with the copies freed, brought to the usual layout.
    return max(copied + nbytes(weight) + _blocked(outputs), _blocked(outputs) + nbytes(outputs))


def _inside_convolution_backward(args: tuple[Any, ...], _: Any) -> int:
    errors, inputs, weight, stride, wanted = args[0], args[1], args[2], args[4], args[10]
    if _is_product(weight, stride) or not inputs.numel():
        return 0
    signal = nbytes(inputs) if wanted[0] else 0
    if is_channels_last(inputs):
        return signal + nbytes(weight) * (2 if wanted[1] else 1)
    stages = [0]
    if wanted[0]:
        # Strides leave gaps, which take one more copy to fill.
        gaps = signal if math.prod(stride) > 1 else 0
        stages += [
            _blocked(errors) + nbytes(weight) + _blocked(inputs),
            _blocked(inputs) + signal + gaps,
        ]
    if wanted[1]:
        copied = 0 if _read_as_is(inputs, weight) else _blocked(inputs)
        # The gradient is made in blocks first, then, with the copies freed, brought to the usual layout.
        stages += [signal + _blocked(errors) + copied + nbytes(weight), signal + 2 * nbytes(weight)]
    return max(stages)


def _norm_backward(args: tuple[Any, ...], _: Any) -> int:
    # The errors of the inputs, made in two steps.
    return 2 * nbytes(args[1])


def _encoder_layer(args: tuple[Any, ...], _: Any) -> int:
    inputs, heads, wide = args[0], args[2], args[14]
    if inputs.is_nested:
        return 0  # it has no one length to compute with
    samples, length, width = inputs.shape
    one, scores = nbytes(inputs), samples * heads * length * length * inputs.element_size()
    hidden = one // width * wide.shape[0]
    # Q, K and V with their copies by head; then they and the scores; then the wide hidden layer.
    return int(max(6 * one, 3 * one + scores, 3 * one + hidden))


INSIDE: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.convolution: _inside_convolution,
    aten.convolution_backward: _inside_convolution_backward,
    aten.native_batch_norm_backward: _norm_backward,
    aten._transformer_encoder_layer_fwd: _encoder_layer,
}
"""The most that an operation holds inside, its results included, where that is more than its results."""
