"""What the methods' papers say of them, judged from records of equal seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fedpmt.report.tables import evaluated
from reproduction.artefact import Table
from reproduction.paper import IID, PARTITIONS, TWO_CLASSES
from reproduction.readings import TAIL, final, reaching
from reproduction.verdicts import CONFIDENCE, Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.records import RunRecord
    from fedpmt.report.tables import Milestone
    from reproduction.entrants import RunsByEntrant

TARGETS = {IID: 0.5, TWO_CLASSES: 0.4}
"""Accuracies that most methods reach on a split, in a contest on CIFAR-10."""

PANELS = (IID, TWO_CLASSES)
SEEN, NOT_SEEN, OPEN, UNKNOWN = "seen", "not seen", "within noise", "not decided"
LIKELY, UNLIKELY = "in all seeds, not significant", "in no seed, not significant"
"""Seeds agree, but are too few or too far apart for the interval to leave zero out."""


def reached(run: RunRecord) -> Milestone | None:
    """Where a run is at the target of its split."""
    return reaching(run, TARGETS.get(str(run.settings.get("partition")), TARGETS[IID]))


def reached_seconds(run: RunRecord) -> float | None:
    """Virtual time to the target."""
    found = reached(run)
    return found.seconds if found else None


def reached_rounds(run: RunRecord) -> float | None:
    """Rounds to the target."""
    found = reached(run)
    return float(found.round) if found else None


def reached_bytes(run: RunRecord) -> float | None:
    """Bytes uploaded until the target."""
    found = reached(run)
    return float(found.bytes_up) if found else None


def jumps(run: RunRecord) -> float | None:
    """How far the accuracy moves from one evaluation to the next, on average over the second half."""
    accuracies = [accuracy for _, accuracy in evaluated(run)]
    moves = [abs(after - before) for before, after in pairwise(accuracies[len(accuracies) // 2 :])]
    return sum(moves) / len(moves) if moves else None


@dataclass(frozen=True)
class Finding:
    """What a paper says: one method before another, by a number of which more, or less, is better."""

    source: str
    text: str
    first: str
    second: str
    measure: Callable[[RunRecord], float | None]
    more: bool = False  # whether more is better
    panels: tuple[str, ...] = PANELS
    margin: float = 0.0  # by which the first may fall behind; below 0: by how much it must be ahead
    reaches: bool = True  # whether a number that is not there was never reached, or says nothing

    def verdict(self, firsts: Sequence[RunRecord], seconds: Sequence[RunRecord]) -> tuple[str, str]:
        """Whether it is seen, and in how many of the seeds, from runs of the same seeds.

        One seed alone decides where there is no other; of several one is not enough.
        """
        leads = []
        by_seed = {run.settings.get("seed"): run for run in seconds}
        for run in firsts:
            other = by_seed.get(run.settings.get("seed"))
            if other is None:
                continue
            mine, theirs = self.measure(run), self.measure(other)
            if (mine is None and theirs is None) or (not self.reaches and None in (mine, theirs)):
                continue
            # What was never reached is behind everything that was.
            lead = math.inf if theirs is None else -math.inf if mine is None else theirs - mine
            if self.more and math.isfinite(lead):
                lead = -lead
            leads.append(lead + self.margin)
        if not leads:
            return UNKNOWN, "-"
        seeds = max(len(firsts), len(seconds))
        text = f"{sum(lead > 0 for lead in leads)} of {seeds}"
        if len(leads) == 1 < seeds:
            return OPEN, text
        return judged(leads), text


def judged(leads: Sequence[float]) -> str:
    """By the interval of the mean lead; where that reaches to both sides, by whether the seeds agree.

    >>> judged([3.0, 3.1, 2.9]), judged([3.0, 1.0, 8.0]), judged([3.0, -1.0, 8.0])
    ('seen', 'in all seeds, not significant', 'within noise')
    """
    # Nothing can be averaged with what was never reached: then all seeds must agree.
    estimate = Estimate.of(leads) if all(map(math.isfinite, leads)) else None
    mean = leads[0] if estimate is None else estimate.mean
    agreed = all(lead > 0 for lead in leads) or all(lead < 0 for lead in leads)
    sure = agreed if estimate is None else estimate.half < abs(mean)
    if len(leads) == 1 or sure:
        return SEEN if mean > 0 else NOT_SEEN
    if not agreed:
        return OPEN
    return LIKELY if mean > 0 else UNLIKELY


FINDINGS = (
    Finding("FedRolex", "FedRolex ends above HeteroFL", "fedrolex", "heterofl", final, more=True),
    Finding("FedRolex", "HeteroFL ends above random dropout", "heterofl", "feddrop", final, more=True),
    Finding("FedRolex", "FedRolex ends above random dropout", "fedrolex", "feddrop", final, more=True),
    Finding("FjORD", "FjORD ends above random dropout", "fjord", "feddrop", final, more=True),
    Finding("FedPMT", "FedPMT ends above random dropout", "fedpmt", "feddrop", final, more=True),
    Finding("FedPMT", "FedPMT is sooner at the target than FedAvg", "fedpmt", "fedavg", reached_seconds),
    Finding(
        "SCAFFOLD",
        "SCAFFOLD needs fewer rounds than FedAvg",
        "scaffold",
        "fedavg",
        reached_rounds,
        panels=(TWO_CLASSES,),
    ),
    Finding(
        "FedProx",
        "FedProx's accuracy jumps less than FedAvg's",
        "fedprox",
        "fedavg",
        jumps,
        panels=(TWO_CLASSES,),
    ),
    Finding("FedMP", "pruned nets are sooner at the target than FedAvg", "fedmp", "fedavg", reached_seconds),
    Finding(
        "PruneFL",
        "PruneFL ends no more than 1 point below FedAvg",
        "prunefl",
        "fedavg",
        final,
        more=True,
        margin=0.01,
    ),
    Finding(
        "FjORD",
        "FjORD with distillation ends above FjORD without",
        "fjord:distillation",
        "fjord",
        final,
        more=True,
    ),
    Finding(
        "FedDF", "FedDF on one net needs fewer rounds than FedAvg", "feddf:one-net", "fedavg", reached_rounds
    ),
    Finding(
        "FedGen",
        "FedGen ends above FedAvg",
        "fedgen",
        "fedavg",
        final,
        more=True,
        panels=(TWO_CLASSES,),
    ),
    Finding("IST", "IST uploads less than FedAvg up to the target", "ist", "fedavg", reached_bytes),
)


def findings(found: RunsByEntrant) -> list[dict[str, str]]:
    """Every finding on every split that it is about, where both sides take part."""
    judged = []
    for finding in FINDINGS:
        for partition in finding.panels:
            first, second = (partition, finding.first), (partition, finding.second)
            if first not in found or second not in found:
                continue
            verdict, leads = finding.verdict(found[first], found[second])
            judged.append(
                {
                    "source": finding.source,
                    "finding": finding.text,
                    "partition": partition,
                    "verdict": verdict,
                    "seeds": leads,
                }
            )
    return judged


def findings_table(judged: list[dict[str, str]]) -> Table:
    """As a page has them."""
    rows = [
        [f"{one['finding']} ({one['source']})", PARTITIONS[one["partition"]], one["verdict"], one["seeds"]]
        for one in judged
    ]
    targets = ", ".join(f"{100 * target:.0f} % {PARTITIONS[split]}" for split, target in TARGETS.items())
    note = (
        f"Seen, not seen: by the mean over seeds, where the {100 * CONFIDENCE:.0f} % interval of the difference on "
        f"equal seeds excludes zero. Not significant: it does not, but all seeds agree. {OPEN.capitalize()}: seeds "
        "disagree, or only one of several counts. "
        f"{UNKNOWN.capitalize()}: neither reached the target, or a run is missing. The target ({targets}) is reached "
        f"when the mean over the last {100 * TAIL:.0f} % of the evaluations reaches it. No finding of SlimFL's paper "
        "applies: they are about channels that lose messages, as only its row with fading does here."
    )
    return Table("What the papers say", ("finding", "split", "here", "seeds for it"), rows, note, words=True)
