"""Methods that only this reproduction plays: forms of FedPMT that were not kept, and a FedAvg that measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpmt.methods.averaging import send, with_steps
from fedpmt.methods.base import Gather, Step, Traits, aggregate
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.parts.part import mask
from fedpmt.training.local import LocalWork, Outcome
from fedpmt.training.messages import UPDATE

if TYPE_CHECKING:
    from fedpmt.methods.averaging import Averaged
    from fedpmt.methods.base import Fold, Round, Server
    from fedpmt.training.local import Run
    from fedpmt.training.messages import Client, Reply, Task

GAIN = "gain"
"""Among the server's moments: by layer, how far it moved in a round, squared."""

MEMORY = 0.8
"""Of the gains before the last round's, what is kept."""


@dataclass(frozen=True)
class ExpectedDecrease(FedPMT):
    """The pair (f, τ) of the largest expected decrease, Σ_{l in f} τ |g_l|², by how far each layer moves in a round.

    A step along the mean gradient g lowers the loss by η |g|² to first order, and the movement of the global model's
    layer in a round is η τ g_l up to noise, so no device reports anything in addition.
    """

    def assign(self, state: Averaged, client: Client, round: Round) -> Task:
        """The depth whose layers gain most in the steps that the budget leaves for it."""
        gains = state.moments.get(GAIN, {})
        if client.plan is None or not gains:
            return super().assign(state, client, round)
        best, most, taken = None, -1.0, 1
        for part in self.masks(state):
            steps = client.plan.meter.affordable(part, client.plan.room)
            trained = mask(state.structure, part)
            layers = [layer.name for layer, on in zip(state.structure.layers, trained, strict=True) if on]
            gain = steps * sum(float(gains[name]) for name in layers if name in gains)
            if steps and gain > most:
                best, most, taken = part, gain, steps
        if best is None:
            return super().assign(state, client, round)
        return with_steps(send(state.tensors, (best,)), client, taken)

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        """As FedPMT's, with each layer's movement remembered."""
        return Gather(lambda replies, server: self._watch(state, replies, round, server))

    def _watch(self, state: Averaged, kept: list[Reply], round: Round, server: Server) -> Step[Averaged]:
        # Its own moments are no optimizer's: these are given to it without them.
        others = {name: one for name, one in state.moments.items() if name != GAIN}
        plain = FedPMT(weight=self.weight, server=self.server, depths=self.depths)
        step = aggregate(plain, replace(state, moments=others), kept, round, server)
        before, gains = state.moments.get(GAIN, {}), {}
        for layer in state.structure.layers:
            names = [name for name in layer.parameters if name in step.state.tensors]
            moved = sum(
                float((step.state.tensors[name] - state.tensors[name]).square().sum()) for name in names
            )
            old = float(before[layer.name]) if layer.name in before else moved
            gains[layer.name] = torch.tensor(MEMORY * old + (1 - MEMORY) * moved)
        return replace(step, state=replace(step.state, moments={**step.state.moments, GAIN: gains}))


@dataclass(frozen=True)
class Calibrated(FedPMT):
    """Weights of each layer's trainers by label counts: what trains a layer is to be like what all devices hold.

    Where only fast devices train a layer, their classes count for more than they should. With p_c the share of class c
    in the cohort and q_lc that among the trainers of layer l, device k counts Σ_c n_kc / n_k · p_c / q_lc times there.
    """

    @property
    def traits(self) -> Traits:
        """As FedPMT's, and it tells more."""
        return replace(super().traits, discloses="label counts", sends_more=True, sums="none")

    @property
    def local(self) -> LocalWork[Any]:
        """SGD, and the label counts with the reply."""
        return Counting()

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        """As FedPMT's, of updates that were weighed."""
        return Gather(lambda replies, server: self._weigh(state, replies, round, server))

    def _weigh(self, state: Averaged, kept: list[Reply], round: Round, server: Server) -> Step[Averaged]:
        counts = np.array([[reply.scalars[name] for name in sorted(reply.scalars)] for reply in kept], float)
        wanted = counts.sum(0) / counts.sum()
        factors = [dict[str, float]() for _ in kept]
        for layer in state.structure.layers:
            trainers = [
                place for place, one in enumerate(kept) if any(name in one.update for name in layer.tensors)
            ]
            if not trainers:
                continue
            seen = counts[trainers].sum(0) / counts[trainers].sum()
            ratio = np.divide(wanted, seen, out=np.zeros_like(wanted), where=seen > 0)
            each = (counts[trainers] / counts[trainers].sum(1, keepdims=True)) @ ratio
            sizes = counts[trainers].sum(1)
            # The weights of the mean stay as they are, so these must be 1 on average.
            each *= sizes.sum() / (sizes * each).sum()
            for place, factor in zip(trainers, each, strict=True):
                factors[place] |= dict.fromkeys(layer.tensors, float(factor))
        weighed = [
            replace(
                reply,
                tensors={UPDATE: {name: one * by.get(name, 1.0) for name, one in reply.update.items()}},
                scalars={},
            )
            for reply, by in zip(kept, factors, strict=True)
        ]
        plain = FedPMT(weight=self.weight, server=self.server, depths=self.depths)
        return aggregate(plain, state, weighed, round, server)


class Counting(LocalWork[Any]):
    """SGD on a device that also tells how many samples of each class it has."""

    def reply(self, run: Run[Any]) -> tuple[Outcome, Any]:
        """The counts, by class."""
        structure = run.job.model.structure
        classes = structure.shapes[structure.parameters[-1]][0]
        counts = torch.bincount(run.job.data.targets, minlength=classes).tolist()
        return Outcome(
            scalars={f"class {number:04d}": int(one) for number, one in enumerate(counts)}
        ), run.job.own


@dataclass(frozen=True)
class WatchedFedAvg(FedAvg):
    """FedAvg that also measures, per layer, how much of the devices' updates cancels in their mean.

    disagreement = 1 - |mean update|² / mean |update|²: 0 where all agree, near 1 where they cancel.
    """

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        """As FedAvg's, with the measure as metrics of the round."""
        return Gather(lambda replies, server: self.watch(state, replies, round, server))

    def watch(self, state: Averaged, kept: list[Reply], round: Round, server: Server) -> Step[Averaged]:
        """FedAvg's step, and how far its devices disagree."""
        step = aggregate(FedAvg(), state, kept, round, server)
        metrics = {}
        for layer in state.structure.layers:
            mean = squares = 0.0
            for name in layer.parameters:
                updates = [reply.update[name] for reply in kept]
                squares += sum(float(update.square().sum()) for update in updates) / len(updates)
                mean += float((sum(updates[1:], updates[0]) / len(updates)).square().sum())
            metrics[f"disagreement {layer.name}"] = 1 - mean / squares if squares else 0.0
        return Step(step.state, metrics, step.server_operations)
