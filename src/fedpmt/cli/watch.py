"""`fedpmt watch`, and `--watch` of commands that train."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedpmt.cli import show
from fedpmt.types import SettingError

LAST_LOOK_SECONDS = 5.0
"""How long a finished run waits for the server of its page."""

Watch = Annotated[
    bool,
    typer.Option(
        "--watch", help="Serve a page on this machine that follows the run.", rich_help_panel="The run"
    ),
]


def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some or will."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port (default: 8723, or a free one if that is taken)."),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="The page's heading (default: what the runs have in common).")
    ] = None,
    show_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the report of runs while they go on; it updates after each round. Ctrl-C ends it, and no run notices.

    Examples:
      fedpmt watch runs --open
      fedpmt run --watch --rounds 200
    """
    for run in runs:
        if not run.is_dir():
            raise SettingError(f"run = '{run}' is not a folder")
    from fedpmt.report.live import open_server

    server = open_server(runs, host, port, **({} if title is None else {"title": title}))
    show.say(f"watch: {server.url} (Ctrl-C ends it)")
    if show_page:
        webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever(poll_interval=0.2)


@contextlib.contextmanager
def watched_live(folder: Path, wanted: bool) -> Iterator[None]:
    """Serve a folder's page while a run goes on, from a process of its own: what happens there can't hurt the run."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "fedpmt.report.live", str(folder)]
    # Its own session: Ctrl-C is for the run.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        yield
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_LOOK_SECONDS)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
