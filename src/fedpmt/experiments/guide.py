"""A document's marked spots, filled with what the leaderboard measured.

    <!-- measured: DATA SPLIT QUESTION -->words<!-- end -->

The words are made from the numbers alone, so that a guide never says more than was measured.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fedpmt.experiments.entrants import KNOWN
from fedpmt.experiments.scores import lost
from fedpmt.records import write_atomically
from fedpmt.report.quantities import bytes_unit, show, time_unit
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from fedpmt.report.quantities import Unit

NOT_YET = "not measured yet"
SPOT = re.compile(r"(<!-- measured: (\S+) (\S+) (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)
FEW = 3
NEAR = 0.9
"""Of the best accuracy: what is still worth its savings."""

Row = dict[str, Any]


def fill(document: Path, data: str, numbers: Mapping[str, Any]) -> None:
    """Fill the spots of this data set in a file."""
    try:
        text = document.read_text(encoding="utf-8")
        write_atomically(document, filled(text, data, numbers).encode())
    except OSError as error:
        raise SettingError(f"guide = '{document}' cannot be filled ({error})") from error


def filled(text: str, data: str, numbers: Mapping[str, Any]) -> str:
    """The text with its spots of this data set filled; those of others stay as they are."""

    def words(spot: re.Match[str]) -> str:
        opening, about, partition, question, _, closing = spot.groups()
        if about != data:
            return spot.group()
        if question not in QUESTIONS:
            raise SettingError.unknown("question of the guide", question, QUESTIONS)
        return f"{opening}{QUESTIONS[question](numbers, partition) or NOT_YET}{closing}"

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


def listed(rows: Sequence[Row]) -> str:
    """A few of them, each method once by its best form, and FedPMT with its place."""
    forms: dict[str, Row] = {}
    for row in rows:
        forms.setdefault(KNOWN[row["entrant"]].method, row)
    rows = list(forms.values())
    shown = "; ".join(told(row) for row in rows[:FEW])
    place = next((place for place, row in enumerate(rows, 1) if row["entrant"] == "fedpmt"), None)
    if place is None or place <= FEW:
        return shown
    return f"{shown}; FedPMT is number {place} of {len(rows)} with {100 * rows[place - 1]['accuracy']:.1f} %"


def accuracy(numbers: Mapping[str, Any], partition: str) -> str:
    """Who ends highest."""
    return listed(rows_of(numbers, partition))


def best_for(against: str, unit: Callable[[float], Unit]) -> Callable[[Mapping[str, Any], str], str]:
    """Who is best for so much."""

    def question(numbers: Mapping[str, Any], partition: str) -> str:
        parts = [
            f"for {show(one['limit'], unit)} {KNOWN[one['best']].title} ({100 * one['accuracy']:.1f} %)"
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
    """Who is best of those that need and tell nothing beside weights, and whose server only averages."""
    return listed(
        [
            row
            for row in rows_of(numbers, partition)
            if not any(numbers["needs"][row["entrant"]].values()) and not row["server_operations"]
        ]
    )


def public(numbers: Mapping[str, Any], partition: str) -> str:
    """What public data buys."""
    rows = rows_of(numbers, partition)
    with_data = [row for row in rows if numbers["needs"][row["entrant"]]["data"]]
    without = [row for row in rows if not numbers["needs"][row["entrant"]]["data"]]
    if not with_data or not without:
        return ""
    return f"best with it: {told(with_data[0])}; best without: {told(without[0])}"


def of_devices(evaluates: str) -> Callable[[Mapping[str, Any], str], str]:
    """Nets that are not one for all: devices' own, on the classes they hold, or split ones, on all classes."""

    def question(numbers: Mapping[str, Any], partition: str) -> str:
        rows = [
            row for row in numbers["rows"] if row["partition"] == partition and row["evaluates"] == evaluates
        ]
        return "; ".join(told(row) for row in sorted(rows, key=lambda row: -row["accuracy"]))

    return question


QUESTIONS: dict[str, Callable[[Mapping[str, Any], str], str]] = {
    "accuracy": accuracy,
    "time": best_for("seconds", time_unit),
    "uploads": best_for("bytes", bytes_unit),
    "memory": memory,
    "lean": lean,
    "public": public,
    "own": of_devices("personal"),
    "split": of_devices("split"),
}
