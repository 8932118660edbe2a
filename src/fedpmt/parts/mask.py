"""Which single weights a model keeps: the greedy choice of most gain per time (PruneFL), or the largest (FIARSE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedpmt.parts.width import kept_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.models.structure import Structure


def prunable(structure: Structure) -> list[str]:
    """The tensors that can be pruned: biases and norms are few, and never are."""
    return [name for name in structure.parameters if len(structure.shapes[name]) > 1]


def largest_entries(sizes: Mapping[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
    """The mask of this share of all entries, the largest ones; at least one.

    >>> found = largest_entries({"a": np.array([3.0, 1.0]), "b": np.array([[2.0], [4.0]])}, 0.5)
    >>> found["a"].tolist(), found["b"].tolist()
    ([True, False], [[False], [True]])
    """
    together = np.concatenate([size.reshape(-1) for size in sizes.values()])
    count = kept_count(len(together), share)
    kept = np.zeros(len(together), dtype=bool)
    kept[np.argpartition(-together, count - 1)[:count]] = True
    ends = np.cumsum([size.size for size in sizes.values()])
    parts = zip(sizes.items(), np.split(kept, ends[:-1]), strict=True)
    return {name: own.reshape(size.shape) for (name, size), own in parts}


def rearranged(
    weights: Mapping[str, np.ndarray],
    masks: Mapping[str, np.ndarray],
    squares: Mapping[str, np.ndarray],
    times: Mapping[str, float],
    fixed: float,
    constant: float,
    drop: float,
    most: int,
) -> dict[str, np.ndarray]:
    """The mask of the highest Γ among those that keep all but the weakest active weights; at most `most` entries.

    `fixed` is Σ g² of what cannot be pruned, `constant` its time c.
    """
    kept = {name: strongest(weights[name], bits, drop) for name, bits in masks.items()}
    gain = fixed + sum(float(squares[name][bits].sum()) for name, bits in kept.items())
    time = constant + sum(times[name] * int(bits.sum()) for name, bits in kept.items())
    others = {name: np.flatnonzero(~bits) for name, bits in kept.items()}
    gains = np.concatenate([squares[name].reshape(-1)[places] for name, places in others.items()])
    prices = np.concatenate([np.full(len(places), times[name]) for name, places in others.items()])
    order = np.argsort(-gains / prices, kind="stable")
    room = max(0, most - sum(int(bits.sum()) for bits in kept.values()))
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[: min(room, worthwhile(gains[order], prices[order], gain, time))]] = True
    ends = np.cumsum([len(places) for places in others.values()])
    for (name, places), own in zip(others.items(), np.split(chosen, ends[:-1]), strict=True):
        kept[name].reshape(-1)[places[own]] = True
    return kept


def strongest(weight: np.ndarray, bits: np.ndarray, drop: float) -> np.ndarray:
    """The active entries without the share of them that is smallest in magnitude."""
    active = np.flatnonzero(bits)
    order = np.argsort(np.abs(weight.reshape(-1)[active]), kind="stable")
    kept = bits.copy()
    kept.reshape(-1)[active[order[: int(drop * len(active))]]] = False
    return kept


def worthwhile(gains: np.ndarray, prices: np.ndarray, gain: float, time: float) -> int:
    """How many of these, best first, are worth more per time than everything before them: g_j² / t_j > Γ.

    >>> worthwhile(np.array([9.0, 4.0, 1.0]), np.ones(3), gain=6.0, time=2.0)  # Γ: 3, 5
    1
    """
    gain_before = gain + np.concatenate([[0.0], np.cumsum(gains)])[:-1]
    time_before = time + np.concatenate([[0.0], np.cumsum(prices)])[:-1]
    better = gains * time_before > prices * gain_before
    return len(better) if better.all() else int(np.argmin(better))
