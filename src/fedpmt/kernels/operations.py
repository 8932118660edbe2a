"""Common layers with their backward pass written out, for the fast path.

What is gained is what is left out: no graph is built, no gradient is stored (a weight is updated by the product that
would be its gradient), and buffers are reused from step to step. Images are channels-last, where convolution and
pooling are fastest, and belong to one device. Rows of features are stacked over devices that train together, and
each ends with a one: a bias is the last column of its weight, so that it costs no operation of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fedpmt.training.batches import channels_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.training.local import LocalSettings
    from fedpmt.types import Tensors

aten = torch.ops.aten

LINE = 16
"""Rows begin at multiples of this many numbers: products are faster where they are aligned."""

UNFOLDED_CHANNELS = 8
"""From this many channels on, copying the windows of a convolution costs less than it saves."""


def rows_with_one(*shape: int, like: Tensor) -> Tensor:
    """A buffer of ones with aligned rows; the last column is the one that stays."""
    *outer, columns = shape
    return like.new_ones(*outer, -(-(columns + 1) // LINE) * LINE)[..., : columns + 1]


class Weight:
    """A trained tensor and its momentum; steps are taken where the gradient arises.

    Where it stands for s w, its gradient is that of w over s and its step that of w times s: `gain` is s².
    """

    def __init__(self, tensor: Tensor, settings: LocalSettings, gain: float = 1.0) -> None:
        self.value, self._gain = tensor, gain
        self._rate, self._momentum, self._decay = (
            settings.learning_rate,
            settings.momentum,
            settings.weight_decay,
        )
        self._velocity: Tensor | None = None
        self._kept = 1 - self._rate * self._decay
        self._add_product = tensor.baddbmm_ if tensor.ndim == 3 else tensor.addmm_

    def step_product(self, left: Tensor, right: Tensor) -> None:
        """Take the step whose gradient is a matrix product, without storing it where that can be avoided."""
        if self._momentum:
            self.step(left @ right)
            return
        # w <- (1 - η λ) w - η left right
        self._add_product(left, right, beta=self._kept, alpha=-self._rate * self._gain)

    def step(self, gradient: Tensor) -> None:
        """Take the step of a given gradient."""
        if self._gain != 1:
            gradient = gradient * self._gain
        if self._decay:
            gradient = gradient.add(self.value, alpha=self._decay)
        if self._momentum:
            # v <- m v + g
            self._velocity = (
                gradient if self._velocity is None else self._velocity.mul_(self._momentum).add_(gradient)
            )
            gradient = self._velocity
        # w <- w - η g
        self.value.add_(gradient, alpha=-self._rate)


class Operation(ABC):
    """One module of a chain. `backward` takes the error at the output, trains, and gives the error at the input."""

    weighted = False

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """The module's output; what `backward` needs is kept, and the result may be written over by the next call."""

    @abstractmethod
    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        """Update the weights; the result counts only where it is `wanted`."""

    def tensors(self, place: int) -> dict[str, Tensor]:
        """The module's own tensors, of one device of the stack, as copies."""
        return {}

    def corners(self, narrow: Operation) -> list[tuple[Tensor, Tensor]]:
        """Where the weights of a narrower copy of this operation stand in its own, each beside them."""
        return []


@dataclass
class _Buffers:
    """What a linear layer writes for batches of one size."""

    activations: Tensor  # outputs, and the one
    outputs: Tensor
    errors: Tensor
    above: Tensor | None = None  # the error that came in last, and the same turned
    turned: Tensor | None = None


class Linear(Operation):
    """y = x Wᵀ + b, rectified or not, for each device of a stack."""

    weighted = True

    def __init__(self, devices: Sequence[Tensors], settings: LocalSettings, gain: float = 1.0) -> None:
        weights = [tensors["weight"] for tensors in devices]
        (outputs, self._width), self._biased = weights[0].shape, "bias" in devices[0]
        matrix = rows_with_one(len(devices), outputs, self._width, like=weights[0])
        matrix[..., :-1] = torch.stack(weights)
        if self._biased:
            matrix[..., -1] = torch.stack([tensors["bias"] for tensors in devices])
        else:
            matrix = matrix[..., :-1]
        self._weight = Weight(matrix, settings, gain)
        self._across, self._down = matrix.transpose(1, 2), matrix[..., : self._width]
        self._buffers: dict[int, _Buffers] = {}
        self.rectified = False

    def forward(self, inputs: Tensor) -> Tensor:
        buffers = self._buffers.get(inputs.shape[1]) or self._make_buffers(inputs)
        self._inputs = inputs if self._biased else inputs[..., :-1]
        torch.bmm(self._inputs, self._across, out=buffers.outputs)
        if self.rectified:
            buffers.activations.clamp_min_(0)
        return buffers.activations

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        buffers = self._buffers[error.shape[1]]
        if self.rectified:
            aten.threshold_backward.grad_input(error, buffers.outputs, 0, grad_input=error)
        # Before the step: the error goes down through the weights that made it.
        below = torch.bmm(error, self._down, out=buffers.errors) if wanted else error
        if buffers.above is not error:
            buffers.above, buffers.turned = error, error.transpose(1, 2)
        self._weight.step_product(cast("Tensor", buffers.turned), self._inputs)
        return below

    def tensors(self, place: int) -> dict[str, Tensor]:
        matrix = self._weight.value[place]
        own = {"weight": matrix[:, : self._width].clone(memory_format=torch.contiguous_format)}
        return {**own, "bias": matrix[:, -1].clone()} if self._biased else own

    def corners(self, narrow: Operation) -> list[tuple[Tensor, Tensor]]:
        theirs = cast("Linear", narrow)._weight.value
        mine = self._weight.value[:, : theirs.shape[1]]
        if not self._biased:
            return [(mine[..., : theirs.shape[2]], theirs)]
        inputs = theirs.shape[2] - 1
        return [(mine[..., :inputs], theirs[..., :inputs]), (mine[..., -1], theirs[..., -1])]

    def _make_buffers(self, inputs: Tensor) -> _Buffers:
        devices, count, _ = inputs.shape
        activations = rows_with_one(devices, count, self._across.shape[2], like=inputs)
        buffers = _Buffers(activations, activations[..., :-1], inputs.new_empty(devices, count, self._width))
        self._buffers[count] = buffers
        return buffers


class Convolution(Operation):
    """A two-dimensional convolution by torch's own kernels."""

    weighted = True

    def __init__(
        self, module: nn.Conv2d, tensors: Tensors, settings: LocalSettings, gain: float = 1.0
    ) -> None:
        weight = channels_last(tensors["weight"]).clone()
        self._weight, self._bias = Weight(weight, settings, gain), None
        if "bias" in tensors:
            self._bias = Weight(tensors["bias"].clone(), settings, gain)
        self._how = (
            list(module.stride),
            list(cast("tuple[int, int]", module.padding)),
            list(module.dilation),
        )
        self._groups = module.groups

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs
        bias = None if self._bias is None else self._bias.value
        return torch.conv2d(inputs, self._weight.value, bias, *self._how, self._groups)

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        below, gradient, bias_gradient = self._backward(error, wanted, True, self._bias is not None)
        self._weight.step(gradient)
        if self._bias is not None:
            self._bias.step(bias_gradient)
        return below if wanted else error

    def _backward(self, error: Tensor, *wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        weight = self._weight.value
        result = aten.convolution_backward(
            error,
            self._inputs,
            weight,
            [weight.shape[0]],
            *self._how,
            False,
            [0, 0],
            self._groups,
            list(wanted),
        )
        return cast("tuple[Tensor, Tensor, Tensor]", result)

    def tensors(self, place: int) -> dict[str, Tensor]:
        own = {"weight": self._weight.value.clone(memory_format=torch.contiguous_format)}
        return own if self._bias is None else {**own, "bias": self._bias.value.clone()}

    def corners(self, narrow: Operation) -> list[tuple[Tensor, Tensor]]:
        other = cast("Convolution", narrow)
        filters, channels = other._weight.value.shape[:2]
        pairs = [(self._weight.value[:filters, :channels], other._weight.value)]
        if self._bias is not None and other._bias is not None:
            pairs.append((self._bias.value[:filters], other._bias.value))
        return pairs


class UnfoldedConvolution(Convolution):
    """A plain convolution as one product with the copied windows, which serve the forward and the backward pass."""

    def __init__(
        self, module: nn.Conv2d, tensors: Tensors, settings: LocalSettings, gain: float = 1.0
    ) -> None:
        super().__init__(module, tensors, settings, gain)
        # The same memory: filters are channels-last.
        filters = self._weight.value.permute(0, 2, 3, 1).view(self._weight.value.shape[0], -1)
        self._matrix = Weight(filters, settings, gain)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs = inputs.contiguous(memory_format=torch.channels_last)
        filters, channels, tall, wide = self._weight.value.shape
        count, _, height, width = inputs.shape
        high, broad = height - tall + 1, width - wide + 1
        line = width * channels
        windows = inputs.as_strided(
            (count, high, broad, tall, wide * channels), (height * line, line, channels, line, 1)
        )
        if count not in self._buffers:
            outputs = inputs.new_empty(count * high * broad, filters)
            self._buffers[count] = inputs.new_empty(windows.shape), outputs
        copied, outputs = self._buffers[count]
        self._windows = copied.copy_(windows).view(len(outputs), -1)
        across = self._matrix.value.t()
        if self._bias is None:
            torch.mm(self._windows, across, out=outputs)
        else:
            torch.addmm(self._bias.value, self._windows, across, out=outputs)
        return outputs.view(count, high, broad, filters).permute(0, 3, 1, 2)

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        below = self._backward(error, True, False, False)[0] if wanted else error
        flat = error.permute(0, 2, 3, 1).reshape(len(self._windows), -1)
        self._matrix.step_product(flat.t(), self._windows)
        if self._bias is not None:
            self._bias.step(flat.sum(dim=0))
        return below


def convolution(
    module: nn.Conv2d, tensors: Tensors, settings: LocalSettings, gain: float = 1.0, *, trained: bool
) -> Operation:
    """The faster of the two forms."""
    plain = (module.stride, module.padding, module.dilation, module.groups) == ((1, 1), (0, 0), (1, 1), 1)
    weight = tensors["weight"]
    if trained and plain and weight.device.type == "cpu" and weight.shape[1] >= UNFOLDED_CHANNELS:
        return UnfoldedConvolution(module, tensors, settings, gain)
    return Convolution(module, tensors, settings, gain)


class Pool(Operation):
    """A max-pool."""

    def __init__(self, module: nn.MaxPool2d) -> None:
        pairs = [
            _pair(value) for value in (module.kernel_size, module.stride, module.padding, module.dilation)
        ]
        self._how = (*pairs, module.ceil_mode)

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs
        outputs, self._where = aten.max_pool2d_with_indices(inputs, *self._how)
        return cast("Tensor", outputs)

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        return cast(
            "Tensor", aten.max_pool2d_with_indices_backward(error, self._inputs, *self._how, self._where)
        )


class Relu(Operation):
    """max(x, 0) of images, in place: no operation before it needs its own output."""

    def forward(self, inputs: Tensor) -> Tensor:
        self._outputs = inputs.clamp_min_(0)
        return self._outputs

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        return cast("Tensor", aten.threshold_backward.grad_input(error, self._outputs, 0, grad_input=error))


class Flatten(Operation):
    """From images to rows of features, in the order of channels that the next layer's weights expect."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.ndim == 3:
            return inputs
        count = len(inputs)
        self._shape = inputs.shape
        if count not in self._rows:
            self._rows[count] = rows_with_one(1, count, inputs[0].numel(), like=inputs)
        rows = self._rows[count]
        rows[0, :, :-1].view(self._shape).copy_(inputs)
        return rows

    def backward(self, error: Tensor, *, wanted: bool) -> Tensor:
        return error.view(self._shape).contiguous(memory_format=torch.channels_last)


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
