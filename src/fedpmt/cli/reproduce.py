"""`fedpmt reproduce` and `fedpmt leaderboard`: many runs, kept as thin records, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from platformdirs import user_cache_dir

from fedpmt.cli import show
from fedpmt.cli.runs import parse_seeds
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from reproduction.artefact import Artefact
    from reproduction.library import Library
    from reproduction.paper import Experiment, Scope

ALL = "all"
NAMES = ("complexity", "comparison", "accuracy", "completion-time", "studies", "convergence", "rivals")

Seeds = Annotated[str, typer.Option(help="Seeds, as 0-9; runs that are there are not played again.")]
Out = Annotated[Path, typer.Option(help="Folder of the tables and figures.")]
Records = Annotated[
    Path | None, typer.Option(help="Folder of the kept runs (default: records in the output folder).")
]
Work = Annotated[
    Path | None, typer.Option(help="Folder of runs that are not finished (default: the user cache).")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data files; else FEDPMT_DATA, else the user cache.")
]
Jobs = Annotated[int, typer.Option(help="Runs at a time; 0: one per core.", min=0)]
Quick = Annotated[bool, typer.Option("--quick", help="A small version on embedded data.")]
DrawOnly = Annotated[
    bool,
    typer.Option("--draw-only", help="Train nothing: tables and figures from the runs that are there."),
]


def reproduce(
    what: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)} or {ALL}")],
    seeds: Seeds = "0",
    out: Out = Path("results"),
    records: Records = None,
    work: Work = None,
    data_dir: DataDir = None,
    jobs: Jobs = 0,
    quick: Quick = False,
    draw_only: DrawOnly = False,
) -> None:
    """Make the paper's tables and figures again, beside its own values."""
    if what not in (*NAMES, ALL):
        raise SettingError.unknown("what", what, (*NAMES, ALL))
    chosen = NAMES if what == ALL else (what,)
    numbers = parse_seeds(seeds)
    from reproduction.catalogue import EXPERIMENTS
    from reproduction.paper import Scope

    library = _library(out, records, work, jobs)
    scope = Scope(numbers, quick, data_dir)
    _produce([EXPERIMENTS[name] for name in chosen], library, scope, out, draw_only=draw_only)


def leaderboard(
    entrants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENTRANT]...",
            help="Methods, or METHOD:VARIANT, as feddrop:unscaled; default: all methods and variants.",
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="embedded, mnist, fashion-mnist or cifar10.")] = "embedded",
    partition: Annotated[
        str, typer.Option(help="One split or several: iid, classes:N, dirichlet:ALPHA.")
    ] = "iid,classes:2",
    rounds: Annotated[
        int | None, typer.Option(help="Global rounds (default: 100 on embedded data, else 200).", min=1)
    ] = None,
    seeds: Seeds = "0",
    out: Out = Path("results"),
    records: Records = None,
    work: Work = None,
    data_dir: DataDir = None,
    jobs: Jobs = 0,
    guide: Annotated[
        Path | None,
        typer.Option(help="A document, or a folder of them, whose marked spots are filled with the numbers."),
    ] = None,
    case: Annotated[
        str,
        typer.Option(
            help="Another situation, on embedded data: even (a fleet of two speeds) or deadline (15 s a round)."
        ),
    ] = "",
    strongest: Annotated[
        bool,
        typer.Option(
            "--strongest", help="Each method in its strongest form, and no variants but those named."
        ),
    ] = False,
    quick: Quick = False,
    draw_only: DrawOnly = False,
) -> None:
    """Compare all methods under one budget: accuracy, time, bytes, operations, memory, and what each needs."""
    from fedpmt.data.partition import check_spec

    numbers = parse_seeds(seeds)
    partitions = [part.strip() for part in partition.split(",")]
    for one in partitions:
        check_spec(one)
    if len(set(partitions)) < len(partitions):
        raise SettingError(f"partition = '{partition}' is refused: a split is named twice")
    from reproduction.entrants import STRONGEST, Contest, entrants_of
    from reproduction.guide import documents_of, fill
    from reproduction.leaderboard import leaderboard as experiment
    from reproduction.paper import Scope

    named = [*(entrants or []), *(one.name for one in STRONGEST if strongest)]
    chosen = entrants_of(named)
    contest = Contest(
        numbers, data, tuple(partitions), rounds, chosen, quick=quick, data_dir=data_dir, case=case
    )
    documents = [] if guide is None else documents_of(guide, contest.key)
    library = _library(out, records, work, jobs)
    [artefact] = _produce(
        [experiment(contest)], library, Scope(numbers, quick, data_dir), out, draw_only=draw_only
    )
    for document in documents:
        fill(document, contest.key, artefact.values)
        show.say(str(document))


def _library(out: Path, records: Path | None, work: Path | None, jobs: int) -> Library:
    from reproduction.library import Library

    cache = work or Path(user_cache_dir("fedpmt")) / "reproduce"
    return Library(records or out / "records", cache, jobs or None)


def _produce(
    experiments: Sequence[Experiment], library: Library, scope: Scope, out: Path, *, draw_only: bool
) -> list[Artefact]:
    """Play what is missing, publish, and list what the folder then has."""
    from reproduction.artefact import publish
    from reproduction.claims import write_verdicts
    from reproduction.library import name_of

    wanted = [settings for experiment in experiments for settings in experiment.runs(scope)]
    missing = library.missing(wanted)
    if not draw_only and missing:
        show.say(f"{len(missing)} runs to play, of {len({name_of(one) for one in wanted})}")
        with show.whole(len(missing)) as report:
            library.play(wanted, report)
    made = [_made(experiment, library, scope) for experiment in experiments]
    for artefact in made:
        for path in publish(artefact, out):
            show.say(str(path))
    verdicts = write_verdicts(out)
    if verdicts is not None:
        show.say(str(verdicts))
    return made


def _made(experiment: Experiment, library: Library, scope: Scope) -> Artefact:
    """A page drawn while some of its runs are missing names the command that draws it so."""
    artefact = experiment.make(library, scope)
    if not library.missing(experiment.runs(scope)):
        return artefact
    return replace(artefact, command=f"{artefact.command} --draw-only")
