"""The clock of events: replies per second of FedBuff, for several sizes of its buffer, over those of rounds."""

from __future__ import annotations

import sys
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from benchmarks.page import table
from benchmarks.results import Machine, Measurement, describe
from benchmarks.runner import measure, python_of, ways

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers.common import Job
    from benchmarks.settings import Setting

BUFFERS = (1, 5, 20)
REPLIES = 80
"""Timed in each repetition, whatever the buffer."""


class EventRow(BaseModel):
    """One way of collecting replies; rates are medians over repetitions."""

    setting: str
    buffer: int | None  # K; None: rounds of FedAvg
    replies_per_second: float
    low: float
    high: float
    over_rounds: float  # the median over repetitions, each against the rounds of the same one


class EventResults(BaseModel):
    """One run of this part of the benchmark."""

    machine: Machine
    repeat: int
    events: list[EventRow] = []


def job_of(setting: Setting, buffer: int | None, *, replies: int, seed: int, data_dir: Path | None) -> Job:
    """Make a run that collects this many replies after its warm-up; its last step is evaluated and not timed."""
    each = buffer or setting.cohort
    options: dict[str, Any] = {**ways("ours")[0].options, **setting.ours("fedbuff" if buffer else "fedavg")}
    if buffer:
        options |= {"clock": "events", "buffer": buffer, "concurrency": setting.cohort}
    if data_dir is not None:
        options["data_dir"] = str(data_dir)
    # A round's worth of replies warms up.
    warmup = -(-setting.cohort // each)
    return setting.job(options, rounds=warmup + -(-replies // each) + 1, warmup=warmup, seed=seed)


def run(
    settings: Sequence[Setting],
    *,
    repeat: int = 3,
    replies: int = REPLIES,
    buffers: Sequence[int] = BUFFERS,
    data_dir: Path | None = None,
    limit: float = 600.0,
) -> EventResults:
    """Measure rounds and every size of the buffer, in turn in each repetition."""
    results = EventResults(machine=describe(), repeat=repeat)
    way, python = ways("ours")[0], python_of("ours")
    for setting in settings:
        kinds: list[int | None] = [None, *buffers]
        rates: dict[int | None, list[float]] = {kind: [] for kind in kinds}
        for repetition in range(repeat):
            for kind in kinds:
                job = job_of(setting, kind, replies=replies, seed=repetition, data_dir=data_dir)
                name = "fedavg" if kind is None else f"fedbuff K={kind}"
                blank = Measurement(
                    setting=setting.name, peer="ours", variant=name, repetition=repetition, threads=way.name
                )
                one = measure("ours", python, way, job, blank, limit)
                if one.error or not one.seconds:
                    raise RuntimeError(f"{setting.name} {name}: {one.error or 'no server step was measured'}")
                rates[kind].append(rate(kind or setting.cohort, one.seconds))
                print(f"{setting.name} {name}: {rates[kind][-1]:.1f} replies/s", file=sys.stderr, flush=True)
        results.events += rows_of(setting.name, rates)
    return results


def rate(each: int, seconds: Sequence[float]) -> float:
    """Replies per second where every step takes the same number of them.

    The total is taken, not the median: devices work while the server steps, so steps are short and long in turn.

    >>> rate(5, [0.5, 1.5])
    5.0
    """
    return each * len(seconds) / sum(seconds)


def rows_of(setting: str, rates: dict[int | None, list[float]]) -> list[EventRow]:
    """Summarise the repetitions, each against the rounds of the same one."""
    return [
        EventRow(
            setting=setting,
            buffer=kind,
            replies_per_second=median(found),
            low=min(found),
            high=max(found),
            over_rounds=median(one / base for one, base in zip(found, rates[None], strict=True)),
        )
        for kind, found in rates.items()
    ]


def events_text(results: EventResults) -> str:
    """Show all rates in a table."""
    body = [
        [
            row.setting,
            "FedAvg, rounds" if row.buffer is None else f"FedBuff, K = {row.buffer}",
            f"{row.replies_per_second:.1f} ({row.low:.1f} to {row.high:.1f})",
            f"{row.over_rounds:.2f}",
        ]
        for row in results.events
    ]
    return table(("setting", "replies are collected by", "replies per second", "over rounds"), body)
