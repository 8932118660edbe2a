"""`fedpmt data`: what is there, and how to get the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedpmt.cli import show
from fedpmt.cli.runs import Json

app = typer.Typer(help="Data sets: list what is there, fetch what is not.", no_args_is_help=True)
Folder = Annotated[
    Path | None, typer.Option(help="Folder of the data files; else FEDPMT_DATA, else the user cache.")
]


@app.command("list")
def list_sets(data_dir: Folder = None, as_json: Json = False) -> None:
    """Say which data sets are there."""
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
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10.")],
    data_dir: Folder = None,
) -> None:
    """Fetch a data set, check it and unpack it."""
    from fedpmt.data import sources

    with show.transfer() as progress:
        where = sources.get(name, data_dir, progress)
    print(where)
