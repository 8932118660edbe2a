"""The layers of a model as a table: what each holds, computes and keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from fedpmt.pricing.text_table import text_table
from fedpmt.types import shown_bytes, shown_count

if TYPE_CHECKING:
    from fedpmt.pricing.price import Price


class LayerRow(BaseModel):
    """One layer of the full model; operations are for one batch."""

    model_config = ConfigDict(frozen=True)
    name: str
    kind: str  # conv, linear or other
    units: int  # n_l
    parameters: int
    forward: int
    error: int
    gradient: int
    update: int
    share: float  # of a full training step
    activation_bytes: int  # per sample, kept for the backward pass


class LayerTable(BaseModel):
    """The layers of a model, first to last; printed, one line each, with operations and activations per sample."""

    model_config = ConfigDict(frozen=True)
    task: str  # the net of the paper, or the user's class
    batch: int
    layers: tuple[LayerRow, ...]
    base_bytes: int = 0  # what the owner froze: a device downloads it once
    base_forward: int = 0  # operations before the first layer; frozen weights inside layers count there

    @property
    def parameters(self) -> int:
        """Numbers that are trained, in all layers."""
        return sum(row.parameters for row in self.layers)

    def __str__(self) -> str:
        rows = [
            [
                row.name,
                shown_count(row.parameters),
                shown_count(row.forward / self.batch),
                f"{row.share:.1%}",
                shown_bytes(row.activation_bytes),
            ]
            for row in self.layers
        ]
        title = f"{self.task}: {_counted(len(rows), 'layer')}, {shown_count(self.parameters)} parameters"
        about = (
            "per sample: operations of the forward pass, and activations kept to train the\n"
            f"layer; share: of a full training step with batches of {self.batch}"
        )
        columns = ("layer", "parameters", "operations", "share", "activations")
        return "\n".join([text_table(title, columns, rows), about, *self._base()])

    def _base(self) -> list[str]:
        if not self.base_bytes:
            return []
        forward = shown_count(self.base_forward / self.batch)
        run = f"; {forward} operations before the first layer" if self.base_forward else ""
        return [f"base, sent once: {shown_bytes(self.base_bytes)}{run}"]


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def layer_rows(price: Price) -> tuple[LayerRow, ...]:
    """The rows of a model's table."""
    layers = price.layers()
    whole = sum(layer.operations for layer in layers) + price.base_forward
    return tuple(
        LayerRow(
            name=layer.name,
            kind=layer.kind,
            units=layer.units,
            parameters=layer.parameters,
            forward=round(layer.forward),
            error=round(layer.error),
            gradient=round(layer.gradient),
            update=round(layer.update),
            share=layer.operations / whole,
            activation_bytes=round(layer.activations),
        )
        for layer in layers
    )


def layer_table(task: str, price: Price) -> LayerTable:
    """The table of a model."""
    return LayerTable(
        task=task,
        batch=price.batch,
        layers=layer_rows(price),
        base_bytes=price.structure.base_bytes,
        base_forward=round(price.base_forward),
    )
