"""Differential privacy on the device: one clip over all it trained, and noise on what it trained.

What leaves the device is, with Δ = w_k - w over all trained entries together,

    Δ min(1, C / ‖Δ‖) + N(0, (z C)² I)

so that whatever data the device holds moves the mean of its reply by at most 2 C: the Gaussian mechanism, for the
device's whole data set. Where training has left the finite numbers, Δ is taken to be zero. Its loss does not travel.
Its number of samples, its part and its time do, and are not protected. Loads no torch until it is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedpmt.types import Tensors

NOISE = "noise"
"""The purpose of the noise's generator; on a real device it must be one that nobody else can run again."""

SENSITIVITY = 2.0
"""In units of C: another data set may turn the clipped update around."""


@dataclass(frozen=True)
class Privacy:
    """What a device does to its update before it sends it."""

    clip: float  # C
    noise: float  # z

    def protect(self, update: Tensors, rng: np.random.Generator) -> dict[str, Tensor]:
        """Clip an update and add noise to it."""
        import torch

        norm = math.sqrt(sum(float(change.cpu().double().square().sum()) for change in update.values()))
        if not math.isfinite(norm):
            # No clip holds what is not a number: noise alone leaves the device.
            update, norm = {name: torch.zeros_like(change) for name, change in update.items()}, 0.0
        share = min(1.0, self.clip / norm) if norm else 1.0
        return {name: self._noised(share, change, rng) for name, change in update.items()}

    def _noised(self, share: float, change: Tensor, rng: np.random.Generator) -> Tensor:
        import torch

        values = rng.normal(scale=self.noise * self.clip, size=tuple(change.shape))
        # Rounded to 16 bits only as a whole: what becomes of a noisy number is nobody's secret any more.
        wide = change.to(torch.promote_types(change.dtype, torch.float32))
        return (share * wide + torch.from_numpy(values).to(wide)).to(change.dtype)


def epsilon(noise: float, releases: int, delta: float) -> float:
    """ε of `releases` replies of one device at δ, by Rényi differential privacy, without amplification by sampling.

    One reply has RDP α ρ with ρ = 2² / (2 z²); T of them α T ρ; and ε = min_α α T ρ + log(1/δ) / (α - 1), which is

        T ρ + 2 √(T ρ log(1/δ))   at   α = 1 + √(log(1/δ) / (T ρ))

    >>> round(epsilon(noise=10.0, releases=5, delta=1e-5), 3)
    2.246
    """
    if noise == 0:
        return math.inf
    total = releases * SENSITIVITY**2 / (2 * noise**2)
    return total + 2 * math.sqrt(total * math.log(1 / delta))
