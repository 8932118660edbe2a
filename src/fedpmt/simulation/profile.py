"""Measure this machine: how long each depth really takes, and how much memory it really needs."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from fedpmt.devices.fleet import MIB, speed_scale
from fedpmt.devices.tables import write_table
from fedpmt.models.layered import PREFIX_BATCH
from fedpmt.models.precision import Prefix
from fedpmt.models.structure import FrozenPrecision
from fedpmt.parts.depth import suffixes
from fedpmt.parts.part import GLOBAL, frozen_prefix, mask
from fedpmt.seeds import Seeds
from fedpmt.training.local import Job, LocalWork, Site, local_settings
from fedpmt.training.loop import train
from fedpmt.training.messages import Task
from fedpmt.types import MODEL, Examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.layered import LayeredModel
    from fedpmt.parts.part import Part
    from fedpmt.settings import Settings
    from fedpmt.simulation.problem import Problem


def profile(settings: Settings, problem: Problem, data: Examples, name: str, repeat: int) -> dict[str, Any]:
    """Seconds per sample and peak memory of each depth, on one thread as devices train; and a row for the fleet CSV.

    The row's speed is relative to a device that trains one epoch of the full model in `full_seconds`; the row says so,
    and of which model and how many samples, in its column `scale`.
    """
    local = local_settings(settings)
    site = Site({GLOBAL: problem.model}, problem.objective, local)
    weights = problem.model.initial()
    parts = suffixes(problem.model.structure, settings.depths or problem.depths)

    def once(part: Part) -> None:
        job: Job[None] = Job(site, Task((part,), {MODEL: weights}), part, None, data, Seeds(0, 0))
        train(LocalWork(), job)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        once(parts[-1])  # the first call sets up libraries and is not like the others
        times: dict[int, list[float]] = {number: [] for number in range(len(parts))}
        for _ in range(repeat):
            for number, part in enumerate(parts):
                begun = time.perf_counter()
                once(part)
                times[number].append(time.perf_counter() - begun)
        received = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        received += problem.model.structure.base_bytes
        peaks = [received + peak_bytes(partial(once, part)) for part in parts]
        batch = PREFIX_BATCH if settings.keeps_prefix else settings.batch
        frozen = frozen_seconds(problem.model, data, parts[0], batch, repeat)
    finally:
        torch.set_num_threads(threads)
    layers = problem.model.structure.layers
    rows = [
        {
            "depth": number + 1,
            "frozen": [
                layer.name
                for layer, on in zip(layers, mask(problem.model.structure, part), strict=True)
                if not on
            ],
            "trains_from": layers[frozen_prefix(problem.model.structure, part)].name,
            "seconds_per_sample": statistics.median(times[number]) / (len(data) * settings.epochs),
            "peak_bytes": peaks[number],
        }
        for number, part in enumerate(parts)
    ]
    speed = settings.full_seconds / (rows[-1]["seconds_per_sample"] * settings.samples)  # type: ignore[operator]
    row = {
        "name": name,
        "speed": f"{speed:.6g}",
        "memory_mib": _memory_bytes() // MIB,
        "scale": speed_scale(settings),
    }
    return {
        "name": name,
        "batch": settings.batch,
        "speed": speed,
        "memory_mib": row["memory_mib"],
        "scale": row["scale"],
        "depths": rows,
        "frozen_seconds_per_sample": frozen,
        "csv": write_table(list(row), [list(row.values())]).rstrip("\n"),
    }


def frozen_seconds(
    model: LayeredModel, data: Examples, part: Part, batch: int, repeat: int
) -> dict[str, float]:
    """Measure how long the layers that a part freezes run forward, in seconds per sample and by precision.

    They run as in local training, so 8 bits are rounded to and computed in 32. Seconds are of this thread: what else
    the machine does would blur a ratio of such short times. Nothing where the model cannot be cut.
    """
    cut = frozen_prefix(model.structure, part)
    if not model.can_cut(cut):
        return {}
    positions = np.arange(len(data))
    batches = [data.take(positions[start : start + batch]).inputs for start in range(0, len(data), batch)]
    weights = model.initial()
    prefixes = {name: Prefix.of(model, cut, weights, name) for name in get_args(FrozenPrecision)}
    times: dict[str, list[float]] = {name: [] for name in prefixes}
    for measurement in range(repeat + 1):
        for name, prefix in prefixes.items():
            begun = time.thread_time()
            for inputs in batches:
                prefix.run(inputs)
            # The first of each sets up libraries.
            times[name] += [time.thread_time() - begun] if measurement else []
    model.release()
    return {name: statistics.median(found) / len(data) for name, found in times.items()}


def peak_bytes(work: Callable[[], object]) -> int:
    """Measure the most memory that was allocated at once while `work` ran, as torch's own allocator saw it.

    This includes what an operation allocates and frees inside. What was there before does not count, nor do NumPy's
    arrays, so the received weights have to be added and the device's samples are left out, as in its price.
    """
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    held = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _memory_bytes() -> int:
    """All the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
