"""Strongly convex problems with everything known exactly: what a test problem offers, and a quadratic.

Arrays are batched: a point is the last axis, and every axis before it (arms, seeds, devices) is carried along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.seeds import generator
from reproduction.theory.stationary import coverage, stationary

if TYPE_CHECKING:
    from collections.abc import Sequence


class Problem(ABC):
    """F = mean of F_k over the devices, parameters split in blocks; F* and F_k* are found to rounding."""

    name: str
    devices: int  # |K|
    alike: bool  # F_k = F on all devices: i.i.d. as the theorem means it
    blocks: tuple[int, ...]  # parameters of each block, first layer first
    strong_convexity: float  # μ
    smoothness: float  # L
    start: np.ndarray  # w^1

    @abstractmethod
    def local_losses(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """F_k at each point, k being its owner; `owners` has the shape of the points without the last axis."""

    @abstractmethod
    def local_gradients(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇F_k at each point."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Randomness for stochastic gradients: `shape` of them, with one axis more."""

    @abstractmethod
    def noisy_gradients(self, points: np.ndarray, owners: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """∇F_k(·, ξ_k) at each point."""

    @abstractmethod
    def variances(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """E‖∇F_k(·, ξ_k) - ∇F_k(·)‖² at each point, which δ_k² bounds."""

    @abstractmethod
    def hessians(self, point: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇²F_k at one point, for these devices: (devices, parameters, parameters)."""

    @property
    def dimension(self) -> int:
        """How many parameters there are, d."""
        return sum(self.blocks)

    @cached_property
    def everybody(self) -> np.ndarray:
        """The devices' numbers."""
        return np.arange(self.devices)

    def gradients(self, point: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇F_k at one point, for these devices."""
        return self.local_gradients(np.broadcast_to(point, (len(owners), self.dimension)), owners)

    def losses(self, points: np.ndarray) -> np.ndarray:
        """F at each point."""
        if self.alike:
            return self.local_losses(points, np.zeros(points.shape[:-1], dtype=np.int64))
        shape = (*points.shape[:-1], self.devices)
        spread = np.broadcast_to(points[..., None, :], (*shape, self.dimension))
        return np.asarray(self.local_losses(spread, np.broadcast_to(self.everybody, shape)).mean(axis=-1))

    @cached_property
    def optimum(self) -> np.ndarray:
        """w*."""
        if self.alike:
            return stationary(self, np.eye(self.devices)[:, :1], self.start)
        return stationary(self, np.full((self.devices, 1), 1 / self.devices), self.start)

    @cached_property
    def minimum(self) -> float:
        """F*."""
        return float(self.losses(self.optimum))

    @cached_property
    def local_minima(self) -> np.ndarray:
        """F_k*."""
        if self.alike:
            return np.full(self.devices, self.minimum)
        own = [stationary(self, np.eye(self.devices)[:, [k]], self.optimum) for k in range(self.devices)]
        return self.local_losses(np.array(own), self.everybody)

    @property
    def heterogeneity(self) -> float:
        """Λ = F* - mean of F_k*."""
        return max(0.0, self.minimum - float(self.local_minima.mean()))

    @property
    def distance(self) -> float:
        """Γ_1 = ‖w^1 - w*‖²."""
        return float(((self.start - self.optimum) ** 2).sum())

    def rest(self, levels: Sequence[int]) -> np.ndarray:
        """Where FedPMT with these fixed depths comes to rest: Σ_k A_k ∘ ∇F_k(w) = 0. It is w* when F_k = F."""
        if self.alike:
            return self.optimum
        return stationary(self, coverage(levels, self.blocks), self.optimum)

    def floor(self, levels: Sequence[int]) -> float:
        """F - F* there: the error that no number of rounds removes."""
        return max(0.0, float(self.losses(self.rest(levels))) - self.minimum)


class Quadratic(Problem):
    """F_k(w) = (w - c_k)ᵀ H (w - c_k) / 2, with gradients blurred by N(0, σ²) in every entry.

    All blocks have the same size and the same curvatures, from μ to L. With `coupling` = 0, H is diagonal and
    blocks do not feel each other; else H is rotated by a turn of that angle between neighbours across blocks.
    `difference` is the deviation of the centres c_k: 0 makes the devices alike (i.i.d.).
    """

    def __init__(
        self,
        *,
        devices: int,
        blocks: int,
        size: int,
        strong_convexity: float = 1.0,
        smoothness: float = 1.0,
        noise: float = 1.0,
        difference: float = 0.0,
        coupling: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.name = "quadratic"
        self.devices, self.blocks, self.alike = devices, (size,) * blocks, difference == 0
        self.strong_convexity, self.smoothness, self.noise = strong_convexity, smoothness, noise
        self.curvatures = np.tile(np.linspace(strong_convexity, smoothness, size), blocks)
        self.matrix = np.diag(self.curvatures)
        self.diagonal = coupling == 0
        if not self.diagonal:
            turn = _rotation(blocks, size, coupling)
            self.matrix = turn @ self.matrix @ turn.T
        rng = generator(seed, "theory/quadratic")
        self.centres = difference * rng.standard_normal((devices, self.dimension))  # c_k
        self.start = np.ones(self.dimension)

    def _slopes(self, offsets: np.ndarray) -> np.ndarray:
        return offsets * self.curvatures if self.diagonal else offsets @ self.matrix

    def local_losses(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """F_k."""
        offsets = points - self.centres[owners]
        return np.asarray((offsets * self._slopes(offsets)).sum(axis=-1) / 2)

    def local_gradients(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇F_k = H (w - c_k)."""
        # The long runs are i.i.d., and looking the same centre up a million times is a third of their time.
        return self._slopes(points if self.alike else points - self.centres[owners])

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """The blur of each gradient."""
        # Single precision halves the time of a long run; the blur need not be finer.
        return self.noise * rng.standard_normal((*shape, self.dimension), dtype=np.float32)

    def noisy_gradients(self, points: np.ndarray, owners: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """H (w - c_k) + blur."""
        return np.asarray(self.local_gradients(points, owners) + draws)

    def variances(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """σ² d everywhere."""
        return np.full(points.shape[:-1], self.noise**2 * self.dimension)

    def hessians(self, point: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """H on every device."""
        return np.broadcast_to(self.matrix, (len(owners), self.dimension, self.dimension))


def _rotation(blocks: int, size: int, angle: float) -> np.ndarray:
    """A turn by `angle` in each plane of an entry of one block and the next entry of the next block."""
    turn = np.eye(blocks * size)
    for block in range(blocks - 1):
        for entry in range(size):
            first, second = block * size + entry, (block + 1) * size + (entry + 1) % size
            plane = np.eye(blocks * size)
            plane[[first, second], [first, second]] = np.cos(angle)
            plane[first, second], plane[second, first] = -np.sin(angle), np.sin(angle)
            turn = turn @ plane
    return turn
