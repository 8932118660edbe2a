"""FlexLoRA: Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", 2024.

Fine-tuning with adapters of different ranks: a device gets the leading r_k of r components of each adapter. The mean of
the factors A and B is not the mean of what they do, so the server averages the products and divides them up again:

    W = Σ_k a_k B_k A_k / Σ_k a_k = U S V^T,   B <- U S,   A <- V^T,   r components of the largest singular values

What leads in the next round is what matters most. Everything else that is trained, such as the head, is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.methods.averaging import Averaged, MeanFold, Weight, send, weight_of
from fedpmt.methods.base import (
    Fold,
    Gather,
    Method,
    Predictor,
    Round,
    Server,
    Setup,
    Step,
    Traits,
    acts,
    require,
)
from fedpmt.models.adapters import find_adapters, find_factors
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, WHOLE, Indices, Part, Selection
from fedpmt.parts.width import kept_count
from fedpmt.pricing.matching import rate_within
from fedpmt.training.local import LocalWork
from fedpmt.training.messages import UPDATE, Client, Reply, Task

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.models.adapters import Adapter
    from fedpmt.models.structure import Structure

RANK_BYTES = 2


@dataclass(frozen=True)
class FlexLoRA(Method[Averaged, Any]):
    """Adapters of as high a rank as a device can afford, averaged as products."""

    weight: Weight = "samples"
    rate: float | None = None  # the same share of all ranks on every device instead of what it can afford

    def __post_init__(self) -> None:
        require(self, rate=(self.rate is None or 0 < self.rate <= 1, "> 0 and <= 1"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=True,
            needs_adapters=True,
            combines="mean of products, divided by SVD",
            needs_round="its server divides up the product of all adapters of a round",
            budget=acts("device") if self.rate is None else {},
        )

    @property
    def local(self) -> LocalWork[Any]:
        return LocalWork()

    def init(self, setup: Setup) -> Averaged:
        prototype = setup.prototypes[GLOBAL]
        return Averaged(prototype.structure, prototype.tensors)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        net = state.structure
        rate = self.rate or rate_within(lambda rate: client.fits(lower_ranks(net, rate)))
        return send(state.tensors, (lower_ranks(net, rate),))

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Gather(partial(self.redistribute, state))

    def redistribute(self, state: Averaged, replies: list[Reply], server: Server) -> Step[Averaged]:
        """Average the products of adapters, and everything else as it is."""
        adapters = find_adapters(state.structure)
        factors = find_factors(state.structure)
        mean = MeanFold(state, "overlap", self.weight)
        for reply in replies:
            others = {name: one for name, one in reply.part.trained.items() if name not in factors}
            update = {name: reply.update[name] for name in others}
            mean.add(replace(reply, part=replace(reply.part, trained=others), tensors={UPDATE: update}))
        tensors = dict(mean.finish(server).state.tensors)
        for adapter in adapters:
            tensors |= self.average(state, adapter, replies)
        return Step(replace(state, tensors=tensors))

    def average(self, state: Averaged, adapter: Adapter, replies: list[Reply]) -> dict[str, Tensor]:
        """The new factors; components behind the highest rank that somebody trained stay as they are."""
        import torch

        down, up = state.tensors[adapter.down], state.tensors[adapter.up]
        changed = [r for r in replies if r.update[adapter.down].any() or r.update[adapter.up].any()]
        if not changed:
            return {}  # another division of the same product would still be another model to the next round
        total = sum(weight_of(self.weight, reply.samples) for reply in replies)
        lefts, rights = [], []
        for reply in replies:
            change_down, change_up = reply.update[adapter.down], reply.update[adapter.up]
            rank = len(change_down)
            # B_k and A_k as the device had them in the end, as matrices; some accelerators have no float64
            lefts.append((up[:, :rank] + change_up).flatten(1).cpu().double())
            share = weight_of(self.weight, reply.samples) / total
            rights.append((down[:rank] + change_down).flatten(1).cpu().double() * share)
        rank = max(len(one) for one in rights)
        left, right = divide(torch.cat(lefts, 1), torch.cat(rights), rank)
        new_up, new_down = up.clone(), down.clone()
        new_up[:, :rank] = left.to(up).view_as(up[:, :rank])
        new_down[:rank] = right.to(down).view_as(down[:rank])
        return {adapter.up: new_up, adapter.down: new_down}

    def predictor(self, state: Averaged) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)


def lower_ranks(structure: Structure, rate: float) -> Part:
    """The leading components of each adapter, and all of everything else."""
    if rate == 1:
        return full(structure)
    selections: dict[str, Selection] = dict.fromkeys(structure.tensors, WHOLE)
    for adapter in find_adapters(structure):
        leading = np.arange(kept_count(adapter.rank, rate))
        if len(leading) < adapter.rank:
            axes = len(structure.shapes[adapter.down]), len(structure.shapes[adapter.up])
            selections[adapter.down] = Indices((leading, *[None] * (axes[0] - 1)))
            selections[adapter.up] = Indices((None, leading, *[None] * (axes[1] - 2)))
    return Part(GLOBAL, selections, selections, f"ranks times {rate:.2f}", RANK_BYTES)


def divide(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best product of this rank for a product of two matrices: U S, and V^T with orthonormal rows.

    >>> import torch
    >>> up, down = divide(torch.eye(2), torch.tensor([[0.0, 3.0], [4.0, 0.0]]), rank=1)
    >>> (up @ down).tolist(), down.tolist()
    ([[0.0, 0.0], [4.0, 0.0]], [[1.0, 0.0]])
    """
    import torch

    # Thin factors have a small core with the same singular values.
    basis_left, core_left = torch.linalg.qr(left)
    basis_right, core_right = torch.linalg.qr(right.T)
    u, s, v = torch.linalg.svd(core_left @ core_right.T)
    up, down = basis_left @ (u[:, :rank] * s[:rank]), v[:rank] @ basis_right.T
    # Either sign would do: the largest entry of each row of A is positive.
    sign = down.gather(1, down.abs().argmax(1, keepdim=True)).sign()
    return up * sign.T, down * sign
