"""`fedpmt cost`, `fedpmt plan` and `fedpmt profile`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpmt import api
from fedpmt.cli import show
from fedpmt.cli.flags import with_settings
from fedpmt.cli.runs import Json
from fedpmt.settings import Settings
from fedpmt.types import SettingError, shown_bytes

Task = Annotated[str, typer.Option(help="The net: fcnn-mnist, cnn-mnist or cnn-cifar10.")]
Mode = Annotated[str, typer.Option(help="exact: as really run; paper: as the paper's table is printed.")]
Depths = Annotated[
    str | None, typer.Option(help="Number of depths |I| (default: the paper's larger one).", metavar="N")
]
Draw = Annotated[
    Path | None, typer.Option(help="Also picture what each depth trains, as SVG, PNG or PDF.", metavar="FILE")
]


TRAINING_ONLY = (
    "method",
    "partition",
    "partition_seed",
    "public",
    "validation",
    "server_cap",
    "server_speed",
    "splitting",
    "speeds",
    "speed_weight",
    "drift",
    "dp_clip",
    "dp_noise",
    "dp_delta",
    "budget",
    "options",
    "sampling",
    "level_draw",
    "failure",
    "over_select",
    "workers",
    "executor",
    "eval_every",
    "personal_test",
    "target",
    "time_budget",
    "checkpoint_seconds",
    "seed",
    "schedule",
    "rounds",
    "data_dir",
    "cohort",
)
"""Settings that no price or time depends on."""


def cost(
    task: Task = "fcnn-mnist",
    mode: Mode = "exact",
    depths: Depths = None,
    draw: Draw = None,
    as_json: Json = False,
) -> None:
    """Price every depth of a net for one batch, with FedDrop matched to it."""
    count = api.settings_of({"task": task, "depths": depths}).depths
    from fedpmt.pricing.cost_table import cost_table

    table = cost_table(task, mode, count)
    if draw is not None:
        from fedpmt.report.draw import draw_net

        try:
            draw_net(table.model_dump(mode="json"), draw)
        except OSError as error:
            raise SettingError(f"draw = '{draw}' cannot be written: {error.strerror}") from error
        show.say(f"drawn: {draw}")
    if as_json:
        print(table.model_dump_json())
        return
    layers = [
        [row.name, *(f"{n:,}" for n in (row.parameters, row.forward, row.error, row.gradient, row.update))]
        for row in table.layers
    ]
    show.table(
        f"{task}: operations per batch by layer, mode {mode}",
        ("layer", "parameters", "forward", "error signal", "weight gradient", "update"),
        layers,
    )
    rows = []
    for row in table.depths:
        drop = (
            ["-", "-"]
            if row.feddrop_keep is None
            else [f"{row.feddrop_keep:.2f}", f"{row.feddrop_operations:,}"]
        )
        over = " (over)" if row.feddrop_within_budget is False else ""
        cells = [str(row.depth), ", ".join(row.frozen) or "none", f"{row.operations:,}", f"{row.ratio:.2%}"]
        rows.append(
            [*cells, shown_bytes(row.upload_bytes), shown_bytes(row.memory_bytes), drop[0], drop[1] + over]
        )
    show.table(
        f"{task}: depths, mode {mode}",
        ("depth", "frozen", "operations", "ratio", "upload", "memory", "FedDrop keep", "its operations"),
        rows,
        left=2,
    )


@with_settings(without=(*TRAINING_ONLY, "lr"))
def plan(given: dict[str, Any], as_json: Json = False) -> None:
    """From speeds and a deadline: what each device trains, how long it takes, and what that costs."""
    given.pop("options", None)
    settings = api.settings_of({**given, "cohort": 1})
    api.check(settings)
    planned = api.plan_table(settings)
    if as_json:
        print(json.dumps(planned))
        return
    rows = [
        [
            row["name"] or f"level {row['level']}",
            str(row["devices"]),
            show.number(row["speed"], 3),
            str(row["depth"]),
            ", ".join(row["frozen"]) or "none",
            show.number(row["seconds"]),
            "yes" if row["fits"] else "no",
            shown_bytes(row["upload_bytes"]),
            shown_bytes(row["download_bytes"]),
            shown_bytes(row["memory_bytes"]),
        ]
        for row in planned["devices"]
    ]
    columns = (
        "device",
        "count",
        "speed",
        "depth",
        "frozen",
        "seconds",
        "fits",
        "upload",
        "download",
        "memory",
    )
    show.table(
        f"{settings.task}, assigned by {settings.assign}, prices {settings.mode}, "
        f"deadline {_deadline(settings)}",
        columns,
        rows,
    )
    if settings.deadline is None and settings.assign == "deadline":
        print(
            f"depths are fitted to {planned['deadline']:.1f} s, the tightest deadline that leaves nobody out "
            "and lets the fastest device train everything"
        )
    psi = "infinite" if planned["psi"] is None else show.number(planned["psi"], 3)
    fedpmt, fedavg = show.number(planned["round_seconds"]), show.number(planned["fedavg_round_seconds"])
    print(f"a FedPMT round takes {fedpmt} s, a FedAvg round {fedavg} s; psi is {psi}")
    if planned["note"] is not None:
        print(planned["note"])


def _deadline(settings: Settings) -> str:
    return "none" if settings.deadline is None else f"{settings.deadline:g} s"


@with_settings(without=(*TRAINING_ONLY, "devices", "levels", "fleet", "availability", "assign", "deadline"))
def profile(
    given: dict[str, Any],
    name: Annotated[str, typer.Option(help="What to call this machine in the fleet CSV.")] = "this-machine",
    repeat: Annotated[
        int, typer.Option(help="Measurements per depth; the median counts.", min=1, max=1000)
    ] = 5,
    as_json: Json = False,
) -> None:
    """Measure this machine: seconds per sample and peak memory of each depth, as a row for the fleet CSV."""
    given.pop("options", None)
    settings = api.settings_of(given)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks of itself otherwise
    measured = api.profile(settings, name, repeat)
    if as_json:
        print(json.dumps(measured))
        return
    rows = [
        [
            str(row["depth"]),
            ", ".join(row["frozen"]) or "none",
            f"{1e6 * row['seconds_per_sample']:.1f}",
            shown_bytes(row["peak_bytes"]),
        ]
        for row in measured["depths"]
    ]
    show.table(
        f"{settings.task}, batch {settings.batch}, on {name}",
        ("depth", "frozen", "microseconds a sample", "peak memory"),
        rows,
        left=2,
    )
    print(measured["csv"])
