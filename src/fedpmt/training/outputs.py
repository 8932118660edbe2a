"""Logits and labels in what a model gave and in targets of any kind. Loads no torch by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.types import Arrays

LABELS = "labels"


def logits_of(outputs: Any) -> Tensor:
    """Find the logits in a model's outputs.

    They are a tensor itself, the field or key `logits`, or else the first tensor of a tuple, dict or dataclass.

    Raises:
        SettingError: There is no tensor in the outputs.

    >>> import torch
    >>> logits_of({"features": torch.zeros(2, 8), "logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    from torch import Tensor

    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    for found in (named, *_entries(outputs)):
        if isinstance(found, Tensor):
            return found
    raise SettingError(f"the model's outputs must hold a tensor of logits (got {type(outputs).__name__})")


def with_logits(outputs: Any, logits: Tensor) -> Any:
    """The same outputs with other logits in their place."""
    own = logits_of(outputs)
    if own is outputs:
        return logits
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        fields = [field.name for field in dataclasses.fields(outputs)]
        return dataclasses.replace(
            outputs, **{name: logits for name in fields if getattr(outputs, name) is own}
        )
    if isinstance(outputs, Mapping):
        return {name: logits if entry is own else entry for name, entry in outputs.items()}
    changed = [logits if entry is own else entry for entry in _entries(outputs)]
    if not isinstance(outputs, tuple | list):
        raise SettingError(f"logits can't be replaced in outputs of type {type(outputs).__name__}")
    return type(outputs)(*changed) if hasattr(outputs, "_fields") else type(outputs)(changed)


def count_outputs(outputs: Any) -> int:
    """How many numbers a model gave."""
    from torch import Tensor

    if isinstance(outputs, Tensor):
        return outputs.numel()
    return sum(count_outputs(entry) for entry in _entries(outputs))


def _entries(outputs: Any) -> Iterable[Any]:
    if isinstance(outputs, Mapping):
        return outputs.values()
    if isinstance(outputs, tuple | list):
        return outputs
    if dataclasses.is_dataclass(outputs):
        return [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
    return ()


def labels_of(targets: Arrays) -> Any:
    """Find the labels in targets: an array itself, the entry `labels` of a dict, or its only entry.

    Raises:
        SettingError: A dict has several entries and none is called `labels`.
    """
    if not isinstance(targets, Mapping):
        return targets
    if LABELS in targets:
        return targets[LABELS]
    if len(targets) != 1:
        raise SettingError(
            f"targets must have an entry 'labels' for a ready-made objective (got {', '.join(targets)}); "
            "give loss= and metric= of your own"
        )
    return next(iter(targets.values()))


def class_rows(outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """Logits of shape (items, classes) and a label for each item: a sample, a token or a pixel.

    Classes are on the last axis of the logits, or on the second one, as in images.

    Raises:
        SettingError: The logits have no axis more than the labels.
    """
    logits, labels = logits_of(outputs), labels_of(targets)
    if logits.ndim == 2 and labels.ndim == 1 and len(logits) == len(labels):
        return logits, labels
    shape = tuple(logits.shape)
    last, second = shape[:-1] == tuple(labels.shape), (shape[:1] + shape[2:]) == tuple(labels.shape)
    if not last and not second:
        raise SettingError(
            f"classification needs logits with one more axis than the labels "
            f"(got shapes {shape} and {tuple(labels.shape)})"
        )
    # Both fit where sizes agree by chance: classes of tokens come last, those of pixels second.
    if second and not (last and logits.ndim == 3):
        logits = logits.movedim(1, -1)
    return logits.flatten(0, -2), labels.flatten()


def next_tokens(outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """Logits of shape (tokens, vocabulary) and the token that follows each."""
    logits, labels = logits_of(outputs), labels_of(targets)
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise SettingError(
            f"causal-lm needs logits (samples, tokens, vocabulary) and labels (samples, tokens) "
            f"(got shapes {tuple(logits.shape)} and {tuple(labels.shape)})"
        )
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def aligned(outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """Outputs and targets in one shape, so that neither is broadcast; (n, 1) goes with (n,)."""
    found, wanted = logits_of(outputs), labels_of(targets)
    if found.shape != wanted.shape:
        if found.squeeze(-1).shape != wanted.squeeze(-1).shape:
            raise SettingError(
                f"outputs and targets must have one shape "
                f"(got {tuple(found.shape)} and {tuple(wanted.shape)})"
            )
        wanted = wanted.reshape(found.shape)
    return found, wanted
