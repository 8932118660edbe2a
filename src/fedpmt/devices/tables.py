"""Tables that a user gives: the path of a CSV, its text, a list of rows or a data frame.

Settings keep a path as it is, and a table given in Python as the text of a CSV; whatever it came from, it is read here.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedpmt.types import SettingError, is_control

Row = tuple[str, dict[str, str]]
"""Where a row stands, for messages, and its cells that are not empty, by column."""


def read_table(key: str, source: Any, columns: Sequence[str], needed: Sequence[str]) -> list[Row]:
    """Read a table of known columns; `key` is the setting that it is given by.

    >>> read_table("fleet", "name, speed\\npi, 1/5\\n", ("name", "speed"), ("speed",))
    [('fleet, line 2', {'name': 'pi', 'speed': '1/5'})]
    >>> read_table("fleet", [{"speed": 1, "name": None}], ("name", "speed"), ("speed",))
    [('fleet[0]', {'speed': '1'})]

    Raises:
        SettingError: The source is no table, a column is unknown or missing, or a cell stands in no column.
    """
    name = table_name(key, source)
    if is_file(source) or isinstance(source, str):
        header, rows = _read_csv(name, _lines(name, source))
    elif is_frame(source):
        header, rows = _read_frame(name, source)
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        header, rows = _read_values(name, source)
    else:
        raise SettingError(
            f"{key} must be the path of a CSV, a list of rows or a data frame (got {type(source).__name__})"
        )
    for column in header:
        if column not in columns:
            raise SettingError.unknown(f"{name}: column", column, columns)
    for column in needed:
        if rows and column not in header:
            raise SettingError(f"{name} has no column '{column}' (its columns: {', '.join(header)})")
    for place, cells in rows:
        _refuse_controls(place, cells)
    return rows


def write_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write a table as the text of a CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def is_file(source: Any) -> bool:
    """Whether a table is named by its path; a text with more than one line is the table itself."""
    return isinstance(source, os.PathLike) or (isinstance(source, str) and "\n" not in source)


def is_frame(source: Any) -> bool:
    """Whether a table is a data frame of pandas, which need not be installed."""
    return hasattr(source, "columns") and hasattr(source, "isna")


def table_name(key: str, source: Any) -> str:
    """What a table is called in messages: by its path where it has one."""
    return f"{key} = '{source}'" if is_file(source) else key


def _lines(name: str, source: Any) -> io.StringIO:
    if not is_file(source):
        return io.StringIO(source, newline="")
    try:
        return io.StringIO(Path(source).read_bytes().decode("utf-8-sig"), newline="")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{name} cannot be read: {error}") from error


def _read_csv(name: str, lines: io.StringIO) -> tuple[list[str], list[Row]]:
    reader = csv.reader(lines, skipinitialspace=True)
    rows: list[Row] = []
    try:
        header = [column.strip() for column in next(reader, [])]
        _refuse_other_separators(name, header)
        _refuse_twins(name, [column for column in header if column])
        for cells in reader:
            if [cell.strip() for cell in cells] == header:
                continue  # files of several machines, put together, repeat their headings
            place = f"{name}, line {reader.line_num}"
            found = {
                column: cell.strip() for column, cell in zip(header, cells, strict=False) if cell.strip()
            }
            surplus = [found.pop("", ""), *(cell.strip() for cell in cells[len(header) :])]
            if any(surplus):
                extra = next(filter(None, surplus))
                raise SettingError(f"{place}: '{extra}' stands in no column{_decimal_hint(cells)}")
            rows += [(place, found)] if found else []
    except csv.Error as error:
        raise SettingError(f"{name} cannot be read: {error}") from error
    return [column for column in header if column], rows


def _read_frame(name: str, frame: Any) -> tuple[list[str], list[Row]]:
    frame = frame if frame.index.name is None else frame.reset_index()
    header = [str(column) for column in frame.columns]
    _refuse_twins(name, header)
    missing = frame.isna().to_dict("records")
    values = [
        {key: None if absent[key] else value for key, value in row.items()}
        for row, absent in zip(frame.to_dict("records"), missing, strict=True)
    ]
    return header, _read_values(name, values)[1]


def _read_values(name: str, values: Iterable[Any]) -> tuple[list[str], list[Row]]:
    header: dict[str, None] = {}
    rows: list[Row] = []
    for position, value in enumerate(values):
        place = f"{name}[{position}]"
        if not isinstance(value, Mapping):
            raise SettingError(f"{place} must be a dict of columns (got {type(value).__name__})")
        header |= dict.fromkeys(map(str, value))
        cells = {str(column): "" if cell is None else str(cell).strip() for column, cell in value.items()}
        rows.append((place, {column: cell for column, cell in cells.items() if cell}))
    return list(header), rows


def _refuse_other_separators(name: str, header: Sequence[str]) -> None:
    """Refuse what spreadsheets write in countries where decimals have a comma."""
    found = next((mark for mark in (";", "\t") if any(mark in column for column in header)), None)
    if found is not None:
        shown = "tabs" if found == "\t" else f"'{found}'"
        raise SettingError(
            f"{name} has {shown} between its columns; write commas there, and points in decimals"
        )


def _decimal_hint(cells: Sequence[str]) -> str:
    """What to write where a comma has split a decimal in two."""
    split = [pair for pair in pairwise(cells) if all(cell.strip().isdecimal() for cell in pair)]
    return f" (decimals have a point: {'.'.join(split[-1])})" if split else ""


def _refuse_controls(place: str, cells: Mapping[str, str]) -> None:
    """Refuse characters that a terminal would obey."""
    column = next((column for column, cell in cells.items() if any(map(is_control, cell))), None)
    if column is not None:
        raise SettingError(f"{place}: {column} must not hold control characters (got '{cells[column]}')")


def _refuse_twins(name: str, header: Sequence[str]) -> None:
    twin = next((column for position, column in enumerate(header) if column in header[:position]), None)
    if twin is not None:
        raise SettingError(f"{name}: column '{twin}' appears twice")
