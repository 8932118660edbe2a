"""`fedpmt run` and `fedpmt compare`."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpmt import api, records
from fedpmt.cli import show
from fedpmt.cli.flags import complete_methods, with_settings
from fedpmt.cli.predict import show_prediction
from fedpmt.cli.results import comparison_json, result_of, show_comparison, show_run
from fedpmt.cli.watch import Watch, watched_live
from fedpmt.progress import show_progress
from fedpmt.settings import Settings, stored_settings
from fedpmt.simulation.callbacks import TRACKERS, OnRound, Tracker, call_each
from fedpmt.simulation.runner import differing
from fedpmt.types import SettingError

RUNS = Path("runs")

Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the records (default: a new one under runs/).", rich_help_panel="The run"),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in the folder; the weights are exactly those of an uninterrupted run.",
        rich_help_panel="The run",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.", rich_help_panel="The run")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show settings, prices and predicted time; train nothing.",
        rich_help_panel="The run",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="|".join(TRACKERS),
        help="Write each round for this tool, too; may be given several times.",
        rich_help_panel="The run",
    ),
]
Seeds = Annotated[str | None, typer.Option(help="Seeds, as 0-2,7 (default: 0).", rich_help_panel="Training")]
Sweep = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=A,B,...",
        help="Run each method with each of these values of a setting, or of a method's option; values that hold "
        "commas are separated by semicolons (default: none).",
        rich_help_panel="Training",
    ),
]
MOST_SEEDS, MOST_DIGITS = 1_000, 18


@with_settings(of_file=("out",))
def run(
    given: dict[str, Any],
    out: Out = None,
    resume: Resume = False,
    track: Track = None,
    watch: Watch = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train one method on a fleet of unequal devices. Without flags: FedPMT on embedded MNIST.

    Examples:
      fedpmt run --rounds 50
      fedpmt run --method fedprox --set fedprox.mu=0.1 --partition classes:2
      fedpmt run --fleet devices.csv --deadline 30 --task cnn-cifar10 --dry-run
      fedpmt run --resume --out runs/NAME --rounds 200
    """
    request = request_for(given, out, resume=resume)
    settings = request.settings
    if dry_run:
        show_prediction(request, out or RUNS, as_json=as_json)
        return
    folder = out or _folder(settings, resume=resume, extend="rounds" in given)
    if resume:
        check_begun(folder, [folder])
    with (
        watched_live(folder, watch),
        tracked(track) as trackers,
        watched(request, folder) as (on_start, watching),
    ):
        on_round = call_each([watching, *trackers])
        finished = api.start(request, folder, resume=resume, on_round=on_round, on_start=on_start)
    if as_json:
        print(json.dumps(result_of(finished).as_json()))
        return
    show_run(finished)


@with_settings(without=("method", "seed"), of_file=("out", "seeds"))
def compare(
    given: dict[str, Any],
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Names of `fedpmt methods`; with options of its own as METHOD:KEY=VALUE,KEY=VALUE.",
            autocompletion=complete_methods,
        ),
    ],
    sweep: Sweep = None,
    seeds: Seeds = None,
    out: Out = None,
    resume: Resume = False,
    track: Track = None,
    watch: Watch = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run several methods on the same data, fleet, budgets and seeds, and compare them.

    Examples:
      fedpmt compare fedpmt fedavg feddrop --rounds 100
      fedpmt compare fedpmt fedavg --seeds 0-2 --partition classes:2 --target 0.85
      fedpmt compare fedprox:mu=0.1 fedprox:mu=1
      fedpmt compare fedpmt fedavg --sweep lr=0.01,0.05,0.1
    """
    if len(set(methods)) < len(methods):
        raise SettingError("compare: a method is named twice")
    chosen = parse_seeds(seeds or str(given.get("seed", 0)))
    swept = parse_sweep(sweep)
    requests = api.compare_requests(methods, chosen, given, sweep=swept)
    if dry_run:
        for _, request in requests:
            show_prediction(request, out or RUNS, as_json=as_json)
        return
    first = requests[0][1].settings
    parent = out or RUNS / api.slug(f"compare-{first.model or first.task}-{first.data}-{first.partition}")
    if not resume and any((parent / name / records.CONFIG).exists() for name, _ in requests):
        if out is not None:
            raise SettingError(
                f"out = '{parent}' already holds runs; continue them with --resume or name another folder"
            )
        parent = _fresh(parent)
    if resume:
        check_begun(parent, [parent / name for name, _ in requests])
    with watched_live(parent, watch), tracked(track) as trackers:
        finished = api.compare(
            methods,
            seeds=chosen,
            sweep=swept,
            out=parent,
            resume=resume,
            watch=partial(watched, resumed=parent),
            on_round=trackers,
            **given,
        )
    if as_json:
        print(json.dumps(comparison_json(finished)))
        return
    show_comparison(finished, first.model_dump())
    print()
    show.facts({"runs": str(parent), "next": f"fedpmt report {shlex.quote(str(parent))} --open"})


def parse_sweep(text: str | None) -> dict[str, list[str]]:
    """The values of a setting that is swept.

    >>> parse_sweep("lr=0.01,0.1"), parse_sweep("levels=1/2,1;1/4,1")
    ({'lr': ['0.01', '0.1']}, {'levels': ['1/2,1', '1/4,1']})
    """
    if text is None:
        return {}
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in listed.split(";" if ";" in listed else ",")]
    if not equals or not key.strip() or not all(values) or len(set(values)) < len(values):
        raise SettingError(f"sweep = '{text}' is refused: write KEY=VALUE,VALUE with different values")
    return {key.strip(): values}


def request_for(given: dict[str, Any], out: Path | None, *, resume: bool) -> api.Request:
    """What was typed, over the stored settings of the run that is resumed."""
    stored = records.read_config(out) if resume and out is not None and out.is_dir() else None
    stored = stored and stored_settings(stored)
    method = str(
        given.get("method") or (stored or {}).get("method") or Settings.model_fields["method"].default
    )
    options = api.options_for(method, given.get("options", {}))
    if stored is not None:
        given = {**stored, **given}
        kept = stored.get("options")
        options = {**(kept if isinstance(kept, dict) else {}), **options}
    return api.make_request(method, {**given, "options": options})


@contextlib.contextmanager
def tracked(names: list[str] | None) -> Iterator[list[Tracker]]:
    """Make the trackers of these names, and close them in the end."""
    with contextlib.ExitStack() as stack:
        trackers = []
        for name in names or ():
            if name not in TRACKERS:
                raise SettingError.unknown("track", name, TRACKERS)
            trackers.append(stack.enter_context(TRACKERS[name]()))
        yield trackers


@contextlib.contextmanager
def watched(
    request: api.Request, folder: Path, *, resumed: Path | None = None
) -> Iterator[tuple[Callable[[], None], OnRound]]:
    """Say where a run's records go once it starts, and show its progress.

    `resumed` is the folder that continues the command, if it is not the run's own.
    """
    settings = request.settings
    name = f"{settings.method}, seed {settings.seed}"
    try:
        with show_progress(name, settings.rounds, records.step_word(settings.clock), shown=True) as on_round:
            yield lambda: show.say(f"{name}: {folder}"), on_round
    except KeyboardInterrupt:
        show.say(f"interrupted; continue with --resume --out {resumed or folder}")
        raise


def check_begun(folder: Path, runs: Sequence[Path]) -> None:
    """Refuse to resume where none of these runs has been begun."""
    other = folder in runs and folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    if not other and not any((run / records.CONFIG).exists() for run in runs):
        raise SettingError(f"out = '{folder}' holds no run to continue; leave out --resume to begin one")


def _fresh(folder: Path) -> Path:
    """The folder, or with the next free number behind it."""
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _folder(settings: Settings, *, resume: bool, extend: bool) -> Path:
    """A new folder under runs/; to resume, the latest there with these settings, or to `extend`, with fewer rounds."""
    base = RUNS / api.slug(
        f"{settings.method}-{settings.model or settings.task}-{settings.data}-{settings.partition}"
        f"-seed{settings.seed}"
    )
    if resume and RUNS.is_dir():
        found = sorted(RUNS.glob(f"{base.name}*"), key=lambda path: path.stat().st_mtime, reverse=True)
        stored = {path: records.read_config(path) for path in found}
        same = {path: one for path, one in stored.items() if one and differing(one, settings) is None}
        whole = [path for path, one in same.items() if one.get("rounds", settings.rounds) == settings.rounds]
        fewer = [path for path, one in same.items() if extend and one.get("rounds", 0) < settings.rounds]
        if whole or fewer:
            return (whole or fewer)[0]
    if resume:
        raise SettingError(f"'{RUNS}' holds no run of these settings to continue; name its folder with --out")
    return _fresh(base)


def parse_seeds(text: str) -> list[int]:
    """Seeds as a list.

    >>> parse_seeds("0-2,7")
    [0, 1, 2, 7]
    """
    spans: list[range] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        right = first.isdecimal() and (last.isdecimal() or not dash)
        if not right or max(len(first), len(last)) > MOST_DIGITS:
            raise SettingError(f"seeds = '{text}' is refused: write whole numbers and ranges, as 0-2,7")
        spans.append(range(int(first), int(last or first) + 1))
    if sum(map(len, spans)) > MOST_SEEDS:
        raise SettingError(f"seeds = '{text}' is refused: at most {MOST_SEEDS} seeds can be compared")
    seeds = [seed for span in spans for seed in span]
    if len(set(seeds)) < len(seeds) or not seeds:
        raise SettingError(f"seeds = '{text}' is refused: no seed, or one named twice")
    return seeds
