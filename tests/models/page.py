"""The table of docs/models.md: what is found of each published model. As a program, write it into the document.

python tests/models/page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fedpmt.models.layered import layered
from fedpmt.parts.depth import suffixes
from fedpmt.pricing.price import Price
from fedpmt.types import shown_count
from models.zoo import ZOO

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"


def shorten(names: list[str]) -> str:
    """The first and the last layers of a long list."""
    shown = names if len(names) <= 5 else [*names[:2], "…", *names[-2:]]
    return ", ".join(name if name == "…" else f"`{name}`" for name in shown)


def row(name: str) -> list[str]:
    """One model: its layers, and what it costs to train only the last of them."""
    torch.manual_seed(0)
    published = ZOO[name]
    module, inputs = published.make(), published.inputs()
    model = layered(module, example=inputs)
    price = Price(model, mode="exact", batch=8, samples=48, cached=False, example=inputs)
    depths = suffixes(model.structure, len(model.structure.layers))
    half = depths[(len(depths) - 1) // 2]
    trained = model.structure.size(model.structure.parameters)
    return [
        name,
        shown_count(trained),
        str(len(depths)),
        shorten([layer.name for layer in model.structure.layers]),
        f"{price(depths[0]).share:.2f}",
        f"{price(half).share:.2f}",
    ]


def table() -> str:
    """All models, as Markdown."""
    head = ["model", "trained parameters", "layers", "their names", "last layer alone", "last half"]
    rows = [head, ["---"] * len(head), *(row(name) for name in ZOO)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def fill(text: str) -> str:
    """The document with a new table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
