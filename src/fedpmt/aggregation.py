"""The one coverage-weighted mean of the repository (equation 7 of the paper, per entry).

With C_j the devices that trained entry j and a_k the weight of device k:

    overlap:  w_j <- w_j + Σ_{k in C_j} a_k (w_kj - w_j) / Σ_{k in C_j} a_k
    fill:     w_j <- w_j + Σ_{k in C_j} a_k (w_kj - w_j) / Σ_{k in S} a_k
    zero:     w_j <- Σ_{k in C_j} a_k w_kj / Σ_{k in S} a_k,  where somebody trained the tensor at all

Where devices differ in steps τ_k, or train tensor l only with probability q_kl, a difference can be stretched:

    w_l <- w_l + τ_l Σ_{k in C_l} (a_k / q_kl) (w_kl - w_l) / τ_k / Σ_{k: q_kl > 0} a_k,
    τ_l  = Σ_{k: q_kl > 0} a_k E[τ_k] / Σ_{k: q_kl > 0} a_k

With q = 1 this is FedNova, tensor by tensor; the mean over the draws is that of devices that train everything
(Horvitz-Thompson). With equal steps as well it is the overlap mean, to the bit.

It is computed from differences, so that an entry nobody trained, or that training did not change, keeps
its bits, and "everybody trains everything" is FedAvg to the bit.

A robust mean puts another estimate in the place of the mean over C_j, and the three rules stay what they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from fedpmt import kernels
from fedpmt.parts.part import Indices, Whole, add_at
from fedpmt.settings import parse_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from fedpmt.parts.part import Part
    from fedpmt.types import Tensors

Rule = Literal["overlap", "fill", "zero"]
BLOCK = 2**17
"""Entries at a time: half a megabyte, which stays in the cache from one pass over it to the next."""

TINY = 1e-9
"""So that a tenth of 30 devices is 3 of them, whatever a tenth is in binary."""

TOGETHER = 5
"""Whole tensors wait until so many can be folded in one pass over the sum, since memory is what takes the time."""


class Stretch(NamedTuple):
    """What a device's difference of one tensor counts for, beyond its weight; steps are in any unit."""

    factor: float  # 1 / (q_kl τ_k)
    steps: float  # E[τ_k]


class CoverageMean:
    """Folds replies as they come; holds one sum per tensor and a few replies, whatever the size of the cohort.

    A reply's tensors must stay as they are until the result is taken.
    """

    def __init__(self, weights: Tensors, rule: Rule = "overlap") -> None:
        self.weights = weights
        self._rule = rule
        self._sums: dict[str, Tensor] = {}  # Σ a_k (w_kj - w_j)
        self._covers: dict[str, Tensor | float] = {}  # Σ_{C_j} a_k; one number while every cover is whole
        self._total = 0.0  # Σ_S a_k
        self._unit = 0.0
        self._steps: dict[str, tuple[float, float]] = {}  # Σ a_k E[τ_k] and Σ a_k, of stretched differences
        self._waiting: dict[str, list[tuple[Tensor, float]]] = {}

    def add(
        self,
        part: Part,
        update: Tensors,
        weight: float,
        stretches: Mapping[str, Stretch] | None = None,
        discount: float = 1.0,
    ) -> None:
        """Fold in what one device changed.

        Args:
            part: What it trained.
            update: The differences of the trained tensors.
            weight: a_k.
            stretches: By tensor; one that the part does not train was not drawn this time, and counts as no change.
            discount: Makes the change smaller, and leaves its weight as it is.
        """
        if stretches:
            self._count_steps(part, weight, stretches)
        # Sums are in units of the first weight, so that devices of equal weight, the usual case, need no product.
        self._unit = self._unit or weight or 1.0
        share = weight * discount / self._unit
        self._total += weight
        for name, selection in part.trained.items():
            cover = self._covers.get(name, 0.0)
            scale = share * stretches[name].factor if stretches and name in stretches else share
            if isinstance(selection, Whole):
                self._covers[name] = cover + weight
                self._waiting.setdefault(name, []).append((update[name], scale))
                if len(self._waiting[name]) == TOGETHER:
                    self._fold(name)
                continue
            self._fold(name)
            current = self.weights[name]
            kind = summed_type(current)
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(current, dtype=kind)
            difference = update[name] if scale == 1 else update[name].to(kind) * scale
            if not isinstance(cover, torch.Tensor):
                self._covers[name] = cover = torch.full_like(current, cover, dtype=kind)
            sums = self._sums[name]
            if not isinstance(selection, Indices) or not kernels.add_at(
                sums, cover, selection.axes, difference, weight
            ):
                add_at(sums, selection, difference)
                add_at(cover, selection, weight)

    def changes(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The mean change of each tensor that somebody trained, once, and which entries were; None: all of them."""
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, cover in self._covers.items():
            self._fold(name)
            if name not in self._sums:
                continue  # devices could have trained it, but none of them drew it
            difference = self._sums[name]
            if self._rule == "zero":
                # Σ_C a (w_k - w) + Σ_{S - C} a (0 - w), over Σ_S a
                missing = (self._total - cover) / self._unit
                found[name] = (
                    (difference - missing * self.weights[name].to(difference.dtype))
                    / (self._total / self._unit),
                    None,
                )
                continue
            covered = cover != 0 if isinstance(cover, torch.Tensor) else None
            trained = cover if self._rule == "overlap" else self._total
            steps, weights = self._steps.get(name, (1.0, 1.0))
            unit = self._unit * (steps / weights)  # in which τ_l is 1 where all devices take as many steps
            if isinstance(trained, torch.Tensor):
                # Where the cover is zero so is the sum: dividing by one leaves it zero.
                difference.div_(trained.masked_fill(trained == 0, 1) / unit)
            elif trained != unit:
                difference.div_(trained / unit)
            found[name] = difference, covered
        return found

    def result(self) -> dict[str, Tensor]:
        """The new weights w + Δ, once; tensors that nobody trained are the old ones, not copies."""
        new = dict(self.weights)
        if self._rule != "zero" and all(len(waiting) == 1 for waiting in self._waiting.values()):
            new.update(self._step_at_once())
        for name, (change, _) in self.changes().items():
            new[name] = change.add_(self.weights[name]).to(self.weights[name].dtype)
        return new

    def _step_at_once(self) -> dict[str, Tensor]:
        """The new weights where there was one reply, of tensors that it has whole: they need no sum in memory."""
        names, tensors, shares, divisors = list[str](), list["Tensor"](), list[float](), list[float]()
        for name, waiting in self._waiting.items():
            trained = self._covers[name] if self._rule == "overlap" else self._total
            if name in self._sums or isinstance(trained, torch.Tensor):
                continue
            steps, weights = self._steps.get(name, (1.0, 1.0))
            names.append(name)
            tensors.append(waiting[0][0])
            shares.append(waiting[0][1])
            divisors.append(trained / (self._unit * (steps / weights)))
        moved = kernels.step([self.weights[name] for name in names], tensors, shares, divisors)
        for name in names if moved is not None else ():
            del self._waiting[name], self._covers[name]
        return dict(zip(names, moved or (), strict=moved is not None))

    def _count_steps(self, part: Part, weight: float, stretches: Mapping[str, Stretch]) -> None:
        for name, stretch in stretches.items():
            steps, weights = self._steps.get(name, (0.0, 0.0))
            self._steps[name] = steps + weight * stretch.steps, weights + weight
            if name not in part.trained:
                self._covers[name] = self._covers.get(name, 0.0) + weight

    def _fold(self, name: str) -> None:
        """Add Σ a_k (w_k - w) of the whole tensors that wait, in their order, block by block."""
        waiting = self._waiting.pop(name, [])
        if not waiting:
            return
        fresh = name not in self._sums
        if fresh:
            like = self.weights[name]
            # NumPy asks for huge pages, without which a large sum waits for memory as long as for sums.
            plain = like.device.type == "cpu" and like.dtype == torch.float32
            self._sums[name] = (
                torch.from_numpy(np.empty(tuple(like.shape), dtype=np.float32))
                if plain
                else torch.empty_like(like, dtype=summed_type(like), memory_format=torch.contiguous_format)
            )
        tensors = [tensor for tensor, _ in waiting]
        if kernels.fold(self._sums[name], tensors, [share for _, share in waiting], fresh=fresh):
            return
        for total, *changed in _blocks(self._sums[name], *tensors):
            for place, (own, (_, share)) in enumerate(zip(changed, waiting, strict=True)):
                difference = own if share == 1 else own.to(total.dtype) * share
                if fresh and place == 0:
                    total.copy_(difference)
                else:
                    total.add_(difference)


class RobustMean(CoverageMean):
    """A mean that false replies cannot move at will; it compares differences as they are."""

    def add(
        self,
        part: Part,
        update: Tensors,
        weight: float,
        stretches: Mapping[str, Stretch] | None = None,
        discount: float = 1.0,
    ) -> None:
        """Fold in what one device changed; stretched differences are refused."""
        if stretches:
            raise ValueError("a robust mean compares differences as they are, not stretched ones")
        self.guard(part, update, weight, discount)

    def guard(self, part: Part, update: Tensors, weight: float, discount: float) -> None:
        """Take in a difference so that it cannot do much harm."""
        raise NotImplementedError


class TrimmedMean(RobustMean):
    """The mean of each entry over its trainers but for the largest and smallest values; holds all replies.

    With n_j devices in C_j, floor(share n_j) values are cut at either end, and at least one or two are left: at a share
    of 1/2 this is the median. Each device counts once, since its number of samples is only a claim.
    """

    def __init__(self, weights: Tensors, rule: Rule, share: float) -> None:
        super().__init__(weights, rule)
        self._share = share
        self._replies: list[tuple[Part, Tensors]] = []

    def guard(self, part: Part, update: Tensors, weight: float, discount: float) -> None:
        """Keep what one device changed."""
        if discount != 1:
            update = {name: change * discount for name, change in update.items()}
        self._replies.append((part, update))

    def changes(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The trimmed mean of each tensor that somebody trained, and which entries were; None: all of them."""
        names = dict.fromkeys(name for part, _ in self._replies for name in part.trained)
        return {name: self._change(name) for name in names}

    def _change(self, name: str) -> tuple[Tensor, Tensor | None]:
        current, total = self.weights[name], len(self._replies)
        trainers = [(part, update) for part, update in self._replies if name in part.trained]
        shape, kind = (len(trainers), *current.shape), summed_type(current)
        values, cover = (torch.zeros(shape, dtype=kind, device=current.device) for _ in range(2))
        for row, held, (part, update) in zip(values, cover, trainers, strict=True):
            add_at(row, part.trained[name], update[name].to(kind))
            add_at(held, part.trained[name], 1.0)
        # What a device has not trained is sorted behind all that it might have sent.
        values.masked_fill_(cover == 0, math.nan)
        counts = cover.sum(dim=0)  # n_j
        pairs = zip(
            torch.split(values.reshape(len(trainers), -1), BLOCK, dim=1),
            torch.split(counts.reshape(-1), BLOCK),
            strict=True,
        )
        change = torch.cat([_trim(*pair, self._share) for pair in pairs]).reshape(current.shape)
        covered = None if bool(counts.all()) else counts != 0
        if self._rule == "overlap":
            return change, covered
        change *= counts / total
        if self._rule == "fill":
            return change, covered
        return change - (1 - counts / total) * current.to(kind), None


def _trim(values: Tensor, counts: Tensor, share: float) -> Tensor:
    """The mean of each column's first `counts` values in order, without a share of them at either end."""
    trained = counts.cpu()  # an accelerator may have no float64
    cut = torch.floor(share * trained.double() + TINY).clamp(max=(trained - 1).div(2, rounding_mode="floor"))
    cut = cut.clamp(min=0).to(counts)
    place = torch.arange(len(values), device=values.device)[:, None]
    kept = (place >= cut) & (place < counts - cut)
    return values.sort(dim=0).values.where(kept, 0).sum(dim=0) / (counts - 2 * cut).clamp(min=1)


class ClippedMean(RobustMean):
    """The mean of updates none of which is longer than a limit: longer ones are scaled down to it, as a whole."""

    def __init__(self, weights: Tensors, rule: Rule, limit: float) -> None:
        super().__init__(weights, rule)
        self._limit = limit

    def guard(self, part: Part, update: Tensors, weight: float, discount: float) -> None:
        """Fold in what one device changed, Δ min(1, C / ‖Δ‖)."""
        norm = math.sqrt(sum(float(change.cpu().double().square().sum()) for change in update.values()))
        if norm > self._limit:
            update = {name: change * (self._limit / norm) for name, change in update.items()}
        CoverageMean.add(self, part, update, weight, discount=discount)


def make_mean(weights: Tensors, rule: Rule, mean: str) -> CoverageMean:
    """The mean that a setting names: plain, median, trimmed:SHARE or clipped:NORM."""
    name, number = parse_mean(mean)
    if name == "clipped":
        return ClippedMean(weights, rule, number)
    return CoverageMean(weights, rule) if name == "plain" else TrimmedMean(weights, rule, number)


def summed_type(tensor: Tensor) -> torch.dtype:
    """The type in which tensors like this one are added up: 16 bits would lose all but the first of many."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same entries of all tensors, a block at a time; the first may be written to."""
    return zip(*(torch.split(tensor.reshape(-1), BLOCK) for tensor in tensors), strict=True)
