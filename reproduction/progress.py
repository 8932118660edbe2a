"""How far a batch of runs is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedpmt.cli.show import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reproduction.library import Status

LINE_SECONDS = 30.0
"""Without a terminal a line is printed this often."""


@contextmanager
def progress(runs: int) -> Iterator[Callable[[Status], None]]:
    """Show runs as they are played: done, running, time left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
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

        def report(standing: Status) -> None:
            running = ", ".join(standing.running)
            bar.update(
                task,
                completed=standing.share,
                description=running if len(running) < 60 else f"{len(standing.running)} running",
                done=standing.done,
                left=_left(standing.left),
            )

        yield report


def _lines() -> Callable[[Status], None]:
    last = -LINE_SECONDS

    def report(standing: Status) -> None:
        nonlocal last
        if standing.seconds - last < LINE_SECONDS and standing.done < standing.runs:
            return
        last = standing.seconds
        parts = [
            f"{standing.done} of {standing.runs} runs",
            f"{standing.seconds:.0f} s",
            _left(standing.left),
        ]
        parts += [f"running {', '.join(standing.running)}"] if standing.running else []
        say(", ".join(filter(None, parts)))

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
