"""Room on the disk for what devices keep between rounds."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.pricing.plan import MOST_KINDS
from fedpmt.records import DEVICES
from fedpmt.simulation.cohort import assign
from fedpmt.types import SettingError, shown_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.simulation.loop import Federation


def check_room(federation: Federation, folder: Path) -> None:
    """Refuse more devices than there is room for, in this folder of a run, for what they keep."""
    settings, traits = federation.settings, federation.method.traits
    if not federation.keeps_state:
        return
    cohort = min(settings.devices, math.ceil(settings.cohort * settings.over_select))
    members = min(settings.devices, settings.rounds * cohort)
    # A device's states of the last checkpoint and of its last round; a third while it takes part in another.
    states = 2 * members + cohort
    free = shutil.disk_usage(
        next(path for path in (folder, *folder.absolute().parents) if path.exists())
    ).free
    # Nobody knows who will take part: the largest states count.
    kept = np.sort(kept_bytes(federation))[::-1]
    needed = int(2 * kept[:members].sum() + kept[:cohort].sum())
    # What a resumed run has there already is replaced in time.
    free += sum(path.stat().st_size for path in (folder / DEVICES).rglob("*.safetensors"))
    if needed > free:
        raise SettingError(
            f"devices = {settings.devices}: {settings.method} keeps {traits.keeps} on each device, and {states} "
            f"states of up to {shown_bytes(kept[0])}, {shown_bytes(needed)} in all, do not fit into the "
            f"{shown_bytes(free)} that are free"
        )


def kept_bytes(federation: Federation) -> np.ndarray:
    """What each device keeps: found for each kind of them, or for the fastest where there are too many kinds."""
    kinds = federation.fleet.profiles
    progress = federation.start()
    round_, _ = federation.open(progress, reachable=())
    if len(kinds) > MOST_KINDS:
        kinds = [(federation.fleet.device(int(np.argmax(federation.fleet.speeds))), len(federation.fleet))]
    sizes = [assign(federation, progress, device, round_).part.extra.kept_bytes for device, _ in kinds]
    return np.repeat(sizes, [count for _, count in kinds])
