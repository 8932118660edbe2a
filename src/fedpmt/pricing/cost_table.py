"""The complexity table: what each depth costs, and which keep rate of FedDrop costs the same (Table I)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedpmt.data.registry import DATASETS
from fedpmt.models.build import build
from fedpmt.models.nets import net as find_net
from fedpmt.parts import depth
from fedpmt.parts.width import thinned
from fedpmt.pricing.layer_table import LayerTable, layer_table
from fedpmt.pricing.matching import match_keep
from fedpmt.pricing.paper import dropped_operations
from fedpmt.pricing.price import Mode, Price
from fedpmt.pricing.text_table import text_table
from fedpmt.seeds import generator
from fedpmt.types import SettingError, shown_bytes, shown_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part


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

    def __str__(self) -> str:
        thinned = any(row.feddrop_keep is not None for row in self.depths)
        rows = [[*_cells(self, row), *([_feddrop(row)] if thinned else [])] for row in self.depths]
        columns = ["depth", "trains from", "operations", "ratio", "upload", "memory"]
        title = f"{self.task}: one batch of {self.batch} samples by depth, mode {self.mode}"
        depths = text_table(title, [*columns, *(["FedDrop keep"] if thinned else [])], rows, names=(1,))
        return f"{super().__str__()}\n\n{depths}"


def _cells(table: CostTable, row: DepthRow) -> list[str]:
    return [
        str(row.depth),
        table.layers[len(row.frozen)].name,
        shown_count(row.operations),
        f"{row.ratio:.2%}",
        shown_bytes(row.upload_bytes),
        shown_bytes(row.memory_bytes),
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
