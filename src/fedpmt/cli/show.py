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

if TYPE_CHECKING:
    from fedpmt.records import RoundRecord
    from fedpmt.simulation.loop import OnRound
    from reproduction.library import Standing

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


@contextmanager
def whole(runs: int) -> Iterator[Callable[[Standing], None]]:
    """Shows how far many runs are: done, running, time left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _standings()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]} of {task.fields[runs]} runs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0, done=0, runs=runs, left="")

        def report(standing: Standing) -> None:
            running = ", ".join(standing.running)
            bar.update(
                task,
                completed=standing.share,
                description=running if len(running) < 60 else f"{len(standing.running)} running",
                done=standing.done,
                left=_left(standing.left),
            )

        yield report


def _standings() -> Callable[[Standing], None]:
    last = -PLAIN_SECONDS

    def report(standing: Standing) -> None:
        nonlocal last
        if standing.seconds - last < 6 * PLAIN_SECONDS and standing.done < standing.runs:
            return
        last = standing.seconds
        running = f", running {', '.join(standing.running)}" if standing.running else ""
        say(
            f"{standing.done} of {standing.runs} runs, {standing.seconds:.0f} s, {_left(standing.left)}{running}"
        )

    return report


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"about {_clock(seconds)} left"


def _clock(seconds: float) -> str:
    """A time a person waits.

    >>> _clock(59), _clock(3700)
    ('59 s', '62 min')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


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
