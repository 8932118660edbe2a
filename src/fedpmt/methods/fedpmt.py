"""FedPMT: Wu, Wang and Narayana, "Straggler-resilient Federated Learning: Tackling Computation
Heterogeneity with Layer-wise Partial Model Training in Mobile Edge Network".

Every device runs the whole model forward. A weak one back-propagates only through the last layers it
can afford, and the server averages each layer over the devices that trained it (equation 7):

    w^{t+1} = w^t + Σ_{k in S} A_k ∘ (w_k^{t+1} - w^t),   A_k[l] = f_k[l] / Σ_{k in S} f_k[l]

That is the plan `paper`. The others are ours, and trade samples for layers within the same budget B_k: of the pairs
of a depth and a number of steps, (f, τ) with c_f τ <= B_k,

    traded    the deepest f that leaves τ >= s τ_max steps
    rotated   with probability 1 / R all layers, in the steps that are left for them; else the traded pair

Other methods of the family differ in the block of layers that a device trains, and in how it is averaged
(methods/family.py and methods/fedel.py have them by their papers' names):

    suffix         the deepest suffix that the device can afford
    random-suffix  a suffix of random depth, up to that one; all layers on a device that can afford them
    cycle          the same layers on all devices: all of them for some rounds, then one after another, then again
    window         as many neighbouring layers as it can afford, further towards the output in each round
    random-block   one of the largest blocks of neighbouring layers that it can afford, drawn in each round
    middle, prefix the dearest block in the middle or at the input that costs no more than the suffix

    blend          w[l] <- r_l mean[l] + (1 - r_l) w[l],   r_l = Σ_{k: f_k[l] = 1} a_k / Σ_{k in S} a_k
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from fedpmt.methods.averaging import Averaged, PartAveraging, send, with_steps
from fedpmt.methods.base import Traits, acts, require
from fedpmt.parts.depth import block, maximal, runs, suffixes, windows
from fedpmt.parts.part import mask
from fedpmt.pricing.matching import largest
from fedpmt.resources import ROUNDING
from fedpmt.training.messages import Chance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.aggregation import Rule
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Plan
    from fedpmt.training.messages import Client, Task

PlanName = Literal["paper", "traded", "rotated"]
Block = Literal["suffix", "random-suffix", "cycle", "window", "random-block", "middle", "prefix"]
DRAWN = ("random-suffix", "random-block")
Average = Literal["trainers", "blend"]
FULL_ROUNDS, LAYER_ROUNDS = 5, 2
"""Of a cycle: the rounds that all layers are trained in, and those of each layer alone, as in FedPart."""


@dataclass(frozen=True)
class FedPMT(PartAveraging):
    """Partial model training by depth, Algorithm 1 with both options."""

    depths: int | None = None  # |I|; None: one per layer
    splitting: Literal["server", "device"] = "server"  # Option I or Option II
    block: Block = "suffix"  # which layers a device trains: the paper's last ones, or others
    average: Average = "trainers"  # equation 7, or blended with the old value by the share of trainers
    full_rounds: int = FULL_ROUNDS  # of a cycle, in which all layers are trained
    layer_rounds: int = LAYER_ROUNDS  # of a cycle, for each layer
    plan: PlanName = "paper"  # what a device does with its budget
    share: float = 0.5  # s: of its steps, the least that a traded plan leaves
    every: int = 4  # R: with a rotated plan, one in R of a device's rounds trains all layers, on average

    def __post_init__(self) -> None:
        require(
            self,
            share=(0 <= self.share <= 1, ">= 0 and <= 1"),
            every=(self.every >= 1, ">= 1"),
            full_rounds=(self.full_rounds >= 0, ">= 0"),
            layer_rounds=(self.layer_rounds >= 1, ">= 1"),
            block=(self.plan == "paper" or self.block == "suffix", f"suffix with plan = {self.plan}"),
        )
        cycles = self.block == "cycle"
        require(
            self,
            full_rounds=(cycles or self.full_rounds == FULL_ROUNDS, f"{FULL_ROUNDS} unless block = cycle"),
            layer_rounds=(
                cycles or self.layer_rounds == LAYER_ROUNDS,
                f"{LAYER_ROUNDS} unless block = cycle",
            ),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_speeds=self.plan != "paper" or self.block not in ("suffix", "cycle"),
            # A sum of layers is over their trainers; the share of these is not in it.
            sums="layers" if self.average == "trainers" else "none",
            rotates=self.plan == "rotated" or self.block not in ("suffix", "middle", "prefix"),
            combines=f"{self.rule} mean",
            budget={} if self.block == "cycle" else acts("device"),
        )

    @property
    def rule(self) -> Rule:
        return "overlap" if self.average == "trainers" else "fill"

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
        deepest = masks[-1] if client.plan is None else client.plan.deepest(masks)
        if self.block == "suffix":
            return deepest
        if self.block in ("middle", "prefix"):
            return self.elsewhere(state, deepest, round)
        choices = self.choices(state, client)
        if self.block in DRAWN:
            return choices[int(round.rng("block", client.id).integers(len(choices)))]
        return choices[round.index % len(choices)]

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        if self.plan == "paper" or client.plan is None:
            task = send(state.tensors, self.offer(state, client, round))
            return task if self.normalise != "draws" else replace(task, chances=self.drawn(state, client))
        drawn, *others = chances = self.chances(state, client.plan)
        if others and round.rng("rotation", client.id).random() < others[0].probability:
            drawn = others[0]
        task = with_steps(send(state.tensors, (drawn.part,)), client, drawn.steps)
        return replace(task, chances=chances)

    def chances(self, state: Averaged, plan: Plan) -> tuple[Chance, ...]:
        """What a device may be asked for: the traded pair, and now and then all layers that it has the memory for."""
        masks = self.masks(state)
        if self.plan != "rotated":
            return (Chance(1.0, *plan.trade(masks, self.share)),)
        turn = 1 / self.every
        return Chance(1 - turn, *plan.trade(masks, self.share)), Chance(turn, *plan.trade(masks, 0.0))

    def offer(self, state: Averaged, client: Client, round: Round) -> tuple[Part, ...]:
        """Option II: all masks, and the device's choice travels up with its reply."""
        chooses = self.splitting == "device" and self.block == "suffix"
        return self.masks(state) if chooses else (self.part(state, client, round),)

    def drawn(self, state: Averaged, client: Client) -> tuple[Chance, ...]:
        """The parts that a device's was drawn from; none where it was not."""
        choices = self.choices(state, client) if self.block in DRAWN else ()
        return tuple(Chance(1 / len(choices), part, client.steps) for part in choices)

    def choices(self, state: Averaged, client: Client) -> Sequence[Part]:
        """The parts that a device trains one after another, or draws from."""
        masks = self.masks(state)
        if self.block == "random-suffix":
            deepest = masks[-1] if client.plan is None else client.plan.deepest(masks)
            return masks[-1:] if deepest is masks[-1] else masks[: masks.index(deepest) + 1]
        blocks = self.blocks(state)
        if self.block == "cycle":
            layers = [beginning[0] for beginning in blocks for _ in range(self.layer_rounds)]
            return [*masks[-1:] * self.full_rounds, *layers]
        find = windows if self.block == "window" else maximal
        return find(blocks, client.plan.affords) if client.plan else masks[-1:]

    def blocks(self, state: Averaged) -> tuple[tuple[Part, ...], ...]:
        """All blocks of neighbouring layers, by the layer that they begin with, shortest first."""
        memo = state.structure.memo
        if (FedPMT, "runs", self.depths) not in memo:
            memo[FedPMT, "runs", self.depths] = runs(state.structure, len(self.masks(state)))
        made: tuple[tuple[Part, ...], ...] = memo[FedPMT, "runs", self.depths]
        return made

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
        return replace(
            self, weight="samples", splitting="server", block="suffix", average="trainers", plan="paper"
        )
