"""What is minimised and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.nn import functional

from fedpmt.records import ACCURACY
from fedpmt.training.batches import chunks
from fedpmt.training.metrics import LOWER_IS_BETTER, READY_MADE, Metric, make_metric
from fedpmt.training.outputs import aligned, class_rows, labels_of, next_tokens
from fedpmt.types import IGNORED, SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.types import Arrays, Examples

Loss: TypeAlias = "Callable[[Any, Arrays], Tensor]"
"""Maps what the model gave and the targets of a batch to the mean loss."""

MetricLike: TypeAlias = "str | Metric | Callable[[Any, Arrays], Any] | Any"
"""A metric's name, a function, an object with `update` and `compute`, or a `Metric`."""


Score: TypeAlias = "MetricLike | Mapping[str, MetricLike]"
Metrics: TypeAlias = "Mapping[str, MetricLike] | Iterable[str]"


def cross_entropy(outputs: Any, targets: Arrays) -> Tensor:
    """The mean over samples, tokens or pixels whose label is not -100; 0 where there is none."""
    return _mean_cross_entropy(*class_rows(outputs, targets))


def next_token_loss(outputs: Any, targets: Arrays) -> Tensor:
    """The mean cross-entropy of each token given those before it; labels of -100 do not count."""
    return _mean_cross_entropy(*next_tokens(outputs, targets))


def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    counted = (labels != IGNORED).sum().clamp(min=1)
    return functional.cross_entropy(logits, labels, reduction="sum") / counted


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


def _counted_labels(targets: Arrays) -> float:
    return float((labels_of(targets) != IGNORED).sum())


def _counted_next_labels(targets: Arrays) -> float:
    return float((labels_of(targets)[:, 1:] != IGNORED).sum())


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
    score: Metric = READY_MADE["classification"][ACCURACY]
    score_name: str = ACCURACY
    maximize: bool = True  # whether a higher score is better
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # reported with the score
    counted: Callable[[Arrays], float] | None = None  # what a mean loss is over; None: samples

    @property
    def plain(self) -> bool:
        """Whether the loss is the cross-entropy of classes, which compiled code and distillation know."""
        return self.loss is cross_entropy or self.loss is functional.cross_entropy

    def measure(self, outputs: Any, batch: Examples) -> Measured:
        """What a tally needs to know of a chunk; computed where the model runs."""
        counted = float(len(batch)) if self.counted is None else self.counted(batch.targets)
        # Torch's own mean over nothing is not a number.
        loss = float(self.loss(outputs, batch.targets)) * counted if counted else 0.0
        metrics = (self.score, *self.metrics.values())
        return Measured(loss, counted, tuple(metric.measure(outputs, batch.targets) for metric in metrics))


class Tally:
    """The loss, the score and the other metrics of a test set, from its chunks in order."""

    def __init__(self, objective: Objective) -> None:
        self._score, self._loss, self._counted = objective.score.start(), 0.0, 0.0
        self._metrics = {name: metric.start() for name, metric in objective.metrics.items()}

    def add(self, measured: Measured) -> None:
        """Add a chunk."""
        self._loss += measured.loss
        self._counted += measured.counted
        for meter, values in zip((self._score, *self._metrics.values()), measured.values, strict=True):
            meter.update(values)

    @property
    def loss(self) -> float | None:
        """The mean loss; None where nothing counts."""
        return self._loss / self._counted if self._counted else None

    @property
    def score(self) -> float:
        """The score of all chunks."""
        return self._score.compute()

    @property
    def metrics(self) -> dict[str, float]:
        """The other metrics by name."""
        return {name: meter.compute() for name, meter in self._metrics.items()}


def tally(objective: Objective, forward: Callable[[Arrays], Any], examples: Examples) -> Tally:
    """Judge what a forward pass makes of these examples."""
    found = Tally(objective)
    for span in chunks(examples):
        batch = examples.take(span)
        found.add(objective.measure(forward(batch.inputs), batch))
    return found


def _ready(name: str, loss: Loss, counted: Callable[[Arrays], float] | None) -> Objective:
    score_name, score = next(iter(READY_MADE[name].items()))
    return Objective(loss, score, score_name, score_name not in LOWER_IS_BETTER, counted=counted)


OBJECTIVES = {
    "classification": _ready("classification", cross_entropy, _counted_labels),
    "causal-lm": _ready("causal-lm", next_token_loss, _counted_next_labels),
    "multi-label": _ready("multi-label", binary_cross_entropy, _counted_labels),
    "regression": _ready("regression", squared_error, None),
}
CLASSIFICATION = OBJECTIVES["classification"]


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
        ready.counted if loss is None or loss is functional.cross_entropy else None,
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
