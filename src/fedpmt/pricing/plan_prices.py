"""What a plan is computed from, as plain numbers: enough to compute it again for other deadlines, budgets, precisions.

The planner page (`fedpmt plan --out plan.html`) holds them, and its script does with them what `Planning` does here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fedpmt.parts.depth import full
from fedpmt.parts.part import mask
from fedpmt.pricing.plan import MOST_KINDS
from fedpmt.resources import ROUNDING
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.parts.part import Part
    from fedpmt.pricing.plan import Planner


def plan_prices(
    task: str, planners: Mapping[tuple[str, str], Planner], fleet: Fleet, samples: int
) -> dict[str, Any]:
    """Collect the prices of all depths on all kinds of devices.

    Args:
        task: What the model is called.
        planners: By the precision of trained and of frozen layers, that of the settings first.
        fleet: The devices.
        samples: How many each has.

    Raises:
        SettingError: The fleet has too many kinds of devices for a page.
    """
    planner = next(iter(planners.values()))
    kinds = planner.kinds(fleet)
    if len(kinds) > MOST_KINDS:
        raise SettingError(
            f"out needs a fleet of at most {MOST_KINDS:,} kinds of devices (got {len(kinds):,}); "
            "describe them by --levels, or by rows with a count"
        )
    times = planner.times
    return {
        "task": task,
        "mode": planner.price.mode,
        "assign": planner.assign,
        "samples": samples,
        "full_seconds": times.full_seconds,
        "epochs": times.epochs,
        "all_steps": times.epochs * -(-samples // planner.price.batch),
        "rounding": ROUNDING,
        "base_bytes": planner.structure.base_bytes,
        "layers": [layer.name for layer in planner.structure.layers],
        "prices": [
            {
                "precision": trained,
                "frozen_precision": frozen,
                "depths": [_depth(one, part, samples) for part in one.depths],
                "full": _depth(one, full(one.structure), samples),  # as FedAvg trains it
            }
            for (trained, frozen), one in planners.items()
        ],
        "kinds": [_kind(device, count) for device, count in kinds],
    }


def _depth(planner: Planner, part: Part, samples: int) -> dict[str, Any]:
    """What one depth takes; operations and load are `epochs * each + passes * prefix` (see `StepCost`)."""
    price, times = planner.price, planner.times
    cost = price(part, samples)
    down, up = planner.traffic(part)
    operations = [price.round_operations(cost, samples=samples, epochs=epochs) for epochs in (1, 2)]
    load = [price.load(cost, samples=samples, epochs=epochs) for epochs in (1, 2)]
    return {
        "trained": [bool(on) for on in mask(planner.structure, part)],
        "operations": _linear(*operations),
        "seconds": [times.full_seconds * one for one in _linear(*load)],  # at speed 1
        "whole": cost.whole,  # the prefix runs on all samples, however few steps are taken
        "memory_bytes": cost.memory_bytes,
        "download_bytes": down,
        "upload_bytes": up,
        "ratio": planner.price(part).share,
    }


def _linear(one: float, two: float) -> list[float]:
    """Split what one and two epochs take into what each epoch takes and what is done once."""
    each = two - one
    # Where nothing is done once, a difference of large numbers is not quite nothing.
    once = one - each
    return [each, once] if once > ROUNDING * one else [one, 0.0]


def _kind(device: Device, count: int) -> dict[str, Any]:
    return {
        "name": device.name,
        "level": device.level,
        "devices": count,
        "speed": device.speed,
        "uplink": _finite(device.uplink),
        "downlink": _finite(device.downlink),
        "memory": _finite(device.memory),
        "watts": None if device.watts is None else [device.watts.computing, device.watts.sending],
    }


def _finite(value: float) -> float | None:
    """Infinity, which JSON does not have, is None."""
    return value if math.isfinite(value) else None
