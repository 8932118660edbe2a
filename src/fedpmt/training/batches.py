"""Samples as tensors on a compute device, in the layout that suits who computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fedpmt.types import Arrays, Examples

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

CPU = torch.device("cpu")

CHUNK = 500
"""Samples that a net answers at a time: fixed, so that sums are taken in one order however many workers there are."""


def placed(examples: Examples, device: torch.device = CPU) -> Examples:
    """The same samples as tensors on a device; without a copy where none is needed."""
    return Examples(_placed(examples.inputs, device), _placed(examples.targets, device), examples.ids)


def _placed(arrays: Arrays, device: torch.device) -> Arrays:
    if isinstance(arrays, Mapping):
        return {name: _placed(array, device) for name, array in arrays.items()}
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


def take_rows(examples: Examples, rows: np.ndarray) -> Examples:
    """Some samples, their layout in memory kept."""
    index = torch.from_numpy(rows)
    return Examples(_gathered(examples.inputs, index), _gathered(examples.targets, index), examples.ids[rows])


def _gathered(arrays: Arrays, index: Tensor) -> Arrays:
    if isinstance(arrays, Mapping):
        return {name: _gathered(array, index) for name, array in arrays.items()}
    return gather(arrays, index.to(arrays.device))


def gather(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor; channels-last stays so, which indexing alone would not keep."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return tensor.index_select(0, index)
