"""`fedpmt data` and `fedpmt model`: which data sets and pretrained weights are there, and how to get the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpmt.cli import show
from fedpmt.cli.help_text import Command, Group
from fedpmt.cli.runs import Json
from fedpmt.data.registry import DATASETS
from fedpmt.data.sources import Status
from fedpmt.models.weights import WEIGHTS

PLAIN: dict[str, Any] = {"cls": Group, "rich_markup_mode": None, "no_args_is_help": True}
app = typer.Typer(help="List the data sets, and fetch those that have files.", **PLAIN)
models = typer.Typer(help="List pretrained models, and fetch their weights.", **PLAIN)
FETCHED = ", ".join(name for name, dataset in DATASETS.items() if dataset.files)
Folder = Annotated[
    Path | None, typer.Option(help="Folder of the data files; else FEDPMT_DATA, else the user cache.")
]


@app.command("list", cls=Command)
def list_sets(data_dir: Folder = None, as_json: Json = False) -> None:
    """List the data sets and say which are there.

    Examples:
      fedpmt data list
      fedpmt data list --data-dir /data --json
    """
    from fedpmt.data.sources import status

    found = status(data_dir)
    if as_json:
        print(json.dumps([one._asdict() for one in found], default=str))
        return
    rows = [[one.name, one.state, _where(one, "fedpmt data get")] for one in found]
    show.table("Data sets", ("name", "state", "where"), rows, left=3)


@app.command(cls=Command)
def get(
    name: Annotated[str, typer.Argument(help=f"One of {FETCHED}.")],
    data_dir: Folder = None,
) -> None:
    """Fetch a data set, check it and unpack it.

    Examples:
      fedpmt data get mnist
      fedpmt run --data mnist
    """
    from fedpmt.data import sources

    with show.transfer() as progress:
        where = sources.get(name, data_dir, progress)
    print(where)


@models.command("list", cls=Command)
def list_models(data_dir: Folder = None, as_json: Json = False) -> None:
    """List the pretrained models and say which are there.

    Examples:
      fedpmt model list
    """
    from fedpmt.models.weights import status

    found = status(data_dir)
    if as_json:
        print(json.dumps([one._asdict() for one in found]))
        return
    rows = [[one.name, one.state, WEIGHTS[one.name].about, _where(one, "fedpmt model get")] for one in found]
    show.table("Pretrained models", ("name", "state", "what", "where"), rows, left=4)


def _where(one: Status, command: str) -> str:
    """Where it is, or how to get it."""
    return f"{command} {one.name}" if one.state in ("absent", "damaged") else one.where


@models.command("get", cls=Command)
def get_model(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(WEIGHTS)}.")], data_dir: Folder = None
) -> None:
    """Fetch the weights of a pretrained model and check them; nothing of them is ever run as code.

    Examples:
      fedpmt model get mobilenetv2
      fedpmt run --task mobilenetv2-cifar10
    """
    from fedpmt.models import weights

    with show.transfer() as progress:
        where = weights.get(name, data_dir, progress)
    print(where)
