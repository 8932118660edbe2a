"""Tables as text that fit a given width."""

from __future__ import annotations

import itertools
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

WIDTH = 80
GAP = "  "
LEAST = 8
"""Characters that are always left of a text."""

SPACE_IN_NUMBER = re.compile(r"(?<=[\d±]) (?=[\d±%×]|[A-Za-zµ]{1,3}\b)|(?<=[a-z]) (?=\d)")
"""Spaces at which no line is broken: between a number, its deviation and its unit, and after its name (lr 0.1)."""

NO_BREAK = "\N{NO-BREAK SPACE}"


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    names: Sequence[int] = (0,),
    *,
    keys: int = 1,
    width: int = WIDTH,
) -> str:
    """Lay out a table that fits `width` characters and never breaks a number.

    A column with the same cell in all rows becomes part of a line above the table, and one without any value is left
    out. Headings and texts are wrapped. Columns that still do not fit follow below, with the key columns repeated.

    Args:
        title: The first line; "" for none.
        columns: Their headings.
        rows: One text for each column; "-" or "" where there is no value.
        names: Positions of the columns that hold texts; the others hold numbers, aligned to the right.
        keys: How many leading columns say what a row is about.
        width: How many characters a line may have.

    >>> rows = [["fedpmt", "100", "92.0 %", "35.0 min"], ["fedavg", "100", "93.0 %", "83.3 min"]]
    >>> print(text_table("MNIST", ("run", "rounds", "accuracy", "virtual time"), rows, width=30))
    MNIST
    same in all rows: rounds 100
    run     accuracy  virtual time
    ------------------------------
    fedpmt    92.0 %      35.0 min
    fedavg    93.0 %      83.3 min
    >>> print(text_table("", ("run", "rounds", "accuracy", "virtual time"), rows, width=20))
    same in all rows:
      rounds 100
    run     accuracy
    ----------------
    fedpmt    92.0 %
    fedavg    93.0 %
    <BLANKLINE>
    run     virtual time
    --------------------
    fedpmt      35.0 min
    fedavg      83.3 min
    """
    cells = [[row[place] for row in rows] for place in range(len(columns))]
    every = [
        _Column(head, column, is_text=place in names, is_key=place < keys)
        for place, (head, column) in enumerate(zip(columns, cells, strict=True))
    ]
    varying = [column for column in every[keys:] if len(set(column.cells)) != 1 or len(rows) == 1]
    shared = [column.shared for column in every[keys:] if column not in varying and column.shared]
    lines = wrap(title, width) if title else []
    if shared:
        lines += wrap(f"same in all rows: {'; '.join(shared)}", width, indent="  ")
    blocks = _blocks(every[:keys], varying, width)
    return "\n".join([*lines, "\n\n".join("\n".join(_lines(block, width)) for block in blocks)])


def wrap(text: str, width: int, *, indent: str = "", shorten: bool = True) -> list[str]:
    """Break a text into lines at spaces, but not inside a number with its unit; too long words may be shortened.

    >>> wrap("a round takes 35.0 min", 18)
    ['a round', 'takes 35.0 min']
    """
    limit = width - len(indent) if shorten else len(text)
    kept = SPACE_IN_NUMBER.sub(NO_BREAK, text)
    words = " ".join(shorten_path(word, limit) for word in kept.split(" "))
    lines = textwrap.wrap(
        words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(NO_BREAK, " ") for line in lines] or [""]


def shorten_path(path: str, limit: int) -> str:
    """Leave out the middle of a long path: where it begins and, above all, where it ends tell it apart.

    >>> shorten_path("bert.encoder.layer.11.attention.self.query", 24)
    'bert.enc…tion.self.query'
    """
    if len(path) <= limit:
        return path
    left = limit // 3
    return f"{path[:left]}…{path[left + 1 - limit :]}"


@dataclass(frozen=True)
class _Column:
    heading: str
    cells: list[str]
    is_text: bool
    is_key: bool

    @property
    def shared(self) -> str:
        """What the line above says of a column with equal cells; nothing where they are empty."""
        return "" if self.cells[:1] in ([], ["-"], [""]) else f"{self.heading} {self.cells[0]}".strip()

    @property
    def natural(self) -> int:
        """The width at which nothing is wrapped."""
        return max(map(len, [self.heading, *self.cells]))

    def least(self, width: int) -> int:
        """The width below which it is not set in a table of that width; a key is the last to be shortened."""
        heading = max(map(len, self.heading.split()), default=0)
        widest = max(map(len, self.cells), default=0)
        if not self.is_text:
            return max(heading, widest)
        return max(heading, min(widest, max(LEAST, width * 2 // 5 if self.is_key else 0)))

    def lines(self, cell: str, width: int) -> list[str]:
        return wrap(cell, width) if self.is_text else [cell]


def _blocks(keys: list[_Column], others: list[_Column], width: int) -> Iterator[list[_Column]]:
    """Columns that fit next to each other; each block begins with the key columns."""
    block = keys
    for column in others:
        least = [one.least(width) for one in (*block, column)]
        if _total(least) > width and len(block) > len(keys):
            yield block
            block = keys
        block = [*block, column]
    yield block


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _lines(columns: Sequence[_Column], width: int) -> list[str]:
    """The headings, a rule and the rows."""
    widths = [column.natural for column in columns]
    least = [column.least(width) for column in columns]
    while _total(widths) > width:
        spare = [place for place, size in enumerate(least) if widths[place] > size]
        if not spare:
            break
        widths[max(spare, key=widths.__getitem__)] -= 1

    def side_by_side(cells: Iterable[list[str]]) -> list[str]:
        return [
            GAP.join(
                text.ljust(size) if column.is_text else text.rjust(size)
                for text, size, column in zip(line, widths, columns, strict=True)
            ).rstrip()
            for line in itertools.zip_longest(*cells, fillvalue="")
        ]

    heads = [wrap(column.heading, size) for column, size in zip(columns, widths, strict=True)]
    tallest = max(map(len, heads))
    found = [*side_by_side([""] * (tallest - len(head)) + head for head in heads), "-" * _total(widths)]
    for place in range(len(columns[0].cells)):
        found += side_by_side(
            column.lines(column.cells[place], size) for column, size in zip(columns, widths, strict=True)
        )
    return found
