"""What the methods' papers say of them, judged from records of equal seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fedpmt.experiments.artefact import Table
from fedpmt.experiments.completion_time import CONFIDENCE, Estimate
from fedpmt.experiments.paper import IID, PARTITIONS, TWO_CLASSES
from fedpmt.report.tables import evaluated, first_reaching

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.experiments.entrants import Found
    from fedpmt.records import RunRecord

TARGET = 0.5
TAIL = 0.1
"""The final accuracy is the mean over the evaluations in this share of the rounds: with two classes curves jump."""

PANELS = (IID, TWO_CLASSES)
SEEN, NOT_SEEN, OPEN, UNKNOWN = "seen", "not seen", "within noise", "not decided"


def final(run: RunRecord) -> float:
    """The accuracy a run ends with."""
    every = evaluated(run)
    last = [accuracy for step, accuracy in every if step.round > (1 - TAIL) * len(run.rounds)]
    last = last or [accuracy for _, accuracy in every[-1:]]
    return sum(last) / len(last) if last else 0.0


def reached_seconds(run: RunRecord) -> float | None:
    """Virtual time to the target."""
    found = first_reaching(run, TARGET)
    return found.seconds if found else None


def reached_rounds(run: RunRecord) -> float | None:
    """Rounds to the target."""
    found = first_reaching(run, TARGET)
    return float(found.round) if found else None


def reached_bytes(run: RunRecord) -> float | None:
    """Bytes uploaded until the target."""
    found = first_reaching(run, TARGET)
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
    margin: float = 0.0  # by which the first may fall behind

    def verdict(self, firsts: Sequence[RunRecord], seconds: Sequence[RunRecord]) -> tuple[str, str]:
        """Whether it is seen, and by how much, from runs of the same seeds."""
        leads = []
        by_seed = {run.settings.get("seed"): run for run in seconds}
        for run in firsts:
            other = by_seed.get(run.settings.get("seed"))
            if other is None:
                continue
            mine, theirs = self.measure(run), self.measure(other)
            if mine is None and theirs is None:
                continue
            # What was never reached is behind everything that was.
            lead = math.inf if theirs is None else -math.inf if mine is None else theirs - mine
            if self.more and math.isfinite(lead):
                lead = -lead
            leads.append(lead + self.margin)
        if not leads:
            return UNKNOWN, "-"
        text = f"{sum(lead > 0 for lead in leads)} of {len(leads)}"
        estimate = Estimate.of(leads) if all(map(math.isfinite, leads)) else None
        if estimate is not None:
            undecided = len(leads) > 1 and estimate.half >= abs(estimate.mean)
            return (OPEN if undecided else SEEN if estimate.mean > 0 else NOT_SEEN), text
        sides = {lead > 0 for lead in leads}
        return (OPEN if len(sides) > 1 else SEEN if sides == {True} else NOT_SEEN), text


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
        "fjord",
        "fjord:without-distillation",
        final,
        more=True,
    ),
    Finding("FedDF", "FedDF needs fewer rounds than FedAvg", "feddf", "fedavg", reached_rounds),
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


def findings(found: Found) -> list[dict[str, str]]:
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
    note = (
        f"Seen, not seen: by the mean over seeds. {OPEN.capitalize()}: the {100 * CONFIDENCE:.0f} % interval of the "
        f"difference on equal seeds reaches to both sides. {UNKNOWN.capitalize()}: neither reached the target, or a "
        "run is not there."
    )
    return Table("What the papers say", ("finding", "split", "here", "seeds for it"), rows, note)
