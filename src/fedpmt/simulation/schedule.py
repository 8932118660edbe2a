"""How devices train, round by round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.settings import parse_schedule
from fedpmt.training.local import LocalSettings

if TYPE_CHECKING:
    from fedpmt.settings import Settings


def learning_rate(schedule: str, base: float, round_index: int) -> float:
    """η_t for t = round_index + 1.

    >>> [round(learning_rate("inverse:9", 0.1, t), 4) for t in (0, 10)]
    [0.1, 0.05]
    >>> [round(learning_rate("step:2,0.5", 0.1, t), 4) for t in range(5)]
    [0.1, 0.1, 0.05, 0.05, 0.025]
    """
    name, numbers = parse_schedule(schedule)
    if name == "inverse":
        # Theorem 1: η_t = 2 / (μ ε (t + λ)); given as its value at t = 1.
        return base * (1 + numbers[0]) / (round_index + 1 + numbers[0])
    if name == "step":
        return base * float(numbers[1] ** (round_index // numbers[0]))
    return base


def local_settings(settings: Settings, round_index: int = 0) -> LocalSettings:
    """What the run's settings say about local training in this round."""
    return LocalSettings(
        settings.epochs,
        settings.batch,
        learning_rate(settings.schedule, settings.lr, round_index),
        settings.momentum,
        settings.weight_decay,
        "cache" if settings.keeps_prefix else "recompute",
    )
