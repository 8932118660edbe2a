"""Updates as whole numbers modulo 2³²: what masks can hide, and what adds up exactly.

With R the reach of an entry, n devices, ā the largest weight and Q = ⌊(2³¹ - 1) / n⌋ steps on each side of zero:

    q_k = round(Q / R · a_k / ā · clip(Δ_k, ±R)),   Σ_C a_k Δ_k / Σ_C a_k ≈ R / Q · Σ_C q_k / (Σ_C a_k / ā)

The sum of n of them fits into 32 bits with a sign, and a device that did not train an entry adds exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Words: TypeAlias = "NDArray[np.uint32]"
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Scale:
    """How numbers become words; the same for all devices of a round."""

    reach: float  # R: larger entries of an update are cut to it
    devices: int  # n: how many are added up, at most
    unit: float  # ā: the largest weight of a device

    @property
    def levels(self) -> int:
        """Q: steps on each side of zero."""
        return LARGEST // self.devices

    def encode(self, update: NDArray[np.floating[Any]], weight: float) -> Words:
        """Encode one device's weighted update.

        >>> Scale(reach=1.0, devices=2, unit=10.0).encode(np.array([0.0, -1.0, 9.0]), weight=10.0)
        array([         0, 3221225473, 1073741823], dtype=uint32)
        """
        cut = np.clip(update.astype(np.float64), -self.reach, self.reach)
        steps = np.rint(cut * (weight / self.unit * self.levels / self.reach))
        return steps.astype(np.int64).astype(np.uint32)

    def mean(self, total: Words, weights: float) -> NDArray[np.float64]:
        """Decode a sum of words into the weighted mean; `weights` is the sum of the devices' weights."""
        return total.view(np.int32).astype(np.float64) * (self.reach / self.levels / (weights / self.unit))

    def error(self, devices: int, weights: float) -> float:
        """The largest error of an entry of the mean that rounding can cause, where no entry was cut.

        Each device rounds by half a step at most: |C| R / (2 Q) / (Σ_C a_k / ā), with equal weights about n R / 2³².
        """
        return devices * self.reach / (2 * self.levels) / (weights / self.unit)
