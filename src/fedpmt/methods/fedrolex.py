"""FedRolex: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", 2022.

A device of rate r trains a window of ⌈r n_l⌉ channels of every hidden layer. The window rolls on by one channel
a round, so that all channels are trained equally often whatever the devices can afford:

    I_l(t) = {(t + i) mod n_l : i < ⌈r n_l⌉}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.methods.slicing import SliceAveraging
from fedpmt.parts.width import rolling_channels

if TYPE_CHECKING:
    import numpy as np

    from fedpmt.methods.base import Round


@dataclass(frozen=True)
class FedRolex(SliceAveraging):
    """Rolling sub-models by width."""

    def channels(self, size: int, count: int, round: Round) -> np.ndarray:
        """I_l(t), rolled on by one channel a round."""
        return rolling_channels(size, count, round.index)
