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
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.pricing.matching import match_keep
from fedpmt.pricing.paper import dropped_operations
from fedpmt.pricing.price import Mode, Price
from fedpmt.seeds import generator
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays


class LayerRow(BaseModel):
    """One layer of the full model, for one batch."""

    model_config = ConfigDict(frozen=True)
    name: str
    kind: str  # conv, linear or other
    units: int  # n_l
    parameters: int
    forward: int
    error: int
    gradient: int
    update: int


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


class CostTable(BaseModel):
    """The table of one net; `model_dump(mode="json")` is its JSON form."""

    model_config = ConfigDict(frozen=True)
    task: str
    mode: Mode
    layers: tuple[LayerRow, ...]
    depths: tuple[DepthRow, ...]


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
    return _table(task, price, net.depths[0] if depths is None else depths)


def model_table(
    model: LayeredModel,
    example: Arrays,
    *,
    batch: int,
    samples: int,
    depths: int | None = None,
    cached: bool = False,
    held: int = 0,
    task: str = "model",
) -> CostTable:
    """The table of any model, measured; one depth per layer where `depths` is not given."""
    price = Price(
        model, mode="exact", batch=batch, samples=samples, cached=cached, held=held, example=example
    )
    return _table(task, price, len(model.structure.layers) if depths is None else depths)


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


def _table(task: str, price: Price, count: int) -> CostTable:
    structure = price.structure
    rows = []
    for layer in price.layers():
        rows.append(
            LayerRow(
                name=layer.name,
                kind=layer.kind,
                units=layer.units,
                parameters=layer.parameters,
                forward=round(layer.forward),
                error=round(layer.error),
                gradient=round(layer.gradient),
                update=round(layer.update),
            )
        )
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
                upload_bytes=FLOAT_BYTES * structure.size(list(part.trained)),
                overhead_bytes=part.overhead_bytes,
                memory_bytes=cost.memory_bytes,
                feddrop_keep=keep,
                feddrop_operations=int(operations_at(keep)) if operations_at and keep is not None else None,
                feddrop_within_budget=fits,
            )
        )
    return CostTable(task=task, mode=price.mode, layers=tuple(rows), depths=tuple(depths))
