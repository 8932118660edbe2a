"""Beyond one machine: Flower's Ray simulation on clusters of one and two nodes, against a model of what a round costs.

A round of |S| devices on N nodes with c cores each takes

    T(N) = ceil(|S| / (N c)) (d + m) + |S| f

seconds: d is a device's training, m what Flower and Ray take to hand over one task and its reply, and f the server's
folding of one reply. All three are measured apart from the rounds that they predict.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from benchmarks.page import table
from benchmarks.ray_cluster import RayCluster
from benchmarks.results import Machine, describe
from benchmarks.summary import seconds_text
from fedpmt.aggregation import CoverageMean
from fedpmt.api import paper_problem_of, settings_of
from fedpmt.flower.deployment import Deployment, write_app
from fedpmt.flower.loopback import FINISHED, Loopback
from fedpmt.parts.part import WHOLE, Part
from fedpmt.records import ROUNDS, RunRecord, read_run

if TYPE_CHECKING:
    from collections.abc import Sequence

WARMUP = 2
NODES = (1, 2)
PREDICTED = (1, 2, 4, 8, 16, 32)
LINK = 1e9 / 8
"""Bytes per second of the server's network link that predictions assume: 1 Gbit/s."""

PATIENCE = 120.0
"""Seconds without a new round after which Flower is asked whether the run has failed; asking takes time itself."""

RUN: dict[str, Any] = {
    "method": "fedpmt",
    "task": "fcnn-mnist",
    "data": "synthetic",
    "devices": 40,
    "samples": 300,
    "cohort": 8,
    "batch": 12,
    "lr": 0.01,
    "levels": "1/4,1/3,1/2,1",
    "mode": "exact",
}
SMALL = {"devices": 8, "samples": 24, "cohort": 4, "batch": 12}


class Costs(BaseModel):
    """What a round consists of."""

    cohort: int  # |S|
    cores: int  # c, of each node
    device_seconds: float  # d, the mean over devices, as the nodes themselves measured it
    message_seconds: float  # m
    fold_seconds: float  # f
    round_bytes: float  # of tasks and replies together


class Measured(BaseModel):
    """Rounds on a cluster of some nodes."""

    nodes: int
    seconds: float  # the median over repetitions of the median round
    low: float
    high: float


class ClusterResults(BaseModel):
    """One run of this part of the benchmark."""

    machine: Machine
    setting: dict[str, Any]
    repeat: int
    costs: Costs
    clusters: list[Measured]
    same_weights: bool  # whether runs of one seed ended with the same weights on every cluster


def predict(costs: Costs, nodes: int, link: float | None = None) -> float:
    """Predict the seconds of a round, over a network link of this many bytes per second or without one.

    >>> costs = Costs(cohort=8, cores=1, device_seconds=1, message_seconds=0.5, fold_seconds=0.1, round_bytes=1e6)
    >>> predict(costs, 1), predict(costs, 2), predict(costs, 3), predict(costs, 2, link=1e6)
    (12.8, 6.8, 5.3, 7.8)
    """
    turns = -(-costs.cohort // (nodes * costs.cores))
    network = 0.0 if link is None else costs.round_bytes / link
    return (
        turns * (costs.device_seconds + costs.message_seconds) + costs.cohort * costs.fold_seconds + network
    )


def run(*, repeat: int = 3, rounds: int = 8, cores: int = 1, small: bool = False) -> ClusterResults:
    """Measure the costs, then clusters of one and two nodes in turn.

    Args:
        repeat: Repetitions, each with a seed and with Ray and Flower started anew.
        rounds: Rounds of a repetition that are timed.
        cores: Cores of each node.
        small: Whether to take a small fleet, to see that it runs.
    """
    given = {**RUN, **(SMALL if small else {})}
    idle: list[float] = []
    training: list[float] = []
    sent: list[float] = []
    taken: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    same = True
    for repetition in range(repeat):
        weights = set()
        for nodes in NODES:
            with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder:
                seconds, record = rounds_on(nodes, {**given, "seed": repetition}, rounds, cores, Path(folder))
            taken[nodes].append(median(seconds))
            weights.add(record.result.weights_sha256 if record.result else "")
            print(f"{nodes} node(s): {median(seconds):.3f} s a round", file=sys.stderr, flush=True)
            if nodes == 1:
                training += [one.seconds for step in record.rounds[WARMUP:] for one in step.devices]
                sent += [step.bytes_up + step.bytes_down + step.overhead_bytes for step in record.rounds]
        same &= len(weights) == 1
        # The same messages with next to nothing to train: one sample and one step.
        least = {**given, "samples": 1, "batch": 1, "seed": repetition}
        with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder:
            seconds, record = rounds_on(1, least, rounds, cores, Path(folder))
        step = sum(one.seconds for step in record.rounds[WARMUP:] for one in step.devices)
        trained = step / sum(len(step.devices) for step in record.rounds[WARMUP:])
        idle.append(cores * median(seconds) / given["cohort"] - trained)
    fold = fold_seconds(given, repeat)
    costs = Costs(
        cohort=given["cohort"],
        cores=cores,
        device_seconds=sum(training) / len(training),
        message_seconds=max(0.0, median(idle) - fold),
        fold_seconds=fold,
        round_bytes=sum(sent) / len(sent),
    )
    found = [
        Measured(nodes=nodes, seconds=median(times), low=min(times), high=max(times))
        for nodes, times in taken.items()
    ]
    return ClusterResults(
        machine=describe(), setting=given, repeat=repeat, costs=costs, clusters=found, same_weights=same
    )


def rounds_on(
    nodes: int, given: dict[str, Any], rounds: int, cores: int, folder: Path
) -> tuple[list[float], RunRecord]:
    """Run on a cluster of its own; returns the seconds of each timed round and the records."""
    total = WARMUP + rounds + 1
    settings = settings_of({**given, "rounds": total, "eval_every": total})
    write_app(folder / "app", settings, Deployment(out=str(folder / "run"), state_dir=str(folder / "nodes")))
    federation = {"num-supernodes": settings.devices, "client-resources-num-cpus": 1}
    with (
        RayCluster(folder / "ray", nodes=nodes, cpus=cores),
        Loopback(folder / "processes", simulation=True) as link,
    ):
        number = link.submit(folder / "app", federation_config=federation)
        ends = watch(folder / "run" / ROUNDS, total, link, number)
        status = link.wait(number, PATIENCE)
        if not status.startswith(FINISHED):
            raise RuntimeError(f"the run on {nodes} node(s) did not end: {link.log(number)[-500:]}")
    # The last round is evaluated.
    laps = [after - before for before, after in pairwise(ends)]
    return laps[WARMUP - 1 : -1], read_run(folder / "run")


def watch(path: Path, total: int, link: Loopback, number: int) -> list[float]:
    """Watch a run's file of rounds grow; returns the time at which each round was written."""
    ends: list[float] = []
    last = time.perf_counter()
    while len(ends) < total:
        written = path.read_bytes().count(b"\n") if path.exists() else 0
        now = time.perf_counter()
        if written > len(ends):
            ends += [now] * (written - len(ends))
            last = now
        elif now - last > PATIENCE:
            if link.status(number).startswith(FINISHED):
                raise RuntimeError(f"the run failed: {link.log(number)[-500:]}")
            last = now
        time.sleep(0.005)
    return ends


def fold_seconds(given: dict[str, Any], repeat: int) -> float:
    """Measure what the server takes to fold one reply with all layers into the mean."""
    problem = paper_problem_of(settings_of({**given, "rounds": 1}))
    weights = problem.model.initial()
    part = Part("global", dict.fromkeys(weights, WHOLE), dict.fromkeys(weights, WHOLE), "all")
    taken: list[float] = []
    for _ in range(10 * repeat + 1):
        begun = time.perf_counter()
        mean = CoverageMean(weights)
        for _ in range(given["cohort"]):
            mean.add(part, weights, 1.0)
        mean.result()
        taken.append((time.perf_counter() - begun) / given["cohort"])
    return median(taken[1:])


def tables(results: ClusterResults, predicted: Sequence[int] = PREDICTED) -> dict[str, str]:
    """Make the tables of costs, of what was measured, and of larger clusters."""
    costs = results.costs
    parts = [
        ["a device's training, d", seconds_text(costs.device_seconds)],
        ["handing over a task and its reply, m", seconds_text(costs.message_seconds)],
        ["folding a reply on the server, f", seconds_text(costs.fold_seconds)],
        ["tasks and replies of a round", f"{costs.round_bytes / 1e6:.1f} MB"],
    ]
    compared = [
        [
            str(one.nodes),
            f"{1 / predict(costs, one.nodes):.2f}",
            f"{1 / one.seconds:.2f} ({1 / one.high:.2f} to {1 / one.low:.2f})",
            f"{predict(costs, one.nodes) / one.seconds - 1:+.0%}",
        ]
        for one in results.clusters
    ]
    larger = [
        [
            str(nodes),
            str(nodes * costs.cores),
            f"{1 / predict(costs, nodes):.2f}",
            f"{1 / predict(costs, nodes, LINK):.2f}",
        ]
        for nodes in predicted
    ]
    weights = "the same" if results.same_weights else "not the same"
    head = ("nodes", "rounds per second, predicted", "measured", "predicted time over measured")
    return {
        "costs": table(("cost", "measured"), parts),
        "measured": f"{table(head, compared)}\n\nThe weights at the end are {weights} on both clusters.",
        "predicted": table(
            ("nodes", "devices at a time", "rounds per second", "with a link of 1 Gbit/s"), larger
        ),
    }
