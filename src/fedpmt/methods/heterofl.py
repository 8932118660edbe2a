"""HeteroFL: Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", 2021.

A device of rate r trains the first ⌈r n_l⌉ channels of every hidden layer, so that narrow models are nested in
wider ones, and every entry is averaged over the devices that trained it:

    w_j <- Σ_{k in C_j} w_{k,j} / |C_j|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.methods.slicing import SliceAveraging
from fedpmt.parts.width import first_channels

if TYPE_CHECKING:
    import numpy as np

    from fedpmt.methods.base import Round


@dataclass(frozen=True)
class HeteroFL(SliceAveraging):
    """Static nested sub-models by width."""

    def channels(self, size: int, count: int, round: Round) -> np.ndarray:
        """I_l = {0, .., ⌈r n_l⌉ - 1}, in every round."""
        return first_channels(size, count)
