"""PruneFL: Jiang et al., "Model Pruning Enables Efficient Federated Learning on Edge Devices", 2022.

All devices train one sparse model under one mask over single weights. It is found by one powerful device alone (initial
pruning) and changed now and then during federated learning (further pruning) so as to get the most out of the time
a round takes. With g_j² the squared gradients of weight j, t_j the time it takes and c that of everything else:

    Γ(A) = Σ_{j in A} g_j² / (c + Σ_{j in A} t_j)

The weights that stay are all that cannot be pruned and the active ones but the q_t of least magnitude in each
layer; then the best of all others are added, by g_j² / t_j, as long as that is more than Γ of those before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np

from fedpmt.methods.base import ABOVE_0, FROM_0, FROM_1, SHARE, Method, Predictor, Round, Setup, Step
from fedpmt.parts.depth import full, suffix
from fedpmt.parts.mask import rearranged
from fedpmt.parts.part import GLOBAL, WHOLE, Mask, Part, place, take
from fedpmt.pricing.budget import Usage
from fedpmt.pricing.cost import FLOAT_BYTES, Memory
from fedpmt.pricing.matching import largest_rate
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from fedpmt.methods.base import Action, PriceOf
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Selection
    from fedpmt.resources import Resource
    from fedpmt.training.local import LocalWork
    from fedpmt.training.masked import Squares


def prunable(structure: Structure) -> list[str]:
    """The tensors that can be pruned: biases and norms are few, and never are."""
    return [name for name in structure.parameters if len(structure.shapes[name]) > 1]


@dataclass(frozen=True)
class Initial:
    """Where initial pruning stands."""

    sweeps: int  # to ask for
    rounds: int = 0
    device: int | None = None  # the one that does it, once it has replied
    density: float | None = None  # after the last change of the mask
    steady: int = 0  # changes in a row that left the density about as it was
    done: int = 0  # sweeps since that change
    among: np.ndarray | None = None  # the devices that may do it; None: all


@dataclass(frozen=True)
class Sparse:
    """The server's state."""

    structure: Structure
    tensors: Mapping[str, Tensor]  # w, zero where it is pruned
    masks: Mapping[str, np.ndarray]  # m, of the tensors that can be pruned
    limit: float  # the largest density
    population: int
    initial: Initial | None  # None once it is over
    version: int = 0  # of the mask
    holders: tuple[int, ...] = ()  # the devices that have this version
    further: int = 0  # rounds of further pruning

    @property
    def active(self) -> dict[str, Selection]:
        """The entries that are not pruned; a tensor of which nothing is pruned is whole."""
        return {
            name: WHOLE if name not in self.masks or self.masks[name].all() else Mask(self.masks[name])
            for name in self.structure.tensors
        }

    @property
    def density(self) -> float:
        """The share of weights that are active, of those that can be pruned."""
        active = sum(int(bits.sum()) for bits in self.masks.values())
        return active / sum(bits.size for bits in self.masks.values())


@dataclass(frozen=True)
class PruneFL(Method[Sparse, "Squares"]):
    """Initial and further adaptive pruning with one mask for all devices."""

    needs_losses: ClassVar[bool] = True
    sends_more: ClassVar[bool] = True

    weight: Literal["samples", "uniform"] = "samples"
    density: float | None = None  # the largest one; None: what the weakest device's budget comes to
    interval: int = 50  # rounds between two changes of the mask
    drop: float = 0.3  # q_0, the share of active weights that may go at a time
    half_life: float = 10000.0  # rounds in which q_t halves
    initial_rounds: int = 20  # at most; 0: no initial pruning
    sweeps: int = 10  # over the one device's data in each of them
    steady: int = 5  # initial pruning is over after so many changes in a row ...
    change: float = 0.1  # ... that change the density by no more than this
    start_factor: float = 1.5  # times the accuracy of a guess: from there on initial pruning prunes
    times: Literal["sparse", "dense"] = (
        "sparse"  # whether t_j has the products of weight j, or dense ones are in c
    )
    constant: float = 0.77  # c in units of the sparse products of the whole model
    communication: float = 4.52  # time on the link of all weights, in the same units

    def __post_init__(self) -> None:
        self.require(
            density=(self.density is None or 0 < self.density <= 1, SHARE),
            interval=(self.interval >= 1, "a number of rounds"),
            drop=(0 <= self.drop < 1, "a share of 0 or more, below 1,"),
            half_life=(self.half_life > 0, ABOVE_0),
            initial_rounds=(self.initial_rounds >= 0, FROM_0),
            sweeps=(self.sweeps >= 1, FROM_1),
            steady=(self.steady >= 1, FROM_1),
            change=(self.change >= 0, FROM_0),
            start_factor=(self.start_factor >= 0, FROM_0),
            constant=(self.constant > 0, ABOVE_0),
            communication=(self.communication >= 0, FROM_0),
        )

    def init(self, setup: Setup) -> Sparse:
        prototype = setup.prototypes[GLOBAL]
        structure = prototype.structure
        masks = {name: np.ones(structure.shapes[name], dtype=bool) for name in prunable(structure)}
        initial = Initial(self.sweeps, among=setup.fastest) if self.initial_rounds else None
        return Sparse(structure, prototype.tensors, masks, self.limit(setup), setup.population, initial)

    def limit(self, setup: Setup) -> float:
        """The density at which the weakest device could do it, if products with pruned weights were free."""
        weakest = setup.weakest
        if self.density is not None or weakest is None:
            return self.density or 1.0
        structure = setup.prototypes[GLOBAL].structure
        whole = setup.price(full(structure))
        weights = structure.size(prunable(structure))
        rest = structure.size(structure.tensors) - weights

        def usage(rate: float) -> Usage:
            # Memory is left out: no density changes it.
            cost = replace(whole, sustained=rate * whole.sustained, memory=Memory(0, 0, 0, 0))
            active = FLOAT_BYTES * (rest + int(rate * weights))
            return Usage(cost, active + math.ceil(weights / 8), active)

        return largest_rate(lambda rate: weakest.allows(usage(rate)))

    @property
    def keeps(self) -> str:
        return "sums of squared gradients"

    def kept_bytes(self, structures: Mapping[str, Structure]) -> int:
        return FLOAT_BYTES * structures[GLOBAL].size(structures[GLOBAL].parameters)

    @property
    def discloses(self) -> str:
        return "squared gradients, training losses"

    @property
    def combines(self) -> str:
        return "mean under one mask"

    def action(self, resource: Resource) -> Action:
        """One density for all; gradients and products are dense, so that no density changes the memory."""
        return "none" if self.density is not None or resource == "memory" else "shared"

    def cohort(self, state: Sparse, round: Round) -> Sequence[int] | None:
        """One device as long as initial pruning lasts, of the fastest; another one if it did not answer."""
        if state.initial is None:
            return None
        device, among = state.initial.device, state.initial.among
        if device is None:
            device = int(round.rng("initial").choice(state.population if among is None else among))
        return [device]

    def assign(self, state: Sparse, client: Client, round: Round) -> Task:
        from fedpmt.training.masked import EACH_STEP, VERSION

        part = self.part(state, client.id)
        sent = {name: take(state.tensors[name], selection) for name, selection in part.sent.items()}
        scalars = {VERSION: state.version, EACH_STEP: state.initial is not None}
        epochs = None if state.initial is None else state.initial.sweeps
        return Task((part,), {MODEL: sent}, scalars, epochs=epochs)

    def part(self, state: Sparse, device: int) -> Part:
        """The active weights; the mask comes with them where the device does not have it yet."""
        active = state.active
        masks = [selection.bits for selection in active.values() if isinstance(selection, Mask)]
        bits = 0 if device in state.holders else sum(mask.size for mask in masks)
        reported = dict.fromkeys(state.structure.parameters, WHOLE) if self.changes(state) else {}
        label = f"density {state.density:.2f}"
        return Part(GLOBAL, active, active, label, math.ceil(bits / 8), reported=reported)

    def changes(self, state: Sparse) -> bool:
        """Whether the mask may change after this round, for which the server must know the gradients."""
        if state.initial is not None:
            return state.initial.done + state.initial.sweeps >= self.sweeps
        return (state.further + 1) % self.interval == 0

    def local(self) -> LocalWork[Squares]:
        from fedpmt.training.masked import MaskedWork

        return MaskedWork()

    def aggregate(self, state: Sparse, replies: Iterable[Reply], round: Round) -> Step[Sparse]:
        from fedpmt.aggregation import CoverageMean
        from fedpmt.training.masked import ACCURACY, SQUARES

        # All share one mask, so their flat vectors of active entries are averaged as they come.
        active, whole = state.active, full(state.structure)
        mean = CoverageMean(
            {name: take(state.tensors[name], selection) for name, selection in active.items()}
        )
        squares, devices, accuracies = dict[str, np.ndarray](), [], []
        for reply in replies:
            mean.add(whole, reply.tensors[MODEL], reply.samples if self.weight == "samples" else 1)
            for name, square in reply.tensors.get(SQUARES, {}).items():
                squares[name] = squares.get(name, 0.0) + square.double().cpu().numpy()
            devices.append(reply.device)
            accuracies.append(reply.metrics[ACCURACY])
        holders = tuple(sorted({*state.holders, *devices}))
        tensors = {
            name: place(values, active[name], state.structure.shapes[name])
            for name, values in mean.result().items()
        }
        state, changes = replace(state, tensors=tensors, holders=holders), self.changes(state)
        if state.initial is not None:
            state = self.pruned_initially(state, state.initial, devices, accuracies, squares, round)
        else:
            drop = self.drop * 0.5 ** (state.further / self.half_life)  # q_t
            if changes and devices:
                state = self.changed(state, squares, drop, round.price)
            state = replace(state, further=state.further + 1)
        return Step(state, {"density": state.density})

    def pruned_initially(
        self,
        state: Sparse,
        initial: Initial,
        devices: list[int],
        accuracies: list[float],
        squares: dict[str, np.ndarray],
        round: Round,
    ) -> Sparse:
        """After a round of the one device: once it has learned something, the mask changes after so many sweeps."""
        classes = state.structure.shapes[state.structure.layers[-1].parameters[0]][0]
        device = devices[0] if devices else None
        learned = bool(devices) and float(np.mean(accuracies)) >= self.start_factor / classes
        # One that was too late, under a deadline say, was asked for too much.
        sweeps = initial.sweeps if devices else max(1, initial.sweeps // 2)
        changes, done = self.changes(state), initial.done + sweeps if devices else 0
        initial = replace(
            initial, rounds=initial.rounds + 1, device=device, sweeps=sweeps, done=0 if changes else done
        )
        if devices and changes and (learned or initial.density is not None):
            state = self.changed(state, squares, self.drop, round.price)
            before, density = initial.density, state.density
            calm = before is not None and abs(density / before - 1) <= self.change
            initial = replace(initial, density=density, steady=initial.steady + 1 if calm else 0)
        over = initial.steady >= self.steady or initial.rounds >= self.initial_rounds
        # With the end of this phase devices begin to sum anew.
        return (
            replace(state, initial=None, version=state.version + 1)
            if over
            else replace(state, initial=initial)
        )

    def changed(
        self, state: Sparse, squares: Mapping[str, np.ndarray], drop: float, price: PriceOf
    ) -> Sparse:
        """The state under a new mask; a weight that comes back starts from zero."""
        import torch

        constant, times = self.coefficients(state, price)
        fixed = sum(float(square.sum()) for name, square in squares.items() if name not in state.masks)
        weights = {name: state.tensors[name].detach().cpu().numpy() for name in state.masks}
        most = int(state.limit * sum(bits.size for bits in state.masks.values()))
        masks = rearranged(weights, state.masks, squares, times, fixed, constant, drop, most)
        tensors = dict(state.tensors)
        for name, bits in masks.items():
            pruned = torch.from_numpy(~bits).to(tensors[name].device)
            tensors[name] = tensors[name].masked_fill(pruned, 0)
        return replace(state, tensors=tensors, masks=masks, version=state.version + 1, holders=())

    def coefficients(self, state: Sparse, price: PriceOf) -> tuple[float, dict[str, float]]:
        """c, and t_j for the weights of each tensor, in units of the products of the whole model."""
        structure = state.structure
        weights = sum(bits.size for bits in state.masks.values())
        link = self.communication / weights
        costs = [price(suffix(structure, frozen, "")) for frozen in range(len(structure.layers))]
        if self.times == "dense":
            update = 1 / costs[0].operations
            return 1 - weights * update, dict.fromkeys(state.masks, update + link)
        times: dict[str, float] = {}
        gradients = [*(cost.gradient for cost in costs), 0.0]
        for depth, layer in enumerate(structure.layers):
            own = [name for name in layer.parameters if name in state.masks]
            count = sum(state.masks[name].size for name in own)
            # A layer's products are as many in each of its passes, so its share in one of them is its share in all.
            share = (
                (gradients[depth] - gradients[depth + 1]) / gradients[0] if gradients[0] else count / weights
            )
            times |= dict.fromkeys(own, share / count + link)
        return self.constant, times

    def predictor(self, state: Sparse) -> Predictor:
        return Predictor("global", GLOBAL, state.tensors)

    def neutral(self) -> Self:
        return replace(self, initial_rounds=0, density=1.0, drop=0.0)
