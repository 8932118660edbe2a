"""Tables of prices: what each layer holds and computes, what each depth costs, and FedDrop at that price (Table I)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedpmt.data.registry import DATASETS
from fedpmt.models.build import build
from fedpmt.models.nets import net as find_net
from fedpmt.parts import depth
from fedpmt.parts.width import thinned
from fedpmt.pricing.matching import match_keep
from fedpmt.pricing.paper import dropped_operations
from fedpmt.pricing.price import Mode, Price
from fedpmt.pricing.text_table import WIDTH, text_table, wrap
from fedpmt.seeds import generator
from fedpmt.types import SettingError, shown_bytes, shown_count, shown_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part


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
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """Return the table as text of at most this many columns."""
        rows = [
            [
                row.name,
                shown_count(row.parameters),
                shown_count(row.forward / self.batch),
                f"{row.share:.1%}",
                shown_memory(row.activation_bytes),
            ]
            for row in self.layers
        ]
        title = f"{self.task}: {_counted(len(rows), 'layer')}, {shown_count(self.parameters)} parameters"
        about = (
            "per sample: operations of the forward pass, and activations kept to train the "
            f"layer; share: of a full training step with batches of {self.batch}"
        )
        columns = ("layer", "parameters", "operations", "share", "activations")
        after = [line for text in (about, *self._base()) for line in wrap(text, width)]
        return "\n".join([text_table(title, columns, rows, width=width), *after])

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


class DepthRow(BaseModel):
    """One depth i: what it trains, what that costs, and FedDrop at the same price."""

    model_config = ConfigDict(frozen=True)
    depth: int  # i, 1 is the smallest
    frozen: tuple[str, ...]  # the layers that are run forward only
    operations: int  # one batch
    ratio: float  # of the full model's
    upload_bytes: int
    overhead_bytes: int
    memory_bytes: int
    feddrop_keep: float | None  # None where the model has no hidden fully connected layer to thin
    feddrop_operations: int | None
    feddrop_within_budget: bool | None  # False where even the smallest rate costs more than the depth


class CostTable(LayerTable):
    """What each depth of a model costs for one batch; `model_dump(mode="json")` is its JSON form."""

    mode: Mode
    depths: tuple[DepthRow, ...]

    def text(self, width: int = WIDTH) -> str:
        """Return both tables, of layers and of depths, as text of at most this many columns."""
        thinned = any(row.feddrop_keep is not None for row in self.depths)
        rows = [[*_cells(self, row), *([_feddrop(row)] if thinned else [])] for row in self.depths]
        columns = ["depth", "trains from", "operations", "ratio", "upload", "memory"]
        title = f"{self.task}: one batch of {self.batch} samples by depth, mode {self.mode}"
        columns += ["FedDrop keep"] if thinned else []
        depths = text_table(title, columns, rows, names=(1,), width=width)
        return f"{super().text(width)}\n\n{depths}"


def _cells(table: CostTable, row: DepthRow) -> list[str]:
    return [
        str(row.depth),
        table.layers[len(row.frozen)].name,
        shown_count(row.operations),
        f"{row.ratio:.1%}",
        shown_bytes(row.upload_bytes),
        shown_memory(row.memory_bytes),
    ]


def _feddrop(row: DepthRow) -> str:
    if row.feddrop_keep is None:
        return "-"
    return f"{row.feddrop_keep:.2f}{'' if row.feddrop_within_budget else ' (over)'}"


def cost_table(
    task: str,
    mode: str = "exact",
    depths: int | None = None,
    batch: int | None = None,
    *,
    samples: int | None = None,
    cached: bool = False,
    held: int = 0,
) -> CostTable:
    """The table of one of the paper's nets, with the paper's batch size and |I| where none is given."""
    net = find_net(task)
    model = build(net, generator(0, "table"))
    price = Price(
        model,
        mode=_mode(mode),
        batch=net.batch if batch is None else batch,
        samples=DATASETS[net.data].defaults.samples if samples is None else samples,
        cached=cached,
        held=held,
        example=np.zeros((2, *net.input_shape), dtype=np.float32),
        net=net,
    )
    return model_table(task, price, net.depths[0] if depths is None else depths)


def dropped(structure: Structure, keep: float) -> Part | None:
    """A sub-model as FedDrop draws it: some neurons of each hidden fully connected layer, all filters.

    None where there is nothing to thin.
    """
    axes = structure.axes
    if axes is None or not any(group.kind == "linear" for group in axes.groups.values()):
        return None
    return thinned(structure, axes, keep, ("linear",))


def dropped_price(price: Price) -> Callable[[float], float] | None:
    """FedDrop's operations as a function of its keep rate, as the mode counts them."""
    net = price.net
    if price.mode == "paper" and net is not None:
        return lambda keep: dropped_operations(net, keep, price.batch)
    if dropped(price.structure, 1.0) is None:
        return None
    return lambda keep: price(cast("Part", dropped(price.structure, keep))).operations


def _mode(mode: str) -> Mode:
    if mode not in get_args(Mode):
        raise SettingError.unknown("mode", mode, get_args(Mode))
    return cast("Mode", mode)


def model_table(task: str, price: Price, count: int | None = None) -> CostTable:
    """The table of any model; one depth per layer where no number is given."""
    structure = price.structure
    count = len(structure.layers) if count is None else count
    operations_at = dropped_price(price)
    depths = []
    for number, part in enumerate(depth.suffixes(structure, count), start=1):
        cost = price(part)
        keep, fits = match_keep(operations_at, cost.operations) if operations_at else (None, None)
        depths.append(
            DepthRow(
                depth=number,
                frozen=tuple(layer.name for layer in structure.layers[: count - number]),
                operations=int(cost.operations),
                ratio=cost.operations / price.full.operations,
                upload_bytes=structure.nbytes(list(part.trained)),
                overhead_bytes=part.overhead_bytes,
                memory_bytes=cost.memory_bytes,
                feddrop_keep=keep,
                feddrop_operations=int(operations_at(keep)) if operations_at and keep is not None else None,
                feddrop_within_budget=fits,
            )
        )
    layers = layer_table(task, price)
    return CostTable(**dict(layers), mode=price.mode, depths=tuple(depths))
