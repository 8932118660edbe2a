"""`fedpmt report` and `fedpmt runs`."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpmt import records
from fedpmt.cli import show
from fedpmt.cli.runs import Json
from fedpmt.records import RunRecord
from fedpmt.report import groups, tables
from fedpmt.report.quantities import score_unit, time_unit
from fedpmt.report.quantities import show as show_quantity
from fedpmt.types import SettingError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")
    ],
    out: Annotated[Path, typer.Option(help="The page; a CSV of the same name is written too.")] = Path(
        "report.html"
    ),
    targets: Annotated[
        str | None,
        typer.Option(help="Targets for the score, as 0.5,0.9 (default: round accuracies that were reached)."),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="The page's heading (default: what the runs have in common).")
    ] = None,
    show_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write one web page with everything the runs show, and a tidy CSV.

    The page is one file that needs no network: hover, hide, zoom, sort and filter in it.

    Examples:
      fedpmt report runs/* --open
      fedpmt report demo/iid demo/classes-2 --out demo/report.html --targets 0.8,0.9
    """
    wanted = None if targets is None else [_target(text) for text in targets.split(",")]
    found = [records.read_run(folder) for run in runs for folder in run_folders(run)]
    from fedpmt.report.page import write_page

    page, table = write_page(found, out, wanted, **({} if title is None else {"title": title}))
    if show_page and not webbrowser.open(page.absolute().as_uri()):
        show.say(f"no browser could be started; open {page} yourself")
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


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look for runs.")] = Path(
        "runs"
    ),
    as_json: Json = False,
) -> None:
    """List the runs in a folder: what was trained, how far it got and what it scored.

    Examples:
      fedpmt runs
      fedpmt runs demo/iid
      fedpmt run --resume --out runs/NAME
    """
    found = [(path, _read(path)) for path in run_folders(folder)]
    rows = [_row(path.relative_to(folder) if path != folder else path, one) for path, one in found]
    if as_json:
        print(json.dumps([_values(path, one) for path, one in found]))
        return
    show.texts_table(f"{len(rows)} run{'' if len(rows) == 1 else 's'} in {folder}", rows)
    unfinished = [path for path, one in found if isinstance(one, RunRecord) and one.result is None]
    if unfinished:
        show.sentence(f"continue one: fedpmt run --resume --out {unfinished[0]}")


def _read(folder: Path) -> RunRecord | SettingError:
    """A run, or why it cannot be read: one damaged folder hides no other."""
    try:
        return records.read_run(folder)
    except SettingError as error:
        return error


def _values(folder: Path, run: RunRecord | SettingError) -> dict[str, Any]:
    if isinstance(run, SettingError):
        return {"run": str(folder), "state": "damaged", "reason": str(run)}
    scores = tables.evaluated(run)
    return {
        "run": str(folder),
        "method": groups.method_of(run),
        **{key: run.settings.get(key) for key in ("task", "data", "partition", "seed")},
        "rounds": run.rounds[-1].round if run.rounds else 0,
        "of": run.settings.get("rounds"),
        "score_name": run.score_name,
        "score": scores[-1][1] if scores else None,
        "virtual_seconds": run.rounds[-1].virtual_seconds if run.rounds else 0.0,
        "state": run.result.stopped if run.result else "unfinished",
        "started": run.session.started if run.session else None,
    }


STATES = {"rounds": "finished", "unfinished": "not finished", "damaged": "damaged"}


def _row(name: Path, run: RunRecord | SettingError) -> dict[str, str]:
    values = _values(name, run)
    state = STATES.get(values["state"], f"stopped: {values['state']}")
    if isinstance(run, SettingError):
        return {"run": str(name), "state": state}
    return {
        "run": str(name),
        "state": state,
        **{key: str(values[key]) for key in ("method", "task", "data", "partition", "seed")},
        "rounds": f"{values['rounds']} of {values['of']}",
        values["score_name"]: show_quantity(values["score"], score_unit(values["score_name"])),
        "virtual time": show_quantity(values["virtual_seconds"], time_unit),
        "started": (values["started"] or "-")[:10],
    }


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
