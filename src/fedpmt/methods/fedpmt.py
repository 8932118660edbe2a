"""FedPMT: Wu, Wang and Narayana, "Straggler-resilient Federated Learning: Tackling Computation
Heterogeneity with Layer-wise Partial Model Training in Mobile Edge Network".

Every device runs the whole model forward. A weak one back-propagates only through the last layers it
can afford, and the server averages each layer over the devices that trained it (equation 7):

    w^{t+1} = w^t + Σ_{k in S} A_k ∘ (w_k^{t+1} - w^t),   A_k[l] = f_k[l] / Σ_{k in S} f_k[l]

That is the plan `paper`. The others are ours, and trade samples for layers within the same budget B_k: of the pairs
of a depth and a number of steps, (f, τ) with c_f τ <= B_k,

    traded    the deepest f that leaves τ >= s τ_max steps
    rotated   with probability 1 / R all layers, in the steps that are left for them; else the traded pair
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.methods.averaging import Averaged, PartAveraging, send, with_steps
from fedpmt.methods.base import Traits, acts, require
from fedpmt.parts.depth import block, suffixes
from fedpmt.parts.part import mask
from fedpmt.pricing.matching import largest
from fedpmt.resources import ROUNDING
from fedpmt.training.messages import Chance

if TYPE_CHECKING:
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Plan as DevicePlan
    from fedpmt.training.messages import Client, Task

Plan = Literal["paper", "traded", "rotated"]


@dataclass(frozen=True)
class FedPMT(PartAveraging):
    """Partial model training by depth, Algorithm 1 with both options."""

    depths: int | None = None  # |I|; None: one per layer
    splitting: Literal["server", "device"] = "server"  # Option I or Option II
    block: Literal["suffix", "middle", "prefix"] = (
        "suffix"  # the paper's last layers, or others at their price
    )
    plan: Plan = "paper"  # what a device does with its budget
    share: float = 0.5  # s: of its steps, the least that a traded plan leaves
    every: int = 4  # R: a rotated plan trains all layers once in so many rounds of a device, on average

    def __post_init__(self) -> None:
        require(self, share=(0 <= self.share <= 1, ">= 0 and <= 1"), every=(self.every >= 1, ">= 1"))

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=self.plan != "paper",
            sums="layers",
            combines="overlap mean",
            budget=acts("device"),
        )

    def masks(self, state: Averaged) -> tuple[Part, ...]:
        """Ξ_1 to Ξ_|I|, smallest first."""
        memo = state.structure.memo
        if (FedPMT, self.depths) not in memo:
            memo[FedPMT, self.depths] = suffixes(state.structure, self.depths or len(state.structure.layers))
        made: tuple[Part, ...] = memo[FedPMT, self.depths]
        return made

    def part(self, state: Averaged, client: Client, round: Round) -> Part:
        """Option I: the largest f_k within what the server knows the device can do."""
        masks = self.masks(state)
        chosen = masks[-1] if client.plan is None else client.plan.deepest(masks)
        return chosen if self.block == "suffix" else self.elsewhere(state, chosen, round)

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        if self.plan == "paper" or client.plan is None:
            return send(state.tensors, self.offer(state, client, round))
        drawn, *others = chances = self.chances(state, client.plan)
        if others and round.rng("rotation", client.id).random() < others[0].probability:
            drawn = others[0]
        task = with_steps(send(state.tensors, (drawn.part,)), client, drawn.steps)
        return replace(task, chances=chances)

    def chances(self, state: Averaged, plan: DevicePlan) -> tuple[Chance, ...]:
        """What a device may be asked for: the traded pair, and now and then all layers that it has the memory for."""
        masks = self.masks(state)
        if self.plan != "rotated":
            return (Chance(1.0, *plan.trade(masks, self.share)),)
        turn = 1 / self.every
        return Chance(1 - turn, *plan.trade(masks, self.share)), Chance(turn, *plan.trade(masks, 0.0))

    def offer(self, state: Averaged, client: Client, round: Round) -> tuple[Part, ...]:
        """Option II: all masks, and the device's choice travels up with its reply."""
        return self.masks(state) if self.splitting == "device" else (self.part(state, client, round),)

    def elsewhere(self, state: Averaged, chosen: Part, round: Round) -> Part:
        """The dearest block in another place that costs no more: to compare with, not in the paper."""
        structure, most = state.structure, round.price(chosen).sustained * (1 + ROUNDING)
        layers = len(structure.layers)
        if all(mask(structure, chosen)):
            return chosen
        firsts = (0,) if self.block == "prefix" else range(1, layers - 1)
        blocks = [
            block(structure, first, last, f"layers {first + 1}-{last}")
            for first in firsts
            for last in range(first + 1, layers)
        ]
        blocks.sort(key=lambda part: round.price(part).sustained)
        return largest(blocks, lambda part: round.price(part).sustained <= most)

    def neutral(self) -> Self:
        return replace(self, splitting="server", block="suffix", plan="paper")
