"""Where a weighted sum of local gradients vanishes: the optimum, local optima, and where fixed levels end up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_STEPS = 200
TOLERANCE = 1e-11


class Local(Protocol):
    """What Newton's method must know of the devices' objectives."""

    def gradients(self, point: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇F_k at one point, for these devices: (devices, parameters)."""

    def hessians(self, point: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇²F_k at one point: (devices, parameters, parameters)."""


def stationary(problem: Local, weights: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The w with Σ_k a_k ∘ ∇F_k(w) = 0, for weights a of shape (devices, parameters), by damped Newton steps."""
    owners = np.flatnonzero(weights.any(axis=1))
    weights = weights[owners]
    point = start
    residual = (weights * problem.gradients(point, owners)).sum(axis=0)
    for _ in range(MOST_STEPS):
        size = float(np.linalg.norm(residual))
        if size < TOLERANCE:
            return point
        jacobian = (weights[:, :, None] * problem.hessians(point, owners)).sum(axis=0)
        direction = np.linalg.solve(jacobian, residual)
        length = 1.0
        while True:
            candidate = point - length * direction
            ahead = (weights * problem.gradients(candidate, owners)).sum(axis=0)
            if np.linalg.norm(ahead) < size or length < 1e-6:
                break
            length /= 2
        if np.linalg.norm(ahead) >= size:  # nothing left but rounding
            return point
        point, residual = candidate, ahead
    return point


def coverage(levels: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
    """A_k of equation 7 for devices of these depths: (devices, parameters); `blocks` has the sizes, first layer first.

    A device of depth i trains the last i blocks.

    >>> coverage([1, 2], [1, 1])
    array([[0. , 0.5],
           [1. , 0.5]])
    """
    depth = np.asarray(levels)[:, None]
    trained = depth > len(blocks) - 1 - np.arange(len(blocks))
    counts = np.maximum(trained.sum(axis=0), 1)
    return np.repeat(trained / counts, blocks, axis=1)
