"""What a person sees: tables on standard output, progress on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
)
from rich.table import Table

from fedpmt.report.quantities import score_title
from fedpmt.types import printable

if TYPE_CHECKING:
    from fedpmt.records import ResultRecord


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table; the first columns are text, the others numbers."""
    shown = Table(title=printable(title), title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        shown.add_column(column, justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        shown.add_row(*map(printable, row))
    console = Console()
    # A pipe has no width of its own: let the table be as wide as it needs. Brackets in names are no markup.
    Console(width=None if console.is_terminal else 200, markup=False, emoji=False).print(shown)


def texts_table(title: str, rows: Sequence[Mapping[str, str]], left: int = 1) -> None:
    """Print rows of texts by column; a dash where a row has none."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    table(title, heads, [[row.get(head, "-") for head in heads] for row in rows], left)


def say(text: str) -> None:
    """A line for a person, out of the way of results."""
    print(printable(text), file=sys.stderr, flush=True)


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


def number(value: float | None, digits: int = 1) -> str:
    """A number with thousands marked; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value:.1%}"


NOT_SHOWN = set[str](
    {"score_name", "maximize", "scores", "score_by_width", "clients", "score_by_client", "score_by_level"}
)
"""Fields of a result that are shown otherwise: as the score, or in a table of their own."""


def result_fields(result: ResultRecord) -> dict[str, Any]:
    """What a run ended with, its score under its own name."""
    absent = {key for key in ("joules", "epsilon") if getattr(result, key) is None}
    values = result.model_dump(mode="json", exclude=NOT_SHOWN | absent)
    scored = {score_title(result.score_name): result.score_text}
    scored |= {score_title(name): f"{value:.4g}" for name, value in result.scores.items()}
    if result.score_by_width is not None:
        widths = result.score_by_width.items()
        shown = (f"{width}: {result.model_copy(update={'score': one}).score_text}" for width, one in widths)
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
