"""Objectives and metrics by name, and those that are made of what a user gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpmt.records import ACCURACY
from fedpmt.training.objective import (
    ACCURATE,
    CLASSIFICATION,
    Loss,
    Mean,
    Metric,
    Objective,
    Rows,
    class_rows,
    correct,
    cross_entropy,
    in_full,
    labels_of,
    logits_of,
)
from fedpmt.types import IGNORED, Arrays, SettingError

MetricLike: TypeAlias = "str | Metric | Callable[[Any, Arrays], Any] | Any"
"""A metric's name, a function of outputs and targets to a value for each sample, token or pixel or to a pair (values,
weights), of which the mean is the score, an object with `update(outputs, targets)` and `compute()`, or a `Metric`."""

Score: TypeAlias = "MetricLike | Mapping[str, MetricLike]"
Metrics: TypeAlias = "Mapping[str, MetricLike] | Iterable[str]"


def next_tokens(outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """Logits of shape (tokens, vocabulary) and the token that follows each."""
    logits, labels = logits_of(outputs), labels_of(targets)
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise SettingError(
            f"causal-lm needs logits (samples, tokens, vocabulary) and labels (samples, tokens) "
            f"(got shapes {tuple(logits.shape)} and {tuple(labels.shape)})"
        )
    return in_full(logits[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()


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
    return in_full(found), wanted


def next_token_loss(outputs: Any, targets: Arrays) -> Tensor:
    """The mean cross-entropy of each token given those before it; labels of -100 do not count."""
    return cross_entropy(*next_tokens(outputs, targets))


def next_token_correct(outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """1 for each token that is the likeliest one after those before it, and whether the token counts."""
    return correct(*next_tokens(outputs, targets))


def binary_cross_entropy(outputs: Any, targets: Arrays) -> Tensor:
    """The mean over all labels, each true or false; labels of -100 do not count."""
    logits, labels = aligned(outputs, targets)
    counted = (labels != IGNORED).to(logits.dtype)
    total = functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits.dtype), weight=counted, reduction="sum"
    )
    return total / counted.sum().clamp(min=1)


def squared_error(outputs: Any, targets: Arrays) -> Tensor:
    """The mean of (output - target)² over all entries."""
    found, wanted = aligned(outputs, targets)
    return functional.mse_loss(found, wanted.to(found.dtype))


class Sums:
    """Adds up what was measured, in double precision; `finish` makes a score of the sums."""

    def __init__(self, finish: Callable[[np.ndarray], float]) -> None:
        self._finish, self._total = finish, np.zeros(())

    def update(self, measured: Tensor) -> None:
        """Add a chunk."""
        self._total = self._total + measured.cpu().double().numpy()

    def compute(self) -> float:
        """Tell the score."""
        return float(self._finish(self._total))


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


def as_given(outputs: Any, targets: Arrays) -> tuple[Any, Arrays]:
    """Leave outputs and targets to the meter."""
    return outputs, targets


def make_metric(given: Any) -> Metric:
    """Make a metric of what a user gives: a function, an object with `update` and `compute`, or a `Metric`.

    Raises:
        SettingError: It is none of them.
    """
    if isinstance(given, Metric):
        return given
    if callable(getattr(given, "update", None)) and callable(getattr(given, "compute", None)):
        return Metric(as_given, partial(Updated, given))
    if not callable(given):
        raise SettingError(
            "metric must be a function, an object with update and compute, or a mapping from a name to one"
        )
    return Metric(given, Mean)


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
        "accuracy": ACCURATE,
        "macro-f1": Metric(class_counts, partial(Sums, macro_f1)),
        "micro-f1": Metric(class_counts, partial(Sums, micro_f1)),
        "perplexity": Metric(partial(item_losses, class_rows), partial(Mean, perplexity)),
    },
    "causal-lm": {
        "perplexity": Metric(partial(item_losses, next_tokens), partial(Mean, perplexity)),
        "accuracy": Metric(next_token_correct, Mean),
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


def _ready(name: str, loss: Loss, rows: Rows | None) -> Objective:
    score_name, score = next(iter(READY_MADE[name].items()))
    return Objective(loss, score, score_name, score_name not in LOWER_IS_BETTER, rows=rows)


OBJECTIVES = {
    "classification": CLASSIFICATION,
    "causal-lm": _ready("causal-lm", next_token_loss, next_tokens),
    "multi-label": _ready("multi-label", binary_cross_entropy, aligned),
    "regression": _ready("regression", squared_error, None),
}


def make_objective(
    loss: Loss | None = None,
    metric: Score | None = None,
    *,
    maximize: bool | None = None,
    metrics: Metrics | None = None,
    objective: str = "classification",
) -> Objective:
    """Make an objective of what a user gives.

    Args:
        loss: The mean loss of a batch; None: that of the ready-made objective.
        metric: The score: a name that the objective knows, a function or an object, which gives the score its name (a
            lambda's is "score"), or a mapping from a name to one; None: that of the ready-made objective.
        maximize: Whether a higher score is better; None: yes, but for names of which the opposite is known.
        metrics: Further metrics by name, or names that the objective knows.
        objective: classification, causal-lm, multi-label or regression; or custom, where the loss is given.

    Raises:
        SettingError: What was given is no metric, or can't be minimized or maximized.

    >>> make_objective(metric={"mse": lambda outputs, targets: (outputs - targets) ** 2}, maximize=False).score_name
    'mse'
    >>> make_objective(objective="regression", metrics=["mae"]).maximize
    False
    """
    kind = "classification" if objective == "custom" else objective
    if kind not in OBJECTIVES:
        raise SettingError.unknown("objective", objective, OBJECTIVES)
    if loss is not None and not callable(loss):
        raise SettingError(
            f"loss must be a function of outputs and targets (got {loss!r}); objective chooses a ready-made one, "
            'e.g. objective="regression" for the mean squared error'
        )
    ready = OBJECTIVES[kind]
    name, score = (ready.score_name, ready.score) if metric is None else _named(metric, kind)
    known = metric is None or isinstance(metric, str) or name == ACCURACY
    higher = name not in LOWER_IS_BETTER if known else maximize is not False
    if maximize is not None and maximize != higher:
        raise SettingError(f"maximize must be {str(higher).lower()} for {name} (got {str(maximize).lower()})")
    others = _further(metrics or {}, kind)
    if name in others:
        raise SettingError(f"metrics must not repeat the score ('{name}')")
    return Objective(
        ready.loss if loss is None else loss,
        score,
        name,
        higher,
        others,
        ready.rows if loss is None else None,
    )


def _named(metric: Any, kind: str) -> tuple[str, Metric]:
    if isinstance(metric, Mapping):
        if len(metric) != 1:
            raise SettingError(
                f"metric must have exactly one entry (got {len(metric)}); others go to metrics="
            )
        ((name, given),) = metric.items()
        return _checked_name(name), _find(given, kind)
    if isinstance(metric, str):
        return metric, _find(metric, kind)
    name = getattr(metric, "__name__", "score")
    return "score" if name == "<lambda>" else name, make_metric(metric)


def _further(metrics: Mapping[str, Any] | Iterable[str], kind: str) -> dict[str, Metric]:
    named = metrics if isinstance(metrics, Mapping) else {name: name for name in _listed(metrics)}
    return {_checked_name(name): _find(given, kind) for name, given in named.items()}


def _listed(metrics: Any) -> Iterable[str]:
    names = (
        [metrics] if isinstance(metrics, str) else list(metrics if isinstance(metrics, Iterable) else [None])
    )
    if not all(isinstance(name, str) for name in names):
        raise SettingError("metrics must be a mapping from names to metrics, or a list of names")
    return names


def _find(given: Any, kind: str) -> Metric:
    if not isinstance(given, str):
        return make_metric(given)
    if given not in READY_MADE[kind]:
        raise SettingError.unknown("metric", given, READY_MADE[kind])
    return READY_MADE[kind][given]


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise SettingError(f"metric must have a name that is not empty (got {name!r})")
    return name
