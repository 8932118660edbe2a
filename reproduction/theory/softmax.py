"""Softmax regression with an l2 penalty μ on synthetic(α, β), split in blocks of input features."""

from __future__ import annotations

import numpy as np

from fedpmt.data.sets.synthetic import CLASSES, SyntheticData
from fedpmt.seeds import generator
from reproduction.theory.problems import Problem


class Softmax(Problem):
    """F_k(w) = mean cross-entropy of device k's samples + (μ / 2) ‖w‖².

    A point holds the weights of the features one after the other, the bias last; a block is a group of
    neighbouring features, and the bias belongs to the last. Inputs are divided by one number, so that L is 1 + μ
    where devices keep their data. They keep a share `own` of it, and the rest is dealt out again at random; or,
    `pooled`, every device has the samples of all, which is what i.i.d. means in the theorem. F is the same in each.
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


def _deal(every: np.ndarray, kept: int, order: np.ndarray) -> np.ndarray:
    """The first `kept` samples of each device stay, the others change places."""
    rest = every[:, kept:]
    dealt = rest.reshape(-1, rest.shape[-1])[order].reshape(rest.shape)
    return np.concatenate([every[:, :kept], dealt], axis=1)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
