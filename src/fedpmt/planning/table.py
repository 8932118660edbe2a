"""A plan as a table: what each kind of device trains, what it takes, and ψ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fedpmt.submodel.depth import full, mask
from fedpmt.theory.splitting import splitting_constant

if TYPE_CHECKING:
    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.planning.assign import Planner

MOST_ROWS = 500


def plan_table(planner: Planner, fleet: Fleet, samples: int, deadline: float | None) -> dict[str, Any]:
    """One row per kind of device, slowest first; of a fleet with very many kinds, evenly spaced ones."""
    kinds = fleet.profiles
    if len(kinds) > MOST_ROWS:
        kinds = tuple(kinds[position * len(kinds) // MOST_ROWS] for position in range(MOST_ROWS))
    rows = [_row(planner, device, count, samples) for device, count in kinds]
    counts = [0] * len(planner.widths)
    for row in rows:
        counts[row["width"] - 1] += row["devices"]
    psi = splitting_constant([count / sum(counts) for count in counts])
    everything = full(planner.structure)
    limit = math.inf if deadline is None else deadline
    return {
        "assign": planner.assign,
        "mode": planner.price.mode,
        "deadline": planner.deadline if planner.assign == "deadline" else deadline,
        "devices": rows,
        "psi": psi if math.isfinite(psi) else None,
        "round_seconds": min(limit, max(row["seconds"] for row in rows)),
        "fedavg_round_seconds": min(
            limit, max(planner.seconds(device, everything, samples) for device, _ in kinds)
        ),
    }


def _row(planner: Planner, device: Device, count: int, samples: int) -> dict[str, Any]:
    part = planner.width(device, samples)
    down, up = planner.traffic(part)
    trained = mask(planner.structure, part)
    return {
        "name": device.name,
        "level": device.level,
        "devices": count,
        "speed": device.speed,
        "width": planner.widths.index(part) + 1,
        "frozen": [layer.name for layer, on in zip(planner.structure.layers, trained, strict=True) if not on],
        "seconds": planner.seconds(device, part, samples),
        "fits": planner.fits(device, part, samples),
        "upload_bytes": up,
        "download_bytes": down,
        "memory_bytes": planner.price(part).memory_bytes,
        "ratio": planner.price(part).share,
    }
