"""Looked at before training: whether anybody can reply, layers that nobody trains, budgets that are too small, norms
frozen too early, idle settings, and room on the disk.
"""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedpmt.parts.part import GLOBAL, frozen_prefix, left_out, mask
from fedpmt.pricing.plan import MOST_KINDS, round_up
from fedpmt.records import DEVICES
from fedpmt.resources import ROUNDING
from fedpmt.simulation.bookkeeping import record_device
from fedpmt.simulation.cohort import assign
from fedpmt.simulation.problem import sizes_of
from fedpmt.types import SettingError, shown_bytes, shown_count, shown_joules, shown_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from fedpmt.devices.fleet import Device
    from fedpmt.methods.base import Round
    from fedpmt.simulation.loop import Federation, Progress


LOG = logging.getLogger("fedpmt")
ROUNDS_AHEAD = 50
"""That are looked at where a device's layers change from round to round, before some are said to be nobody's."""


def warn_before_training(federation: Federation, progress: Progress) -> None:
    """Log what a user would want to know before the first round."""
    warn_of_untrained_layers(federation, progress)
    warn_of_exceeded_budget(federation, progress)
    warn_of_idle_precision(federation, progress)
    if progress.rounds == 0:
        warn_of_fresh_norms(federation, progress)


def check_replies(federation: Federation, progress: Progress, *, keep_idle: bool = False) -> None:
    """Refuse a deadline, or a fleet's memory, under which no device can ever reply.

    With `keep_idle`, only where none could with any method: not even with FedPMT's smallest part.
    """
    settings, latest, planner = federation.settings, federation.settings.deadline, federation.planner
    # A method that chooses its devices may ask one of them for less when it was late, as PruneFL does.
    changing = bool(settings.drift) or federation.traces is not None or federation.chooses_cohort
    if changing or (latest is None and federation.fleet.memories is None):
        return
    samples = sizes_of(federation.problem, settings)
    if keep_idle and planner.fits_of(federation.fleet, planner.depths[0], samples).any():
        return
    found = []
    for round_, device in _assignments(federation, progress):
        one = assign(federation, progress, device, replace(round_, cohort=(device.id,)))
        if one.able and (latest is None or one.seconds <= latest * (1 + ROUNDING)):
            return
        found.append(one)
    seconds = [one.seconds for one in found if one.able]
    if not seconds or latest is None:
        least = shown_memory(min(one.usage.memory for one in found))
        raise SettingError(
            f"memory_mib must be larger: no device has the memory for what {settings.method} lets it train, "
            f"{least} or more"
        )
    raise SettingError(
        f"deadline must be >= {round_up(min(seconds))}, the seconds that the fastest device needs with "
        f"{settings.method} (got {latest:g})"
    )


AMOUNTS = {
    "operations": shown_count,
    "time": "{:,.1f} s".format,
    "energy": shown_joules,
    "memory": shown_memory,
}
"""How the amount of a resource is shown; others are bytes."""


def warn_of_exceeded_budget(federation: Federation, progress: Progress) -> None:
    """Log a warning where not even the smallest that a method can give a device is within its budget."""
    limits, exceeding, kinds = federation.settings.limits, [], 0
    if limits is None:
        return
    round_, _ = federation.open(progress, reachable=())
    for device in _strongest_first(federation):
        one = assign(federation, progress, device, replace(round_, cohort=(device.id,)))
        record = record_device(federation, one, "arrived", progress.rounds)
        kinds += 1
        exceeding += [record.used or 0.0] if record.over_budget else []
    if exceeding:
        LOG.warning(
            "%s: budget = '%s' is exceeded on %s: the least that they can be given to train takes up to %s",
            federation.settings.method,
            federation.settings.budget,
            "all devices" if len(exceeding) == kinds else "some devices",
            AMOUNTS.get(limits.resource, shown_bytes)(max(exceeding)),
        )


def warn_of_untrained_layers(federation: Federation, progress: Progress) -> None:
    """Log a warning where the method, as it would be assigned now, leaves some layer to nobody."""
    layers = untrained_layers(federation, progress)
    if layers:
        samples = sizes_of(federation.problem, federation.settings)
        LOG.warning(
            "%s: %s",
            federation.settings.method,
            federation.planner.untrained(layers, federation.fleet, samples),
        )


def warn_of_fresh_norms(federation: Federation, progress: Progress) -> None:
    """Log a warning where devices freeze layers with BatchNorm that has seen no data.

    Frozen layers normalise with the running statistics they were sent. Before training these describe nothing, and
    while the layers before them learn they lag behind: over many norms the errors multiply.
    """
    model = federation.problem.model
    weights = model.initial()
    fresh = [
        layer.name
        for layer in model.structure.layers
        if any(name.endswith("running_var") and bool((weights[name] == 1).all()) for name in layer.buffers)
    ]
    if not fresh:
        return
    round_, _ = federation.open(progress, reachable=())
    for device in _strongest_first(federation):
        part = assign(federation, progress, device, replace(round_, cohort=(device.id,))).part
        trained = mask(model.structure, part) if part.model == GLOBAL else ()
        if any(
            layer.name in fresh and not on for layer, on in zip(model.structure.layers, trained, strict=False)
        ):
            LOG.warning(
                "%s: BatchNorm in '%s' has seen no data, and devices that freeze it normalise with its initial "
                "statistics; use GroupNorm, pretrained weights or a smaller lr (docs/models.md)",
                federation.settings.method,
                fresh[0],
            )
            return


def untrained_layers(federation: Federation, progress: Progress) -> tuple[str, ...]:
    """Name the layers of the global model that no device trains in time and in memory.

    None of them where devices train other nets than the global one: the server then makes its own use of those.
    """
    structure, settings = federation.problem.model.structure, federation.settings
    latest = float("inf") if settings.deadline is None else settings.deadline * (1 + ROUNDING)
    missing = {layer.name for layer in structure.layers}
    for round_, device in _assignments(federation, progress):
        one = assign(federation, progress, device, replace(round_, cohort=(device.id,)))
        part = one.part.resident()
        trained = mask(structure, part)
        if not any(trained):
            return ()
        if one.able and one.seconds <= latest:
            missing -= {layer.name for layer, on in zip(structure.layers, trained, strict=True) if on}
            # What is left out is left out by chance, and comes another time.
            missing -= {structure.layers[place].name for place in left_out(structure, part)}
        if not missing:
            return ()
    return tuple(layer.name for layer in structure.layers if layer.name in missing)


def _assignments(federation: Federation, progress: Progress) -> Iterator[tuple[Round, Device]]:
    """Yield the rounds and devices to look at: this round, and later ones where layers change from round to round."""
    round_, _ = federation.open(progress, reachable=())
    kinds = list(_strongest_first(federation))
    yield from ((round_, device) for device in kinds)
    if federation.method.traits.rotates:
        for ahead in range(1, ROUNDS_AHEAD):
            later, _ = federation.open(replace(progress, rounds=progress.rounds + ahead), reachable=())
            yield later, kinds[0]  # the strongest has the widest choice


def warn_of_idle_precision(federation: Federation, progress: Progress) -> None:
    """Log a warning where a precision is set for frozen layers and no device has any that run apart from the rest."""
    precision = federation.settings.frozen_precision
    if precision != "fp32" and not _runs_frozen_layers(federation, progress):
        LOG.warning(
            "%s: frozen-precision = '%s' does nothing: no device has frozen layers that can be run before the others",
            federation.settings.method,
            precision,
        )


def _runs_frozen_layers(federation: Federation, progress: Progress) -> bool:
    models, levels = federation.problem.models, len(federation.fleet.level_speeds)
    drawn = range(1, levels + 1) if federation.settings.level_draw == "round" else [levels]
    round_, _ = federation.open(progress, reachable=())
    for level in drawn:
        for device in _strongest_first(federation, level):
            part = assign(federation, progress, device, replace(round_, cohort=(device.id,))).part.resident()
            model = models[part.model]
            if model.can_cut(frozen_prefix(model.structure, part)):
                return True
    return False


def _strongest_first(federation: Federation, level: int | None = None) -> Iterable[Device]:
    """Yield one device of each kind; in a fleet of very many kinds, the fastest of each level and depth.

    Where levels are drawn in each round all are on the same one, the highest unless it is given.
    """
    fleet, settings = federation.fleet, federation.settings
    sizes = sizes_of(federation.problem, settings)
    if isinstance(sizes, np.ndarray) and len(fleet) <= MOST_KINDS:
        # What a device can train depends on how many samples it has, too.
        kinds = [fleet.device(int(index)) for index in np.argsort(fleet.speeds, kind="stable")]
    elif isinstance(sizes, int) and len(fleet.profiles) <= MOST_KINDS:
        kinds = [device for device, _ in fleet.profiles]
    else:
        groups = federation.planner.groups(fleet, sizes)
        kinds = [fleet.device(int(members[np.argmax(fleet.speeds[members])])) for members in groups]
    if settings.level_draw == "round":
        # Any device may come to be on it.
        kinds = [fleet.at_level(device.id, level or len(fleet.level_speeds)) for device in kinds]
    return reversed(kinds)


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
