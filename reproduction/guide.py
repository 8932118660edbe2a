"""Documents' marked spots, filled with what the leaderboard measured.

    <!-- measured: CONTEST SPLIT QUESTION -->words<!-- end -->

A contest is named after its data, and its case (`embedded-even`). A question is one of those below, or a method's
name: what it came to.

The words are made from the numbers alone, so that a guide never says more than was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedpmt.methods.registry import METHODS
from fedpmt.records import write_atomically
from fedpmt.report.quantities import bytes_unit, show, time_unit
from fedpmt.types import SettingError
from reproduction.entrants import KNOWN
from reproduction.scores import lost

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fedpmt.report.quantities import Unit

NOT_YET = "not measured yet"
SPOT = re.compile(r"(<!-- measured: (\S+) (\S+) (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)
FEW = 3
NEAR = 0.9
"""Of the best accuracy: what is still worth its savings."""

Row = dict[str, Any]
Question = Callable[[Mapping[str, Any], str], str]
"""Of all numbers and a split; no words where nothing was measured."""


def documents_of(guide: Path, contest: str) -> list[Path]:
    """The file, or the Markdown files of the folder, with spots of this contest."""
    files = sorted(guide.rglob("*.md")) if guide.is_dir() else [guide]
    try:
        found = [
            file
            for file in files
            if any(about == contest for _, about, *_ in SPOT.findall(file.read_text(encoding="utf-8")))
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"guide = '{guide}' cannot be read ({error})") from error
    if not found:
        raise SettingError(f"guide = '{guide}' is refused: it has no spot for what is measured on {contest}")
    return found


def fill(document: Path, contest: str, numbers: Mapping[str, Any]) -> None:
    """Fill the spots of this contest in a file."""
    try:
        text = document.read_text(encoding="utf-8")
        write_atomically(document, filled(text, contest, numbers).encode())
    except OSError as error:
        raise SettingError(f"guide = '{document}' cannot be filled ({error})") from error


def filled(text: str, contest: str, numbers: Mapping[str, Any]) -> str:
    """The text with its spots of this contest filled; those of others stay as they are."""

    def words(spot: re.Match[str]) -> str:
        opening, about, partition, question, _, closing = spot.groups()
        if about != contest:
            return spot.group()
        if question not in ANSWERS:
            raise SettingError.unknown("question of the guide", question, ANSWERS)
        return f"{opening}{ANSWERS[question](numbers, partition) or NOT_YET}{closing}"

    return SPOT.sub(words, text)


def rows_of(numbers: Mapping[str, Any], partition: str) -> list[Row]:
    """The rows of one split whose accuracies are comparable, the most accurate first."""
    rows = [row for row in numbers["rows"] if row["partition"] == partition and row["evaluates"] == "global"]
    return sorted(rows, key=lambda row: -row["accuracy"])


def told(row: Row) -> str:
    """An entrant with its accuracy."""
    half = row["accuracy_half_interval"]
    interval = "" if half is None else f" ± {100 * half:.1f}"
    ended = lost(row.get("diverged", 0), row.get("runs", 1))
    return f"{KNOWN[row['entrant']].title} {100 * row['accuracy']:.1f}{interval} %{ended}"


def by_method(rows: Sequence[Row]) -> list[Row]:
    """Each method once, by the first of its forms."""
    forms: dict[str, Row] = {}
    for row in rows:
        forms.setdefault(KNOWN[row["entrant"]].method, row)
    return list(forms.values())


def listed(rows: Sequence[Row]) -> str:
    """A few of them, each method once by its best form, and FedPMT with its place."""
    rows = by_method(rows)
    shown = "; ".join(told(row) for row in rows[:FEW])
    place = next((place for place, row in enumerate(rows, 1) if row["entrant"] == "fedpmt"), None)
    if place is None or place <= FEW:
        return shown
    return f"{shown}; FedPMT is number {place} of {len(rows)} with {100 * rows[place - 1]['accuracy']:.1f} %"


def accuracy(numbers: Mapping[str, Any], partition: str) -> str:
    """Who ends highest."""
    return listed(rows_of(numbers, partition))


def best_for(against: str, unit: Callable[[float], Unit]) -> Question:
    """Who is best within a limit."""

    def question(numbers: Mapping[str, Any], partition: str) -> str:
        parts = [
            f"{show(one['limit'], unit)}: {KNOWN[one['best']].title} ({100 * one['accuracy']:.1f} %)"
            for one in numbers["best_within"][against]
            if one["partition"] == partition and one["best"] is not None
        ]
        return "; ".join(parts)

    return question


def memory(numbers: Mapping[str, Any], partition: str) -> str:
    """Who needs least memory on the weakest devices, of those near the best accuracy."""
    rows = rows_of(numbers, partition)
    near = [row for row in rows if row["accuracy"] >= NEAR * rows[0]["accuracy"]]
    least = sorted(near, key=lambda row: float(row["memory_slowest_level"]))[:FEW]
    return "; ".join(f"{told(row)} in {show(row['memory_slowest_level'], bytes_unit)}" for row in least)


def lean(numbers: Mapping[str, Any], partition: str) -> str:
    """Who is best of those that need and send weights alone, and whose server only averages."""
    return listed(
        [
            row
            for row in rows_of(numbers, partition)
            if not any(numbers["needs"][row["entrant"]].values()) and not row["server_operations"]
        ]
    )


def public(numbers: Mapping[str, Any], partition: str) -> str:
    """What public data buys: the best with it of those that keep to the budget, the same without distilling, and the
    best without.
    """
    rows = rows_of(numbers, partition)
    holds = [row for row in rows if numbers["needs"][row["entrant"]]["data"]]
    distils, plain = ([row for row in holds if bool(row["server_operations"]) == on] for on in (True, False))
    if not distils:
        return ""
    best = min(distils, key=lambda row: float(row["over_budget"]))  # the most accurate of several
    without = [row for row in rows if row not in holds and row["over_budget"] <= best["over_budget"]]
    words = [f"best with it: {told(best)}", *(told(row) for row in plain[:1])]
    return "; ".join([*words, *(f"best without: {told(row)}" for row in without[:1])])


def of_devices(evaluates: str) -> Question:
    """Nets that are not one for all: devices' own, on the classes they hold, or split ones, on all classes."""

    def question(numbers: Mapping[str, Any], partition: str) -> str:
        rows = [
            row for row in numbers["rows"] if row["partition"] == partition and row["evaluates"] == evaluates
        ]
        return "; ".join(told(row) for row in sorted(rows, key=lambda row: -row["accuracy"]))

    return question


def of_method(method: str) -> Question:
    """What a method came to, in each of its forms, and its place by its best."""

    def question(numbers: Mapping[str, Any], partition: str) -> str:
        forms = [
            row
            for row in numbers["rows"]
            if row["partition"] == partition and KNOWN[row["entrant"]].method == method
        ]
        words = [
            f"{told(row)} {OF[row['evaluates']]}in {show(row['virtual_seconds'], time_unit)}, "
            f"{show(row['bytes_up'], bytes_unit)} up"
            for row in forms
        ]
        ranked = [KNOWN[row["entrant"]].method for row in by_method(rows_of(numbers, partition))]
        if method in ranked:
            words.append(f"number {ranked.index(method) + 1} of {len(ranked)} by accuracy")
        return "; ".join(words)

    return question


OF = {"global": "", "personal": "(devices' own nets) ", "split": "(devices' halves with the server's) "}

QUESTIONS: dict[str, Question] = {
    "accuracy": accuracy,
    "time": best_for("seconds", time_unit),
    "uploads": best_for("bytes", bytes_unit),
    "memory": memory,
    "lean": lean,
    "public": public,
    "own": of_devices("personal"),
    "split": of_devices("split"),
}
ANSWERS: dict[str, Question] = QUESTIONS | {method: of_method(method) for method in METHODS}
