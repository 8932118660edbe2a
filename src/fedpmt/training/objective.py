"""What is minimised and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional

from fedpmt.records import ACCURACY
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.types import Arrays

Loss: TypeAlias = "Callable[[Tensor, Arrays], Tensor]"
"""Maps outputs and targets of a batch to the mean loss."""

Metric: TypeAlias = "Loss | Mapping[str, Loss]"
"""Maps outputs and targets of a batch to one score per sample; as a mapping with one entry, under that name."""


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each sample whose largest logit is its label's."""
    return (outputs.argmax(dim=-1) == targets).to(torch.float32)


@dataclass(frozen=True)
class Objective:
    """A loss ℓ(w; z) averaged over a batch, and a score per sample whose mean is reported under its name."""

    loss: Callable[[Tensor, Arrays], Tensor] = functional.cross_entropy
    score: Callable[[Tensor, Arrays], Tensor] = correct
    score_name: str = ACCURACY
    maximize: bool = True  # whether a higher score is better


CLASSIFICATION = Objective()


def make_objective(
    loss: Loss | None = None, metric: Metric | None = None, *, maximize: bool = True
) -> Objective:
    """Make an objective of what a user gives.

    Args:
        loss: The mean loss of a batch; None: cross-entropy.
        metric: A function, whose name the score gets (a lambda's is "score"), or a mapping from that name to the
            function; None: the accuracy of the largest output.
        maximize: Whether a higher score is better.

    Raises:
        SettingError: The metric is not one function, or an accuracy is to be minimized.

    >>> make_objective(metric={"mse": lambda outputs, targets: (outputs - targets) ** 2}, maximize=False).score_name
    'mse'
    """
    name, score = _named(metric)
    if name == ACCURACY and not maximize:
        raise SettingError("maximize must be true for an accuracy; give a metric of your own to minimize it")
    return Objective(loss or CLASSIFICATION.loss, score, name, maximize)


def _named(metric: Metric | None) -> tuple[str, Loss]:
    if metric is None:
        return ACCURACY, CLASSIFICATION.score
    if isinstance(metric, Mapping):
        if len(metric) != 1:
            raise SettingError(f"metric must have exactly one entry (got {len(metric)})")
        ((name, score),) = metric.items()
    else:
        name, score = getattr(metric, "__name__", "score"), metric
    name = "score" if name == "<lambda>" else name
    if not callable(score) or not isinstance(name, str) or not name.strip():
        raise SettingError("metric must be a function, or a mapping from its name to the function")
    return name, score
