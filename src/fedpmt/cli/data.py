"""`fedpmt data` and `fedpmt model`: which data sets and pretrained weights are there, and how to get the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedpmt.cli import show
from fedpmt.cli.runs import Json
from fedpmt.data.registry import DATASETS
from fedpmt.models.weights import WEIGHTS

app = typer.Typer(help="List the data sets, and fetch those that have files.", no_args_is_help=True)
models = typer.Typer(help="List pretrained models, and fetch their weights.", no_args_is_help=True)
FETCHED = ", ".join(name for name, dataset in DATASETS.items() if dataset.files)
Folder = Annotated[
    Path | None, typer.Option(help="Folder of the data files; else FEDPMT_DATA, else the user cache.")
]


@app.command("list")
def list_sets(data_dir: Folder = None, as_json: Json = False) -> None:
    """List the data sets and say which are there."""
    from fedpmt.data.sources import status

    found = status(data_dir)
    if as_json:
        print(json.dumps([one._asdict() for one in found], default=str))
        return
    show.table(
        "Data sets", ("name", "state", "where"), [[str(cell) for cell in one] for one in found], left=3
    )


@app.command()
def get(
    name: Annotated[str, typer.Argument(help=f"One of {FETCHED}.")],
    data_dir: Folder = None,
) -> None:
    """Fetch a data set, check it and unpack it."""
    from fedpmt.data import sources

    with show.transfer() as progress:
        where = sources.get(name, data_dir, progress)
    print(where)


@models.command("list")
def list_models(data_dir: Folder = None, as_json: Json = False) -> None:
    """List the pretrained models and say which are there."""
    from fedpmt.models.weights import status

    found = status(data_dir)
    if as_json:
        print(json.dumps([one._asdict() for one in found]))
        return
    rows = [[one.name, one.state, one.where, WEIGHTS[one.name].about] for one in found]
    show.table("Pretrained models", ("name", "state", "where", "what"), rows, left=4)


@models.command("get")
def get_model(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(WEIGHTS)}.")], data_dir: Folder = None
) -> None:
    """Fetch the weights of a pretrained model and check them; nothing of them is ever run as code."""
    from fedpmt.models import weights

    with show.transfer() as progress:
        where = weights.get(name, data_dir, progress)
    print(where)
