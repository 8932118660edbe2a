"""All methods at equal operations: accuracy, time, bytes and memory, and what of their papers' findings is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import PercentFormatter

from fedpmt import api
from fedpmt.experiments.accuracy import final
from fedpmt.experiments.artefact import Artefact, Picture, Table
from fedpmt.experiments.completion_time import CONFIDENCE, Estimate
from fedpmt.experiments.paper import IID, PARTITIONS, TITLES, TWO_CLASSES, Experiment, seeds_text
from fedpmt.methods.registry import METHODS, method_class
from fedpmt.report.budgets import ACTIONS
from fedpmt.report.drawing import curve
from fedpmt.report.quantities import Spread, bytes_unit, count_unit, show
from fedpmt.report.tables import evaluated, first_reaching
from fedpmt.report.theme import DASHES, PALETTE, new_figure, themed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from fedpmt.experiments.library import Library
    from fedpmt.experiments.paper import Scope
    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings

ROUNDS = 200
BUDGET = "operations"
TARGET = 0.5
PANELS = (IID, TWO_CLASSES)
SEEN, NOT_SEEN, OPEN, UNKNOWN = "seen", "not seen", "within noise", "not decided"
Found = dict[tuple[str, str], list["RunRecord"]]  # partition and method -> its seeds


def settings_of(scope: Scope, method: str, partition: str, seed: int) -> Settings:
    """One run: five levels and the paper's fleet; on embedded data its smaller net with four."""
    more: dict[str, Any] = {} if scope.quick else {"rounds": ROUNDS}
    chosen = scope.settings(method, task_of(scope), partition, seed, mode="exact", budget=BUDGET, **more)
    return api.settings_of(chosen.model_dump())


def task_of(scope: Scope) -> str:
    """The net."""
    return "cnn-mnist" if scope.quick else "cnn-cifar10"


def runs(scope: Scope) -> list[Settings]:
    """All runs, seed by seed."""
    return [
        settings_of(scope, method, partition, seed)
        for seed in scope.seeds
        for partition in PANELS
        for method in METHODS
    ]


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


def memory(run: RunRecord, level: int | None = None) -> float:
    """The most that a device held, of all or of one level."""
    held = (
        device.memory_bytes for step in run.rounds for device in step.devices if level in (None, device.level)
    )
    return float(max(held, default=0))


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
    Finding("IST", "IST uploads less than FedAvg up to the target", "ist", "fedavg", reached_bytes),
)


def make(library: Library, scope: Scope) -> Artefact:
    """A table for each split, the findings, and accuracy against virtual time."""
    found: Found = {}
    for partition in PANELS:
        for method in METHODS:
            every = [library.find(settings_of(scope, method, partition, seed)) for seed in scope.seeds]
            found[partition, method] = [run for run in every if run is not None]
    tables, values = [], []
    for partition in PANELS:
        rows = []
        for method in METHODS:
            cells, value = _row(method, found[partition, method])
            rows.append(cells)
            values.append({"partition": partition, **value})
        tables.append(Table(f"{TITLES[task_of(scope)]}, {PARTITIONS[partition]}", COLUMNS, rows))
    judged = findings(found)
    counts = sorted({len(members) for members in found.values()})
    seeds = seeds_text(range(counts[-1]))
    rounds = runs(scope)[0].rounds if scope.seeds else ROUNDS
    return Artefact(
        "rivals",
        "All methods at equal operations",
        f"fedpmt reproduce rivals{scope.suffix}",
        f"{seeds}, {rounds} rounds, budget `{BUDGET}`: on each level a method gets the largest part that takes no more "
        "`exact` operations than FedPMT's width there; where the budget does not act, the clock shows what that costs. "
        f"Means over seeds with {100 * CONFIDENCE:.0f} % intervals. Time is virtual, until {100 * TARGET:.0f} % are "
        "first reached; bytes and operations are of all devices in all rounds; memory is the most that a device of the "
        "slowest level, and any device, held. Over budget counts devices in rounds.",
        [*tables, _findings_table(judged)],
        [Picture("rivals", draw(found), f"Test accuracy against virtual time, {seeds}.")],
        {"rows": values, "findings": judged, "seeds": counts},
    )


COLUMNS = (
    "method", "budget acts", "accuracy, %", "time to 50 %, min", "uploaded", "downloaded", "operations",
    "memory, slowest level", "memory, most", "over budget",
)  # fmt: skip


def _row(method: str, members: list[RunRecord]) -> tuple[list[str], dict[str, Any]]:
    title = method_class(method).__name__
    if not members:
        return [title, *["-"] * (len(COLUMNS) - 1)], {"method": method, "runs": 0}
    accuracy = Estimate.of([100 * final(run) for run in members])
    seconds = [reached_seconds(run) for run in members]
    minutes = Estimate.of([None if one is None else one / 60 for one in seconds])
    results = [run.result for run in members if run.result is not None]
    action = results[0].budget_action if results else None
    totals = {
        name: Spread.of(float(sum(getattr(step, name) for step in run.rounds)) for run in members)
        for name in ("bytes_up", "bytes_down", "operations")
    }
    slowest, most = Spread.of(memory(run, 1) for run in members), Spread.of(memory(run) for run in members)
    devices = [device for run in members for step in run.rounds for device in step.devices]
    over = sum(device.over_budget for device in devices) / max(1, len(devices))
    cells = [
        title,
        ACTIONS.get(action or "", "-"),
        accuracy.text(1) if accuracy else "-",
        minutes.text(1) if minutes else "not reached",
        show(totals["bytes_up"], bytes_unit),
        show(totals["bytes_down"], bytes_unit),
        show(totals["operations"], count_unit),
        show(slowest, bytes_unit),
        show(most, bytes_unit),
        f"{100 * over:.0f} %",
    ]
    return cells, {
        "method": method,
        "runs": len(members),
        "action": action,
        "accuracy": accuracy.mean / 100 if accuracy else None,
        "accuracy_half_interval": accuracy.half / 100 if accuracy and math.isfinite(accuracy.half) else None,
        "minutes_to_target": minutes.mean if minutes else None,
        "reached": minutes.reached if minutes else 0,
        **{name: spread.mean if spread else None for name, spread in totals.items()},
        "memory_slowest_level": slowest.mean if slowest else None,
        "memory_most": most.mean if most else None,
        "over_budget": over,
    }


def findings(found: Found) -> list[dict[str, str]]:
    """Every finding on every split that it is about."""
    judged = []
    for finding in FINDINGS:
        for partition in finding.panels:
            verdict, leads = finding.verdict(
                found.get((partition, finding.first), []), found.get((partition, finding.second), [])
            )
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


def _findings_table(judged: list[dict[str, str]]) -> Table:
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


@themed
def draw(found: Found) -> Figure:
    """One panel for each split."""
    figure = new_figure(8.4, 4.2)
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, partition in zip(panels, PANELS, strict=True):
        for place, method in enumerate(METHODS):
            shape = curve(found[partition, method], "seconds")
            if shape is None:
                continue
            axes.plot(
                shape.place,
                shape.mean,
                color=PALETTE[place % len(PALETTE)],
                dashes=DASHES[place // len(PALETTE)],
                linewidth=1.4,
                label=method_class(method).__name__,
            )
        axes.set_title(PARTITIONS[partition])
        axes.set_xlabel("virtual time (s)")
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    panels[0].set_ylabel("test accuracy")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(PALETTE))
    return figure


RIVALS = Experiment("rivals", "all methods at equal operations, and what their papers found", runs, make)
