"""`fedpmt deploy`: the same run on Flower, with a process for each device."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpmt.cli import show
from fedpmt.cli.flags import with_settings
from fedpmt.cli.runs import Json, Resume, request_for
from fedpmt.progress import show_progress
from fedpmt.records import DeviceRecord, RunRecord, step_word
from fedpmt.report.quantities import score_title
from fedpmt.types import SettingError, shown_bytes

Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the app, the records, the devices' state and the logs (default: deployment).",
        rich_help_panel="The run",
    ),
]
WriteOnly = Annotated[
    bool,
    typer.Option(
        "--write-only",
        help="Only write the Flower app; start it with `flwr run` where a SuperLink is.",
        rich_help_panel="The run",
    ),
]
ReplayFlag = Annotated[
    bool,
    typer.Option(
        "--replay",
        help="Play the recorded arrivals of a finished deployment with --clock events in the simulator, "
        "and compare the weights.",
        rich_help_panel="The run",
    ),
]
UpdateLimit = Annotated[
    float | None,
    typer.Option(
        help="Refuse updates whose norm is more than this many times that of the model (default: 10).",
        rich_help_panel="The run",
    ),
]
SecAgg = Annotated[
    bool | None,
    typer.Option(
        "--secagg",
        help="Secure aggregation: the server learns sums per layer, not one device's update.",
        rich_help_panel="Privacy",
    ),
]
MinDevices = Annotated[
    int | None,
    typer.Option(
        help="With --secagg: open a layer's sum only if so many devices trained it; 3 are advised (default: 2).",
        rich_help_panel="Privacy",
    ),
]
SecAggRange = Annotated[
    float | None,
    typer.Option(
        help="With --secagg: the largest change of one weight in a round; a larger one is cut (default: 8).",
        rich_help_panel="Privacy",
    ),
]


@with_settings(without=("model", "layers", "tied"), of_file=("out",))
def deploy(
    given: dict[str, Any],
    out: Out = None,
    resume: Resume = False,
    write_only: WriteOnly = False,
    replay: ReplayFlag = False,
    update_limit: UpdateLimit = None,
    secagg: SecAgg = None,
    min_devices: MinDevices = None,
    secagg_range: SecAggRange = None,
    as_json: Json = False,
) -> None:
    """Train on Flower: a SuperLink and one SuperNode per device, started and stopped here.

    `--deadline` is real seconds of a round here; a reply that is late, lost or refused is recorded as such. With
    `--clock events` no device waits for another: the server steps after every `--buffer` replies.

    Examples:
      fedpmt deploy --samples 800 --lr 0.1 --rounds 6
      fedpmt deploy --write-only --out my-app
      fedpmt deploy --secagg --min-devices 3
    """
    from fedpmt.flower.deploy import SMALL, Places, deploy_here, split_settings, write

    out = out or Path("deployment")
    places = Places(out)
    if resume and not (places.app.exists() or places.run.exists()):
        raise SettingError(f"out = '{out}' holds no deployment to continue; leave out --resume to begin one")
    typed = {
        "update_limit": update_limit,
        "secagg": secagg,
        "min_devices": min_devices,
        "secagg_range": secagg_range,
    }
    if replay:
        others = {**given, **typed, "resume": resume, "write_only": write_only}
        _replay(places.run, others, as_json=as_json)
        return
    if given.get("model"):
        raise SettingError(
            f"model = '{given['model']}' cannot be deployed by this command: write a Flower app of your own "
            "(docs/deploying.md)"
        )
    given, own = split_settings(places, given, typed, resume=resume)
    settings = request_for({**SMALL, **given} if not resume else given, places.run, resume=resume).settings
    write(places, settings, own, resume=resume)
    if write_only:
        show.say(f"the app is {places.app}; run it with: flwr run {places.app}")
        return
    try:
        label = f"{settings.method} on {settings.devices} nodes"
        with show_progress(label, settings.rounds, step_word(settings.clock), shown=True) as on_round:
            finished = deploy_here(
                places,
                settings,
                lambda: show.say(f"{settings.method}, {settings.devices} nodes: {out}"),
                on_round,
            )
    except KeyboardInterrupt:
        show.say(f"interrupted, all processes stopped; continue with fedpmt deploy --resume --out {out}")
        raise
    if finished.result is None:
        raise SettingError(f"'{places.run}' is not finished")
    if as_json:
        print(json.dumps(finished.result.as_json()))
        return
    _tables(finished)


def _replay(folder: Path, typed: dict[str, Any], *, as_json: bool) -> None:
    """Play a deployment once more in the simulator, and say that the weights are the same."""
    from fedpmt.flower.deploy import replay_here

    said = next((key for key, value in typed.items() if value), None)
    if said is not None:
        flag = said.replace("_", "-")
        raise SettingError(
            f"{flag} = {typed[said]} cannot be combined with --replay, which plays what is recorded"
        )
    replayed = replay_here(folder)
    assert replayed.result is not None
    if as_json:
        print(json.dumps(replayed.result.as_json()))
        return
    arrivals = [one for step in replayed.rounds for one in step.devices if one.outcome == "arrived"]
    late = [one for one in arrivals if one.staleness]
    shown = {
        "server steps": str(len(replayed.rounds)),
        "replies": str(len(arrivals)),
        "late replies": str(len(late)),
        "weights_sha256": replayed.result.weights_sha256,
    }
    show.sentence("The replay has the weights of the deployment")
    show.facts(shown)


def _tables(finished: RunRecord) -> None:
    """The result, and what each device did for it."""
    result = finished.result
    assert result is not None
    shown = {
        score_title(result.score_name): result.score_text,
        "rounds": str(result.rounds),
        **({} if result.epsilon is None else {"epsilon": f"{result.epsilon:.3g}"}),
        "seconds": show.number(result.virtual_seconds),
        "uploaded": shown_bytes(result.bytes_up),
        "downloaded": shown_bytes(result.bytes_down),
        "weights_sha256": result.weights_sha256,
        "records": result.run,
    }
    late = [one.staleness for step in finished.rounds for one in step.devices if one.staleness is not None]
    if late:
        shown["mean staleness"] = show.number(sum(late) / len(late), 2)
    show.sentence(f"{result.method} on {result.data}, {result.partition}")
    show.facts(shown)
    print()
    of_device: dict[int, list[DeviceRecord]] = defaultdict(list)
    for step in finished.rounds:
        for one in step.devices:
            of_device[one.device].append(one)
    rows = []
    for device, times in sorted(of_device.items()):
        good = [one for one in times if one.outcome == "arrived"]
        parts = sorted({one.part for one in good})
        seconds = sum(one.seconds for one in good) / len(good) if good else None
        rows.append(
            [
                str(device),
                show.number(times[-1].speed, 2),
                ", ".join(parts) or "-",
                f"{len(good)} of {len(times)}",
                show.number(seconds, 2),
                shown_bytes(sum(one.bytes_up for one in good)),
            ]
        )
    columns = ("device", "speed", "trains", "replies that counted", "seconds of training", "uploaded")
    show.table("What each device did", columns, rows)
    lost = [(step.round, one) for step in finished.rounds for one in step.devices if one.reason]
    word = step_word(finished.settings.get("clock"))
    for number, one in lost:
        show.say(f"{word} {number}: device {one.device} {one.outcome}: {one.reason}")
