"""`fedpmt reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_cache_dir

from fedpmt.cli import show
from fedpmt.cli.runs import parse_seeds
from fedpmt.types import SettingError

ALL = "all"
NAMES = ("complexity", "comparison", "accuracy", "completion-time", "studies", "convergence", "rivals")


def reproduce(
    what: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)} or {ALL}")],
    seeds: Annotated[
        str, typer.Option(help="Seeds, as 0-9; runs that are there are not played again.")
    ] = "0",
    out: Annotated[Path, typer.Option(help="Folder of the tables and figures.")] = Path("results"),
    records: Annotated[
        Path | None, typer.Option(help="Folder of the kept runs (default: records in the output folder).")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of runs that are not finished (default: the user cache).")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data files; else FEDPMT_DATA, else the user cache.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: one per core.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small version on embedded data.")] = False,
    draw_only: Annotated[
        bool,
        typer.Option("--draw-only", help="Train nothing: tables and figures from the runs that are there."),
    ] = False,
) -> None:
    """Make the paper's tables and figures again, beside its own values."""
    if what not in (*NAMES, ALL):
        raise SettingError.unknown("what", what, (*NAMES, ALL))
    chosen = NAMES if what == ALL else (what,)
    numbers = parse_seeds(seeds)
    from fedpmt.experiments.artefact import publish
    from fedpmt.experiments.catalogue import EXPERIMENTS
    from fedpmt.experiments.claims import write_verdicts
    from fedpmt.experiments.library import Library, name_of
    from fedpmt.experiments.paper import Scope

    scope = Scope(numbers, quick, data_dir)
    cache = work or Path(user_cache_dir("fedpmt")) / "reproduce"
    library = Library(records or out / "records", cache, jobs or None)
    wanted = [settings for name in chosen for settings in EXPERIMENTS[name].runs(scope)]
    missing = library.missing(wanted)
    if not draw_only and missing:
        show.say(f"{len(missing)} runs to play, of {len({name_of(one) for one in wanted})}")
        with show.whole(len(missing)) as report:
            library.play(wanted, report)
    for name in chosen:
        for path in publish(EXPERIMENTS[name].make(library, scope), out):
            show.say(str(path))
    verdicts = write_verdicts(out)
    if verdicts is not None:
        show.say(str(verdicts))
