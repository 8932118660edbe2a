"""The one coverage-weighted mean of the repository (equation 7 of the paper, per entry).

With C_j the devices that trained entry j and a_k the weight of device k:

    overlap:  w_j <- w_j + Σ_{k in C_j} a_k (w_kj - w_j) / Σ_{k in C_j} a_k
    fill:     w_j <- w_j + Σ_{k in C_j} a_k (w_kj - w_j) / Σ_{k in S} a_k
    zero:     w_j <- Σ_{k in C_j} a_k w_kj / Σ_{k in S} a_k,  where somebody trained the tensor at all

It is computed from differences, so that an entry nobody trained, or that training did not change, keeps
its bits, and "everybody trains everything" is FedAvg to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from fedpmt.submodel.part import Whole, add_at, take

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.submodel.part import Part
    from fedpmt.types import Tensors

Rule = Literal["overlap", "fill", "zero"]
BLOCK = 2**18
"""Entries at a time: a megabyte, which stays in the cache between three passes over it."""


class CoverageMean:
    """Folds replies one by one; holds one sum per tensor, whatever the size of the cohort."""

    def __init__(self, weights: Tensors, rule: Rule = "overlap") -> None:
        self._weights = weights
        self._rule = rule
        self._sums: dict[str, Tensor] = {}  # Σ a_k (w_kj - w_j)
        self._covers: dict[str, Tensor] = {}  # Σ_{C_j} a_k; a scalar while every cover is whole
        self._total = torch.zeros(())  # Σ_S a_k

    def add(self, part: Part, tensors: Tensors, weight: float) -> None:
        """Fold in one device's trained tensors."""
        self._total += weight
        for name, selection in part.trained.items():
            current = self._weights[name]
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(current)
                self._covers[name] = torch.zeros((), dtype=current.dtype, device=current.device)
            if isinstance(selection, Whole):
                _add_difference(self._sums[name], tensors[name], current, weight)
            else:
                difference = (tensors[name] - take(current, selection)).mul_(weight)
                add_at(self._sums[name], selection, difference)
            if not isinstance(selection, Whole) and self._covers[name].ndim != current.ndim:
                self._covers[name] = self._covers[name].expand_as(current).clone()
            add_at(self._covers[name], selection, weight)

    def result(self) -> dict[str, Tensor]:
        """The new weights, once; tensors that nobody trained are the old ones, not copies."""
        new = dict(self._weights)
        for name, difference in self._sums.items():
            current, cover = self._weights[name], self._covers[name]
            if self._rule == "overlap":
                # Where the cover is zero so is the sum: dividing by one leaves the entry as it was.
                new[name] = difference.div_(cover.masked_fill(cover == 0, 1)).add_(current)
            elif self._rule == "fill":
                new[name] = difference.div_(self._total).add_(current)
            else:
                # Σ_C a (w_k - w) + Σ_{S - C} a (0 - w), over Σ_S a
                new[name] = current + (difference - (self._total - cover) * current) / self._total
        return new


def _add_difference(total: Tensor, trained: Tensor, current: Tensor, weight: float) -> None:
    """total += weight (trained - current), block by block, so that the difference never leaves the cache."""
    if total.numel() <= BLOCK or not (
        total.is_contiguous() and trained.is_contiguous() and current.is_contiguous()
    ):
        total += (trained - current).mul_(weight)
        return
    buffer = torch.empty(BLOCK, dtype=total.dtype, device=total.device)
    for old, new, now in zip(
        *(torch.split(tensor.view(-1), BLOCK) for tensor in (total, trained, current)), strict=True
    ):
        difference = torch.sub(new, now, out=buffer[: len(old)]).mul_(weight)
        old.add_(difference)
