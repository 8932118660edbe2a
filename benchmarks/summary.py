"""From measurements to the numbers that are shown: medians, spread, ratios, checks. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.results import Measurement, Peak, Results

FEDAVG = "fedavg E=1"
LEAST_TOLERANCE = 0.02
"""Accuracies that are closer than this are called the same, however little ours vary from seed to seed."""

LEAST_SEEDS = 3
"""Accuracies are only compared where this many of ours say how far they vary by chance."""


@dataclass(frozen=True)
class Spread:
    """The median over repetitions of the median round, with the lowest and the highest repetition."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """As it stands in a table."""
        return f"{seconds_text(self.median)} ({seconds_text(self.low)} to {seconds_text(self.high)})"


@dataclass(frozen=True)
class Row:
    """One peer on one setting."""

    peer: str
    variant: str
    threads: str
    seconds: Spread | None  # None: not measured, and `note` says why
    ratio: float | None  # this peer's seconds over ours, repetition by repetition
    steps: float | None
    same_steps: bool
    accuracy: float | None
    same_accuracy: bool | None  # None: not comparable, or nothing to compare with
    share_of_peak: float | None
    operations: float | None
    path: str | None  # how ours trained: compiled or autograd
    note: str = ""


def spread(groups: Iterable[Sequence[float]]) -> Spread | None:
    """Each group is the rounds of one repetition.

    >>> spread([[1, 2, 9], [3, 3], [4]])
    Spread(median=3.0, low=2, high=4)
    """
    medians = [median(group) for group in groups if group]
    return Spread(float(median(medians)), min(medians), max(medians)) if medians else None


def ratio(theirs: Sequence[Measurement], ours: Sequence[Measurement]) -> float | None:
    """Find how many times as long theirs takes: the median over repetitions, each against ours of the same one.

    The machine may be slower in one repetition than in another; within one, all take turns.
    """
    base = {run.repetition: median(run.seconds) for run in ours if run.seconds}
    found = [
        median(run.seconds) / base[run.repetition] for run in theirs if run.seconds and run.repetition in base
    ]
    return median(found) if found else None


def share_of_peak(operations: float, seconds: float, peak_gflops: float) -> float:
    """A multiply-add is two floating point operations.

    >>> share_of_peak(1e9, 0.1, 100)
    0.2
    """
    return 2 * operations / seconds / 1e9 / peak_gflops


def best_peak(peaks: Sequence[Peak]) -> float | None:
    """The best GEMM rate of the run."""
    return max((peak.gflops for peak in peaks), default=None)


def tolerance(ours: Sequence[float]) -> float:
    """Find how far an accuracy may lie from the mean of ours: three deviations over our seeds, or a least amount.

    >>> tolerance([0.50, 0.50, 0.501]), round(tolerance([0.40, 0.42, 0.44]), 3)
    (0.02, 0.06)
    """
    return max(LEAST_TOLERANCE, 3 * stdev(ours))


def rows(results: Results, setting: str) -> list[Row]:
    """Summarise all peers and variants of one setting, fastest first; ours at the top."""
    groups = runs_of(results, setting)
    ours = groups.get(("ours", FEDAVG), [])
    longest = max((run.rounds for run in ours), default=0)
    accuracies = [run.accuracy for run in ours if run.accuracy is not None and run.rounds == longest]
    steps = results.settings[setting]["steps"]
    made = [
        _row(peer, variant, runs, ours, accuracies, longest, steps, best_peak(results.peaks))
        for (peer, variant), runs in groups.items()
    ]
    return sorted(
        made, key=lambda row: (row.peer != "ours", row.seconds.median if row.seconds else float("inf"))
    )


def runs_of(results: Results, setting: str) -> dict[tuple[str, str], list[Measurement]]:
    """Group the measurements of one setting by peer and variant."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for found in results.measurements:
        if found.setting == setting:
            groups.setdefault((found.peer, found.variant), []).append(found)
    return groups


def _row(
    peer: str,
    variant: str,
    runs: list[Measurement],
    ours: list[Measurement],
    accuracies: list[float],
    longest: int,
    steps: int,
    peak: float | None,
) -> Row:
    seconds = None if any(run.cut_off for run in runs) else spread(run.seconds for run in runs)
    counted = [run.steps for run in runs if run.steps is not None]
    reached = [run.accuracy for run in runs if run.accuracy is not None and run.rounds == longest]
    done = _operations(runs)
    epochs = int(variant.rpartition("=")[2])
    same: bool | None = None
    if variant == FEDAVG and reached and len(accuracies) >= LEAST_SEEDS:
        same = abs(fmean(reached) - fmean(accuracies)) <= tolerance(accuracies)
    return Row(
        peer=peer,
        variant=variant,
        threads=runs[0].threads,
        seconds=seconds,
        ratio=None if seconds is None else ratio(runs, ours),
        steps=fmean(counted) if counted else None,
        same_steps=bool(counted) and all(count == steps * epochs for count in counted),
        accuracy=fmean(reached) if reached else None,
        same_accuracy=same,
        share_of_peak=share_of_peak(done, seconds.median, peak) if done and seconds and peak else None,
        operations=done,
        path=runs[0].path,
        note=_note(runs),
    )


def _note(runs: list[Measurement]) -> str:
    if any(run.cut_off for run in runs):
        return "cut off"
    return next((run.error for run in runs if run.error), "")


@dataclass(frozen=True)
class Partial:
    """FedPMT's round over our own FedAvg round, measured and as its price in `exact` operations says."""

    epochs: int
    time: float
    operations: float

    @property
    def apart(self) -> float:
        """How far the time lies above the price, as a share of the price."""
        return self.time / self.operations - 1


def partial(results: Results, setting: str) -> list[Partial]:
    """Find what training parts of the model saves, by number of local epochs."""
    groups = runs_of(results, setting)
    made = []
    for epochs in (1, 5):
        full = groups.get(("ours", f"fedavg E={epochs}"), [])
        part = groups.get(("ours", f"fedpmt E={epochs}"), [])
        time, most, least = ratio(part, full), _operations(full), _operations(part)
        if time is not None and most and least:
            made.append(Partial(epochs, time, least / most))
    return made


def _operations(runs: Sequence[Measurement]) -> float | None:
    done = [operations for run in runs for operations in run.operations]
    return fmean(done) if done else None


def fastest_peer(found: Sequence[Row]) -> Row | None:
    """Find the peer against which ours gains least."""
    peers = [row for row in found if row.peer != "ours" and row.ratio is not None]
    return min(peers, key=lambda row: row.ratio or 0.0, default=None)


def seconds_text(seconds: float) -> str:
    """Three digits that count.

    >>> seconds_text(0.07123), seconds_text(1.9), seconds_text(14.62)
    ('71.2 ms', '1.90 s', '14.6 s')
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
