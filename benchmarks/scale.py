"""How a round grows: seconds and peak memory against population, cohort, model size and workers; start-up times."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel

from benchmarks.page import table
from benchmarks.peers.common import Job
from benchmarks.results import Machine, Measurement, cores, describe
from benchmarks.runner import ROOT, Way, environment, measure, python_of
from benchmarks.summary import Spread
from fedpmt.models.nets import NETS

Kind = Literal["population", "cohort", "model", "workers"]
NET = NETS["fcnn-mnist"]
SAMPLES, BATCH, COHORT, POPULATION = 60, 12, 10, 1000
LARGEST = 1_000_000
WARMUP = 1
AXIS: dict[Kind, str] = {
    "population": "devices in the fleet",
    "cohort": "devices a round",
    "model": "parameters",
    "workers": "workers",
}


class Point(BaseModel):
    """One place on one axis."""

    kind: Kind
    size: float  # devices, devices a round, parameters or workers
    seconds: float  # a round, the median over repetitions of the median
    low: float
    high: float
    peak_mib: float


class Startup(BaseModel):
    """Seconds of real commands, from the shell's point of view."""

    help_seconds: float  # fedpmt --help
    first_round_seconds: float  # fedpmt run on embedded data, until its first round is on disk


class ScaleResults(BaseModel):
    """One run of this part of the benchmark."""

    machine: Machine
    points: list[Point] = []
    startup: Startup | None = None


@dataclass(frozen=True)
class Place:
    """What is measured at one place of an axis."""

    kind: Kind
    size: float
    devices: int = POPULATION
    cohort: int = COHORT
    hidden: tuple[int, ...] = NET.hidden
    workers: int = 0


def parameters(hidden: tuple[int, ...]) -> int:
    """Weights and biases of the fully connected net.

    >>> parameters((400, 300, 200, 100))
    515610
    """
    widths = [28 * 28, *hidden, NET.classes]
    return sum((before + 1) * after for before, after in pairwise(widths))


def places(*, quick: bool = False) -> list[Place]:
    """All that is measured; quick leaves out what takes long."""
    populations = (1_000, 100_000) if quick else (1_000, 10_000, 100_000, LARGEST)
    cohorts = (10, 30) if quick else (10, 30, 100, 300, 1000)
    factors = (0.5, 1) if quick else (0.25, 0.5, 1, 2, 4)
    scaled = [tuple(int(width * factor) for width in NET.hidden) for factor in factors]
    return [
        *(Place("population", size, devices=size) for size in populations),
        *(Place("cohort", size, devices=POPULATION if quick else LARGEST, cohort=size) for size in cohorts),
        *(Place("model", parameters(hidden), hidden=hidden) for hidden in scaled),
        *(Place("workers", workers, cohort=2 * COHORT, workers=workers) for workers in sorted({1, cores()})),
    ]


def measure_place(place: Place, rounds: int, seed: int) -> Measurement:
    """Some rounds in a process of their own."""
    options: dict[str, Any] = {
        "method": "fedavg",
        "task": NET.name,
        "data": "synthetic",
        "devices": place.devices,
        "samples": SAMPLES,
        "workers": place.workers,
    }
    job = Job(
        data="",
        filters=NET.filters,
        hidden=place.hidden,
        cohort=place.cohort,
        batch=BATCH,
        epochs=1,
        lr=0.01,
        rounds=WARMUP + rounds + 1,
        warmup=WARMUP,
        seed=seed,
        options=options,
    )
    blank = Measurement(setting=place.kind, peer="ours", variant="fedavg E=1", repetition=seed, threads="")
    return measure("ours", python_of("ours"), Way(""), job, blank, limit=600)


def run(*, repeat: int = 3, rounds: int = 4, quick: bool = False) -> ScaleResults:
    """All places, repetition by repetition, then the start-up times."""
    results = ScaleResults(machine=describe())
    found: dict[Place, list[Measurement]] = {place: [] for place in places(quick=quick)}
    for repetition in range(repeat):
        for place, runs in found.items():
            one = measure_place(place, rounds, repetition)
            if not one.seconds or one.error:
                raise RuntimeError(f"{place.kind} {place.size}: {one.error or 'no round was measured'}")
            runs.append(one)
            print(
                f"{place.kind} {place.size:g}: {median(one.seconds):.3f} s a round, {one.peak_mib or 0:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
    for place, runs in found.items():
        medians = [median(one.seconds) for one in runs]
        results.points.append(
            Point(
                kind=place.kind,
                size=place.size,
                seconds=median(medians),
                low=min(medians),
                high=max(medians),
                peak_mib=max(one.peak_mib or 0.0 for one in runs),
            )
        )
    results.startup = startup(repeat=3 if quick else 5)
    return results


def startup(repeat: int = 5) -> Startup:
    """Median seconds of `fedpmt --help`, and of `fedpmt run` until its first round is recorded."""
    return Startup(
        help_seconds=median(_help() for _ in range(repeat)),
        first_round_seconds=median(_first_round() for _ in range(repeat)),
    )


def _help() -> float:
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fedpmt", "--help"], check=True, capture_output=True, env=_plain_environment()
    )
    return time.perf_counter() - begun


def _first_round() -> float:
    with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as folder:
        out = Path(folder) / "run"
        lines = out / "rounds.jsonl"
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "fedpmt", "run", "--rounds", "2", "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_plain_environment(),
        )
        while process.poll() is None and not (lines.exists() and lines.stat().st_size):
            time.sleep(0.002)
        taken = time.perf_counter() - begun
        if process.wait() != 0:
            raise RuntimeError(f"fedpmt run ended with code {process.returncode}")
        return taken


def _plain_environment() -> dict[str, str]:
    made = environment(Way(""), "")
    return {**made, "PYTHONPATH": os.pathsep.join([str(ROOT / "src")])}


def scale_text(results: ScaleResults) -> str:
    """Show all places in a table, and the start-up times."""
    body = [
        [
            AXIS[point.kind],
            f"{point.size:,.0f}",
            str(Spread(point.seconds, point.low, point.high)),
            f"{point.peak_mib:.0f} MiB",
        ]
        for point in results.points
    ]
    text = table(("axis", "size", "a round", "peak memory"), body)
    if results.startup is None:
        return text
    return (
        f"{text}\n\n`fedpmt --help` takes {results.startup.help_seconds:.2f} s; `fedpmt run` has its first round "
        f"on disk after {results.startup.first_round_seconds:.2f} s."
    )
