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
    from collections.abc import Collection, Mapping, Sequence

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
            bias_gain=1.0,
        )

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int]]:
        """Those of its weight and its bias."""
        window = self.kernel if self.convolution else ()
        inputs = self.own_inputs * (1 if self.convolution else self.spots)
        return (self.own_outputs, inputs, *window), (self.own_outputs,)

    def blank(self) -> tuple[np.ndarray, np.ndarray]:
        """Weight and bias in the layout of the compiled code, all zero."""
        if self.convolution:
            size: tuple[int, ...] = (*self.kernel, self.inputs, self.outputs)
        else:
            size = self.spots, self.inputs // self.spots, self.outputs
        return _aligned(size), _aligned((self.outputs,))


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


class Net:
    """A chain with room for its tensors, as C reads it.

    The next call lays out the tensors that were given, and writes those that are wanted. Until then they are held in
    `given`, which whoever made that call empties.
    """

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        count = len(shapes)
        self.shapes = shapes
        self._layers = (library.Layer * count)(*(shape.structure for shape in shapes))
        self._values = (library.Values * count)()
        self.structure = library.Net(ctypes.addressof(self._layers), ctypes.addressof(self._values))
        self._weights: list[np.ndarray] = []
        for shape, values in zip(shapes, self._values, strict=True):
            self._weights += (own := shape.blank())
            values.weights, values.biases = (one.ctypes.data for one in own)
        self._velocity: list[np.ndarray] = []
        self._shift: Net | None = None
        self.given: list[Tensor] = []
        # Of each layer, its tensors and their versions; None where the weights were written to since. An id is a
        # tensor's own for as long as there is a reference to it.
        self._marks: list[list[tuple[int, int]] | None] = [None] * count
        self._refs: list[list[ref[Tensor]]] = [[] for _ in shapes]

    def give(self, tensors: Tensors, frozen: int = 0) -> None:
        """Say what the weights are from the next call on.

        Layers before `frozen` are not written to by it: they are left alone where they hold these very tensors already.
        """
        if self.given:  # by a call that never came
            self._marks = [None] * len(self.shapes)
        self.given = []
        for number, (shape, values) in enumerate(zip(self.shapes, self._values, strict=True)):
            own = [tensors[name] for name in shape.names if name in tensors]
            refs, marks = [ref(one) for one in own], None
            if not any(one.is_inference() for one in own):  # these do not count their versions
                marks = [(id(one), tensor._version) for one, tensor in zip(refs, own, strict=True)]
            values.given = values.given_bias = values.wanted = values.wanted_bias = None
            if number >= frozen or marks is None or marks != self._marks[number]:
                held = [one.detach().contiguous() for one in own]
                self.given += held
                values.given = held[0].data_ptr()
                values.given_bias = held[1].data_ptr() if shape.biased else None
            self._refs[number], self._marks[number] = refs, marks if number < frozen else None

    def train(
        self,
        factors: Mapping[str, float],
        wanted: Collection[str] = (),
        *,
        fixed: Collection[str] = (),
        moving: bool = False,
        shift: Tensors | None = None,
    ) -> dict[str, Tensor]:
        """Say how the next call trains, and make room for the tensors that it is to hand back.

        Args:
            factors: What weights are multiplied by in the forward pass, where it is not one.
            wanted: The names of those that are handed back.
            fixed: The names of those that stay as they are, although a layer before them is trained.
            moving: Whether there is momentum.
            shift: What each step adds.
        """
        if moving and not self._velocity:
            self._velocity = [array for shape in self.shapes for array in shape.blank()]
        if shift:
            self._shift = self._shift or Net(self.shapes)
            self._shift.give(shift)
            compiled().fedpmt_lay_out(ctypes.byref(self._shift.structure), ctypes.c_int32(len(self.shapes)))
            self._shift.given.clear()
        found: dict[str, Tensor] = {}
        for number, (shape, values) in enumerate(zip(self.shapes, self._values, strict=True)):
            # Weights here are the factor times the device's own, so that each step is the factor's square longer.
            layer = self._layers[number]
            layer.gain, layer.bias_gain = (
                0.0 if name in fixed else factors.get(name, 1.0) ** 2 for name in shape.names
            )
            laid = self._shift._values[number] if shift and self._shift is not None else library.Values()
            values.shift, values.bias_shift = (
                None if name in fixed else given
                for name, given in zip(shape.names, (laid.weights, laid.biases), strict=True)
            )
            own = self._velocity[2 * number : 2 * number + 2] if moving else ()
            values.velocity, values.bias_velocity = [one.ctypes.data for one in own] or (None, None)
            for name, field, size in zip(shape.names, ("wanted", "wanted_bias"), shape.sizes, strict=True):
                if name in wanted:
                    # NumPy's memory, for the reason given where sums are made.
                    found[name] = torch.from_numpy(np.empty(size, dtype=np.float32))
                    setattr(values, field, found[name].data_ptr())
        return found

    def clear(self, *, weights: bool) -> None:
        """Set velocities to zero, and with `weights` these, too."""
        for array in (*self._velocity, *(self._weights if weights else ())):
            array.fill(0)


_own = threading.local()


def own_net(shapes: tuple[Shape, ...], place: str = "") -> Net:
    """This thread's net for one purpose: new memory for every device would cost more than what is copied there."""
    known: Net | None = _own.__dict__.get(place)
    if known is None or known.shapes != shapes:
        known = _own.__dict__[place] = Net(shapes)
    return known
