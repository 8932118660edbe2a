"""What a person sees: results on standard output, messages on standard error. Loads little."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fedpmt.pricing.text_table import WIDTH, text_table, wrap
from fedpmt.types import printable

NARROWEST = 40
COPIED = ("run", "runs", "next", "run it")
"""Facts that people copy: they stay in one line."""

SPARKS = "▁▂▃▄▅▆▇█"
PLAIN = str.maketrans(
    {
        **{
            "±": "+-",
            "…": "~",
            "·": "|",
            "×": "x",
            "–": "-",
            "ψ": "psi",
            "ε": "epsilon",
            "≥": ">=",
            "≤": "<=",
        },
        **dict(zip(SPARKS, "_.,-=+*#", strict=True)),
    }
)
"""What stands for letters that a terminal cannot show."""


def width() -> int:
    """Return how many columns there are: those of the terminal, or COLUMNS; 80 in a pipe or a file."""
    return max(NARROWEST, shutil.get_terminal_size((WIDTH, 24)).columns)


def writable(text: str) -> str:
    """Replace what standard output has no letters for."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return text.translate(PLAIN)
    return text


def out(text: str) -> None:
    """Print lines of a result that are laid out already."""
    print(writable(text))


def sentence(text: str) -> None:
    """Print a sentence, wrapped."""
    out("\n".join(wrap(writable(printable(text)), width(), shorten=False)))


def paragraph(text: str) -> None:
    """Print a paragraph of a docstring: prose is wrapped as one, indented lines one by one."""
    if not text.startswith(" "):
        sentence(" ".join(text.split()))
        return
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        shown = wrap(writable(line.strip()), width() - len(indent), indent="  ", shorten=False)
        out("\n".join(f"{indent}{one}" for one in shown))


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, keys: int = 1
) -> None:
    """Print a table; the first `left` columns are texts, the others numbers, and the first `keys` name a row."""
    cells = [[writable(printable(cell)) for cell in row] for row in rows]
    heads = [writable(printable(column)) for column in columns]
    out(text_table(writable(printable(title)), heads, cells, range(left), keys=keys, width=width()))


def texts_table(title: str, rows: Sequence[Mapping[str, str]], left: int = 1, keys: int = 1) -> None:
    """Print rows of texts by column; a dash where a row has none."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    table(title, heads, [[row.get(head, "-") for head in heads] for row in rows], left, keys)


def facts(values: Mapping[str, str]) -> None:
    """Print names and values, one below the other; a value that does not fit goes on in the next line."""
    size = max(map(len, values)) + 2
    for name, value in values.items():
        text = writable(printable(value))
        lines = [text] if name in COPIED else wrap(text, width() - size, shorten=False)
        for number, line in enumerate(lines):
            out(f"{'' if number else name:{size}}{line}")


def say(text: str) -> None:
    """Print a line for a person, out of the way of results."""
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


def sparkline(values: Sequence[float], most: int) -> str:
    """Draw numbers as a row of at most `most` bars.

    >>> sparkline([0.1, 0.5, 0.9, 0.9], 10), sparkline([1, 2, 3, 4], 2), sparkline([], 10)
    ('▁▅██', '▃█', '')
    """
    if not values:
        return ""
    count = min(len(values), most)
    # The last value of each stretch: the row ends where the numbers end.
    picked = [values[(place + 1) * len(values) // count - 1] for place in range(count)]
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(SPARKS[min(7, int(8 * (value - low) / span))] for value in picked)


@contextmanager
def transfer() -> Iterator[Callable[[str, int, int | None], None]]:
    """Shows what is being fetched: bars on a terminal, a line per file elsewhere."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(what: str, done: int, total: int | None) -> None:
            if what not in seen:
                seen.add(what)
                say(what)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield update
