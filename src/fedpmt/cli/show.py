"""What a person sees: tables on standard output, progress on standard error."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from fedpmt.records import RoundRecord
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
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=rounds, accuracy="")

        def on_round(record: RoundRecord) -> None:
            shown = {} if record.accuracy is None else {"accuracy": f"accuracy {record.accuracy:.1%}"}
            bar.update(task, completed=record.round, **shown)  # type: ignore[arg-type]

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
        accuracy = "" if record.accuracy is None else f", accuracy {record.accuracy:.1%}"
        done = record.round - first_round + 1
        left = (now - begun) / done * (rounds - record.round)
        say(f"{label}: round {record.round}/{rounds}{accuracy}, {now - begun:.0f} s, about {left:.0f} s left")

    return on_round


def number(value: float | None, digits: int = 1) -> str:
    """A number with thousands marked; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value:.1%}"


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
