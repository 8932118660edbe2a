"""`fedpmt cost`, `fedpmt plan` and `fedpmt profile`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpmt import prices
from fedpmt.api import options_for
from fedpmt.cli import show
from fedpmt.cli.flags import with_settings
from fedpmt.cli.runs import Json
from fedpmt.devices.rows import add_device, check_new_name, read_devices
from fedpmt.pricing.text_table import text_table, wrap
from fedpmt.types import SettingError, shown_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

InputShape = Annotated[
    str | None,
    typer.Option(
        help="With --model: the shape of one input of real numbers, instead of --data (default: none).",
        metavar="3,32,32",
        rich_help_panel="What is learned",
    ),
]
Draw = Annotated[
    Path | None,
    typer.Option(
        help="Also picture what each depth trains, as SVG, PNG or PDF (default: none).", metavar="FILE"
    ),
]


TRAINING_ONLY = (
    "method",
    "weights",
    "partition",
    "partition_seed",
    "public",
    "validation",
    "score_on",
    "server_cap",
    "server_speed",
    "splitting",
    "speeds",
    "speed_weight",
    "drift",
    "availability_trace",
    "speed_trace",
    "dp_clip",
    "dp_noise",
    "dp_delta",
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


FLEET_ONLY = ("devices", "levels", "fleet", "availability", "assign", "deadline", "plan", "budget", "options")
"""Settings that no price of one device depends on."""


@with_settings(without=(*TRAINING_ONLY, *FLEET_ONLY, "lr", "full_seconds"))
def cost(
    given: dict[str, Any], input_shape: InputShape = None, draw: Draw = None, as_json: Json = False
) -> None:
    """Price every depth of a net for one batch, with FedDrop matched to it. Nothing is trained.

    Examples:
      fedpmt cost --task cnn-cifar10
      fedpmt cost --task cnn-cifar10 --mode paper --draw net.svg
      fedpmt cost --model my_module:make_net --input-shape 3,32,32
    """
    given.pop("options", None)
    table = prices.cost(**given, example=_example(input_shape))
    if draw is not None:
        from fedpmt.report.draw import draw_net

        try:
            draw_net(table.model_dump(mode="json"), draw)
        except OSError as error:
            raise SettingError(f"draw = '{draw}' cannot be written: {error.strerror}") from error
        show.say(f"drawn: {draw}")
    show.out(table.model_dump_json() if as_json else table.text(show.width()))


@with_settings(without=(*TRAINING_ONLY, "lr"))
def plan(
    given: dict[str, Any],
    input_shape: InputShape = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write a page in which the plan can be changed (default: none).", metavar="PAGE.html"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """From speeds and a deadline: what each device trains, how long it takes, and what that costs.

    Examples:
      fedpmt plan --deadline 30
      fedpmt plan --fleet devices.csv --deadline 30 --task cnn-cifar10
      fedpmt plan --fleet devices.csv --out plan.html
    """
    given["options"] = options_for("fedpmt", given.get("options", {}))
    table = prices.plan(**given, example=_example(input_shape), out=out)
    if out is not None:
        show.say(f"written: {out}")
    show.out(table.model_dump_json() if as_json else table.text(show.width()))


@with_settings(without=(*TRAINING_ONLY, *FLEET_ONLY))
def profile(
    given: dict[str, Any],
    input_shape: InputShape = None,
    name: Annotated[str, typer.Option(help="What to call this machine in the fleet CSV.")] = "this-machine",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Add the row to this fleet CSV, which fedpmt plan --fleet reads (default: print it).",
            metavar="FILE",
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(help="Measurements per depth; the median counts.", min=1, max=1000)
    ] = 5,
    as_json: Json = False,
) -> None:
    """Measure this machine: seconds per sample and peak memory of each depth, as a row for the fleet CSV.

    Examples:
      fedpmt profile
      fedpmt profile --task cnn-cifar10 --name raspberry --out devices.csv
    """
    given.pop("options", None)
    if out is not None:
        check_new_name(out, name)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks of itself otherwise
    measured = prices.profile(**given, example=_example(input_shape), name=name, repeat=repeat)
    if out is not None:
        (device,) = read_devices(f"{measured['csv']}\n")
        add_device(out, device)
        show.say(f"row added: {out}")
    show.out(json.dumps(measured) if as_json else _profiled(measured, show.width()))


def _profiled(measured: Mapping[str, Any], width: int) -> str:
    """A measurement as a table, and the row for a fleet's CSV."""
    rows = [
        [
            str(row["depth"]),
            row["trains_from"],
            f"{1e6 * row['seconds_per_sample']:,.1f}",
            shown_memory(row["peak_bytes"]),
        ]
        for row in measured["depths"]
    ]
    title = f"{measured['task']}, batch {measured['batch']}, on {measured['name']}"
    columns = ("depth", "trains from", "microseconds a sample", "peak memory")
    said = [text_table(title, columns, rows, names=(1,), width=width)]
    if measured["frozen_seconds_per_sample"]:
        said += _precisions(measured["frozen_seconds_per_sample"])
    said.append(
        f"Row for the fleet CSV: speed 1 means {measured['scale']}; memory is all that this machine has."
    )
    lines = [line for text in said[1:] for line in wrap(text, width)]
    return "\n".join([said[0], *lines, measured["csv"]])


def _precisions(seconds: Mapping[str, float]) -> list[str]:
    """What an operation of the frozen layers takes here in fewer bits, as the setting that prices it."""
    whole, *others = seconds
    shown = ", ".join(f"{name} {1e6 * one:.1f}" for name, one in seconds.items())
    factors = ",".join(f"{name}={seconds[name] / seconds[whole]:.2f}" for name in others)
    return [
        f"Frozen layers of depth 1, microseconds a sample: {shown}.",
        f"As a setting: --precision-seconds {factors} (int8 is simulated).",
    ]


def _example(shape: str | None) -> Any:
    """Inputs of this shape, as in 3,32,32; None where none is given."""
    if shape is None:
        return None
    sizes = shape.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise SettingError(f"input-shape must be whole numbers, as in 3,32,32 (got '{shape}')")
    from fedpmt.own import make_example

    return make_example([int(size) for size in sizes])
