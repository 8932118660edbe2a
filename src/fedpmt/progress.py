"""Rounds as they pass: a bar on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import html
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fedpmt.records import RoundRecord

    OnRecord = Callable[[RoundRecord], None]

PLAIN_SECONDS = 5.0
"""Without a terminal a line is printed this often."""


@contextmanager
def show_progress(label: str, rounds: int, *, shown: bool | None = None) -> Iterator[OnRecord]:
    """Give a function that shows each round's record on standard error, or below a notebook's cell.

    Args:
        label: What runs.
        rounds: How many rounds there are.
        shown: True prints lines where there is neither a terminal nor a notebook; None shows nothing there, and False
            shows nothing anywhere.
    """
    if shown is False:
        yield _ignore
    elif _in_notebook():
        yield _cell(label, rounds)
    elif sys.stderr.isatty():
        with _bar(label, rounds) as on_record:
            yield on_record
    else:
        yield _lines(label, rounds) if shown else _ignore


def _ignore(record: RoundRecord) -> None:
    pass


def _in_notebook() -> bool:
    """Whether output goes to cells; the terminal's IPython is a terminal."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")  # the second one is Colab's


@contextmanager
def _bar(label: str, rounds: int) -> Iterator[OnRecord]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=rounds, score="")

        def on_record(record: RoundRecord) -> None:
            shown: dict[str, Any] = {} if record.score is None else {"score": named_score(record)}
            bar.update(task, completed=record.round, **shown)

        yield on_record


def _cell(label: str, rounds: int) -> OnRecord:
    """A bar as HTML: rich's own needs ipywidgets in a notebook."""
    from IPython.display import HTML, display

    timer, score = _Timer(rounds), ""
    handle = display(HTML(_html(label, 0, rounds, "")), display_id=True)

    def on_record(record: RoundRecord) -> None:
        nonlocal score
        score = score if record.score is None else f"{named_score(record)}, "
        handle.update(HTML(_html(label, record.round, rounds, f"{score}{timer.say(record.round)}")))

    return on_record


def _html(label: str, done: int, rounds: int, words: str) -> str:
    bar = f'<progress value="{done}" max="{rounds}"></progress>'
    return f"<div>{html.escape(label)} {bar} {done}/{rounds} {html.escape(words)}</div>"


def _lines(label: str, rounds: int) -> OnRecord:
    timer = _Timer(rounds)
    last = time.monotonic()

    def on_record(record: RoundRecord) -> None:
        nonlocal last
        timer.see(record.round)
        now = time.monotonic()
        if now - last < PLAIN_SECONDS and record.round < rounds:
            return
        last = now
        score = "" if record.score is None else f", {named_score(record)}"
        words = f"{label}: round {record.round}/{rounds}{score}, {timer.say(record.round)}"
        print(words, file=sys.stderr, flush=True)

    return on_record


class _Timer:
    """Real seconds so far, and about how many are left."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._first, self._begun = rounds, 0, time.monotonic()

    def see(self, number: int) -> None:
        """Note the first round that was played: a resumed run begins later."""
        self._first = self._first or number

    def say(self, number: int) -> str:
        """The seconds in words."""
        self.see(number)
        spent = time.monotonic() - self._begun
        left = spent / (number - self._first + 1) * (self._rounds - number)
        return f"{spent:.0f} s, about {left:.0f} s left"


def named_score(record: RoundRecord) -> str:
    """A score with its name."""
    return f"{record.score_name} {record.score_text}"
