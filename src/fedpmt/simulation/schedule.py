"""How devices train, round by round."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedpmt.settings import parse_schedule
from fedpmt.training.local import LocalSettings
from fedpmt.training.optimizers import SGD, Adam
from fedpmt.training.privacy import Privacy

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.settings import Settings
    from fedpmt.training.optimizers import Optimizer


def learning_rate(schedule: str, base: float, round_index: int, rounds: int = 1, warmup: int = 0) -> float:
    """η_t for t = round_index + 1.

    >>> [round(learning_rate("inverse:9", 0.1, t), 4) for t in (0, 10)]
    [0.1, 0.05]
    >>> [round(learning_rate("step:2,0.5", 0.1, t), 4) for t in range(5)]
    [0.1, 0.1, 0.05, 0.05, 0.025]
    >>> [round(learning_rate("cosine", 0.1, t, rounds=4), 4) for t in range(4)]
    [0.1, 0.0854, 0.05, 0.0146]
    >>> [round(learning_rate("constant", 0.1, t, warmup=2), 4) for t in range(4)]
    [0.0333, 0.0667, 0.1, 0.1]
    """
    if round_index < warmup:
        # Linear, and never zero: a round at rate zero would be thrown away.
        return base * (round_index + 1) / (warmup + 1)
    name, numbers = parse_schedule(schedule)
    if name == "inverse":
        # Theorem 1: η_t = 2 / (μ ε (t + λ)); given as its value at t = 1.
        return base * (1 + numbers[0]) / (round_index + 1 + numbers[0])
    if name == "step":
        return base * float(numbers[1] ** (round_index // numbers[0]))
    if name == "cosine":
        floor = numbers[0] if numbers else 0.0  # as a share of the base
        part = (round_index - warmup) / max(1, rounds - warmup)
        return base * (floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, part))) / 2)
    return base


def make_optimizer(settings: Settings) -> Optimizer:
    """The optimizer on devices that settings name."""
    if settings.optimizer == "sgd":
        return SGD(settings.momentum, settings.nesterov, settings.weight_decay)
    return Adam(settings.weight_decay, decoupled=settings.optimizer == "adamw")


def local_settings(
    settings: Settings,
    round_index: int = 0,
    optimizer: Optimizer | None = None,
    rate: Callable[[int], float] | None = None,
) -> LocalSettings:
    """What the run's settings, or a user's own optimizer and rate, say about local training in this round."""
    if rate is None:
        found = learning_rate(settings.schedule, settings.lr, round_index, settings.rounds, settings.warmup)
    else:
        found = rate(round_index)
    return LocalSettings(
        settings.epochs,
        settings.batch,
        found,
        optimizer or make_optimizer(settings),
        settings.clip_norm,
        "cache" if settings.keeps_prefix else "recompute",
        None if settings.dp_clip is None else Privacy(settings.dp_clip, settings.dp_noise),
    )
