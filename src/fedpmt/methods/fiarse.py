"""FIARSE: Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", 2024.

A device gets the share γ of all weights that are largest in magnitude, found anew in every round; the others are zero
there. Its sub-model is a threshold τ on |θ|, which has a part in the gradient of every weight that is kept:

    θ̂ = θ ∘ m,  m = 1[|θ| >= τ],        ∂ℓ/∂θ = ∂ℓ/∂θ̂ ∘ m ∘ (1 + 2 τ |θ| / (|θ| + τ)²)

The server averages each weight over the devices that had it. Single weights are kept or not, so a sub-model saves
bytes, but neither operations nor activations: products stay dense, and that is their price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from fedpmt.methods.averaging import Averaged, PartAveraging
from fedpmt.methods.base import Predictor, Traits, acts, require
from fedpmt.parts.depth import full
from fedpmt.parts.mask import largest_entries, prunable
from fedpmt.parts.part import GLOBAL, WHOLE, Mask, Part, place, take
from fedpmt.parts.width import INDEX_BYTES
from fedpmt.pricing.matching import largest_rate
from fedpmt.resources import Resources
from fedpmt.training.local import LocalWork
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fedpmt.kernels import StepRule
    from fedpmt.methods.base import Round
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Selection
    from fedpmt.training.local import Job, PriceOf, Run
    from fedpmt.training.messages import Client
    from fedpmt.types import Examples

Scope = Literal["net", "layer"]

TESTED = (1.0, 1 / 4, 1 / 16, 1 / 64)
"""Sizes whose sub-models are scored at the end: those of the paper's experiments."""

MASKS, THRESHOLDS = "masks", "thresholds"


@dataclass(frozen=True)
class Thresholded(LocalWork[None]):
    """Training of θ ∘ 1[|θ| >= τ]. A weight that falls below τ is out until the round is over.

    τ is the smallest magnitude that the device was sent, in the whole net or in each tensor. Tensors that were sent
    whole are trained as always.
    """

    scope: Scope

    def start(self, job: Job[None]) -> Run[None]:
        import torch

        run = super().start(job)
        masks = masks_of(job.part)
        received = job.task.tensors[MODEL]
        smallest = {name: received[name].abs().min() for name in masks if received[name].numel()}
        if self.scope == "net" and smallest:
            smallest = dict.fromkeys(smallest, torch.stack(list(smallest.values())).min())
        run.memo[THRESHOLDS] = smallest
        run.memo[MASKS] = {name: torch.from_numpy(masks[name].bits).to(run.params[name]) for name in masks}
        return run

    def loss(self, run: Run[None], batch: Examples) -> Tensor:
        tensors = run.tensors
        for name, mask in run.memo[MASKS].items():
            threshold = run.memo[THRESHOLDS].get(name, 0.0)
            # θ̂ = θ ∘ m; what the device was not sent is no weight of its net, whatever τ is
            tensors[name] = tensors[name] * (mask * (tensors[name].detach().abs() >= threshold))
        return run.site.objective.loss(run.forward(tensors, batch.inputs), batch.targets)

    def correct(self, run: Run[None], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, threshold in run.memo[THRESHOLDS].items():
            if threshold > 0:
                magnitude = run.params[name].detach().abs()
                # 1 + |θ| ∂m/∂|θ|, with 2 τ / (|θ| + τ)² in the place of the step's derivative
                gradients[name] = gradients[name] * (
                    1 + 2 * threshold * magnitude / (magnitude + threshold).square()
                )
        return gradients

    def compiled(self, job: Job[None]) -> StepRule | None:
        return None if masks_of(job.part) else job.rule()

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """The mask and the gradient's factor are applied to every entry, and θ̂ and the mask are held."""
        masked = list(masks_of(part))
        if not masked:
            return part.extra
        held = 2 * structure.nbytes(masked)
        return replace(part.extra, step=2.0 * structure.size(masked), memory_bytes=held)


def masks_of(part: Part) -> dict[str, Mask]:
    """The tensors of which a device has only some entries."""
    return {name: selection for name, selection in part.trained.items() if isinstance(selection, Mask)}


@dataclass(frozen=True)
class FIARSE(PartAveraging):
    """The largest weights on each device, as many as its budget would pay for if zeros cost nothing."""

    size: float | None = None  # γ, the same share on every device; None: by its budget
    scope: Scope = "net"  # the largest weights of the whole net, or the same share of every tensor

    def __post_init__(self) -> None:
        require(self, size=(self.size is None or 0 < self.size <= 1, "> 0 and <= 1"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            sums="entries",
            combines="overlap mean",
            # No size changes the memory of dense gradients and activations.
            budget=acts("device", "memory") if self.size is None else {},
        )

    @property
    def local(self) -> LocalWork[Any]:
        return Thresholded(self.scope)

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        share = self.share(state.structure, client) if self.size is None else self.size
        if share == 1:
            return full(state.structure)
        kept = self.selections(state, share)
        masks = [one.bits for one in kept.values() if isinstance(one, Mask)]
        entries, active = sum(bits.size for bits in masks), sum(int(bits.sum()) for bits in masks)
        return Part(GLOBAL, kept, kept, f"size {share:.3g}", position_bytes(entries, active))

    def share(self, structure: Structure, client: Client) -> float:
        """γ: the largest share that the device could pay for if products with zeros were free."""
        limit = client.limit
        if limit is None:
            return 1.0
        whole = client.usage(full(structure))
        pruned = prunable(structure)
        entries, held = structure.size(pruned), structure.nbytes(pruned)
        rest = structure.nbytes(structure.tensors) - held

        def claim(rate: float) -> Resources:
            up = rest + rate * held
            down = up if rate == 1 else up + position_bytes(entries, math.ceil(rate * entries))
            operations, seconds, joules = (
                rate * amount for amount in (whole.operations, whole.seconds, whole.joules)
            )
            return Resources(operations, seconds, down + up, up, joules=joules)

        return largest_rate(lambda rate: claim(rate) <= limit)

    def selections(self, state: Averaged, share: float) -> dict[str, Selection]:
        """Which entries of each tensor a sub-model of this size has; found once in a round."""
        memo, key = state.structure.memo, (FIARSE, self.scope)
        if key not in memo or memo[key][0] is not state.tensors:
            memo[key] = state.tensors, {}
        known: dict[float, dict[str, Selection]] = memo[key][1]
        if share not in known:
            known[share] = self.find(state, share)
        return known[share]

    def find(self, state: Averaged, share: float) -> dict[str, Selection]:
        """The largest weights; biases, norms and buffers are few, and all of them are kept."""
        pruned = prunable(state.structure)
        sizes = {name: state.tensors[name].detach().float().abs().cpu().numpy() for name in pruned}
        if self.scope == "net":
            bits = largest_entries(sizes, share) if sizes else {}
        else:
            bits = {name: largest_entries({name: one}, share)[name] for name, one in sizes.items()}
        return {
            name: Mask(bits[name]) if name in bits and not bits[name].all() else WHOLE
            for name in state.structure.tensors
        }

    def predictors_by_width(self, state: Averaged) -> Mapping[str, Predictor]:
        """The sub-models of the paper's sizes."""
        return {f"{share:g}": Predictor("global", GLOBAL, self.cut(state, share)) for share in TESTED}

    def cut(self, state: Averaged, share: float) -> dict[str, Tensor]:
        """The weights of a sub-model in the full shapes, zero where it has none."""
        if share == 1:
            return dict(state.tensors)
        return {
            name: place(take(state.tensors[name], one), one, state.structure.shapes[name])
            for name, one in self.selections(state, share).items()
        }

    def neutral(self) -> Self:
        return replace(self, size=1.0)


def position_bytes(entries: int, active: int) -> int:
    """Bytes that say which entries are active: one bit per entry, or the positions of the active ones."""
    return min(math.ceil(entries / 8), INDEX_BYTES * active)
