"""What a round of every method takes, next to our own FedAvg round: methods in turn in each repetition."""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from benchmarks.page import table
from benchmarks.results import Machine, Measurement, describe
from benchmarks.runner import measure, python_of, ways
from benchmarks.summary import Spread, spread
from fedpmt.methods.registry import general_methods

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers.common import Job
    from benchmarks.settings import Setting

BASE = "fedavg"
OPTIONS: dict[str, dict[str, Any]] = {
    # Rounds of one device alone are no rounds of a cohort; the mask is there when the clock starts.
    "prunefl": {"initial_rounds": 0, "interval": 2},
    # Timed at the same work as in all results so far; the weights of its terms take no time.
    "fedgen": {"generative": 2.0, "latent": 2.0},
    "scaffold": {"option": "II"},
    "comet": {"asked": 1_000},
}


HOLDERS = 0.8
"""Of the setting's devices: what is left of the data is public, or for validation."""


class MethodRow(BaseModel):
    """One method: seconds of a round, and how much of FedAvg's time and operations that is."""

    method: str
    seconds: float  # the median over repetitions of the median round
    low: float
    high: float
    times_fedavg: float  # the median over repetitions, each against the FedAvg round of the same one
    operations: float  # `exact` operations over FedAvg's
    fast: bool  # whether its local rounds are compiled code's, and not autograd's


class MethodResults(BaseModel):
    """One run of this part of the benchmark."""

    machine: Machine
    setting: str
    repeat: int
    rounds: int  # timed in each repetition
    methods: list[MethodRow] = []


def job_of(
    setting: Setting, method: str, *, rounds: int, warmup: int, seed: int, data_dir: Path | None
) -> Job:
    """Some rounds of one method; the last one is evaluated and not timed."""
    options = {
        **ways("ours")[0].options,
        **setting.ours(method),
        "budget": "operations",
        "options": OPTIONS.get(method, {}),
    }
    if data_dir is not None:
        options["data_dir"] = str(data_dir)
    return setting.job(options, rounds=warmup + rounds + 1, warmup=warmup, seed=seed)


def run(
    setting: Setting,
    names: Sequence[str] = tuple(general_methods()),
    *,
    repeat: int = 3,
    rounds: int = 6,
    warmup: int = 2,
    data_dir: Path | None = None,
    limit: float = 600.0,
) -> MethodResults:
    """Every method once in each repetition, FedAvg first."""
    # Fewer devices, as many a round: some methods need samples that no device holds.
    setting = replace(setting, devices=round(HOLDERS * setting.devices))
    names = [BASE, *(name for name in names if name != BASE)]
    found: dict[str, list[Measurement]] = {name: [] for name in names}
    way, python = ways("ours")[0], python_of("ours")
    for repetition in range(repeat):
        for name in names:
            job = job_of(setting, name, rounds=rounds, warmup=warmup, seed=repetition, data_dir=data_dir)
            blank = Measurement(
                setting=setting.name, peer="ours", variant=name, repetition=repetition, threads=way.name
            )
            one = measure("ours", python, way, job, blank, limit)
            if one.error or not one.seconds:
                raise RuntimeError(f"{name}: {one.error or 'no round was measured'}")
            found[name].append(one)
            print(f"{name}: {median(one.seconds):.4f} s a round", file=sys.stderr, flush=True)
    rows = [row_of(name, found[name], found[BASE]) for name in names]
    return MethodResults(machine=describe(), setting=setting.name, repeat=repeat, rounds=rounds, methods=rows)


def row_of(name: str, runs: Sequence[Measurement], base: Sequence[Measurement]) -> MethodRow:
    """A method's repetitions against FedAvg's, one by one: the machine may be slower in one than in another."""
    time = spread([one.seconds for one in runs])
    if time is None:
        raise ValueError(f"{name} was not measured")
    pairs = list(zip(runs, base, strict=True))
    return MethodRow(
        method=name,
        seconds=time.median,
        low=time.low,
        high=time.high,
        times_fedavg=median(median(one.seconds) / median(other.seconds) for one, other in pairs),
        operations=median(median(one.operations) / median(other.operations) for one, other in pairs),
        fast=all(one.path == "compiled" for one in runs),
    )


def methods_text(results: MethodResults) -> str:
    """Show all methods in a table."""
    body = [
        [
            row.method,
            str(Spread(row.seconds, row.low, row.high)),
            f"{row.times_fedavg:.2f}",
            f"{row.operations:.2f}",
            "yes" if row.fast else "no",
        ]
        for row in results.methods
    ]
    about = (
        f"A round of each method on {results.setting}, in turn, median of {results.repeat} repetition(s) of"
        f" {results.rounds} rounds; each device has a budget of as many `exact` operations as FedPMT's depth takes"
        " on its level."
    )
    head = ("method", "a round", "time over FedAvg's", "operations over FedAvg's", "fast path")
    return f"{about}\n\n{table(head, body)}"
