"""`fedpmt model`: pretrained weights, which are there and how to get them."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedpmt.cli import show
from fedpmt.cli.data import Folder
from fedpmt.cli.runs import Json
from fedpmt.models.weights import WEIGHTS

app = typer.Typer(help="List pretrained models, and fetch their weights.", no_args_is_help=True)


@app.command("list")
def list_models(data_dir: Folder = None, as_json: Json = False) -> None:
    """List the pretrained models and say which are there."""
    from fedpmt.models.weights import status

    found = status(data_dir)
    if as_json:
        print(json.dumps([one._asdict() for one in found]))
        return
    rows = [[one.name, one.state, one.where, WEIGHTS[one.name].about] for one in found]
    show.table("Pretrained models", ("name", "state", "where", "what"), rows, left=4)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(WEIGHTS)}.")], data_dir: Folder = None
) -> None:
    """Fetch the weights of a pretrained model and check them; nothing of them is ever run as code."""
    from fedpmt.models import weights

    with show.transfer() as progress:
        where = weights.get(name, data_dir, progress)
    print(where)
