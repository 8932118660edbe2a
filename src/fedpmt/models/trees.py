"""Tensors inside of whatever modules are given and return: tuples, dicts, dataclasses, Hugging Face outputs."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Go through all tensors of a value, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for child in _children(value):
            yield from tensors_in(child)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Copy a value with every tensor replaced by `function(tensor)`, called in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        found = {key: map_tensors(child, function) for key, child in value.items()}
        if dataclasses.is_dataclass(value):
            # Hugging Face outputs are dicts and dataclasses at once: they are made from keywords.
            return type(value)(**found)
        if type(value) is dict or not isinstance(value, MutableMapping):
            return type(value)(found)  # type: ignore[call-arg]
        # A defaultdict, for one, is not made from a mapping.
        copied = copy.copy(value)
        copied.update(found)
        return copied
    if isinstance(value, tuple | list):
        children = [map_tensors(child, function) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: map_tensors(getattr(value, name), function) for name in fields}
        )
    return value


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the channels of each pixel lie side by side in memory."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.init:
                yield getattr(value, field.name)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """One number for all bits of a model."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        # As bytes, since NumPy has no bfloat16.
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
