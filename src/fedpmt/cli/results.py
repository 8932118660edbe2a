"""What `fedpmt run` and `fedpmt compare` print in the end."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedpmt.cli import show
from fedpmt.methods.registry import METHODS
from fedpmt.records import ResultRecord, RunRecord, plural, step_word, total_joules
from fedpmt.report import tables
from fedpmt.report.budgets import BudgetRow, budgets
from fedpmt.report.headline import headline
from fedpmt.report.quantities import bytes_unit, joules_unit, score_title, score_unit, time_unit
from fedpmt.report.quantities import show as quantity
from fedpmt.report.tables import TargetRow
from fedpmt.types import SettingError

TITLES = {name: title for name, (_, title) in METHODS.items()}
USUAL = {
    "runs": "1",
    "wasted": "0.0 %",
    "replies counted": "100.0 %",
    "evaluated": "global",
    "server operations": "0",
}
"""Columns that are left out where all rows have this value."""

SPARKS = 32


def result_of(finished: RunRecord) -> ResultRecord:
    """Return the result of a run that must be finished."""
    if finished.result is None:
        raise SettingError(f"'{finished.folder}' is not finished")
    return finished.result


def show_run(finished: RunRecord) -> None:
    """Print how a run ended, where it is, and what to do next."""
    result, settings = result_of(finished), finished.settings
    net = settings.get("model") or settings.get("task")
    title = f"{TITLES.get(result.method, result.method)} on {net}, {result.data}, {result.partition}"
    score = quantity(result.score, score_unit(result.score_name))
    rounds = plural(result.rounds, step_word(settings.get("clock")))
    show.sentence(f"{title}: {result.score_name} {score} after {rounds}")
    print()
    show.facts(run_facts(finished))
    show_clients([finished])
    show_budgets(budgets([finished]))


def run_facts(finished: RunRecord) -> dict[str, str]:
    """Say what a person wants to know of a finished run, by name."""
    result = result_of(finished)
    facts = _score_facts(finished)
    facts["virtual time"] = quantity(result.virtual_seconds, time_unit)
    if finished.session is not None and finished.session.seconds:
        facts["real time"] = quantity(finished.session.seconds, time_unit)
    down = quantity(float(result.bytes_down), bytes_unit)
    facts["uploaded"] = f"{quantity(float(result.bytes_up), bytes_unit)} (downloaded: {down})"
    joules = total_joules(finished.rounds)
    if joules is not None:
        facts["energy"] = quantity(joules, joules_unit)
    if result.epsilon is not None:
        facts["epsilon"] = f"{result.epsilon:.3g} at delta {finished.settings.get('dp_delta'):g}"
    if result.stopped != "rounds":
        facts["stopped by"] = result.stopped
    folder = shlex.quote(str(finished.folder))
    return facts | {"run": str(finished.folder), "next": f"fedpmt report {folder} --open"}


def _score_facts(finished: RunRecord) -> dict[str, str]:
    """The score's course, and the scores that stand next to it."""
    result = result_of(finished)
    unit, facts = score_unit(result.score_name), dict[str, str]()
    scores = tables.evaluated(finished)
    if scores:
        step, best = (max if result.maximize else min)(scores, key=lambda pair: pair[1])
        word = step_word(finished.settings.get("clock"))
        line = show.sparkline([score for _, score in scores], SPARKS)
        facts[score_title(result.score_name)] = f"{line} best {quantity(best, unit)} in {word} {step.round}"
    facts |= {score_title(name): f"{value:.3g}" for name, value in result.scores.items()}
    if result.score_by_width is not None:
        widths = (f"{width}: {quantity(one, unit)}" for width, one in result.score_by_width.items())
        facts["by width"] = ", ".join(widths)
    return facts


def show_comparison(finished: Sequence[RunRecord], settings: Mapping[str, Any]) -> None:
    """Print who was soonest and who was best, then the tables; `settings` are those of the first run."""
    targets = _targets(settings)
    for text in headline(finished, targets, TITLES):
        show.sentence(text)
    print()
    net = settings.get("model") or settings["task"]
    title = f"{net} on {settings['data']}, {settings['partition']}, prices {settings['mode']}"
    rows = [row.texts() for row in tables.summary(finished)]
    usual = {head for head, value in USUAL.items() if all(row.get(head) == value for row in rows)}
    show.texts_table(title, [{head: row[head] for head in row if head not in usual} for row in rows])
    reached = tables.time_to_target(finished, targets)
    if reached:
        print()
        show.texts_table("Virtual time to a target", _by_target(reached))
    show_clients(finished)
    show_budgets(budgets(finished))


def comparison_json(finished: Sequence[RunRecord]) -> dict[str, Any]:
    """Return results, targets and budgets of a comparison as raw numbers."""
    rows = tables.time_to_target(finished, _targets(finished[0].settings))
    document: dict[str, Any] = {"runs": [result_of(one).as_json() for one in finished]}
    document |= {"headline": headline(finished, _targets(finished[0].settings), TITLES)}
    document |= {"targets": [dataclasses.asdict(row) for row in rows]}
    spent = budgets(finished)
    return document | ({"budget": [dataclasses.asdict(row) for row in spent]} if spent else {})


def _targets(settings: Mapping[str, Any]) -> tuple[float, ...] | None:
    target = settings.get("target")
    return None if target is None else (float(target),)


def _by_target(rows: Sequence[TargetRow]) -> list[dict[str, str]]:
    """One row per line, one column per target; the number of runs where not all of them reached it."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        texts = row.texts()
        some = f" ({texts['reached']})" if 0 < row.reached < row.runs else ""
        cells = lines.setdefault(texts["run"], {"run": texts["run"]})
        cells[texts["target"]] = texts["virtual time"] + some
    return list(lines.values())


def show_clients(runs: Sequence[RunRecord]) -> None:
    """Print what clients get on their own test samples; nothing where they have none."""
    texts = [row.texts() for row in tables.client_scores(runs)]
    if texts:
        print()
        show.texts_table(f"Clients: {runs[0].score_name} on their own samples", texts)


def show_budgets(rows: Sequence[BudgetRow]) -> None:
    """Print what was spent of the budget, level by level; nothing where there was none."""
    if rows:
        print()
        keys = ("run", "level", "trains", "budget acts")
        texts = [row.texts() for row in rows]
        ordered = [{**{key: row[key] for key in keys}, **row} for row in texts]
        show.texts_table(f"Budget: {rows[0].resource}", ordered, left=4, keys=2)
