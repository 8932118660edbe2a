"""What each entrant ended with and what it took, and where FedPMT is behind, from records."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpmt.report.budgets import ACTIONS
from fedpmt.report.quantities import Spread, bytes_unit, count_unit, show, time_unit
from fedpmt.report.tables import EVALUATED, evaluated, summary
from reproduction.artefact import Table
from reproduction.entrants import KNOWN
from reproduction.findings import LIKELY, OPEN, SEEN, Finding
from reproduction.paper import PARTITIONS
from reproduction.readings import TAIL, final, reaching
from reproduction.verdicts import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.records import RunRecord
    from fedpmt.report.quantities import Unit
    from fedpmt.report.tables import SummaryRow
    from reproduction.entrants import Contest, Entrant, RunsByEntrant

OURS = "fedpmt"
NOT_REACHED = "not reached"
AT_MOST = "≤ "
NOT_ALIKE = " †"
"""Marks accuracies that are of other nets than one global model's."""


@dataclass(frozen=True)
class Score:
    """One entrant on one split."""

    entrant: Entrant
    partition: str
    accuracy: Estimate  # of the last tenth of the rounds
    reached: dict[float, Estimate | None]  # target -> virtual seconds
    at_once: frozenset[float]  # targets that a run's first evaluation is at: it was there before
    total: SummaryRow  # over all rounds, of those that did not diverge
    down: Spread | None  # bytes to devices, with what says which part is theirs
    diverged: int  # how many of the runs
    slowest: Spread | None  # the most bytes that a device of the slowest level held
    most: Spread | None  # that any device held
    over: float  # the share of devices in rounds that were over their budget
    action: str | None

    @classmethod
    def of(
        cls, entrant: Entrant, partition: str, members: Sequence[RunRecord], targets: Sequence[float]
    ) -> Score | None:
        """From its runs; None where there is none."""
        accuracy = Estimate.of([final(run) for run in members])
        if accuracy is None:
            return None
        # What a run had spent until it diverged is no price of anything.
        whole = [run for run in members if not run.diverged] or members
        devices = [device for run in members for step in run.rounds for device in step.devices]
        results = [run.result for run in members if run.result is not None]
        return cls(
            entrant,
            partition,
            accuracy,
            {target: Estimate.of([seconds_to(run, target) for run in members]) for target in targets},
            frozenset(target for target in targets if any(there_at_once(run, target) for run in members)),
            summary(whole)[0],
            Spread.of(map(downloaded, whole)),
            sum(run.diverged for run in members),
            Spread.of(memory(run, 1) for run in members),
            Spread.of(memory(run) for run in members),
            sum(device.over_budget for device in devices) / max(1, len(devices)),
            results[0].budget_action if results else None,
        )

    @property
    def comparable(self) -> bool:
        """Whether its accuracy is of one global model, on all classes."""
        return self.total.evaluates == "global"

    def values(self) -> dict[str, Any]:
        """For programs."""
        spreads = {
            "virtual_seconds": self.total.virtual_seconds,
            "bytes_up": self.total.bytes_up,
            "bytes_down": self.down,
            "operations": self.total.operations,
            "server_operations": self.total.server_operations,
            "server_steps": self.total.server_steps,
            "server_steps_default": self.total.server_steps_default,
            "memory_slowest_level": self.slowest,
            "memory_most": self.most,
        }
        return {
            "entrant": self.entrant.name,
            "method": self.entrant.method,
            "partition": self.partition,
            "runs": self.accuracy.runs,
            "diverged": self.diverged,
            "evaluates": self.total.evaluates,
            "accuracy": self.accuracy.mean,
            "accuracy_half_interval": _finite(self.accuracy.half),
            "seconds_to": {
                str(target): None if found is None else found.mean for target, found in self.reached.items()
            },
            "reached": {str(target): found.reached if found else 0 for target, found in self.reached.items()},
            **{name: spread.mean if spread else None for name, spread in spreads.items()},
            "action": self.action,
            "over_budget": self.over,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def seconds_to(run: RunRecord, target: float) -> float | None:
    """Virtual time to an accuracy."""
    found = reaching(run, target)
    return found.seconds if found else None


def there_at_once(run: RunRecord, target: float) -> bool:
    """Whether the first evaluation is at an accuracy."""
    found, every = reaching(run, target), evaluated(run)
    return found is not None and found.round == every[0][0].round


def downloaded(run: RunRecord) -> float:
    """Bytes to all devices, with index lists, masks and seeds: they travel with the tensors."""
    return float(sum(step.bytes_down + step.overhead_bytes for step in run.rounds))


def memory(run: RunRecord, level: int | None = None) -> float:
    """The most bytes that a device held, of all or of one level."""
    held = (
        device.memory_bytes for step in run.rounds for device in step.devices if level in (None, device.level)
    )
    return float(max(held, default=0))


def scores(contest: Contest, found: RunsByEntrant) -> list[Score]:
    """Of all that have runs; split by split, the most accurate first."""
    every = []
    for partition in contest.partitions:
        there = [
            Score.of(entrant, partition, found[partition, entrant.name], contest.targets)
            for entrant in contest.entrants
        ]
        every += sorted((one for one in there if one is not None), key=lambda one: -one.accuracy.mean)
    return every


def percent(estimate: Estimate) -> str:
    """An accuracy with its interval.

    >>> percent(Estimate(0.613, 0.004, 3, 3))
    '61.3 ± 0.4'
    """
    return Estimate(100 * estimate.mean, 100 * estimate.half, estimate.reached, estimate.runs).text(1)


def minutes(estimate: Estimate | None) -> str:
    """A virtual time with its interval."""
    if estimate is None:
        return NOT_REACHED
    return Estimate(estimate.mean / 60, estimate.half / 60, estimate.reached, estimate.runs).text(1)


def result_table(title: str, members: Sequence[Score], targets: Sequence[float]) -> Table:
    """What came out."""
    columns = (
        "entrant", "accuracy, %", "seeds", *(f"min to {100 * target:.0f} %" for target in targets), "virtual time",
        "uploaded", "downloaded", "evaluated",
    )  # fmt: skip
    rows = [
        [
            _named(one),
            percent(one.accuracy) + ("" if one.comparable else NOT_ALIKE),
            str(one.accuracy.runs) + lost(one.diverged, one.accuracy.runs),
            *(AT_MOST * (target in one.at_once) + minutes(one.reached[target]) for target in targets),
            show(one.total.virtual_seconds, time_unit),
            show(one.total.bytes_up, bytes_unit),
            show(one.down, bytes_unit),
            EVALUATED.get(one.total.evaluates, one.total.evaluates),
        ]
        for one in members
    ]
    return Table(f"{title}: what came out", columns, rows)


def lost(diverged: int, runs: int) -> str:
    """What is said of runs that diverged.

    >>> lost(1, 3), lost(0, 3)
    (', diverged in 1 of 3', '')
    """
    return f", diverged in {diverged} of {runs}" if diverged else ""


def cost_table(title: str, members: Sequence[Score]) -> Table:
    """What it took."""
    columns = (
        "entrant", "budget acts", "over budget", "device operations", "server operations",
        "server steps a round", "memory, slowest level", "memory, most",
    )  # fmt: skip
    rows = [
        [
            _named(one),
            ACTIONS.get(one.action or "", "-"),
            f"{100 * one.over:.0f} %",
            show(one.total.operations, count_unit),
            show(one.total.server_operations, count_unit),
            one.total.steps_text(),
            show(one.slowest, bytes_unit),
            show(one.most, bytes_unit),
        ]
        for one in members
    ]
    return Table(f"{title}: what it took", columns, rows)


def _named(one: Score) -> str:
    return f"**{one.entrant.title}**" if one.entrant.name == OURS else one.entrant.title


@dataclass(frozen=True)
class Measure:
    """A number by which entrants are set against FedPMT."""

    name: str
    of: Callable[[RunRecord], float | None]
    unit: Callable[[float], Unit] | None  # None: an accuracy
    learned: bool  # it says something of an accuracy, so what is evaluated must be alike

    def text(self, members: Sequence[RunRecord]) -> str:
        """The mean over seeds, and how many of them it is of where not all have it."""
        estimate = Estimate.of([self.of(run) for run in members])
        if estimate is None:
            return NOT_REACHED
        shown = f"{100 * estimate.mean:.1f} %" if self.unit is None else show(estimate.mean, self.unit)
        return (
            shown if estimate.reached == estimate.runs else f"{shown} ({estimate.reached} of {estimate.runs})"
        )


def measures_of(targets: Sequence[float]) -> tuple[Measure, ...]:
    """All of them."""
    return (
        Measure("accuracy", final, None, learned=True),
        *(
            Measure(
                f"virtual time to {100 * target:.0f} %",
                lambda run, target=target: seconds_to(run, target),  # type: ignore[misc]
                time_unit,
                learned=True,
            )
            for target in targets
        ),
        Measure(
            "virtual time of all rounds",
            _spent(lambda run: run.rounds[-1].virtual_seconds),
            time_unit,
            learned=False,
        ),
        Measure(
            "uploaded",
            _spent(lambda run: float(sum(step.bytes_up for step in run.rounds))),
            bytes_unit,
            learned=False,
        ),
        Measure("downloaded", _spent(downloaded), bytes_unit, learned=False),
        Measure("memory, slowest level", lambda run: memory(run, 1), bytes_unit, learned=False),
    )


def _spent(of: Callable[[RunRecord], float]) -> Callable[[RunRecord], float | None]:
    """What all rounds took; a run that diverged has not played them all."""
    return lambda run: None if run.diverged else of(run)


EVEN = 0.001
"""A share of what FedPMT takes that nobody would call less: a byte that names a depth, say."""


def losses(contest: Contest, found: RunsByEntrant, every: Sequence[Score]) -> list[dict[str, Any]]:
    """Who is ahead of FedPMT by each measure on each split, on equal seeds; a method counts once, by its best form."""
    rows = []
    for partition in contest.partitions:
        ours = found.get((partition, OURS), [])
        if not ours:
            continue
        forms = defaultdict(list)
        for one in every:
            if one.partition == partition and one.entrant.method != OURS:
                forms[one.entrant.method].append(one)
        for measure in measures_of(contest.targets):
            ahead, likely, even, rivals = [], [], [], 0
            for members in forms.values():
                there = [one for one in members if one.comparable or not measure.learned]
                if not there:
                    continue
                rivals += 1
                verdict, entrant = _best_form(measure, there, found, ours)
                told = (entrant, measure.text(found[partition, entrant.name]))
                if verdict == SEEN:
                    ahead.append(told)
                elif verdict == LIKELY:
                    likely.append(told)
                elif verdict == OPEN:
                    even.append(entrant)
            rows.append(
                {
                    "measure": measure.name,
                    "partition": partition,
                    "seeds": len(ours),
                    "fedpmt": measure.text(ours),
                    "ahead": {entrant.name: text for entrant, text in ahead},
                    "likely_ahead": {entrant.name: text for entrant, text in likely},
                    "within_noise": [entrant.name for entrant in even],
                    "rivals": rivals,
                }
            )
    return rows


def _best_form(
    measure: Measure, forms: Sequence[Score], found: RunsByEntrant, ours: Sequence[RunRecord]
) -> tuple[str, Entrant]:
    """How the form of a method that does best does against FedPMT; of several that are ahead, the furthest."""
    judged, more = [], measure.unit is None  # a share: more of it is better
    base = None if more else Estimate.of([measure.of(run) for run in ours])
    margin = 0.0 if base is None or not math.isfinite(base.mean) else -EVEN * base.mean
    for one in forms:
        members = found[one.partition, one.entrant.name]
        # What a run that diverged would have spent is not known; what it never learned is.
        finding = Finding(
            "", "", one.entrant.name, OURS, measure.of, more=more, margin=margin, reaches=measure.learned
        )
        verdict, _ = finding.verdict(members, ours)
        estimate = Estimate.of([measure.of(run) for run in members])
        mean = -math.inf if estimate is None else estimate.mean if more else -estimate.mean
        judged.append(((verdict == SEEN, verdict == LIKELY, verdict == OPEN, mean), verdict, one.entrant))
    _, verdict, entrant = max(judged, key=lambda one: one[0])
    return verdict, entrant


def loss_table(rows: Sequence[dict[str, Any]]) -> Table:
    """As the page has it."""
    cells = [
        [
            row["measure"],
            PARTITIONS.get(row["partition"], row["partition"]),
            row["fedpmt"],
            f"{len(row['ahead'])} of {row['rivals']}",
            ", ".join(f"{KNOWN[name].title} {text}" for name, text in row["ahead"].items()) or "none",
            ", ".join(f"{KNOWN[name].title} {text}" for name, text in row["likely_ahead"].items()) or "-",
            ", ".join(KNOWN[name].title for name in row["within_noise"]) or "-",
        ]
        for row in rows
    ]
    note = (
        "Better: the 95 % interval of the mean difference on equal seeds excludes zero (with one seed, any difference "
        "counts; one usable seed of several decides nothing). Better in all seeds: the interval includes zero. "
        "Within noise: seeds disagree. Each method counts once, in its best variant. Accuracies that are not of one "
        "global model are left out. An accuracy is reached when the mean over the last "
        f"{100 * TAIL:.0f} % of the evaluations reaches it. Downloads include index lists, masks and seeds. "
        f"Savings of up to {100 * EVEN:.1f} % do not count. A diverged run reaches nothing and ends at a guess."
    )
    columns = (
        "by",
        "split",
        "FedPMT",
        "better",
        "which",
        "better in all seeds, not significantly",
        "within noise",
    )
    return Table("Where FedPMT loses", columns, cells, note, words=True)


def verdict_text(rows: Sequence[dict[str, Any]]) -> str:
    """The same in a sentence for each split, of accuracy alone."""
    lines = []
    for row in rows:
        if row["measure"] != "accuracy":
            continue
        split = PARTITIONS.get(row["partition"], row["partition"])
        behind, maybe = (
            ", ".join(f"{KNOWN[name].title} ({text})" for name, text in row[which].items())
            for which in ("ahead", "likely_ahead")
        )
        said = f"Significantly better: {behind}." if behind else "No method is significantly better."
        if maybe:
            said += f" Better in all {row['seeds']} seeds, but not significantly: {maybe}."
        even = (
            "With one seed, the noise is not known."
            if row["seeds"] == 1
            else f"Within noise: {len(row['within_noise'])} of {row['rivals']} rivals."
        )
        lines.append(f"{split}: FedPMT ends at {row['fedpmt']}. {said} {even}")
    return "\n".join(f"- {line}" for line in lines)
