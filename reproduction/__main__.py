"""`python -m reproduction`: the paper's tables and figures, and all methods under one budget.

Loads no torch until a page is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from platformdirs import user_cache_dir

from fedpmt.cli.main import run_app
from fedpmt.cli.runs import parse_seeds
from fedpmt.cli.show import say
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.settings import Settings
    from reproduction.artefact import Artefact
    from reproduction.library import Library
    from reproduction.paper import Experiment, Scope

FETCHED = ("people", "fine-tuning", "tuned-cifar10", "tuned-cifar10-all", "tuned-elsewhere", "ablation")
"""Pages whose data no package brings along: `all --quick` leaves them out, by themselves they are of a few rounds."""

PROGRAM = "python -m reproduction"
PAGES = {
    "complexity": "Table I of the paper: the operations of every depth.",
    "comparison": "The paper's comparison of methods, each cell found out from the method itself.",
    "accuracy": "Figure 1 of the paper: test accuracy against rounds.",
    "completion-time": "Table II of the paper: virtual time to an accuracy.",
    "studies": "What the paper leaves open, as small studies on embedded data.",
    "variations": "Figure 1 with one thing changed that the paper leaves open, on MNIST and CIFAR-10.",
    "convergence": "Theorem 1 of the paper against convex problems.",
    "rivals": "Methods that exchange weights, at equal operations.",
    "people": "Devices that are people: 30 people's phones, and 138 of Shakespeare's roles.",
    "fine-tuning": "Pretrained models: MobileNetV2 on CIFAR-10 and MiniLM on Reuters' news.",
    "tuned-embedded": "All methods at rates chosen on validation data, on both clocks: embedded images.",
    "tuned-cifar10": "The best methods at rates chosen on validation data: CIFAR-10.",
    "tuned-cifar10-all": "All methods on both clocks, at rates chosen on embedded images: CIFAR-10, many hours.",
    "tuned-elsewhere": "The same on other splits, with five local epochs, and with devices that are people.",
    "blocks": "What one block costs by its place in the net: CoCoFL's measurements against our prices.",
    "orderings": "Published orderings of DepthFL and FIARSE: embedded images.",
    "ablation": "FedPMT with one ingredient changed at a time: embedded images and CIFAR-10.",
}

PUBLISHED = {
    "complexity": "complexity",
    "comparison": "comparison",
    "accuracy": "accuracy --seeds 0-9",
    "completion-time": "completion-time --seeds 0-9",
    "studies": "studies --seeds 0-2",
    "variations": "variations --seeds 0-4",
    "convergence": "convergence --seeds 0-9",
    "rivals": "rivals --seeds 0-2",
    "people": "people --seeds 0-2",
    "fine-tuning": "fine-tuning",
    "tuned-embedded": "tuned-embedded --seeds 0-9",
    "tuned-cifar10": "tuned-cifar10 --seeds 0-2",
    "tuned-cifar10-all": "tuned-cifar10-all --seeds 0-2",
    "tuned-elsewhere": "tuned-elsewhere --seeds 0-9",
    "blocks": "blocks",
    "orderings": "orderings --seeds 0-9",
    "ablation": "ablation --seeds 0-9",
    "leaderboard-embedded": "leaderboard --seeds 0-9",
    "leaderboard-embedded-even": "leaderboard --strongest --case even --seeds 0-2",
    "leaderboard-embedded-deadline": "leaderboard --strongest --case deadline --seeds 0-2",
    "leaderboard-cifar10": (
        "leaderboard --strongest feddf:no-distillation comet:alone --data cifar10 --seeds 0-2"
    ),
}
"""What makes every page of docs/results, in the order in which `all` makes them."""

HOURS = "about 60 hours of one core, more than a day on two"

app = typer.Typer(
    help="Make the paper's tables and figures again, with its own values next to ours, and compare all methods. "
    "Every command writes a page as Markdown and as HTML, its numbers as JSON and its figures as SVG.",
    epilog="Examples: [bold]python -m reproduction accuracy --quick[/] (minutes, on embedded data) · "
    "[bold]python -m reproduction accuracy --seeds 0-9 --draw-only --out docs/results[/] (from the kept runs)",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Seeds = Annotated[str, typer.Option(help="Seeds, e.g. 0-9 or 0,3. Runs that are kept are not played again.")]
Out = Annotated[Path, typer.Option(help="Folder of the pages and figures.")]
Records = Annotated[
    Path | None, typer.Option(help="Folder of the kept runs (default: records in the output folder).")
]
Work = Annotated[
    Path | None, typer.Option(help="Folder of runs that are not finished (default: the user cache).")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the data files; else FEDPMT_DATA, else the user cache.")
]
Jobs = Annotated[int, typer.Option(help="Runs played at a time; 0: one per core.", min=0)]
Quick = Annotated[bool, typer.Option("--quick", help="A small version on embedded data.")]
DrawOnly = Annotated[
    bool, typer.Option("--draw-only", help="Train nothing: make the pages from the runs that are kept.")
]


def _page_command(name: str) -> Callable[..., None]:
    def command(
        seeds: Seeds = "0",
        out: Out = Path("results"),
        records: Records = None,
        work: Work = None,
        data_dir: DataDir = None,
        jobs: Jobs = 0,
        quick: Quick = False,
        draw_only: DrawOnly = False,
    ) -> None:
        numbers = parse_seeds(seeds)
        from reproduction.catalogue import EXPERIMENTS
        from reproduction.paper import Scope

        library = _library(out, records, work, jobs)
        _produce(EXPERIMENTS[name], library, Scope(numbers, quick, data_dir), out, draw_only=draw_only)

    return command


for _name, _about in PAGES.items():
    _example = f"Example: [bold]{PROGRAM} {_name} --quick --out results[/]"
    app.command(_name, help=_about, epilog=_example)(_page_command(_name))


def commands_of_all(*, quick: bool) -> list[list[str]]:
    """What `all` runs, in order: the commands that docs/results was made by, or small pages on embedded data."""
    if quick:
        return [[name, "--quick"] for name in PAGES if name not in FETCHED]
    return [command.split() for command in PUBLISHED.values()]


@app.command(
    "all",
    help=f"Every page of docs/results, each with the seeds it is published with: {HOURS}. An interrupted command "
    "continues where it stopped, since finished runs are kept. With --quick, small pages on embedded data, in "
    f"minutes and without {', '.join(FETCHED)}.",
    epilog=f"Example: [bold]{PROGRAM} all --quick --out results[/]",
)
def make_all(
    out: Out = Path("results"),
    records: Records = None,
    work: Work = None,
    data_dir: DataDir = None,
    jobs: Jobs = 0,
    quick: Quick = False,
    draw_only: DrawOnly = False,
) -> None:
    """Run the commands one after another, and end with the first that fails."""
    given = {"--out": out, "--records": records, "--work": work, "--data-dir": data_dir, "--jobs": jobs}
    places = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    for command in commands_of_all(quick=quick):
        say(f"{PROGRAM} {' '.join(command)}")
        code = program([*command, *places, *(["--draw-only"] if draw_only else [])])
        if code:
            raise typer.Exit(code)


@app.command(
    epilog=f"Examples: [bold]{PROGRAM} leaderboard --quick[/] · "
    f"[bold]{PROGRAM} leaderboard --strongest --case deadline --seeds 0-2 --out docs/results --guide docs[/]"
)
def leaderboard(
    entrants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENTRANT]...",
            help="Methods, or METHOD:VARIANT, e.g. feddrop:unscaled; default: all methods and variants.",
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
            "--strongest", help="Each method in its strongest form, and no variants except those named."
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
        raise SettingError(f"partition = '{partition}' names a split twice")
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
    artefact = _produce(
        experiment(contest), library, Scope(numbers, quick, data_dir), out, draw_only=draw_only
    )
    for document in documents:
        fill(document, contest.key, artefact.values)
        say(str(document))


@app.command(epilog=f"Example: [bold]{PROGRAM} migrate docs/results/records[/]")
def migrate(
    records: Annotated[Path, typer.Argument(help="Folder of the kept runs.", exists=True, file_okay=False)],
) -> None:
    """Check all kept runs against their hashes, and give those of an older version today's names."""
    from reproduction.library import migrate_archives

    for path in migrate_archives(records):
        say(str(path))


def _library(out: Path, records: Path | None, work: Path | None, jobs: int) -> Library:
    from reproduction.library import Library

    cache = work or Path(user_cache_dir("fedpmt")) / "reproduction"
    return Library(records or out / "records", cache, jobs or None)


def _produce(
    experiment: Experiment, library: Library, scope: Scope, out: Path, *, draw_only: bool
) -> Artefact:
    """Play what is missing, pack it, publish the page, and list what was written."""
    from reproduction.artefact import publish, write_verdicts

    wanted, before = experiment.runs(scope), None
    while wanted != before:
        if not draw_only:
            _play(library, wanted)
        packed = library.pack(experiment.name, wanted)
        if packed is not None:
            say(str(packed))
        wanted, before = experiment.then(library, scope), wanted
    made = _made(experiment, library, scope)
    for path in publish(made, out):
        say(str(path))
    verdicts = write_verdicts(out)
    if verdicts is not None:
        say(str(verdicts))
    return made


def _play(library: Library, wanted: Sequence[Settings]) -> None:
    """Play those that are missing."""
    from reproduction.library import name_of, progress

    missing = library.missing(wanted)
    if not missing:
        return
    say(f"{len(missing)} runs to play, of {len({name_of(one) for one in wanted})}")
    try:
        with progress(len(missing)) as report:
            library.play(wanted, report)
    except KeyboardInterrupt:
        say("interrupted; the same command continues where it stopped")
        raise


def _made(experiment: Experiment, library: Library, scope: Scope) -> Artefact:
    """A page drawn while some of its runs are missing names the command that draws it so."""
    artefact = experiment.make(library, scope)
    if not library.missing([*experiment.runs(scope), *experiment.then(library, scope)]):
        return artefact
    return replace(artefact, command=f"{artefact.command} --draw-only")


def program(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m reproduction` and return its exit code."""
    return run_app(app, PROGRAM, arguments)


if __name__ == "__main__":
    sys.exit(program())
