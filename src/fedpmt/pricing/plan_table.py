"""A plan as a table: what each kind of device trains, what it takes, and ψ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.parts.depth import full
from fedpmt.parts.part import mask
from fedpmt.pricing.splitting import splitting_constant

if TYPE_CHECKING:
    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.pricing.plan import Planner

MOST_ROWS = 100


def plan_table(planner: Planner, fleet: Fleet, samples: int, deadline: float | None) -> dict[str, Any]:
    """One row per kind of device, slowest first; in a fleet of very many kinds, one per level and depth."""
    chosen = planner.depths_of(fleet, samples)
    kinds = fleet.profiles if len(fleet.profiles) <= MOST_ROWS else _groups(planner, fleet, samples)
    rows = [_row(planner, device, count, samples) for device, count in kinds]
    shares = np.bincount(chosen - 1, minlength=len(planner.depths)) / len(fleet)
    psi = splitting_constant(shares.tolist())
    slowest = float(planner.seconds_of(fleet, full(planner.structure), samples).max())
    limit = math.inf if deadline is None else deadline
    uncovered = planner.uncovered(fleet, samples)
    return {
        "assign": planner.assign,
        "mode": planner.price.mode,
        "deadline": planner.deadline if planner.assign == "deadline" else deadline,
        "devices": rows,
        "psi": psi if math.isfinite(psi) else None,
        "uncovered": list(uncovered),
        "note": planner.untrained(uncovered, fleet, samples) if uncovered else None,
        "round_seconds": min(limit, max(row["seconds"] for row in rows)),
        "fedavg_round_seconds": min(limit, slowest),
    }


def _groups(planner: Planner, fleet: Fleet, samples: int) -> list[tuple[Device, int]]:
    """Devices of one level and depth together, each group shown by its slowest."""
    groups = []
    for members in planner.groups(fleet, samples):
        slowest = fleet.device(int(members[np.argmin(fleet.speeds[members])]))
        groups.append((replace(slowest, name=f"level {slowest.level}, the slowest of"), len(members)))
    return groups


def _row(planner: Planner, device: Device, count: int, samples: int) -> dict[str, Any]:
    part = planner.depth(device, samples)
    down, up = planner.traffic(part)
    trained = mask(planner.structure, part)
    return {
        "name": device.name,
        "level": device.level,
        "devices": count,
        "speed": device.speed,
        "depth": planner.depths.index(part) + 1,
        "frozen": [layer.name for layer, on in zip(planner.structure.layers, trained, strict=True) if not on],
        "seconds": planner.seconds(device, part, samples),
        "fits": planner.fits(device, part, samples),
        "upload_bytes": up,
        "download_bytes": down,
        "memory_bytes": planner.price(part).memory_bytes,
        "ratio": planner.price(part).share,
    }
