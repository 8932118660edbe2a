"""Put a federation together from its settings."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fedpmt import kernels
from fedpmt.devices.fleet import Fleet, make_fleet
from fedpmt.devices.traces import make_traces
from fedpmt.models.adapters import find_adapters
from fedpmt.models.chain import calls_modules_only
from fedpmt.parts.depth import suffixes
from fedpmt.pricing.meter import Times
from fedpmt.pricing.plan import Planner, make_planner
from fedpmt.pricing.price import Price
from fedpmt.records import DEVICES
from fedpmt.seeds import Seeds
from fedpmt.settings import parse_precision_seconds
from fedpmt.simulation.checkpoint import DeviceStore
from fedpmt.simulation.executors import Executor, Parallel, Plain
from fedpmt.simulation.loop import Federation
from fedpmt.simulation.problem import Problem, draws_at_random, sizes_of
from fedpmt.simulation.workers import can_fork
from fedpmt.training.batches import PlacedData, compute_device
from fedpmt.training.local import LocalWork, local_settings, make_optimizer
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from fedpmt.methods.base import Method
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Extra, Part
    from fedpmt.settings import Settings


def make_price(settings: Settings, problem: Problem, room: float = math.inf) -> Price:
    """What parts of this model cost under these settings; `room` is the memory that every device has."""
    return Price(
        problem.model,
        mode=settings.mode,
        batch=settings.batch,
        samples=settings.samples,
        cached=settings.keeps_prefix,
        keep_base=settings.prefix,
        room=room,
        reused=settings.prefix_tolerance is not None,
        held=(problem.optimizer or make_optimizer(settings)).held,
        example=problem.example(),
        net=problem.net,
        epochs=settings.epochs,
        others=problem.prototypes,
        precision=settings.precision,
        frozen_precision=settings.frozen_precision,
        precision_seconds=parse_precision_seconds(settings.precision_seconds),
    )


def plan(
    settings: Settings,
    problem: Problem,
    fleet: Fleet,
    method: Method[Any, Any] | None = None,
    *,
    samples: int | None = None,
) -> Planner:
    """Plan who trains what; with a method, prices know what its local work adds to a part.

    `samples` is how many each device has, where the problem is only an example of its data.
    """
    structure = problem.model.structure
    price = make_price(settings, problem, math.inf if fleet.memories is None else float(fleet.memories.min()))
    structures = {name: model.structure for name, model in problem.models.items()}
    extra = None if method is None else extra_of(method, price, structures)
    masks = suffixes(structure, settings.depths or problem.depths)
    times = Times(price, settings.full_seconds, settings.epochs)
    return make_planner(
        structure,
        masks,
        price,
        times,
        fleet,
        assign=settings.assign,
        deadline=settings.deadline,
        samples=sizes_of(problem, settings) if samples is None else samples,
        budget=settings.limits,
        structures=structures,
        extra=extra,
    )


def extra_of(
    method: Method[Any, Any], price: Price, structures: Mapping[str, Structure]
) -> Callable[[Part], Extra] | None:
    """What a method's local work adds to the price of a part; None where it is what the part says of itself."""
    work = method.local
    if type(work).extra is LocalWork.extra:
        return None
    return lambda part: work.extra(part, price, structures[part.model])


@contextmanager
def assemble(
    settings: Settings, problem: Problem, method: Method[Any, Any], folder: Path
) -> Iterator[Federation]:
    """A federation ready to play; torch gets one thread per device while it lasts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    executor: Executor | None = None
    try:
        fleet = make_fleet(settings).ordered(problem.data.names)
        traces = make_traces(settings, fleet, problem.data.names)
        problem = add_nets(settings, problem, method)
        check_fit(settings, problem, method)
        # Prices are measured where torch is sure to be, and do not depend on the device.
        planner = plan(settings, problem, fleet, method)
        device = compute_device(settings.device)
        check_precision(problem, device)
        problem = replace(
            problem,
            model=problem.model.clone().to(device),
            prototypes={name: net.to(device) for name, net in problem.prototypes.items()},
        )
        store = DeviceStore(folder / DEVICES, device)
        # A user's own forward pass may count on the usual layout; compiled code reads images with channels last.
        compiled = settings.executor == "auto" and kernels.knows(problem.model, problem.example(device))
        modules = problem.model.modules_of(0, len(problem.model.structure.layers)) if compiled else []
        data = PlacedData(
            problem.data,
            device,
            images_last=compiled and calls_modules_only(modules),
            score_on=settings.score_on,
        )
        executor = make_executor(settings, problem, device, data)
        yield Federation(settings, problem, data, method, fleet, planner, executor, store, traces=traces)
    finally:
        torch.set_num_threads(threads)
        if executor is not None:
            executor.close()


def add_nets(settings: Settings, problem: Problem, method: Method[Any, Any]) -> Problem:
    """The problem with the nets that a method has in play in addition to the global one."""
    nets = method.models(problem.model, problem.example(), Seeds(settings.seed))
    return replace(problem, prototypes=nets)


def check_fit(settings: Settings, problem: Problem, method: Method[Any, Any]) -> None:
    """Refuse targets and models that a method cannot do with."""
    if method.traits.needs_classes and problem.data.classes is None:
        raise SettingError(f"method = '{settings.method}' needs targets that are classes 0, 1, ...")
    if method.traits.needs_adapters and not find_adapters(problem.model.structure):
        raise SettingError(
            f"method = '{settings.method}' needs a model with LoRA adapters (see fedpmt.lora), and this one has none"
        )


def check_precision(problem: Problem, device: torch.device) -> None:
    """Refuse a model of numbers that the device cannot hold."""
    state = problem.model.state_dict({})
    wide = next((name for name, tensor in state.items() if tensor.dtype == torch.float64), None)
    if device.type == "mps" and wide is not None:
        raise SettingError(f"device = 'mps' has no float64 (got '{wide}'); convert the model with .float()")


def make_executor(settings: Settings, problem: Problem, device: torch.device, data: PlacedData) -> Executor:
    """Where local work runs; the numbers do not depend on it."""
    local = local_settings(settings, 0, problem.optimizer, problem.rate, problem.transform)
    stochastic = problem.transform is not None or draws_at_random(problem.model, problem.example())
    workers = settings.workers or os.cpu_count() or 1
    one = Plain(
        problem.models,
        problem.objective,
        local,
        stochastic,
        fast=settings.executor == "auto",
        data=data,
    )
    if settings.executor == "plain" or workers == 1:
        return one
    processes = min(workers, settings.concurrency or settings.cohort)
    return Parallel(one, workers, processes if processes > 1 and can_fork(device) else 0)
