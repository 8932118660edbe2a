"""What a person sees: tables on standard output, progress on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedpmt.report.quantities import score_title

if TYPE_CHECKING:
    from fedpmt.records import ResultRecord, RoundRecord
    from fedpmt.simulation.loop import OnRound

PLAIN_SECONDS = 5.0
"""Without a terminal a line is printed this often."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table; the first columns are text, the others numbers."""
    shown = Table(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        shown.add_column(column, justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    console = Console()
    # A pipe has no width of its own: let the table be as wide as it needs.
    Console(width=None if console.is_terminal else 200).print(shown)


def say(text: str) -> None:
    """A line for a person, out of the way of results."""
    print(text, file=sys.stderr, flush=True)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def warnings() -> Iterator[None]:
    """Show what the library logs as a line on standard error."""
    log, handler = logging.getLogger("fedpmt"), _Lines(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def progress(label: str, rounds: int) -> Iterator[OnRound]:
    """Shows rounds as they pass: a bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(label, rounds)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=rounds, score="")

        def on_round(record: RoundRecord) -> None:
            shown: dict[str, Any] = {} if record.score is None else {"score": named_score(record)}
            bar.update(task, completed=record.round, **shown)

        yield on_round


def _lines(label: str, rounds: int) -> OnRound:
    begun = time.monotonic()
    last = begun
    first_round = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal last, first_round
        first_round = first_round or record.round
        now = time.monotonic()
        if now - last < PLAIN_SECONDS and record.round < rounds:
            return
        last = now
        score = "" if record.score is None else f", {named_score(record)}"
        done = record.round - first_round + 1
        left = (now - begun) / done * (rounds - record.round)
        say(f"{label}: round {record.round}/{rounds}{score}, {now - begun:.0f} s, about {left:.0f} s left")

    return on_round


def number(value: float | None, digits: int = 1) -> str:
    """A number with thousands marked; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value:.1%}"


def score(record: RoundRecord | ResultRecord) -> str:
    """A score: in percent if it is an accuracy, else as a plain number."""
    if record.score is None or record.accuracy is not None:
        return percent(record.accuracy)
    return f"{record.score:.4g}"


def named_score(record: RoundRecord | ResultRecord) -> str:
    """A score with its name."""
    return f"{record.score_name} {score(record)}"


def result_fields(result: ResultRecord) -> dict[str, Any]:
    """What a run ended with, its score under its own name."""
    values = result.model_dump(mode="json", exclude={"score_name", "maximize", "scores", "score_by_width"})
    scored = {score_title(result.score_name): score(result)}
    scored |= {score_title(name): f"{value:.4g}" for name, value in result.scores.items()}
    if result.score_by_width is not None:
        widths = result.score_by_width.items()
        shown = (f"{width}: {score(result.model_copy(update={'score': one}))}" for width, one in widths)
        scored["score_by_width"] = ", ".join(shown)
    fields: dict[str, Any] = {}
    for key, value in values.items():
        fields |= scored if key == "score" else {key: value}
    return fields


def as_rows(values: dict[str, Any]) -> list[list[str]]:
    """A dict as table rows."""
    return [[key, "-" if value is None else str(value)] for key, value in values.items()]


@contextmanager
def transfer() -> Iterator[Callable[[str, int, int | None], None]]:
    """Shows what is being fetched: bars on a terminal, a line per file elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def line(what: str, done: int, total: int | None) -> None:
            if what not in seen:
                seen.add(what)
                say(what)

        yield line
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield update
