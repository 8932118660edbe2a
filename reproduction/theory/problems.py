"""Strongly convex problems with everything known exactly: what each offers, a quadratic, and softmax regression.

Arrays are batched: a point is the last axis, and every axis before it (arms, seeds, devices) is carried along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedpmt.data.sets.synthetic import CLASSES, SyntheticData
from fedpmt.seeds import generator
from fedpmt.types import SettingError

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
        return self.error(self.rest(levels))

    def pulled(self, pull: np.ndarray) -> float:
        """F - F* where these pulls of all devices at each block, (devices, blocks), balance."""
        return self.error(stationary(self, np.repeat(pull, self.blocks, axis=1), self.optimum))

    def error(self, point: np.ndarray) -> float:
        """F - F*, without what rounding leaves below zero."""
        return max(0.0, float(self.losses(point)) - self.minimum)


class Quadratic(Problem):
    """F_k(w) = (w - c_k)ᵀ H (w - c_k) / 2, with gradients blurred by N(0, σ²) in every entry.

    All blocks have the same size and the same curvatures, from μ to L. With `coupling` = 0, H is diagonal and
    blocks do not feel each other; else H is rotated by a turn of that angle between neighbours across blocks.
    `difference` is the deviation of the centres c_k: 0 makes the devices alike (i.i.d.). With `two_classes` it is that
    of the centres of ten classes, and c_k is the mean of two of them, those with neighbouring numbers.
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
        two_classes: bool = False,
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
        kinds = CLASSES if two_classes else devices
        self.centres = difference * rng.standard_normal((kinds, self.dimension))  # c_k
        if two_classes:
            held = np.arange(devices)[:, None] + np.arange(2)
            self.centres = self.centres[held % CLASSES].mean(axis=1)
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


class Softmax(Problem):
    """F_k(w) = mean cross-entropy of device k's samples + (μ / 2) ‖w‖².

    A point holds the weights of the features one after the other, the bias last; a block is a group of
    neighbouring features, and the bias belongs to the last. Inputs are divided by one number, so that L is 1 + μ
    where devices keep their data. They keep a share `own` of it, and the rest is dealt out again at random; or,
    `pooled`, every device has the samples of all, which is what i.i.d. means in the theorem. F is the same in each.
    With `two_classes` the samples are sorted by class instead, and each device has two of them, half of its samples
    each; F is another, since classes with few samples are repeated and those with many cut to fit.
    """

    def __init__(
        self,
        *,
        devices: int,
        blocks: int,
        alpha: float = 1.0,
        beta: float = 1.0,
        own: float = 1.0,
        pooled: bool = False,
        two_classes: bool = False,
        features: int = 11,
        samples: int = 100,
        batch: int = 4,
        regularisation: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.name = f"softmax on synthetic({alpha:g}, {beta:g})"
        self.devices, self.batch, self.regularisation, self.alike = devices, batch, regularisation, pooled
        data = SyntheticData(
            alpha=alpha, beta=beta, seed=seed, devices=devices, samples=samples, input_shape=(features,)
        )
        shards = [data.shard(device) for device in range(devices)]
        inputs = np.stack([np.asarray(shard.inputs, dtype=np.float64) for shard in shards])
        inputs = np.concatenate([inputs, np.ones((devices, samples, 1))], axis=-1)
        answers = np.eye(CLASSES)[np.stack([shard.targets for shard in shards])]
        inputs /= np.sqrt(_curvature(inputs))
        kept = round(own * samples)
        order = generator(seed, "theory/deal").permutation(devices * (samples - kept))
        inputs, answers = _deal(inputs, kept, order), _deal(answers, kept, order)
        if two_classes:
            held = _sort_by_class(answers.argmax(axis=-1))
            inputs, answers = (every.reshape(devices * samples, -1)[held] for every in (inputs, answers))
        if pooled:
            inputs, answers = (
                np.broadcast_to(
                    every.reshape(1, devices * samples, -1), (devices, devices * samples, every.shape[-1])
                )
                for every in (inputs, answers)
            )
        self.inputs, self.answers = inputs, answers  # x_{k,s}, y_{k,s} as unit vectors
        # Adding one vector to every class changes no probability: along it only μ bends the loss.
        self.strong_convexity = regularisation
        self.smoothness = _curvature(inputs[:1] if pooled else inputs) + regularisation
        groups = np.array_split(np.arange(features + 1), blocks)
        self.blocks = tuple(len(group) * CLASSES for group in groups)
        self.start = np.zeros((features + 1) * CLASSES)

    def _weights(self, points: np.ndarray) -> np.ndarray:
        return points.reshape(*points.shape[:-1], -1, CLASSES)

    def _shards(self, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The owners' samples; where all have the same, one copy for all."""
        chosen = 0 if self.alike else owners
        return self.inputs[chosen], self.answers[chosen]

    def local_losses(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """F_k."""
        inputs, answers = self._shards(owners)
        logits = inputs @ self._weights(points)
        logits -= logits.max(axis=-1, keepdims=True)
        right = (logits * answers).sum(axis=-1)
        entropy = (np.log(np.exp(logits).sum(axis=-1)) - right).mean(axis=-1)
        return np.asarray(entropy + self.regularisation / 2 * (points**2).sum(axis=-1))

    def local_gradients(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇F_k."""
        return self._gradients(points, *self._shards(owners))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """The samples of each mini-batch, drawn with replacement."""
        return rng.integers(self.inputs.shape[1], size=(*shape, self.batch))

    def noisy_gradients(self, points: np.ndarray, owners: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """∇F_k(·, ξ_k)."""
        chosen = owners[..., None]
        return self._gradients(points, self.inputs[chosen, draws], self.answers[chosen, draws])

    def _gradients(self, points: np.ndarray, inputs: np.ndarray, answers: np.ndarray) -> np.ndarray:
        wrong = _probabilities(inputs @ self._weights(points)) - answers
        slopes = np.swapaxes(inputs, -1, -2) @ wrong / inputs.shape[-2]
        return np.asarray(slopes.reshape(points.shape) + self.regularisation * points)

    def variances(self, points: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """The variance of one sample's gradient over the size of the batch."""
        inputs, answers = self._shards(owners)
        wrong = _probabilities(inputs @ self._weights(points)) - answers
        each = ((inputs**2).sum(axis=-1) * (wrong**2).sum(axis=-1)).mean(axis=-1)
        mean = np.swapaxes(inputs, -1, -2) @ wrong / inputs.shape[-2]
        return np.asarray((each - (mean**2).sum(axis=(-1, -2))) / self.batch)

    def hessians(self, point: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """∇²F_k = mean of x xᵀ ⊗ (diag(p) - p pᵀ), + μ."""
        every = []
        for inputs in self.inputs[owners]:
            chances = _probabilities(inputs @ self._weights(point))
            bends = chances[:, :, None] * np.eye(CLASSES) - chances[:, :, None] * chances[:, None, :]
            products = inputs[:, :, None] * inputs[:, None, :]
            table = np.tensordot(products, bends, axes=(0, 0)) / len(inputs)  # feature, feature, class, class
            every.append(table.transpose(0, 2, 1, 3).reshape(self.dimension, self.dimension))
        return np.array(every) + self.regularisation * np.eye(self.dimension)


def _curvature(inputs: np.ndarray) -> float:
    """The largest λ_max(mean x xᵀ) / 2 of a device: a softmax bends by at most 1/2 in its logits."""
    squares = np.swapaxes(inputs, -1, -2) @ inputs / inputs.shape[-2]
    return float(np.linalg.eigvalsh(squares).max()) / 2


def _sort_by_class(labels: np.ndarray) -> np.ndarray:
    """The samples that each device gets if all hold two classes: (devices, samples), numbers of pooled samples."""
    devices, samples = labels.shape
    pool, half = labels.reshape(-1), samples // 2
    counts = np.bincount(pool, minlength=CLASSES)
    # Halves of devices by class, about in proportion; no class has more than one half of every device.
    ends = np.round(2 * devices * np.cumsum(counts) / counts.sum()).astype(np.int64)
    halves = np.diff(ends, prepend=0)
    if halves.max() > devices:
        raise SettingError(f"two classes are refused: one class has {counts.max()} of {len(pool)} samples")
    runs = [np.resize(np.flatnonzero(pool == kind), (number, half)) for kind, number in enumerate(halves)]
    every = np.concatenate([run for run in runs if len(run)])
    return np.concatenate([every[:devices], every[devices:]], axis=1)


def _deal(every: np.ndarray, kept: int, order: np.ndarray) -> np.ndarray:
    """The first `kept` samples of each device stay, the others change places."""
    rest = every[:, kept:]
    dealt = rest.reshape(-1, rest.shape[-1])[order].reshape(rest.shape)
    return np.concatenate([every[:, :kept], dealt], axis=1)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
