"""Scores of a whole test set, from chunks of it.

A metric has two halves. `measure(outputs, targets)` is called on each chunk, where the model runs and in any order.
What it gives goes to one meter, chunk after chunk in the order of the test set, and the meter tells the score. So no
outputs need to be held, and the bits don't depend on the number of workers. A user gives

    a function      of outputs and targets to a value for each sample, token or pixel, or to a pair (values, weights);
                    the score is their (weighted) mean over the whole test set
    an object       with `update(outputs, targets)` and `compute()`, as in torchmetrics: it sees every chunk
    a Metric        for anything else, e.g. `Metric(counts, lambda: Sums(f1_of_counts))`
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpmt.training.outputs import aligned, class_rows, next_tokens
from fedpmt.types import IGNORED, SettingError

if TYPE_CHECKING:
    from fedpmt.types import Arrays

Measure = Callable[[Any, Any], Any]


class Meter(Protocol):
    """Takes what was measured of each chunk, in order."""

    def update(self, measured: Any, /) -> None:
        """Add a chunk."""

    def compute(self) -> float:
        """Tell the score of all chunks."""
        ...


@dataclass(frozen=True)
class Metric:
    """A score of a whole test set."""

    measure: Measure  # outputs and targets of a chunk -> what the meter needs of it
    start: Callable[[], Meter]  # a new meter


class Sums:
    """Adds up what was measured, in double precision; `finish` makes a score of the sums."""

    def __init__(self, finish: Callable[[np.ndarray], float]) -> None:
        self._finish, self._total = finish, np.zeros(())

    def update(self, measured: Tensor) -> None:
        """Add a chunk."""
        self._total = self._total + _doubles(measured)

    def compute(self) -> float:
        """Tell the score."""
        return float(self._finish(self._total))


class Mean:
    """The mean of all values, or a weighted one of pairs (values, weights); NaN where no weight counts."""

    def __init__(self, finish: Callable[[float], float] = float) -> None:
        self._finish, self._total, self._weight = finish, 0.0, 0.0

    def update(self, measured: Tensor | tuple[Tensor, Tensor]) -> None:
        """Add a chunk."""
        values, weights = split_values(measured)
        if weights is None:
            self._total += float(values.sum())
            self._weight += values.size
        else:
            # Times zero would keep what is not finite, e.g. the loss of padding.
            self._total += float(np.where(weights != 0, values, 0.0).ravel() @ weights.ravel())
            self._weight += float(weights.sum())

    def compute(self) -> float:
        """Tell the score."""
        return float(self._finish(self._total / self._weight if self._weight else np.nan))


class Updated:
    """A copy of a user's object with `update` and `compute`, which sees outputs and targets themselves."""

    def __init__(self, own: Any) -> None:
        self._own = copy.deepcopy(own)
        if hasattr(self._own, "reset"):
            self._own.reset()

    def update(self, measured: tuple[Any, Any]) -> None:
        """Show it a chunk."""
        with torch.no_grad():
            self._own.update(*measured)

    def compute(self) -> float:
        """Ask it for its score."""
        return float(self._own.compute())


def split_values(measured: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Values, and their weights where there are any, as arrays in double precision."""
    values, weights = measured if isinstance(measured, tuple) else (measured, None)
    if not isinstance(values, Tensor) or not (weights is None or isinstance(weights, Tensor)):
        raise SettingError("a metric must give a tensor of values, or a pair of tensors (values, weights)")
    if values.ndim == 0:
        raise SettingError("a metric must give a value for each sample, or (values, weights), not their mean")
    if weights is not None and weights.shape != values.shape:
        raise SettingError(
            f"values and weights of a metric must have one shape "
            f"(got {tuple(values.shape)} and {tuple(weights.shape)})"
        )
    return _doubles(values), None if weights is None else _doubles(weights)


def _doubles(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().double().numpy()
    return array


def make_metric(given: Any) -> Metric:
    """Make a metric of what a user gives: a function, an object with `update` and `compute`, or a `Metric`.

    Raises:
        SettingError: It is none of them.
    """
    if isinstance(given, Metric):
        return given
    if callable(getattr(given, "update", None)) and callable(getattr(given, "compute", None)):
        return Metric(_as_given, partial(Updated, given))
    if not callable(given):
        raise SettingError(
            "metric must be a function, an object with update and compute, or a mapping from a name to one"
        )
    return Metric(given, Mean)


def _as_given(outputs: Any, targets: Arrays) -> tuple[Any, Arrays]:
    return outputs, targets


Rows = Callable[[Any, Any], tuple[Tensor, Tensor]]


def correct(rows: Rows, outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """1 for each item whose largest logit is its label's, and whether the item counts."""
    logits, labels = rows(outputs, targets)
    return (logits.argmax(dim=-1) == labels).to(torch.float32), labels != IGNORED


def item_losses(rows: Rows, outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each item, and whether the item counts."""
    logits, labels = rows(outputs, targets)
    return functional.cross_entropy(logits, labels, reduction="none"), labels != IGNORED


def class_counts(outputs: Any, targets: Arrays) -> Tensor:
    """For each class: how often it was predicted rightly, predicted, and true."""
    logits, labels = class_rows(outputs, targets)
    counted = labels != IGNORED
    labels, predicted, classes = labels[counted], logits.argmax(dim=-1)[counted], logits.shape[-1]
    found = (labels[labels == predicted], predicted, labels)
    return torch.stack([torch.bincount(one, minlength=classes) for one in found])


def label_counts(outputs: Any, targets: Arrays) -> Tensor:
    """The same for each of several labels that a sample may have at once: predicted where the logit is positive."""
    logits, labels = aligned(outputs, targets)
    counted, true = labels != IGNORED, labels > 0.5
    predicted = (logits > 0) & counted
    found = (predicted & true, predicted, true & counted)
    return torch.stack([one.reshape(-1, one.shape[-1]).sum(dim=0) for one in found])


def right_labels(outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """1 for each label of a sample that the sign of its logit tells, and whether the label counts."""
    logits, labels = aligned(outputs, targets)
    return ((logits > 0) == (labels > 0.5)).to(torch.float32), labels != IGNORED


def squared_errors(outputs: Any, targets: Arrays) -> Tensor:
    """(output - target)² of each entry."""
    found, wanted = aligned(outputs, targets)
    return (found - wanted) ** 2


def absolute_errors(outputs: Any, targets: Arrays) -> Tensor:
    """|output - target| of each entry."""
    found, wanted = aligned(outputs, targets)
    return (found - wanted).abs()


def micro_f1(counts: np.ndarray) -> float:
    """2 tp / (predicted + true), over all classes together."""
    right, predicted, true = counts.sum(axis=1)
    return float(2 * right / max(1.0, predicted + true))


def macro_f1(counts: np.ndarray) -> float:
    """The mean of 2 tp / (predicted + true) over the classes that are predicted or true anywhere."""
    right, predicted, true = counts[:, counts[1:].sum(axis=0) > 0]
    return float((2 * right / (predicted + true)).mean()) if right.size else 0.0


def perplexity(mean: float) -> float:
    """exp(mean loss); infinite where it is beyond what a number can hold."""
    with np.errstate(over="ignore"):
        return float(np.exp(mean))


READY_MADE: dict[str, dict[str, Metric]] = {
    "classification": {
        "accuracy": Metric(partial(correct, class_rows), Mean),
        "macro-f1": Metric(class_counts, partial(Sums, macro_f1)),
        "micro-f1": Metric(class_counts, partial(Sums, micro_f1)),
        "perplexity": Metric(partial(item_losses, class_rows), partial(Mean, perplexity)),
    },
    "causal-lm": {
        "perplexity": Metric(partial(item_losses, next_tokens), partial(Mean, perplexity)),
        "accuracy": Metric(partial(correct, next_tokens), Mean),
    },
    "multi-label": {
        "micro-f1": Metric(label_counts, partial(Sums, micro_f1)),
        "macro-f1": Metric(label_counts, partial(Sums, macro_f1)),
        "accuracy": Metric(right_labels, Mean),
    },
    "regression": {
        "mse": Metric(squared_errors, Mean),
        "mae": Metric(absolute_errors, Mean),
    },
}
"""The metrics that each objective knows by name; the first is its score."""

LOWER_IS_BETTER = frozenset({"perplexity", "mse", "mae"})
