"""`fedpmt report`."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedpmt import records
from fedpmt.cli import show
from fedpmt.cli.runs import Json
from fedpmt.types import SettingError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")
    ],
    out: Annotated[Path, typer.Option(help="The page; its CSV is written next to it.")] = Path("report.html"),
    targets: Annotated[str | None, typer.Option(help="Targets for the score, as 0.5,0.9.")] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
    show_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write one web page with everything the runs show, and a tidy CSV.

    The page is one file that needs no network: hover, hide, zoom, sort and filter in it.
    """
    wanted = None if targets is None else [_target(text) for text in targets.split(",")]
    found = [records.read_run(folder) for run in runs for folder in run_folders(run)]
    from fedpmt.report import tables
    from fedpmt.report.page import write_page

    page, table = write_page(found, out, wanted, **({} if title is None else {"title": title}))
    if show_page:
        webbrowser.open(page.absolute().as_uri())
    if as_json:
        rows = tables.time_to_target(found, wanted)
        print(
            json.dumps(
                {
                    "page": str(page),
                    "csv": str(table),
                    "runs": len(found),
                    "targets": [row.texts() for row in rows],
                }
            )
        )
        return
    show.say(f"{len(found)} runs: {page}, {table}")


def _target(text: str) -> float:
    """A target as the user wrote it; the report knows what it may be."""
    try:
        return float(text)
    except ValueError:
        raise SettingError(f"targets must be numbers, as 0.5,0.9 (got '{text}')") from None


def run_folders(folder: Path) -> list[Path]:
    """The folder itself, or the run folders below it."""
    found = records.find_runs([folder])
    if not found:
        raise SettingError(f"run = '{folder}' is not a run folder, nor does it hold one")
    return found
