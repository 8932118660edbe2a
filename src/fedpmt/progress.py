"""Rounds as they pass: a bar on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import html
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from fedpmt.records import RoundRecord

    OnRecord = Callable[[RoundRecord], None]

PLAIN_SECONDS = 5.0
"""Without a terminal a line is printed this often."""

NARROW = 70
"""On a terminal with fewer columns the bar shows neither the label nor the speed."""


@contextmanager
def show_progress(label: str, rounds: int, word: str, *, shown: bool | None = None) -> Iterator[OnRecord]:
    """Give a function that shows each round's record on standard error, or below a notebook's cell.

    Args:
        label: What runs.
        rounds: How many rounds there are.
        word: What one of them is called.
        shown: True prints lines where there is neither a terminal nor a notebook; None shows nothing there, and False
            shows nothing anywhere.
    """
    if shown is False:
        yield _ignore
    elif _in_notebook():
        yield _cell(label, rounds, word)
    elif sys.stderr.isatty():
        with _bar(label, rounds, word) as on_record:
            yield on_record
    else:
        yield _lines(label, rounds, word) if shown else _ignore


def _ignore(record: RoundRecord) -> None:
    pass


def _in_notebook() -> bool:
    """Whether output goes to cells; the terminal's IPython is a terminal."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")  # the second one is Colab's


@contextmanager
def _bar(label: str, rounds: int, word: str, console: Console | None = None) -> Iterator[OnRecord]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    console = console or Console(stderr=True)
    whole = Column(no_wrap=True)
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=whole),
        TextColumn("{task.fields[score]}", table_column=whole),
        TextColumn("{task.fields[pace]}", table_column=whole),
    )
    narrow = console.width < NARROW
    pace = Pace(rounds, word)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("" if narrow else label, total=rounds, score="", pace="")

        def on_record(record: RoundRecord) -> None:
            shown: dict[str, Any] = {} if record.score is None else {"score": named_score(record)}
            pace.see(record.round)
            bar.update(task, completed=record.round, pace=pace.left if narrow else pace.words, **shown)

        yield on_record


def _cell(label: str, rounds: int, word: str) -> OnRecord:
    """A bar as HTML: rich's own needs ipywidgets in a notebook."""
    from IPython.display import HTML, display

    pace, score = Pace(rounds, word), ""
    handle = display(HTML(_html(label, 0, rounds, "")), display_id=True)

    def on_record(record: RoundRecord) -> None:
        nonlocal score
        pace.see(record.round)
        score = score if record.score is None else named_score(record)
        handle.update(HTML(_html(label, record.round, rounds, _join(score, pace.words))))

    return on_record


def _html(label: str, done: int, rounds: int, words: str) -> str:
    bar = f'<progress value="{done}" max="{rounds}"></progress>'
    return f"<div>{html.escape(label)} {bar} {done}/{rounds} {html.escape(words)}</div>"


def _lines(label: str, rounds: int, word: str) -> OnRecord:
    pace = Pace(rounds, word)
    last = time.monotonic()

    def on_record(record: RoundRecord) -> None:
        nonlocal last
        pace.see(record.round)
        now = time.monotonic()
        if now - last < PLAIN_SECONDS and record.round < rounds:
            return
        last = now
        score = "" if record.score is None else named_score(record)
        words = f"{label}: {_join(f'{word} {record.round}/{rounds}', score, pace.words)}"
        print(words, file=sys.stderr, flush=True)

    return on_record


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


class Pace:
    """How fast rounds pass and how long the rest takes, from the end of the first one on: start-up is left out."""

    def __init__(self, rounds: int, word: str, now: Callable[[], float] = time.monotonic) -> None:
        self._rounds, self._word, self._now = rounds, word, now
        self._first: tuple[int, float] | None = None
        self._last = 0, 0.0

    def see(self, number: int) -> None:
        """Note that a round has ended; a resumed run begins later than with the first."""
        self._last = number, self._now()
        self._first = self._first or self._last

    @property
    def left(self) -> str:
        """The time left in words; nothing as long as it is not known."""
        seconds = self._seconds
        if seconds is None:
            return ""
        return f"{_duration(seconds * (self._rounds - self._last[0]))} left"

    @property
    def words(self) -> str:
        """The speed and the time left."""
        seconds = self._seconds
        if seconds is None:
            return ""
        speed = (
            f"{1 / seconds:.{0 if seconds < 0.1 else 1}f} {self._word}s/s"
            if seconds < 1
            else f"{seconds:.3g} s a {self._word}"
        )
        return _join(speed, self.left if self._last[0] < self._rounds else "")

    @property
    def _seconds(self) -> float | None:
        """Real seconds a round takes; None before two of them have ended."""
        if self._first is None or self._last[0] == self._first[0]:
            return None
        took = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return took or None


def _duration(seconds: float) -> str:
    """A time as people say it.

    >>> _duration(12.3), _duration(600), _duration(9000)
    ('12 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def named_score(record: RoundRecord) -> str:
    """A score with its name."""
    return f"{record.score_name} {record.score_text}"
