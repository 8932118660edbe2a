"""What is minimised and what is reported.

A metric has two halves. `measure(outputs, targets)` is called on each chunk of the test set, where the model runs and
in any order. What it gives goes to one meter, chunk after chunk in the order of the test set, and the meter tells the
score. So no outputs need to be held, and the bits don't depend on the number of workers. Objectives by name are in
`ready_made`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpmt.models.trees import map_tensors, tensors_in
from fedpmt.records import ACCURACY
from fedpmt.training.batches import chunks
from fedpmt.types import IGNORED, Arrays, Examples, SettingError

LABELS = "labels"

Loss: TypeAlias = Callable[[Any, Arrays], Tensor]
"""Maps what the model gave and the targets of a batch to the mean loss."""

Rows: TypeAlias = Callable[[Any, Arrays], tuple[Tensor, Tensor]]
"""Maps them to outputs and labels of single items: samples, tokens or pixels."""


def logits_of(outputs: Any) -> Tensor:
    """Find the logits in a model's outputs.

    They are a tensor itself, the field or key `logits`, or else the first tensor of a tuple, dict or dataclass.

    Raises:
        SettingError: There is no tensor in the outputs.

    >>> import torch
    >>> logits_of({"features": torch.zeros(2, 8), "logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    found = named if isinstance(named, Tensor) else next(tensors_in(outputs), None)
    if found is None:
        raise SettingError(f"the model's outputs must hold a tensor of logits (got {type(outputs).__name__})")
    return found


def with_logits(outputs: Any, logits: Tensor) -> Any:
    """The same outputs with other logits in their place."""
    own = logits_of(outputs)
    return map_tensors(outputs, lambda tensor: logits if tensor is own else tensor)


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
    if (
        isinstance(outputs, Tensor)
        and outputs.ndim == 2
        and isinstance(targets, Tensor)
        and targets.ndim == 1
    ):
        return outputs, targets
    logits, labels = logits_of(outputs), labels_of(targets)
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


def cross_entropy(outputs: Any, targets: Arrays) -> Tensor:
    """The mean over samples, tokens or pixels whose label is not -100; 0 where there is none."""
    logits, labels = class_rows(outputs, targets)
    counted = (labels != IGNORED).sum().clamp(min=1)
    return functional.cross_entropy(logits, labels, reduction="sum") / counted


def correct(outputs: Any, targets: Arrays) -> tuple[Tensor, Tensor]:
    """1 for each item whose largest logit is its label's, and whether the item counts."""
    logits, labels = class_rows(outputs, targets)
    return (logits.argmax(dim=-1) == labels).to(torch.float32), labels != IGNORED


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

    measure: Callable[[Any, Arrays], Any]  # outputs and targets of a chunk -> what the meter needs of it
    start: Callable[[], Meter]  # a new meter


@dataclass
class Mean:
    """The mean of all values, or a weighted one of pairs (values, weights); NaN where no weight counts."""

    finish: Callable[[float], float] = float  # makes the score of the mean
    total: float = 0.0
    weight: float = 0.0

    def update(self, measured: Tensor | tuple[Tensor, Tensor]) -> None:
        """Add a chunk."""
        values, weights = measured if isinstance(measured, tuple) else (measured, None)
        if not isinstance(values, Tensor) or not (weights is None or isinstance(weights, Tensor)):
            raise SettingError(
                "a metric must give a tensor of values, or a pair of tensors (values, weights)"
            )
        if values.ndim == 0:
            raise SettingError(
                "a metric must give a value for each sample, or (values, weights), not their mean"
            )
        if weights is None:
            self.total += float(values.cpu().double().sum())
            self.weight += values.numel()
            return
        if weights.shape != values.shape:
            raise SettingError(
                f"values and weights of a metric must have one shape "
                f"(got {tuple(values.shape)} and {tuple(weights.shape)})"
            )
        # Times zero would keep what is not finite, e.g. the loss of padding.
        values, weights = values.cpu().double(), weights.cpu().double()
        self.total += float((values * weights).where(weights != 0, 0).sum())
        self.weight += float(weights.sum())

    def compute(self) -> float:
        """Tell the score."""
        return float(self.finish(self.total / self.weight if self.weight else np.nan))


ACCURATE = Metric(correct, Mean)


@dataclass(frozen=True)
class Measured:
    """What an objective says of a chunk of the test set."""

    loss: float  # the sum over what counts
    counted: float
    values: tuple[Any, ...]  # of the score, then of each metric, for their meters


@dataclass(frozen=True)
class Objective:
    """A loss ℓ(w; z) averaged over a batch, and the metrics that are reported; all of them get what the model gave."""

    loss: Loss = cross_entropy
    score: Metric = ACCURATE
    score_name: str = ACCURACY
    maximize: bool = True  # whether a higher score is better
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # reported with the score
    rows: Rows | None = None  # the items that the loss is the mean of, but for labels of -100; None: samples

    @cached_property
    def plain(self) -> bool:
        """Whether the loss is the cross-entropy of classes, which compiled code and distillation know."""
        return self.loss is cross_entropy or self.loss is functional.cross_entropy

    def measure(self, outputs: Any, batch: Examples) -> Measured:
        """What `pool` needs to know of a chunk; computed where the model runs."""
        counted = float(len(batch))
        if self.rows is not None:
            counted = float((self.rows(outputs, batch.targets)[1] != IGNORED).sum())
        # Torch's own mean over nothing is not a number.
        loss = float(self.loss(outputs, batch.targets)) * counted if counted else 0.0
        metrics = (self.score, *self.metrics.values())
        return Measured(loss, counted, tuple(metric.measure(outputs, batch.targets) for metric in metrics))


@dataclass(frozen=True)
class Scores:
    """What an objective says of a test set."""

    score: float
    loss: float | None  # None where nothing counts
    metrics: dict[str, float]


def pool(objective: Objective, measured: Iterable[Measured], each: list[Any] | None = None) -> Scores:
    """Make scores of what was measured of all chunks, in order; `each` gets what was measured for the score."""
    meters = [metric.start() for metric in (objective.score, *objective.metrics.values())]
    loss = counted = 0.0
    for chunk in measured:
        loss, counted = loss + chunk.loss, counted + chunk.counted
        for meter, values in zip(meters, chunk.values, strict=True):
            meter.update(values)
        if each is not None:
            each.append(chunk.values[0])
    score, *others = [meter.compute() for meter in meters]
    metrics = dict(zip(objective.metrics, others, strict=True))
    return Scores(score, loss / counted if counted else None, metrics)


def judge(objective: Objective, forward: Callable[[Arrays], Any], examples: Examples) -> Scores:
    """Score what a forward pass makes of these examples."""
    batches = (examples.take(span) for span in chunks(examples))
    return pool(objective, (objective.measure(forward(batch.inputs), batch) for batch in batches))


CLASSIFICATION = Objective(rows=class_rows)
