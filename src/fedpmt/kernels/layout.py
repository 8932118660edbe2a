"""Which models are chains that compiled code knows, and their layers and tensors as it reads them.

It knows convolutions (stride 1, no padding, with or without a 2 x 2 max-pool) and linear layers, in single precision
on the CPU.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn

from fedpmt.kernels import library
from fedpmt.kernels.library import LANES, compiled
from fedpmt.models.build import FlatLinear
from fedpmt.models.chain import hooked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.models.layered import LayeredModel
    from fedpmt.types import Arrays, Tensors


_IMAGES, _FEATURES = (nn.Conv2d, nn.MaxPool2d, nn.ReLU), (nn.Linear, nn.ReLU, nn.Flatten)


def is_chain(model: LayeredModel, first: int = 0) -> bool:
    """Whether a model can be run in halves and is made, from layer `first` on, of modules known here.

    Images come first, then features.
    """
    if not model.composable or model.structure.fixed:
        return False  # what is frozen, or counts, is not known here
    modules = modules_in(model, first)
    kinds = [kind for module in modules for kind in _kinds(module)]
    flat = kinds.index(nn.Flatten) if takes_images(modules) and nn.Flatten in kinds else 0
    return (
        all(_is_known(module) for module in modules)
        and not _tied(modules)
        # A ReLU works in place, so it must not be what meets the data first.
        and next((kind for kind in kinds if kind is not nn.Flatten), None) in (nn.Linear, nn.Conv2d)
        and next((kind for kind in reversed(kinds) if kind is not nn.Flatten), None) is nn.Linear
        and all(kind in _IMAGES for kind in kinds[:flat])
        and all(kind in _FEATURES for kind in kinds[flat:])
    )


def modules_in(model: LayeredModel, first: int = 0) -> list[nn.Module]:
    """What a chain runs, in order, from layer `first` on."""
    everything = (module for _, module in model.modules_of(first, len(model.structure.layers)))
    return [module for module in everything if not does_nothing(module)]


def does_nothing(module: nn.Module) -> bool:
    """Whether a module hands on what it is given, in training mode as well."""
    return type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)


def takes_images(modules: Sequence[nn.Module]) -> bool:
    """Whether a chain begins with a convolution."""
    return bool(modules) and type(modules[0]) is nn.Conv2d


def fits(model: LayeredModel, inputs: Tensor, first: int = 0) -> bool:
    """Whether inputs have the shape that a chain reads: a linear layer also takes sequences, which are not for here."""
    modules = modules_in(model, first)
    if takes_images(modules):
        return inputs.ndim == 4
    return inputs.ndim == 2 or type(modules[0]) is nn.Flatten


def _kinds(module: nn.Module) -> list[type[nn.Module]]:
    return [nn.Flatten, nn.Linear] if type(module) is FlatLinear else [type(module)]


def _tied(modules: Sequence[nn.Module]) -> bool:
    """Whether a tensor is used in two places."""
    used = [id(parameter) for module in modules for parameter in module.parameters()]
    return len(set(used)) < len(used)


def _is_known(module: nn.Module) -> bool:
    if hooked(module):
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if type(module) is nn.MaxPool2d:
        return not module.return_indices
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    return type(module) in (nn.Linear, FlatLinear, nn.ReLU)


@dataclass(frozen=True)
class Shape:
    """One layer as the compiled code sees it, and what its own tensors are called."""

    path: str
    convolution: bool
    inputs: int  # padded, but for the data's own channels
    outputs: int  # padded
    own_inputs: int
    own_outputs: int
    biased: bool
    spots: int = 1  # positions of each input channel that a linear layer behind a flatten sees
    height: int = 0
    width: int = 0
    kernel: tuple[int, int] = (0, 0)
    pooled: bool = False
    rectified: bool = False

    @cached_property
    def names(self) -> tuple[str, str]:
        """What its weight and its bias are called."""
        return f"{self.path}.weight", f"{self.path}.bias"

    @cached_property
    def structure(self) -> library.Layer:
        """As C reads it."""
        return library.Layer(
            convolution=self.convolution,
            inputs=self.inputs,
            outputs=self.outputs,
            height=self.height,
            width=self.width,
            kernel_height=self.kernel[0],
            kernel_width=self.kernel[1],
            pooled=self.pooled,
            rectified=self.rectified,
            biased=self.biased,
            blocks=math.prod(self.kernel) if self.convolution else self.spots,
            own_inputs=self.own_inputs,
            own_outputs=self.own_outputs,
            gain=1.0,
        )

    @cached_property
    def turned(self) -> tuple[ctypes.c_int32, ...]:
        """The sizes of a linear layer's weights, for C to turn them from one layout into the other."""
        stored = self.inputs // self.spots
        sizes = self.own_outputs, self.own_inputs, self.spots, stored, self.outputs
        return tuple(map(ctypes.c_int32, sizes))

    def blank(self) -> tuple[np.ndarray, np.ndarray]:
        """Weight and bias in the layout of the compiled code, all zero."""
        if self.convolution:
            size: tuple[int, ...] = (*self.kernel, self.inputs, self.outputs)
        else:
            size = self.spots, self.inputs // self.spots, self.outputs
        return _aligned(size), _aligned((self.outputs,))

    def pack(self, tensors: Tensors, packed: np.ndarray, bias: np.ndarray) -> None:
        """Write the layer's tensors there."""
        # Training that diverged leaves other values than zero in the padding.
        if packed.shape[-2] > self.own_inputs:
            packed[..., self.own_inputs :, :] = 0
        if self.outputs > self.own_outputs:
            packed[..., self.own_outputs :] = 0
            bias[self.own_outputs :] = 0
        own_weight, own_bias = self.names
        weight = tensors[own_weight].detach().numpy()
        if self.biased:
            bias[: self.own_outputs] = tensors[own_bias].detach().numpy()
        if self.convolution:
            packed[:, :, : self.own_inputs, : self.own_outputs] = weight.transpose(2, 3, 1, 0)
            return
        weight = np.ascontiguousarray(weight)
        compiled().fedpmt_turn(weight.ctypes, packed.ctypes, *self.turned, ctypes.c_int32(0))


def _aligned(size: tuple[int, ...]) -> np.ndarray:
    """Zeros that begin with a cache line, as the compiled code's own buffers do."""
    count, line = math.prod(size), 64
    room = np.zeros(4 * count + line, dtype=np.uint8)
    begin = -room.ctypes.data % line
    return room[begin : begin + 4 * count].view(np.float32).reshape(size)


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


def shapes_of(
    model: LayeredModel, tensors: Tensors, inputs: Arrays, first: int = 0
) -> tuple[Shape, ...] | None:
    """The chain from layer `first` on, as shapes; None where the compiled code is not there or does not know it."""
    if library.library() is None or not isinstance(inputs, Tensor):
        return None
    names = [name for layer in model.structure.layers[first:] for name in layer.tensors]
    if any(name not in tensors for name in names):
        return None  # a net without some of its layers
    own = [tensors[name] for name in names]
    if any(one.dtype != torch.float32 or one.device.type != "cpu" for one in (inputs, *own)):
        return None
    known = _known.setdefault(model, {})
    key = first, inputs.shape[1:], tuple(one.shape for one in own)
    if key not in known:
        known[key] = _shapes(model, tensors, inputs, first)
    return known[key]


_known: WeakKeyDictionary[LayeredModel, dict[object, tuple[Shape, ...] | None]] = WeakKeyDictionary()
"""What was found of each model, by the sizes of its inputs and tensors."""


def _shapes(model: LayeredModel, tensors: Tensors, inputs: Tensor, first: int) -> tuple[Shape, ...] | None:
    if not is_chain(model, first) or not fits(model, inputs, first):
        return None
    found: list[Shape] = []
    size = (inputs.shape[2], inputs.shape[3]) if inputs.ndim == 4 else (1, 1)
    for link in model.modules_of(first, len(model.structure.layers)):
        path, module = link.path or "", link.module
        last, biased = found[-1] if found else None, f"{path}.bias" in tensors
        match module:
            case nn.Conv2d():
                plain = (module.stride, module.padding, module.dilation, module.groups)
                if plain != ((1, 1), (0, 0), (1, 1), 1):
                    return None
                filters, channels, tall, wide = tensors[f"{path}.weight"].shape
                if last is not None and channels != last.own_outputs:
                    return None  # torch says what is wrong
                stored = last.outputs if last else channels
                high, broad = size
                window = Shape(path, True, stored, _padded(filters), channels, filters, biased, 1, *size)
                found.append(replace(window, kernel=(tall, wide)))
                size = high - tall + 1, broad - wide + 1
            case nn.MaxPool2d():
                pairs = (module.kernel_size, module.stride, module.padding, module.dilation)
                if last is None or last.pooled or module.ceil_mode or [_pair(one) for one in pairs] != [
                    (2, 2), (2, 2), (0, 0), (1, 1),
                ]:  # fmt: skip
                    return None
                found[-1] = replace(last, pooled=True)
                size = size[0] // 2, size[1] // 2
            case nn.ReLU() if last is not None:
                found[-1] = replace(last, rectified=True)
            case nn.Linear():
                outputs, features = tensors[f"{path}.weight"].shape
                behind = last is not None and last.convolution
                spots = size[0] * size[1] if behind else 1
                if last is not None and features != last.own_outputs * spots:
                    return None
                stored = last.outputs * spots if last else _padded(features)
                own = features // spots, outputs
                found.append(Shape(path, False, stored, _padded(outputs), *own, biased, spots))
            case nn.Flatten():
                pass
            case _ if not does_nothing(module):
                return None
    return tuple(found) if found and min(size) > 0 else None


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def rows_of(inputs: Tensor, first: Shape) -> np.ndarray:
    """Samples as the first layer reads them: channels-last, or rows of padded features."""
    if first.convolution:
        return np.ascontiguousarray(inputs.permute(0, 2, 3, 1).numpy())
    rows = inputs.flatten(1).numpy()
    missing = first.inputs - rows.shape[1]
    return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, missing))) if missing else rows)


Buffers = list[tuple[np.ndarray, np.ndarray]]
"""Weight and bias of each layer, in the layout of the compiled code."""


@dataclass
class _Held:
    """A thread's buffers for one purpose, and which tensors each layer is a copy of."""

    shapes: tuple[Shape, ...]
    buffers: Buffers
    refs: list[list[ref[Tensor]]]  # one object for each tensor for as long as they are kept here
    marks: list[list[tuple[int, int]] | None]  # their ids and the tensors' versions; None: written to since


_own = threading.local()


def own_buffers(
    shapes: Sequence[Shape], place: str, tensors: Tensors | None = None, frozen: int = 0
) -> Buffers:
    """This thread's buffers for one purpose: new memory for every device would cost more than what is copied there.

    They hold these tensors, or what the last user left. Only the layers before `frozen` are left as they are: those are
    not written again for the next device that is sent the same tensors.
    """
    key, known = tuple(shapes), _own.__dict__
    held: _Held | None = known.get(place)
    if held is None or held.shapes != key:
        count = len(key)
        held = known[place] = _Held(key, [shape.blank() for shape in shapes], [[]] * count, [None] * count)
    if tensors is None:
        return held.buffers
    for number, (shape, (weight, bias)) in enumerate(zip(shapes, held.buffers, strict=True)):
        own = [tensors[name] for name in shape.names if name in tensors]
        refs, marks = [ref(one) for one in own], None
        if not any(one.is_inference() for one in own):  # these do not count their versions
            marks = [(id(one), tensor._version) for one, tensor in zip(refs, own, strict=True)]
        if marks is None or marks != held.marks[number]:
            shape.pack(tensors, weight, bias)
        held.refs[number], held.marks[number] = refs, marks if number < frozen else None
    return held.buffers


def read_back(
    shapes: Sequence[Shape], packed: Buffers, frozen: int, names: frozenset[str]
) -> dict[str, Tensor]:
    """Copies of the tensors from layer `frozen` on, in their own layout."""
    trained: dict[str, Tensor] = {}
    for shape, (stored, bias) in list(zip(shapes, packed, strict=True))[frozen:]:
        outputs, inputs = shape.own_outputs, shape.own_inputs
        if shape.convolution:
            weight = np.array(stored[:, :, :inputs, :outputs].transpose(3, 2, 0, 1), order="C")
        else:
            weight = np.empty((outputs, inputs * shape.spots), dtype=np.float32)
            compiled().fedpmt_turn(weight.ctypes, stored.ctypes, *shape.turned, ctypes.c_int32(1))
        for name, own in zip(shape.names, (weight, bias[:outputs].copy()), strict=True):
            if name in names:
                trained[name] = torch.from_numpy(own)
    return trained


class Net:
    """A chain with its tensors, as C reads it; it must live as long as `structure` is in use."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        weights: Buffers,
        velocity: Buffers | None = None,
        shift: Buffers | None = None,
        gains: Sequence[float] = (),
    ) -> None:
        self.weights, self._held = weights, (velocity, shift)
        # An array of copies: what is set here is of this net alone.
        self._layers = (library.Layer * len(shapes))(*(shape.structure for shape in shapes))
        for layer, gain in zip(self._layers, gains, strict=False):
            layer.gain = gain  # its gradients count this many times
        nothing = [(None, None)] * len(shapes)
        self._values = (library.Values * len(shapes))(
            *(
                library.Values(*(None if one is None else one.ctypes.data for pair in pairs for one in pair))
                for pairs in zip(weights, velocity or nothing, shift or nothing, strict=True)
            )
        )
        self.structure = library.Net(ctypes.addressof(self._layers), ctypes.addressof(self._values))
