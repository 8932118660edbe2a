"""The numbers of a comparison: what each method ended with, and what it took to get to a target."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from fedpmt.records import ACCURACY, check_target, reaches, total_joules, write_atomically
from fedpmt.report.groups import clean, differing_settings, group_runs, method_of, run_labels, settings_of
from fedpmt.report.quantities import (
    Spread,
    bytes_unit,
    count_unit,
    joules_unit,
    percent_unit,
    score_title,
    score_unit,
    show,
    time_unit,
)
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fedpmt.records import RoundRecord, RunRecord
    from fedpmt.report.groups import Group

STEPS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
OUTCOMES = ("arrived", "late", "failed", "surplus", "refused")

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Milestone:
    """Where a run first reached a target."""

    round: int
    seconds: float  # on the virtual clock
    bytes_up: int  # by all devices, up to and with that round
    joules: float | None = None  # the same; None without watts


@dataclass(frozen=True)
class TargetRow:
    """A group of runs and one target; the spreads are over those runs that reached it."""

    label: str
    panel: str
    line: str
    method: str
    target: float
    runs: int
    reached: int
    rounds: Spread | None
    seconds: Spread | None
    bytes_up: Spread | None
    joules: Spread | None = None  # None where the fleet states no watts
    evaluates: str = "global"  # what the score is of
    score_name: str = ACCURACY
    maximize: bool = True

    def texts(self) -> dict[str, str]:
        """The cells as a person reads them, by column title."""
        accuracy = self.score_name == ACCURACY
        kind = "" if self.evaluates == "global" else f" ({EVALUATED.get(self.evaluates, self.evaluates)})"
        return {
            "run": f"{self.label}{kind}",
            "target": f"{100 * self.target:.6g} %" if accuracy else f"{self.score_name} {self.target:.6g}",
            "reached": f"{self.reached} of {self.runs}",
            "round": show(self.rounds),
            "virtual time": show(self.seconds, time_unit),
            "uploaded": show(self.bytes_up, bytes_unit),
            **({} if self.joules is None else {"energy": show(self.joules, joules_unit)}),
        }


@dataclass(frozen=True)
class SummaryRow:
    """What a group of runs ended with, finished or not."""

    label: str
    panel: str
    line: str
    method: str
    runs: int
    finished: int
    rounds: Spread | None
    score: Spread | None  # at the last evaluation
    best_score: Spread | None
    loss: Spread | None
    virtual_seconds: Spread | None
    bytes_up: Spread | None
    bytes_down: Spread | None
    operations: Spread | None  # of the devices, counted or not
    wasted_share: Spread | None  # of these operations, spent on replies that did not count
    counted_share: Spread | None  # of the devices asked, those whose reply is in an average
    server_operations: Spread | None = None
    server_steps: Spread | None = None  # per round; None where the server trains nothing
    server_steps_default: Spread | None = None  # what the method's own settings ask for
    joules: Spread | None = None  # of the devices that were asked; None where the fleet states no watts
    epsilon: Spread | None = None  # of differential privacy; None without
    evaluates: str = "global"  # what the score is of
    score_name: str = ACCURACY
    maximize: bool = True
    server_cap: str = "none"  # times the devices' operations
    scores: Mapping[str, Spread | None] = field(default_factory=dict)  # other metrics at the last evaluation

    def texts(self) -> dict[str, str]:
        """The cells as a person reads them, by column title."""
        unit = score_unit(self.score_name)
        return {
            "run": self.label,
            "runs": str(self.runs)
            if self.finished == self.runs
            else f"{self.runs} ({self.finished} finished)",
            "rounds": show(self.rounds),
            score_title(self.score_name): show(self.score, unit),
            "best": show(self.best_score, unit),
            **{score_title(name): show(value) for name, value in self.scores.items()},
            "loss": show(self.loss),
            "virtual time": show(self.virtual_seconds, time_unit),
            "uploaded": show(self.bytes_up, bytes_unit),
            "downloaded": show(self.bytes_down, bytes_unit),
            **({} if self.joules is None else {"energy": show(self.joules, joules_unit)}),
            **({} if self.epsilon is None else {"epsilon": show(self.epsilon)}),
            "operations": show(self.operations, count_unit),
            "wasted": show(self.wasted_share, percent_unit),
            "replies counted": show(self.counted_share, percent_unit),
            "evaluated": EVALUATED.get(self.evaluates, self.evaluates),
            "server operations": show(self.server_operations, count_unit),
            "server steps a round": self.steps_text(),
        }

    def steps_text(self) -> str:
        """Steps that the server took and those its method asks for, with the cap that stands between them."""
        if self.server_steps is None:
            return "-"
        cap = "no cap" if self.server_cap == "none" else f"cap {self.server_cap} × devices"
        return f"{show(self.server_steps)} of {show(self.server_steps_default)} ({cap})"


EVALUATED = {"global": "global", "split": "split, mean over devices", "personal": "mean personal"}


def evaluated(run: RunRecord) -> list[tuple[RoundRecord, float]]:
    """The rounds that have a score, with it."""
    return [(step, step.score) for step in run.rounds if step.score is not None and math.isfinite(step.score)]


def uploaded(run: RunRecord) -> list[int]:
    """The bytes sent up until after each round."""
    return list(accumulate(step.bytes_up for step in run.rounds))


def first_reaching(run: RunRecord, target: float) -> Milestone | None:
    """The first evaluation at the target or better; None where there is none, or all was lost afterwards."""
    if run.diverged:
        return None
    for count, (step, total) in enumerate(zip(run.rounds, uploaded(run), strict=True), start=1):
        if step.score is not None and reaches(step.score, target, maximize=run.maximize):
            return Milestone(step.round, step.virtual_seconds, total, total_joules(run.rounds[:count]))
    return None


def time_to_target(runs: Sequence[RunRecord], targets: Sequence[float] | None = None) -> list[TargetRow]:
    """For each group of runs and each target: the first round, the virtual time, the bytes sent up and the energy.

    Without targets, those of `default_targets` are taken for runs whose score is an accuracy.
    """
    rows = []
    for group in group_runs(runs):
        known = group.score_name == ACCURACY
        for target in targets if targets is not None else default_targets(runs) if known else ():
            check_target(target, group.score_name)
            reached = [found for run in group.runs if (found := first_reaching(run, target)) is not None]
            rows.append(
                TargetRow(
                    label=group.label,
                    panel=group.panel,
                    line=group.line,
                    method=group.method,
                    target=target,
                    runs=len(group.runs),
                    reached=len(reached),
                    rounds=Spread.of(found.round for found in reached),
                    seconds=Spread.of(found.seconds for found in reached),
                    bytes_up=Spread.of(found.bytes_up for found in reached),
                    joules=Spread.of(found.joules for found in reached),
                    evaluates=_evaluates(group),
                    score_name=group.score_name,
                    maximize=group.runs[0].maximize,
                )
            )
    return rows


@dataclass(frozen=True)
class ClientsRow:
    """The scores of clients' own test samples in a group of runs; of a run, at its end."""

    label: str
    panel: str
    line: str
    count: int  # clients that have some
    mean: Spread | None
    spread: Spread | None
    worst_tenth: Spread | None
    by_level: Mapping[str, Spread | None]
    by_client: Mapping[str, Spread | None]
    score_name: str = ACCURACY

    def texts(self) -> dict[str, str]:
        """The cells as a person reads them, by column title."""
        unit = score_unit(self.score_name)
        levels = {f"level {level}": show(value, unit) for level, value in self.by_level.items()}
        own = {"mean": self.mean, "spread": self.spread, "worst tenth": self.worst_tenth}
        return {
            "run": self.label,
            "clients": str(self.count),
            **{title: show(value, unit) for title, value in own.items()},
            **levels,
        }


def client_scores(runs: Sequence[RunRecord]) -> list[ClientsRow]:
    """One row per group of runs whose clients have test samples of their own."""
    rows = []
    for group in group_runs(runs):
        results = [run.result for run in group.runs if run.result is not None]
        own = [result.clients for result in results if result.clients is not None]
        if not own:
            continue
        by_level = [result.score_by_level or {} for result in results]
        by_client = [result.score_by_client or {} for result in results]
        rows.append(
            ClientsRow(
                label=group.label,
                panel=group.panel,
                line=group.line,
                count=max(one.count for one in own),
                mean=Spread.of(one.mean for one in own),
                spread=Spread.of(one.spread for one in own),
                worst_tenth=Spread.of(one.worst_tenth for one in own),
                by_level=_spreads(by_level),
                by_client={clean(name): value for name, value in _spreads(by_client).items()},
                score_name=group.score_name,
            )
        )
    return rows


def _spreads(every: Sequence[Mapping[str, float]]) -> dict[str, Spread | None]:
    """The spread over runs of each number that one of them has."""
    names = dict.fromkeys(name for one in every for name in one)
    return {name: Spread.of(one.get(name) for one in every) for name in names}


def default_targets(runs: Sequence[RunRecord]) -> tuple[float, ...]:
    """Up to five round accuracies that some run reaches, none below half of the best.

    Of other scores nobody knows which values are round: they have no default targets.
    """
    accuracies = (run for run in runs if run.score_name == ACCURACY)
    best = max((score for run in accuracies for _, score in evaluated(run)), default=0.0)
    return tuple(step for step in STEPS if best / 2 <= step <= best)[-5:]


def _evaluates(group: Group) -> str:
    """What the scores of a group are of."""
    kinds = {step.evaluates for run in group.runs for step, _ in evaluated(run)}
    kinds |= {run.result.evaluates for run in group.runs if run.result}
    return ", ".join(sorted(kinds)) or "global"


def summary(runs: Sequence[RunRecord]) -> list[SummaryRow]:
    """One row per group of runs."""
    rows, names = [], score_names(runs)
    for group in group_runs(runs):
        totals = [_totals(run) for run in group.runs]
        spreads = {name: Spread.of(total[name] for total in totals) for name in totals[0]}
        finished = sum(run.result is not None for run in group.runs)
        last = [last_scores(run) for run in group.runs]
        rows.append(
            SummaryRow(
                label=group.label,
                panel=group.panel,
                line=group.line,
                method=group.method,
                runs=len(group.runs),
                finished=finished,
                evaluates=_evaluates(group),
                score_name=group.score_name,
                maximize=group.runs[0].maximize,
                server_cap=settings_of(group.runs[0]).get("server_cap", "none"),
                scores={name: Spread.of(one.get(name) for one in last) for name in names},
                **spreads,
            )
        )
    return rows


def last_scores(run: RunRecord) -> dict[str, float]:
    """The metrics other than the score, at the last evaluation."""
    rounds = (step.scores for step in reversed(run.rounds) if step.score is not None)
    found = next(rounds, run.result.scores if run.result else {})
    return {clean(name): value for name, value in found.items()}


def score_names(runs: Sequence[RunRecord]) -> list[str]:
    """The names of all metrics other than the score that any run has."""
    return list(dict.fromkeys(name for run in runs for name in last_scores(run)))


def _totals(run: RunRecord) -> dict[str, float | None]:
    """The numbers of one run, from its rounds; from its result where no rounds are left."""
    scores = [score for _, score in evaluated(run)]
    losses = [step.loss for step in run.rounds if step.loss is not None]
    outcomes = Counter(device.outcome for step in run.rounds for device in step.devices)
    operations = sum(step.operations for step in run.rounds)
    wasted = sum(step.wasted_operations for step in run.rounds)
    result = run.result
    totals: dict[str, float | None] = {
        "rounds": len(run.rounds),
        "score": scores[-1] if scores else None,
        "best_score": (max if run.maximize else min)(scores, default=None),
        "loss": losses[-1] if losses else None,
        "virtual_seconds": run.rounds[-1].virtual_seconds if run.rounds else 0.0,
        "bytes_up": sum(step.bytes_up for step in run.rounds),
        "bytes_down": sum(step.bytes_down for step in run.rounds),
        "operations": operations,
        "wasted_share": wasted / operations if operations else None,
        "counted_share": outcomes["arrived"] / outcomes.total() if outcomes else None,
        "server_operations": sum(step.server_operations for step in run.rounds),
        "joules": total_joules(run.rounds),
        "epsilon": run.result.epsilon if run.result else None,
        **{name: _mean_metric(run, name) for name in ("server_steps", "server_steps_default")},
    }
    if result is None:
        return totals
    if result.score is not None:
        totals["score"] = result.score
    if not run.rounds:
        for name in (
            "rounds",
            "virtual_seconds",
            "bytes_up",
            "bytes_down",
            "operations",
            "server_operations",
            "joules",
            "loss",
        ):
            totals[name] = getattr(result, name)
    return totals


def _mean_metric(run: RunRecord, name: str) -> float | None:
    values = [step.metrics[name] for step in run.rounds if name in step.metrics]
    return sum(values) / len(values) if values else None


def tidy(runs: Sequence[RunRecord]) -> list[dict[str, Cell]]:
    """One row per run and round; every row has the same columns.

    `bytes_*`, `operations`, `joules` and `round_seconds` are of the round; `total_*` and `virtual_seconds` count
    from the start. `asked` splits into `arrived`, `late`, `failed` and `surplus`. What not every run has
    is in columns named `setting:`, `layer:` (devices that trained it), `accuracy_level:`,
    `accuracy_class:` and `metric:`, empty where absent. A score that is not an accuracy is in columns named
    `score:NAME`, `score_level:NAME:` and `score_class:NAME:`, and other metrics of an evaluation in `score:NAME`.
    """
    named = {"method", "task", "data", "partition", "seed"}
    differing = [key for key in differing_settings(runs) if key not in named]
    rows = []
    for label, run in zip(run_labels(runs), runs, strict=True):
        settings = settings_of(run)
        head: dict[str, Cell] = {"run": label, "folder": clean(run.folder.name), "method": method_of(run)}
        head |= {key: settings.get(key) for key in ("task", "data", "partition", "seed")}
        head |= {f"setting:{key}": settings.get(key) for key in differing}
        head["finished"] = run.result is not None
        totals: dict[str, float] = {}
        for step in run.rounds:
            energy = ("joules",) if step.joules is not None else ()
            for name in ("bytes_up", "bytes_down", "operations", *energy):
                totals[f"total_{name}"] = totals.get(f"total_{name}", 0) + getattr(step, name)
            rows.append(head | _round_cells(step, totals, clean(run.score_name)))
    columns = dict.fromkeys(column for row in rows for column in row)
    ordered = sorted(columns, key=lambda column: column.startswith(LAST_COLUMNS))
    return [{column: row.get(column) for column in ordered} for row in rows]


LAST_COLUMNS = ("layer:", "accuracy_", "score_", "metric:")


def _round_cells(step: RoundRecord, totals: Mapping[str, float], score_name: str) -> dict[str, Cell]:
    whole, level, of_class = (
        ("accuracy", "accuracy_level:", "accuracy_class:")
        if score_name == ACCURACY
        else (f"score:{score_name}", f"score_level:{score_name}:", f"score_class:{score_name}:")
    )
    outcomes = Counter[str](device.outcome for device in step.devices)
    cells: dict[str, Cell] = {
        (whole if name == "accuracy" else name): step.score if name == "accuracy" else getattr(step, name)
        for name in NUMBERS
    }
    cells |= {f"score:{clean(name)}": value for name, value in step.scores.items()}
    cells |= totals if step.joules is None else {"joules": step.joules, **totals}
    cells |= {"asked": len(step.devices), **{outcome: outcomes[outcome] for outcome in OUTCOMES}}
    cells |= {f"layer:{clean(name)}": count for name, count in step.layers.items()}
    cells |= {f"{level}{clean(name)}": value for name, value in (step.score_by_level or {}).items()}
    cells |= {f"{of_class}{clean(name)}": value for name, value in (step.score_by_class or {}).items()}
    return cells | {f"metric:{clean(name)}": value for name, value in step.metrics.items()}


NUMBERS = (
    "round", "accuracy", "loss", "virtual_seconds", "round_seconds", "bytes_up", "bytes_down", "overhead_bytes",
    "operations", "wasted_operations", "server_operations", "learning_rate",
)  # fmt: skip


def csv_text(runs: Sequence[RunRecord]) -> str:
    """`tidy(runs)` as CSV; runs without rounds leave only the header."""
    rows = tidy(runs)
    columns = (
        list(rows[0]) if rows else ["run", "folder", "method", "task", "data", "partition", "seed", *NUMBERS]
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_csv(runs: Sequence[RunRecord], path: Path) -> None:
    """Write `tidy(runs)` as CSV, in one step."""
    write_file(path, csv_text(runs))


def write_file(path: Path, text: str) -> None:
    """Write a text in one step; a place that cannot be written is the user's to change."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise SettingError(f"'{path}' cannot be written: {error.strerror or error}") from error
