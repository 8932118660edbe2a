"""Room on the disk for what devices keep between rounds."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.parts.part import size
from fedpmt.pricing.cost import FLOAT_BYTES
from fedpmt.pricing.plan import MOST_KINDS
from fedpmt.records import DEVICES
from fedpmt.types import SettingError, shown_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.simulation.loop import Federation


def check_room(federation: Federation, folder: Path) -> None:
    """Refuse more devices than there is room for, in this folder of a run, for what they keep."""
    settings, method = federation.settings, federation.method
    cohort = min(settings.devices, math.ceil(settings.cohort * settings.over_select))
    members = min(settings.devices, settings.rounds * cohort)
    # A device's states of the last checkpoint and of its last round; a third while it takes part in another.
    states = 2 * members + cohort
    most = method.kept_bytes({name: model.structure for name, model in federation.problem.models.items()})
    free = shutil.disk_usage(
        next(path for path in (folder, *folder.absolute().parents) if path.exists())
    ).free
    if states * most <= free:
        return
    # Nobody knows who will take part: the largest states count.
    kept = np.sort(kept_bytes(federation, most))[::-1]
    needed = int(2 * kept[:members].sum() + kept[:cohort].sum())
    # What a resumed run has there already is replaced in time.
    free += sum(path.stat().st_size for path in (folder / DEVICES).rglob("*.safetensors"))
    if needed > free:
        raise SettingError(
            f"devices = {settings.devices} is refused: {settings.method} keeps {method.keeps} on each device, and "
            f"{states} states of up to {shown_bytes(kept[0])}, {shown_bytes(needed)} in all, do not fit into the "
            f"{shown_bytes(free)} that are free"
        )


def kept_bytes(federation: Federation, most: int) -> np.ndarray:
    """What each device keeps: the most that any does, or the net that fits its kind where there are not too many."""
    kinds = federation.fleet.profiles
    if not federation.method.fitted_net or len(kinds) > MOST_KINDS:
        return np.full(len(federation.fleet), most)
    progress = federation.start()
    parts = [federation.ask(progress, device, federation.round(progress)).part for device, _ in kinds]
    shapes = {name: model.structure.shapes for name, model in federation.problem.models.items()}
    sizes = [
        FLOAT_BYTES * sum(size(selection, shapes[part.model][name]) for name, selection in part.kept.items())
        for part in parts
    ]
    return np.repeat(sizes, [count for _, count in kinds])
