"""Tables as text, at most 80 columns wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 80
GAP = "  "
LEAST = 8
"""Characters that are always left of a name."""


def text_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[int] = (0,)
) -> str:
    """Lay out a table. Columns of names are shortened until it fits; numbers never are.

    Args:
        title: The first line.
        columns: Their headings.
        rows: One text for each column.
        names: Positions of the columns that hold names; the others hold numbers, aligned to the right.

    >>> print(text_table("Layers", ("layer", "size"), [["encoder", "1.2 k"], ["head", "20"]]))
    Layers
    layer     size
    --------------
    encoder  1.2 k
    head        20
    """
    widths = [max(len(row[place]) for row in [columns, *rows]) for place in range(len(columns))]
    while sum(widths) + len(GAP) * (len(widths) - 1) > WIDTH:
        widest = max(names, key=lambda place: widths[place])
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1

    def line(cells: Sequence[str]) -> str:
        shown = [
            shorten_path(cell, width).ljust(width) if place in names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return GAP.join(shown).rstrip()

    rule = "-" * (sum(widths) + len(GAP) * (len(widths) - 1))
    return "\n".join([title, line(columns), rule, *(line(row) for row in rows)])


def shorten_path(path: str, limit: int) -> str:
    """Leave out the middle of a long path: where it begins and, above all, where it ends tell it apart.

    >>> shorten_path("bert.encoder.layer.11.attention.self.query", 24)
    'bert.enc…tion.self.query'
    """
    if len(path) <= limit:
        return path
    left = limit // 3
    return f"{path[:left]}…{path[left + 1 - limit :]}"
