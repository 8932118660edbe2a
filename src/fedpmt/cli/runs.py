"""`fedpmt run`, `fedpmt compare` and `fedpmt methods`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpmt import api, records
from fedpmt.cli import show
from fedpmt.cli.flags import with_settings
from fedpmt.cli.watch import Watch, watched_live
from fedpmt.methods.registry import fields, method_class, method_names
from fedpmt.progress import show_progress
from fedpmt.records import ResultRecord, RunRecord
from fedpmt.report import tables
from fedpmt.report.budgets import ACTIONS, BudgetRow, budgets
from fedpmt.settings import Settings
from fedpmt.simulation.callbacks import TRACKERS, OnRound, Tracker, call_each
from fedpmt.simulation.runner import differing
from fedpmt.types import SettingError, shown_bytes, shown_joules

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
Seeds = Annotated[str, typer.Option(help="Seeds, as 0-2,7.", rich_help_panel="Training")]


@with_settings()
def run(
    given: dict[str, Any],
    out: Out = None,
    resume: Resume = False,
    track: Track = None,
    watch: Watch = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train one method on a fleet of unequal devices. Without flags: FedPMT on embedded MNIST."""
    request = request_for(given, out, resume=resume)
    settings = request.settings
    if dry_run:
        _predict(request, out or RUNS, as_json=as_json)
        return
    folder = out or _folder(settings, resume=resume, extend="rounds" in given)
    with (
        watched_live(folder, watch),
        tracked(track) as trackers,
        watched(request, folder) as (on_start, watching),
    ):
        on_round = call_each([watching, *trackers])
        finished = api.start(request, folder, resume=resume, on_round=on_round, on_start=on_start)
    if as_json:
        print(json.dumps(_result(finished).as_json()))
        return
    show.table(
        f"{settings.method} on {settings.data}, {settings.partition}",
        ("", "value"),
        show.as_rows(show.result_fields(_result(finished))),
    )
    _show_clients([finished])
    _show_budgets(budgets([finished]))


@with_settings(without=("method", "seed"))
def compare(
    given: dict[str, Any],
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="Any of `fedpmt methods`.")],
    seeds: Seeds = "0",
    out: Out = None,
    resume: Resume = False,
    track: Track = None,
    watch: Watch = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run several methods on the same data, fleet, budgets and seeds, and compare them."""
    if len(set(methods)) < len(methods):
        raise SettingError("compare: a method is named twice")
    chosen = parse_seeds(seeds)
    requests = api.compare_requests(methods, chosen, given)
    if dry_run:
        for _, request in requests:
            _predict(request, out or RUNS, as_json=as_json)
        return
    first = requests[0][1].settings
    parent = out or RUNS / api.slug(f"compare-{first.model or first.task}-{first.data}-{first.partition}")
    if not resume and any((parent / name / records.CONFIG).exists() for name, _ in requests):
        if out is not None:
            raise SettingError(
                f"out = '{parent}' already holds runs; continue them with --resume or name another folder"
            )
        parent = _fresh(parent)
    with watched_live(parent, watch), tracked(track) as trackers:
        finished = api.compare(
            methods, seeds=chosen, out=parent, resume=resume, watch=watched, on_round=trackers, **given
        )
    spent = budgets(finished)
    if as_json:
        document: dict[str, Any] = {"runs": [_result(one).as_json() for one in finished]}
        if spent:
            document["budget"] = [dataclasses.asdict(row) for row in spent]
        print(json.dumps(document))
        return
    show.texts_table(
        f"{first.model or first.task} on {first.data}, {first.partition}, prices {first.mode}",
        [row.texts() for row in tables.summary(finished)],
    )
    targets = None if first.target is None else (first.target,)
    reached = sorted(tables.time_to_target(finished, targets), key=lambda row: row.target)
    if reached:
        show.texts_table("Time to target", [row.texts() for row in reached], left=2)
    _show_clients(finished)
    _show_budgets(spent)
    show.say(f"records: {parent}")


def _show_clients(runs: Sequence[RunRecord]) -> None:
    """What clients get on their own test samples; nothing where they have none."""
    texts = [row.texts() for row in tables.client_scores(runs)]
    if texts:
        show.texts_table("Clients", texts)


def _show_budgets(rows: list[BudgetRow]) -> None:
    """What was spent of the budget, level by level; nothing where there was none."""
    if rows:
        show.texts_table(f"Budget: {rows[0].resource}", [row.texts() for row in rows], left=3)


def methods(as_json: Json = False) -> None:
    """List the methods and their own settings: the library's, and those of installed packages."""
    known = {}
    for name in method_names():
        try:
            known[name] = {key: default for key, (_, default) in fields(name).items()}
        except SettingError as error:
            show.say(str(error))  # a package's method that cannot be loaded hides no other
    if as_json:
        print(json.dumps(known))
        return
    rows = []
    for name, options in known.items():
        cls = method_class(name)
        about = (cls.__doc__ or name).strip().splitlines()[0]
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        acts = ACTIONS[cls(**cls().traits.under_budget).traits.action("operations")]
        rows.append([name, about, acts, shown])
    show.table(
        "Methods (set an option with --set METHOD.KEY=VALUE)",
        ("method", "what it does", "a budget acts", "options"),
        rows,
        left=4,
    )


def request_for(given: dict[str, Any], out: Path | None, *, resume: bool) -> api.Request:
    """What was typed, over the stored settings of the run that is resumed."""
    stored = records.read_config(out) if resume and out is not None and out.is_dir() else None
    # What settings only name is looked at again: the fingerprint must come out as before.
    stored = stored and {key: value for key, value in stored.items() if key != "digest"}
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
def watched(request: api.Request, folder: Path) -> Iterator[tuple[Callable[[], None], OnRound]]:
    """Say where a run's records go once it starts, and show its progress."""
    settings = request.settings
    name = f"{settings.method}, seed {settings.seed}"
    try:
        with show_progress(name, settings.rounds, shown=True) as on_round:
            yield lambda: show.say(f"{name}: {folder}"), on_round
    except KeyboardInterrupt:
        show.say(f"interrupted; continue with --resume --out {folder}")
        raise


def _result(finished: RunRecord) -> ResultRecord:
    if finished.result is None:
        raise SettingError(f"'{finished.folder}' is not finished")
    return finished.result


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
    return _fresh(base)


def _predict(request: api.Request, folder: Path, *, as_json: bool) -> None:
    settings, prediction = request.settings, api.predict(request, folder)
    if as_json:
        print(json.dumps(prediction))
        return
    show.table("Settings", ("setting", "value"), show.as_rows(prediction["settings"]))
    columns = [
        "trains",
        "level",
        "devices",
        "speed",
        "seconds",
        "reply",
        "upload",
        "memory",
        "operations a round",
    ]
    rows = [
        [
            row["part"],
            str(row["level"]),
            str(row["devices"]),
            show.number(row["speed"], 3),
            show.number(row["seconds"]),
            row["outcome"],
            shown_bytes(row["upload_bytes"]),
            shown_bytes(row["memory_bytes"]),
            show.number(row["operations"], 0),
        ]
        for row in prediction["devices"]
    ]
    if prediction["joules"] is not None:
        columns.append("energy a round")
        for cells, row in zip(rows, prediction["devices"], strict=True):
            cells.append(shown_joules(row["joules"]))
    if settings.budget is not None:
        columns.append("of its budget")
        for cells, row in zip(rows, prediction["devices"], strict=True):
            over = " (over)" if row["over_budget"] else ""
            cells.append(show.percent(row["used"] / row["budget"]) + over)
        print(f"budget {settings.budget}: acts {ACTIONS[prediction['budget_action']]}")
    steps = prediction["steps"]
    shown = "a first round" if settings.clock == "rounds" else f"the first {steps} server steps"
    show.table(f"{settings.method}: {shown}, prices {settings.mode}", columns, rows)
    one, whole = show.number(prediction["round_seconds"]), show.number(prediction["virtual_seconds"])
    print(f"predicted: {one} s a round, {whole} s for {settings.rounds} rounds")
    if prediction["base_bytes"]:
        print(f"base, sent to each device once: {shown_bytes(prediction['base_bytes'])}")
    if "server_operations_at_most" in prediction:
        print(f"server: {_server_words(settings, prediction)}")


def _server_words(settings: Settings, prediction: dict[str, Any]) -> str:
    if settings.server_cap is None:
        return "no limit to its operations (server-cap = none), which are not predicted"
    words = f"at most {settings.server_cap:g} x the devices' operations"
    words += f", {show.number(prediction['server_operations_at_most'], 0)} in {settings.rounds} rounds"
    if settings.server_speed is not None:
        words += f", and up to {show.number(prediction['server_round_seconds_at_most'])} s more a round"
    return words


def parse_seeds(text: str) -> list[int]:
    """Seeds as a list.

    >>> parse_seeds("0-2,7")
    [0, 1, 2, 7]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SettingError(f"seeds = '{text}' is refused: write whole numbers and ranges, as 0-2,7")
        seeds += range(int(first), int(last or first) + 1)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise SettingError(f"seeds = '{text}' is refused: no seed, or one named twice")
    return seeds
