"""The tables of the page: what each group of runs ended with, what a target took, and what was spent of a budget."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from fedpmt.records import ACCURACY, step_word
from fedpmt.report import markup
from fedpmt.report.budgets import COLUMNS as BUDGET_COLUMNS
from fedpmt.report.budgets import budgets
from fedpmt.report.markup import details, named, note, panel_row, section, table, value_cell
from fedpmt.report.quantities import (
    Unit,
    bytes_unit,
    count_unit,
    joules_unit,
    percent_unit,
    plain_unit,
    score_unit,
    show,
    split,
    time_unit,
)
from fedpmt.report.tables import EVALUATED, client_scores, score_names, summary, time_to_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fedpmt.report.markup import Material
    from fedpmt.report.quantities import Spread
    from fedpmt.report.tables import SummaryRow, TargetRow

UnitFor = Callable[[float], Unit]

SCORES = {"final": "score", "best": "best_score"}
COLUMNS: dict[str, tuple[str, UnitFor]] = {
    "loss": ("loss", plain_unit),
    "rounds": ("rounds", plain_unit),
    "virtual time": ("virtual_seconds", time_unit),
    "uploaded": ("bytes_up", bytes_unit),
    "downloaded": ("bytes_down", bytes_unit),
    "energy": ("joules", joules_unit),
    "device operations": ("operations", count_unit),
    "wasted": ("wasted_share", percent_unit),
    "replies counted": ("counted_share", percent_unit),
    "server operations": ("server_operations", count_unit),
}

USUAL = {"server steps a round": "-", "evaluated": "global"}
"""Columns of words, and what stands in them where there is nothing to say."""


def summary_section(material: Material, address: str) -> str:
    """One row per group of runs, and the way to the whole table."""
    rows = summary(material.runs)
    columns = dict(COLUMNS)
    if all(row.joules is None for row in rows):
        del columns["energy"]
    if not any(row.server_operations and row.server_operations.mean for row in rows):
        del columns["server operations"]
    # A column in which every row says the usual says nothing.
    words_of = [word for word in USUAL if any(row.texts()[word] != USUAL[word] for row in rows)]
    units = {
        name: _one_unit((getattr(row, name) for row in rows), unit_for) for name, unit_for in columns.values()
    }
    others = score_names(material.runs)
    heads = [*(f"{word} {material.score_name}" for word in SCORES), *others, *columns, *words_of, "runs"]
    body, panel = list[str](), ""
    for row in rows:
        if row.panel != panel:
            panel = row.panel
            body.append(panel_row(panel, len(heads) + 1))
        cells = "".join(
            _cell(getattr(row, name), score_unit(row.score_name), best=_is_best(row, name, rows))
            for name in SCORES.values()
        )
        cells += "".join(_cell(row.scores[name], plain_unit) for name in others)
        cells += "".join(_cell(getattr(row, name), units[name]) for name, _ in columns.values())
        texts = row.texts()
        cells += "".join(f"<td>{escape(texts[word])}</td>" for word in words_of)
        cells += value_cell(f"{row.runs}{_unfinished(row)}", row.runs)
        body.append(markup.row(row.line, material.looks.get(row.line), cells))
    words = (
        "Mean ± standard deviation over seeds. "
        if any(len(group.runs) > 1 for group in material.groups)
        else ""
    )
    words += "Wasted is the share of device operations spent on replies that did not count."
    words += (
        f" The best {material.score_name} is bold."
        if len(rows) > 1 and any(row.score for row in rows)
        else ""
    )
    link = f'<p class="after"><a class="button" href="{escape(address)}" download>All rounds as CSV</a></p>'
    return section(
        "summary", "Summary", note(words), table(["method", *heads], body, "sortable", "Summary"), link
    )


def _unfinished(row: SummaryRow) -> str:
    left = row.runs - row.finished
    return f"<small>{left} not finished</small>" if left else ""


def _one_unit(spreads: Iterable[Spread | None], unit_for: UnitFor) -> UnitFor:
    """The unit of the largest number, for all numbers of a column: they are there to be compared."""
    unit = unit_for(max((spread.mean for spread in spreads if spread), default=0.0))
    return lambda _: unit


def _is_best(row: SummaryRow, name: str, rows: Sequence[SummaryRow]) -> bool:
    # A personal model answers for fewer classes than a global one: the two are no rivals.
    rivals = [other for other in rows if (other.panel, other.evaluates) == (row.panel, row.evaluates)]
    means = [value.mean for other in rivals if (value := getattr(other, name))]
    own = getattr(row, name)
    return own is not None and len(rivals) > 1 and own.mean == (max if row.maximize else min)(means)


def _cell(value: Spread | None, unit_for: UnitFor, best: bool = False) -> str:
    mean, deviation, unit = split(value, unit_for)
    small = f"<small>{escape(deviation)}</small>" if deviation else ""
    text = escape(f"{mean} {unit}".rstrip())
    return value_cell(f"{text}{small}", value.mean if value else None, "best" if best else "")


def targets_section(material: Material) -> str:
    """What it took to reach each target."""
    title = "Time to target"
    rows = time_to_target(material.runs, material.targets)
    if not rows:
        why = "There is no target that a run reached: no accuracy is recorded, or all are below 10 %."
        if material.score_name != ACCURACY:
            why = f"No target was given, and there are no default targets for {material.score_name}."
        return section("targets", title, note(why))
    lines: dict[tuple[str, str], list[TargetRow]] = {}
    for row in rows:
        lines.setdefault((row.panel, row.line), []).append(row)
    called = {group.label: step_word(group.runs[0].settings.get("clock")) for group in material.groups}
    body, panel = list[str](), ""
    for (of_panel, line), own in lines.items():
        if of_panel != panel:
            panel = of_panel
            body.append(panel_row(panel, len(own) + 1))
        cells = "".join(_target_cell(row, rows, called[own[0].label]) for row in own)
        kind = own[0].evaluates
        small = "" if kind == "global" else f"<small>{escape(EVALUATED.get(kind, kind))}</small>"
        body.append(markup.row(line, material.looks.get(line), cells, small))
    ways = {"at or above" if row.maximize else "at or below" for row in rows}
    energy = ", bytes uploaded and energy" if any(row.joules for row in rows) else " and bytes uploaded"
    words = f"Virtual time, round{energy} at the first evaluation"
    words += (
        f" {' or '.join(sorted(ways))} each {'accuracy' if material.score_name == ACCURACY else 'target'}."
    )
    words += " The soonest is bold." if len(lines) > 1 else ""
    if any(0 < row.reached < row.runs for row in rows):
        words += " Where only some seeds got there, the numbers are theirs."
    first = next(iter(lines.values()))
    mixed = len({row.score_name for row in rows}) > 1
    head = ["method", *(f"{row.target:.6g}" if mixed else row.texts()["target"] for row in first)]
    return section("targets", title, note(words), table(head, body, "sortable", title))


def _target_cell(row: TargetRow, rows: Sequence[TargetRow], word: str) -> str:
    if row.seconds is None:
        return '<td class="none">-<small>not reached</small></td>'
    same = [other for other in rows if other.target == row.target]
    # Scores of other things are no rivals.
    rivals = [other for other in same if (other.panel, other.evaluates) == (row.panel, row.evaluates)]
    # A mean over the seeds that got there is no match for one over all.
    whole = [other for other in rivals if other.reached == other.runs] or rivals
    soonest = min(other.seconds.mean for other in whole if other.seconds)
    best = "best" if len(rivals) > 1 and row in whole and row.seconds.mean == soonest else ""
    time = show(row.seconds, _one_unit((other.seconds for other in same), time_unit))
    sent = show(row.bytes_up, _one_unit((other.bytes_up for other in same), bytes_unit))
    texts = [f"{word} {show(row.rounds)}", sent]
    if row.joules is not None:
        texts.append(show(row.joules, _one_unit((other.joules for other in same), joules_unit)))
    texts += [f"{row.reached} of {row.runs} seeds"] if row.reached < row.runs else []
    small = "".join(f"<small>{escape(text)}</small>" for text in texts)
    return value_cell(f"{escape(time)}{small}", row.seconds.mean, best)


def clients_section(material: Material) -> str:
    """What the clients get on samples of their own; nothing where no run has any."""
    rows = client_scores(material.runs)
    if not rows:
        return ""
    heads = list(dict.fromkeys(head for row in rows for head in row.texts() if head != "run"))
    body, panel = list[str](), ""
    for row in rows:
        if row.panel != panel:
            panel = row.panel
            body.append(panel_row(panel, len(heads) + 1))
        texts = row.texts()
        cells = "".join(f"<td>{escape(texts.get(head, '-'))}</td>" for head in heads)
        body.append(markup.row(row.line, material.looks.get(row.line), cells))
    words = (
        f"The {material.score_name} of each client's own test samples at the end of a run, each client counting the "
        "same: the mean, the standard deviation over clients, the mean of the worst tenth of them, and the means on "
        "each level, 1 being the slowest."
    )
    names = list(dict.fromkeys(name for row in rows for name in row.by_client))
    each = []
    for name in names:
        cells = "".join(
            f"<td>{escape(show(row.by_client.get(name), score_unit(row.score_name)))}</td>" for row in rows
        )
        each.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    labels = [row.label for row in rows]
    one_by_one = details("Client by client", table(["client", *labels], each, label="Client by client"))
    return section(
        "clients", "Clients", note(words), table(["method", *heads], body, label="Clients"), one_by_one
    )


def budget_section(material: Material) -> str:
    """The table of the page; nothing where no run has a budget."""
    rows = budgets(material.runs)
    if not rows:
        return ""
    body, panel, line = list[str](), "", ""
    for row in rows:
        if row.panel != panel:
            panel, line = row.panel, ""
            body.append(panel_row(panel, len(BUDGET_COLUMNS) + 1))
        name = named(row.line, material.looks.get(row.line))
        if row.line == line:
            name = f'<span class="hidden-text">{escape(row.line)}</span>'  # it is in a row above
        line = row.line
        texts = row.texts()
        cells = "".join(f"<td>{escape(texts[column])}</td>" for column in BUDGET_COLUMNS)
        body.append(f'<tr data-line="{escape(line)}"><th scope="row">{name}</th>{cells}</tr>')
    words = (
        f"What a device was allowed ({', '.join(sorted({row.resource for row in rows}))}) and what it took of that"
        " in a round, on average. Over budget: not even the smallest that the method has was within it, or the"
        " budget does not act on the method."
    )
    return section("budget", "Budget", note(words), table(["method", *BUDGET_COLUMNS], body, label="Budget"))
