"""Is the classifier the most biased layer? How far devices' updates of each layer disagree, under FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.methods.base import Gather, Step, aggregate
from fedpmt.methods.fedavg import FedAvg
from fedpmt.report.quantities import Spread
from reproduction.artefact import Table
from reproduction.paper import IID, PARTITIONS, TWO_CLASSES, Scope

if TYPE_CHECKING:
    from fedpmt.methods.averaging import Averaged
    from fedpmt.methods.base import Fold, Round, Server
    from fedpmt.records import RunRecord
    from fedpmt.training.messages import Reply

TASK = "cnn-mnist"
ROUNDS, QUICK_ROUNDS = 30, 3


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


def drift_table(scope: Scope) -> tuple[Table, list[dict[str, Any]]]:
    """Measured anew each time: it takes seconds."""
    layers: list[str] = []
    rows, values = [], []
    for partition in (IID, TWO_CLASSES):
        runs = [_run(partition, seed, quick=scope.quick) for seed in scope.seeds]
        layers = layers or list(runs[0].rounds[0].layers)
        found = {layer: Spread.of(_mean(run, layer) for run in runs) for layer in layers}
        rows.append([PARTITIONS[partition], *(f"{one.mean:.3f}" if one else "-" for one in found.values())])
        values.append({"partition": partition, **{layer: one and one.mean for layer, one in found.items()}})
    rounds = QUICK_ROUNDS if scope.quick else ROUNDS
    note = (
        "1 - |mean update|² / mean |update|² per layer: 0 where devices agree, near 1 where their updates cancel. "
        f"FedAvg, {rounds} rounds."
    )
    return Table(
        "How far devices disagree, layer by layer (CNN-MNIST)", ("partition", *layers), rows, note
    ), values


def _run(partition: str, seed: int, *, quick: bool) -> RunRecord:
    return api.run(
        WatchedFedAvg(),
        task=TASK,
        data="embedded",
        partition=partition,
        seed=seed,
        rounds=QUICK_ROUNDS if quick else ROUNDS,
        eval_every=ROUNDS,
    )


def _mean(run: RunRecord, layer: str) -> float:
    found = [step.metrics[f"disagreement {layer}"] for step in run.rounds]
    return sum(found) / len(found)
