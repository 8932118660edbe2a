"""Differential privacy on the device: one clip over all it trained, and noise on what it trained.

What leaves the device is, with Δ = w_k - w over all trained entries together,

    w + Δ min(1, C / ‖Δ‖) + N(0, (z C)² I)

so that whatever data the device holds moves the mean of its reply by at most 2 C: the Gaussian mechanism, for the
device's whole data set. Where training has left the finite numbers, Δ is taken to be zero. Its loss does not travel.
Its number of samples, its part and its time do, and are not protected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fedpmt.training.local import LocalWork, Outcome, Rng, Run, Site, received
from fedpmt.types import MODEL, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part, Shapes
    from fedpmt.pricing.cost import Cost
    from fedpmt.training.messages import Capacity, Task
    from fedpmt.types import Examples

NOISE = "noise"
"""The purpose of the noise's generator; on a real device it must be one that nobody else can run again."""

SENSITIVITY = 2.0
"""In units of C: another data set may turn the clipped update around."""


def epsilon(noise: float, releases: int, delta: float) -> float:
    """ε of so many replies of one device at δ, by Rényi differential privacy, without amplification by sampling.

    One reply has RDP α ρ with ρ = 2² / (2 z²); T of them α T ρ; and ε = min_α α T ρ + log(1/δ) / (α - 1), which is

        T ρ + 2 √(T ρ log(1/δ))   at   α = 1 + √(log(1/δ) / (T ρ))

    >>> round(epsilon(noise=10.0, releases=5, delta=1e-5), 3)
    2.246
    """
    if noise == 0:
        return math.inf
    total = releases * SENSITIVITY**2 / (2 * noise**2)
    return total + 2 * math.sqrt(total * math.log(1 / delta))


@dataclass(frozen=True)
class PrivateWork(LocalWork[Any]):
    """Any local work that sends its trained tensors and nothing else, made private."""

    inner: LocalWork[Any]
    clip: float  # C
    noise: float  # z
    measures = ()

    def __post_init__(self) -> None:
        if type(self.inner).first is not LocalWork.first or self.inner.measures != LocalWork.measures:
            raise SettingError(
                f"dp-clip is refused: {type(self.inner).__name__} sends more than trained tensors"
            )

    @property
    def fast(self) -> bool:
        return False

    def choose(
        self, offer: tuple[Part, ...], device: Capacity, price: Callable[[Part], Cost], structure: Structure
    ) -> Part:
        return self.inner.choose(offer, device, price, structure)

    def start(self, site: Site, task: Task, part: Part, own: Any, data: Examples, rng: Rng) -> Run:
        run = self.inner.start(site, task, part, own, data, rng)
        run.memo[NOISE] = rng(NOISE)
        return run

    def loss(self, run: Run, batch: Examples, rng: Rng) -> Tensor:
        return self.inner.loss(run, batch, rng)

    def correct(self, run: Run, gradients: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        return self.inner.correct(run, gradients, step)

    def step(self, run: Run, gradients: dict[str, Tensor], velocity: dict[str, Tensor]) -> None:
        self.inner.step(run, gradients, velocity)

    def reply(self, run: Run, own: Any, data: Examples) -> tuple[Outcome, Any]:
        outcome, own = self.inner.reply(run, own, data)
        structure = run.site.models[run.part.model].structure
        sent, trained = received(run.task, run.part, structure), outcome.tensors[MODEL]
        changes = {name: tensor - sent[name] for name, tensor in trained.items()}  # Δ
        norm = math.sqrt(sum(float(change.double().square().sum()) for change in changes.values()))
        if not math.isfinite(norm):
            # No clip holds what is not a number: noise alone leaves the device.
            changes, norm = {name: torch.zeros_like(change) for name, change in changes.items()}, 0.0
        share = min(1.0, self.clip / norm) if norm else 1.0
        noisy = {
            name: sent[name] + (share * change + self.drawn(run, change)) for name, change in changes.items()
        }
        return replace(outcome, tensors={MODEL: noisy}), own

    def drawn(self, run: Run, like: Tensor) -> Tensor:
        """Noise for one tensor."""
        values = run.memo[NOISE].normal(scale=self.noise * self.clip, size=tuple(like.shape))
        return torch.from_numpy(values).to(like)

    def cost(self, part: Part, price: Callable[[Part], Cost]) -> Cost:
        return self.inner.cost(part, price)

    def upload(self, part: Part, structure: Structure) -> dict[str, Shapes]:
        found = self.inner.upload(part, structure)
        if set(found) != {MODEL}:
            raise SettingError(
                f"dp-clip is refused: {', '.join(sorted(set(found) - {MODEL}))} would travel too"
            )
        return found
