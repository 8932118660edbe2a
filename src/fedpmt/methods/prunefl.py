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
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from fedpmt.methods.averaging import Weight, weight_of
from fedpmt.methods.base import Fold, Method, Predictor, Round, Server, Setup, Step, Traits, acts, require
from fedpmt.parts.depth import full, suffix
from fedpmt.parts.mask import prunable, rearranged
from fedpmt.parts.part import GLOBAL, WHOLE, Mask, Part, place, take, travelling_shapes
from fedpmt.pricing.matching import largest_rate
from fedpmt.training.local import LocalWork, Outcome
from fedpmt.training.messages import Client, Reply, Task
from fedpmt.types import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Selection
    from fedpmt.resources import Resources
    from fedpmt.training.local import Job, PriceOf, Reach, Rng, Run
    from fedpmt.types import Examples

SQUARES = "squares"
"""What travels up with the update before the mask is changed: squared gradients."""

ACCURACY = "train_accuracy"
VERSION, EACH_STEP = "mask", "each step"
TOTALS, MASKS, RIGHT = "totals", "masks", "right"


@dataclass(frozen=True)
class Squares:
    """What a device keeps: squared gradients summed over its rounds under one mask. A tensor not in it is zero."""

    sums: Mapping[str, Tensor]
    version: int = -1  # of the mask


class Masked(LocalWork[Squares]):
    """SGD that leaves masked-out weights at zero and sums up the gradients of all of them.

    The mask is applied to gradients, never inside the graph: a masked-out weight has a gradient too, without which
    it could not come back.
    """

    def first(self, device: int, rng: Rng) -> Squares:
        return Squares({})

    def start(self, job: Job[Squares]) -> Run[Squares]:
        import torch

        run = super().start(job)
        run.memo[TOTALS] = {name: torch.zeros_like(parameter) for name, parameter in run.params.items()}
        run.memo[MASKS] = {
            name: torch.from_numpy(selection.bits).to(run.params[name])
            for name, selection in job.part.trained.items()
            if isinstance(selection, Mask)
        }
        run.memo[RIGHT] = job.site.objective.score.start()
        return run

    def loss(self, run: Run[Squares], batch: Examples) -> Tensor:
        import torch

        outputs, objective = run.forward(run.tensors, batch.inputs), run.site.objective
        with torch.no_grad():
            run.memo[RIGHT].update(objective.score.measure(outputs, batch.targets))
        return objective.loss(outputs, batch.targets)

    def correct(self, run: Run[Squares], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = run.memo[TOTALS]
        for name, gradient in gradients.items():
            if run.task.scalars[EACH_STEP]:
                totals[name].addcmul_(gradient, gradient)
            else:
                totals[name].add_(gradient)
        # In place, now that they are added up: each is a tensor of its own.
        for name, mask in run.memo[MASKS].items():
            gradients[name].mul_(mask)
        return gradients

    def reply(self, run: Run[Squares]) -> tuple[Outcome, Squares]:
        own, version = run.job.own, int(run.task.scalars[VERSION])
        metrics = {ACCURACY: run.memo[RIGHT].compute() if run.steps else 0.0}
        sums = gained(run)
        if own is not None and own.version == version:
            sums = {
                name: total + own.sums[name] if name in own.sums else total for name, total in sums.items()
            }
        if not run.part.reported:
            return Outcome(metrics=metrics), Squares(sums, version)
        squares = {name: take(sums[name], selection) for name, selection in run.part.reported.items()}
        return Outcome({SQUARES: squares}, metrics=metrics), Squares({}, version)

    def extra(self, part: Part, price: PriceOf, structure: Structure) -> Extra:
        """Products are dense: a mask saves updates. One more operation for each gradient, and two sums of them held."""
        gradients, held = structure.size(structure.parameters), structure.nbytes(structure.parameters)
        answers = {SQUARES: travelling_shapes(part.reported, structure.shapes)} if part.reported else {}
        return replace(
            part.extra,
            step=gradients,
            memory_bytes=2 * held,
            answers=answers,
            metrics=(ACCURACY,),
            kept_bytes=held,
        )

    def bounds(self, task: Task, reach: Reach) -> Mapping[str, float]:
        """Of n (Σ g)², as many times as there were rounds; Σ g² over single steps is no more."""
        summed = reach.steps * reach.gradient
        return {SQUARES: reach.rounds * reach.samples * summed * summed}


def gained(run: Run[Squares]) -> dict[str, Tensor]:
    """This round's share: n (Σ g)² over the local steps, or Σ g² where each step is to count by itself."""
    totals: dict[str, Tensor] = run.memo[TOTALS]
    if run.task.scalars[EACH_STEP]:
        return totals
    return {name: total.square().mul_(len(run.data)) for name, total in totals.items()}


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


class MaskFold(Fold[Sparse]):
    """The mean of the active entries; then, at intervals, another mask."""

    def __init__(self, method: PruneFL, state: Sparse, round: Round) -> None:
        from fedpmt.aggregation import CoverageMean

        self._method, self._state, self._round = method, state, round
        self._active, self._whole = state.active, full(state.structure)
        # All share one mask, so their flat vectors of active entries are averaged as they come.
        self._mean = CoverageMean(
            {name: take(state.tensors[name], selection) for name, selection in self._active.items()}
        )
        self._squares = dict[str, np.ndarray]()
        self._devices, self._accuracies = list[int](), list[float]()

    def add(self, reply: Reply) -> None:
        self._mean.add(self._whole, reply.update, weight_of(self._method.weight, reply.samples))
        for name, square in reply.tensors.get(SQUARES, {}).items():
            self._squares[name] = self._squares.get(name, 0.0) + square.cpu().double().numpy()
        self._devices.append(reply.device)
        self._accuracies.append(reply.metrics[ACCURACY])

    def finish(self, server: Server) -> Step[Sparse]:
        method, state, devices = self._method, self._state, self._devices
        tensors = {
            name: place(values, self._active[name], state.structure.shapes[name])
            for name, values in self._mean.result().items()
        }
        changes = method.changes(state)
        state = replace(state, tensors=tensors, holders=tuple(sorted({*state.holders, *devices})))
        if state.initial is not None:
            state = method.pruned_initially(
                state, state.initial, devices, self._accuracies, self._squares, self._round
            )
        else:
            drop = method.drop * 0.5 ** (state.further / method.half_life)  # q_t
            if changes and devices:
                state = method.changed(state, self._squares, drop, self._round.price)
            state = replace(state, further=state.further + 1)
        return Step(state, {"density": state.density})


@dataclass(frozen=True)
class PruneFL(Method[Sparse, Squares]):
    """Initial and further adaptive pruning with one mask for all devices."""

    weight: Weight = "samples"
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
        require(
            self,
            density=(self.density is None or 0 < self.density <= 1, "> 0 and <= 1"),
            interval=(self.interval >= 1, ">= 1"),
            drop=(0 <= self.drop < 1, ">= 0 and < 1"),
            half_life=(self.half_life > 0, "> 0"),
            initial_rounds=(self.initial_rounds >= 0, ">= 0"),
            sweeps=(self.sweeps >= 1, ">= 1"),
            steady=(self.steady >= 1, ">= 1"),
            change=(self.change >= 0, ">= 0"),
            start_factor=(self.start_factor >= 0, ">= 0"),
            constant=(self.constant > 0, "> 0"),
            communication=(self.communication >= 0, ">= 0"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            needs_losses=True,
            sends_more=True,
            combines="mean under one mask",
            keeps="sums of squared gradients",
            discloses="squared gradients, training losses",
            # One density for all; gradients and products are dense, so that no density changes the memory.
            budget=acts("shared", "memory") if self.density is None else {},
        )

    @property
    def local(self) -> LocalWork[Squares]:
        return Masked()

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
        whole = weakest.meter.usage(full(structure)).operations
        pruned = prunable(structure)
        weights, held = structure.size(pruned), structure.nbytes(pruned)
        rest = structure.nbytes(structure.tensors) - held

        def usage(rate: float) -> Resources:
            # Memory is left out: no density changes it.
            active = rest + held * int(rate * weights) // max(1, weights)
            return weakest.meter.resources(rate * whole, active + math.ceil(weights / 8), active)

        return largest_rate(lambda rate: usage(rate) <= weakest.limit)

    def cohort(self, state: Sparse, round: Round) -> Sequence[int] | None:
        """One device as long as initial pruning lasts, of the fastest; another one if it did not answer."""
        if state.initial is None:
            return None
        device, among = state.initial.device, state.initial.among
        if device is None:
            device = int(round.rng("initial").choice(state.population if among is None else among))
        return [device]

    def assign(self, state: Sparse, client: Client, round: Round) -> Task:
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

    def fold(self, state: Sparse, round: Round) -> Fold[Sparse]:
        return MaskFold(self, state, round)

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
        weights = {name: state.tensors[name].detach().float().cpu().numpy() for name in state.masks}
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
