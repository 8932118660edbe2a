"""The program called in this process, and what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import fedpmt
from fedpmt.data.sets import embedded

with warnings.catch_warnings():
    # typer 0.20 still uses names that click 8.5 calls deprecated; that is between the two of them.
    warnings.filterwarnings("ignore", "'click", DeprecationWarning)
    from fedpmt.cli.main import program

# Reading the built-in images is most of what a tiny run takes.
READ_ONCE = mock.patch.object(embedded, "_table", functools.cache(embedded._table))
TINY = ("--devices", "10", "--samples", "20", "--cohort", "5", "--rounds", "2", "--batch", "10")


class Called(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


def call(*arguments: object) -> Called:
    """The program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), READ_ONCE:
        code = program([str(argument) for argument in arguments])
    return Called(code, out.getvalue(), err.getvalue())


def table_rows(text: str, title: str) -> list[list[str]]:
    """The cells of the first block of a table."""
    lines = text[text.index(title) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("---")) + 1
    found = []
    for line in lines[first:]:
        if not line:
            break
        found.append(re.split(r"\s{2,}", line.strip()))
    return found


def environment() -> dict[str, str]:
    """For a process of its own, with the package that is tested here."""
    home = str(Path(fedpmt.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "1"}


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A few lines in a process of their own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def refused(*arguments: object) -> str:
    """The one line with which a command is refused."""
    called = call(*arguments)
    assert called.code == 2, called
    assert called.out == ""
    lines = called.err.splitlines()
    assert len(lines) == 1, called.err
    assert lines[0].startswith("fedpmt: ")
    assert "Traceback" not in lines[0]
    return lines[0]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder; None stands for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
