"""Samples as tensors on a compute device, in the layout that suits who computes with them; moved there once."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from fedpmt.data.lazy import Lazy
from fedpmt.types import Arrays, Examples, Rows, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import Tensor

    from fedpmt.data.base import FederatedData

Transform: TypeAlias = "Callable[..., Arrays]"
"""Augments the inputs of a batch: `transform(inputs)`, or `transform(inputs, generator)` with torch's generator."""

CPU = torch.device("cpu")

CHUNK = 500
"""Samples that a net answers at a time: fixed, so that sums are taken in one order however many workers there are."""


def compute_device(name: str) -> torch.device:
    """The device of this name; `auto` takes an accelerator where there is one."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, here in present.items() if here)
    if not present[name]:
        there = ", ".join(kind for kind, here in present.items() if here)
        raise SettingError(f"device = '{name}' is refused: this machine has none (it has: {there})")
    # By its number: which one is the current one is each thread's own matter.
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def placed(examples: Examples, device: torch.device = CPU) -> Examples:
    """The same samples as tensors on a device; without a copy where none is needed."""
    return Examples(_placed(examples.inputs, device), _placed(examples.targets, device), examples.ids)


def _placed(arrays: Arrays, device: torch.device) -> Arrays:
    if isinstance(arrays, Mapping):
        return {name: _placed(array, device) for name, array in arrays.items()}
    if isinstance(arrays, torch.Tensor) or arrays.flags.writeable:
        return torch.as_tensor(arrays).to(device)
    with warnings.catch_warnings():
        # Samples are never written to, so that an array which cannot be, such as a file's, needs no copy.
        warnings.simplefilter("ignore", UserWarning)
        return torch.as_tensor(arrays).to(device)


def chunks(examples: Examples, size: int = CHUNK) -> list[slice]:
    """The spans of samples in which a net goes through all of them."""
    return [slice(start, start + size) for start in range(0, len(examples), size)]


def channels_last(tensor: Tensor) -> Tensor:
    """Images and filters channels-last, where convolutions and pooling are fastest; everything else as it is."""
    if tensor.ndim != 4:
        return tensor
    _, channels, height, width = tensor.shape
    # With one channel both layouts are the same numbers in memory, and torch goes by the strides alone.
    strides = (channels * height * width, 1, channels * width, channels)
    return tensor.contiguous(memory_format=torch.channels_last).as_strided(tensor.shape, strides)


def gather(arrays: Arrays, rows: np.ndarray) -> Arrays:
    """Rows of a tensor, or of each in a dict; channels-last stays so, which indexing alone would not keep."""
    if isinstance(arrays, Mapping):
        return {name: gather(array, rows) for name, array in arrays.items()}
    index = torch.from_numpy(rows).to(arrays.device)
    if arrays.ndim == 4 and arrays.is_contiguous(memory_format=torch.channels_last):
        return arrays.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return arrays.index_select(0, index)


@dataclass(frozen=True)
class PerSample:
    """A transform of single samples, for a whole batch.

    >>> import torch
    >>> PerSample(lambda sample: sample.flip(0))(torch.tensor([[1, 2], [3, 4]]))
    tensor([[2, 1],
            [4, 3]])
    """

    function: Callable[..., Arrays]  # of a sample's inputs, or of these and a generator

    def __call__(self, inputs: Arrays, *generator: torch.Generator) -> Arrays:
        """The batch, sample by sample."""
        if not isinstance(inputs, Mapping):
            return torch.stack([self.function(sample, *generator) for sample in inputs])
        count = len(next(iter(inputs.values())))
        rows = [{name: one[row] for name, one in inputs.items()} for row in range(count)]
        changed = [self.function(row, *generator) for row in rows]
        return {name: torch.stack([one[name] for one in changed]) for name in changed[0]}


def takes_generator(transform: Transform) -> bool:
    """Whether a transform wants a generator in addition to the inputs."""
    function = transform.function if isinstance(transform, PerSample) else transform
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function of C has none
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]
    return len(needed) > 1


def augmented(transform: Transform, batch: Examples, generator: torch.Generator) -> Examples:
    """The batch with other inputs."""
    drawn = (generator,) if takes_generator(transform) else ()
    inputs = transform(batch.inputs, *drawn)
    found = inputs if isinstance(inputs, Mapping) else {"": inputs}
    if not all(isinstance(one, torch.Tensor) and len(one) == len(batch) for one in found.values()):
        raise SettingError(
            f"transform must return the inputs of all {len(batch)} samples of a batch, as tensors"
        )
    return replace(batch, inputs=inputs)


class PlacedData:
    """A federation's data on the compute device: rows are moved once, and a shard is a gather of rows."""

    def __init__(
        self,
        data: FederatedData,
        device: torch.device,
        *,
        images_last: bool = False,
        score_on: Literal["test", "validation"] = "test",
    ) -> None:
        self._data, self._device, self._images_last = data, device, images_last
        everything = data.training_set()
        held = everything is not None and not isinstance(everything, Lazy)
        self._train = self._place(everything) if everything is not None and held else None
        scored = data.validation if score_on == "validation" and data.validation is not None else data.test
        self.test = self._place(scored)
        own = data.own_test
        self.own_test = None
        if own is not None:
            same = own.examples is scored
            self.own_test = replace(own, examples=self.test if same else self._place(own.examples))
        self.public = None if data.public is None else self._place(data.public)
        self.validation = None if data.validation is None else self._place(data.validation)

    def shard(self, device: int) -> Examples:
        """The samples of one device of the fleet."""
        rows = self._data.rows(device)
        if self._train is None or rows is None:
            return self._place(self._data.shard(device))
        return Rows.of(self._train, rows, gather)

    def _place(self, examples: Examples) -> Examples:
        if isinstance(examples, Lazy):
            return examples.placed(self._place)
        examples = placed(examples, self._device)
        if self._images_last and isinstance(examples.inputs, torch.Tensor):
            return replace(examples, inputs=channels_last(examples.inputs))
        return examples
