"""Lower precision than the weights have: autocast for layers that train, 16 or 8 bits for what no gradient passes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedpmt.models.finding import is_inside
from fedpmt.models.layered import INPUTS, KEPT
from fedpmt.models.trees import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import FrozenPrecision, TrainedPrecision
    from fedpmt.types import Arrays, Tensors

VALUES, SCALE = "values", "scale"
GROUP = 64
"""Numbers that share a scale, at least: then scales take no more than a sixteenth of what they are for."""

LARGEST = 127
"""Of the whole numbers in 8 bits, with the same number of them on both sides of zero."""


def computing(precision: TrainedPrecision | FrozenPrecision, inputs: Arrays) -> AbstractContextManager[Any]:
    """Compute what follows in this precision, on the device of the inputs; weights stay as they are."""
    kind = next((tensor.device.type for tensor in tensors_in(inputs)), "cpu")
    lower = precision == "bf16"
    if not lower and not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, torch.bfloat16, enabled=lower)


@dataclass(frozen=True)
class Prefix:
    """The layers before a cut, which no gradient passes: how they run, and how what they answer is kept.

    bf16: they run under autocast, and 16 bits are kept of each number. int8: the weights of linear layers and
    convolutions are rounded to 8 bits, with a scale for each output channel, and 8 bits are kept of each number, with a
    scale for each token or channel. What the others are trained on is the same whether it is kept for a round or made
    for each batch.
    """

    model: LayeredModel
    cut: int
    tensors: Tensors
    precision: FrozenPrecision = "fp32"
    base: Prefix | None = None  # what runs before the first layer, where its outputs are kept
    streamed: bool = False  # whether only one block's weights are held at a time; they are rounded then
    first: int = 0  # of a block: the layer it begins with
    final: bool = True  # of a block: whether it is the last one, whose outputs are kept

    @classmethod
    def of(
        cls,
        model: LayeredModel,
        cut: int,
        received: Tensors,
        precision: FrozenPrecision,
        base: Prefix | None = None,
        *,
        streamed: bool = False,
    ) -> Prefix:
        """The first `cut` layers with the weights that a device received."""
        if streamed:
            return cls(model, cut, received, precision, base, streamed=True)
        rounded = rounded_weights(model, cut, received) if precision == "int8" else {}
        return cls(model, cut, {**received, **rounded}, precision, base)

    def blocks(self) -> Iterator[Prefix]:
        """Give what runs one after another: all of it, or where it is streamed as few layers at a time as can be cut.

        Each block has its own weights only, taken when it is asked for.
        """
        if not self.streamed:
            yield self
            return
        for first, last in block_ends(self.model, self.cut, has_base=self.base is not None):
            names = read_tensors(self.model, first, last)
            tensors = {name: self.tensors[name] for name in names if name in self.tensors}
            if self.precision == "int8":
                tensors |= rounded_weights(self.model, last, tensors, first)
            yield replace(self, cut=last, tensors=tensors, first=first, final=last == self.cut)
            # Else they would be held while the next ones are loaded.
            del tensors
            self.model.unbind()

    def run(self, inputs: Arrays, before: Arrays | None = None) -> Arrays:
        """What the other layers need of these, as it is kept: one row per sample.

        Inputs are samples, or what was kept of the base's outputs together with them. A block that is not the first
        runs on what the one `before` it gave.
        """
        if before is None and self.base is not None:
            before = self.base.restore(inputs)[KEPT]
        with computing(self.precision, inputs):
            kept = self.model.prefix(self.cut, self.tensors, self._samples(inputs), before, self.first)
        return map_tensors(kept, self._lowered) if self.final and self.precision != "fp32" else kept

    def entry(self, kept: Arrays, inputs: Arrays) -> Arrays:
        """What was kept of these inputs, in the form in which it enters the layers from the cut on."""
        return self.model.entry(kept, self._samples(inputs))

    def enter(self, inputs: Arrays) -> Arrays:
        """What the layers from the cut on take, made of these inputs now."""
        return self.restore(self.entry(self.run(inputs), inputs))

    def _samples(self, inputs: Arrays) -> Arrays:
        return inputs if self.base is None else inputs[INPUTS]

    def restore(self, entry: Arrays) -> Arrays:
        """Turn what was kept of samples back into what the layers from the cut on take; 16 bits they take as is."""
        if self.precision != "int8":
            return entry
        if self.model.composable:
            return _widened(entry)
        return {**entry, KEPT: {name: _widened(one) for name, one in entry[KEPT].items()}}

    def _lowered(self, rows: Tensor) -> Any:
        if not rows.is_floating_point():
            return rows
        if self.precision == "bf16":
            return rows.to(torch.bfloat16)
        wide = rows.float()
        scale = _scale(wide, _last_axes(rows.shape))
        return {VALUES: (wide / scale).round().to(torch.int8), SCALE: scale}


def _widened(stored: Arrays) -> Arrays:
    return stored[VALUES] * stored[SCALE] if isinstance(stored, Mapping) else stored


def _last_axes(shape: torch.Size) -> list[int]:
    """The last axes of rows, as many as it takes to hold numbers enough for a scale; never that of the rows.

    >>> _last_axes(torch.Size([50, 20, 768])), _last_axes(torch.Size([50, 16, 14, 14]))
    ([2], [3, 2])
    """
    axes: list[int] = []
    while len(axes) < len(shape) - 1 and math.prod(shape[axis] for axis in axes) < GROUP:
        axes.append(len(shape) - 1 - len(axes))
    return axes


def block_ends(model: LayeredModel, cut: int, *, has_base: bool) -> list[tuple[int, int]]:
    """Where the layers before a cut can be run apart: first and last of each block, the last not in it.

    A base runs alone, before the first layer; with `has_base` it has run already.
    """
    ends = [place for place in range(int(has_base), cut) if model.can_cut(place)]
    return list(pairwise([0, *ends, cut]))


def read_tensors(model: LayeredModel, first: int, last: int) -> list[str]:
    """The tensors that layers `first` to `last - 1` read: their own, then those that belong to others."""
    layout, layers = model.layout, model.structure.layers[first:last]
    own = [name for layer in layers for name in layer.tensors]
    paths = [path for stage in layout.stages[first:last] for path in stage.paths]
    shared = [
        name
        for name in model.structure.tensors
        if len(layout.aliases[name]) > 1 and any(is_inside(one, paths) for one in layout.aliases[name])
    ]
    return list(dict.fromkeys([*own, *shared]))


def rounded_weights(model: LayeredModel, cut: int, received: Tensors, first: int = 0) -> dict[str, Tensor]:
    """The weights of linear layers and convolutions before a cut, as 8 bits hold them; of a base only with layer 0."""
    tensors = {**model.fixed(), **received}
    names = {alias: name for name, aliases in model.layout.aliases.items() for alias in aliases}
    found = {}
    for path, module in model.module.named_modules():
        for attribute, axis in _matrices(module):
            name = names.get(f"{path}.{attribute}" if path else attribute)
            if name in tensors and (first or -1) <= model.layout.owners[name] < cut:
                found[name] = round_weight(tensors[name], axis)
    return found


def _matrices(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The weights of a module that multiply what it is given, each with the axis of its output channels."""
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        yield "weight", int(isinstance(module, nn.modules.conv._ConvTransposeNd))
    elif isinstance(module, nn.MultiheadAttention):
        for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            yield attribute, 0
    elif type(module).__name__ == "Conv1D":  # a linear layer of Hugging Face's, with the other order of axes
        yield "weight", 1


@torch.no_grad()
def round_weight(weight: Tensor, axis: int) -> Tensor:
    """Round a weight to 8 bits, with a scale for each of its output channels.

    >>> round_weight(torch.tensor([[127.0, 1.4], [254.0, 2.8]]), 0)
    tensor([[127.,   1.],
            [254.,   2.]])
    """
    wide = weight.float()
    scale = _scale(wide, [other for other in range(wide.ndim) if other != axis])
    return ((wide / scale).round() * scale).to(weight.dtype)


def _scale(values: Tensor, axes: list[int]) -> Tensor:
    """What the largest whole number stands for; where all values are zero, anything."""
    largest = values.abs().amax(axes, keepdim=True) if axes and values.numel() else values.abs()
    return largest.clamp_min(torch.finfo(values.dtype).tiny * LARGEST) / LARGEST
