"""The other half of the front door: what a model costs and what a fleet can train of it, before anything is trained."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

from fedpmt import __version__
from fedpmt.api import (
    OWN_DATA,
    Own,
    check,
    own_problem,
    own_training,
    settings_of,
    unfilled_problem,
    with_model,
    with_sizes,
)
from fedpmt.data.registry import find_dataset, is_own
from fedpmt.models.nets import TASKS
from fedpmt.models.structure import FrozenPrecision, TrainedPrecision
from fedpmt.settings import RunSettings, Settings
from fedpmt.types import Arrays, SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from fedpmt.api import Layers
    from fedpmt.data.clients import Source
    from fedpmt.pricing.cost_table import CostTable, LayerTable
    from fedpmt.pricing.plan_table import PlanTable
    from fedpmt.simulation.problem import Problem


def layers(
    model: nn.Module | str | None = None,
    example: Arrays | None = None,
    layers: Layers | None = None,
    *,
    clients: Source | str | None = None,
    **settings: Unpack[RunSettings],
) -> LayerTable:
    """Measure the layers of a model: parameters, operations, share of a training step, and activations.

    Nothing is trained, and the module stays as it is. Print the table to read it.

    Args:
        model: Any `nn.Module`, or `package.module:function`; without it, `task=` names a task.
        example: A batch of inputs, two samples or more; or `data=` names a data set whose inputs it takes.
        layers: The module's layers in the order of the forward pass, where those found are not the ones you want.
        clients: Clients' samples as `run` takes them, in place of an example.
        **settings: `batch`, with which the share is computed, and others that `fedpmt cost --help` lists.

    Raises:
        SettingError: The model cannot run the example, or a setting cannot be used.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> [(row.name, row.parameters) for row in layers(net, torch.zeros(2, 4)).layers]
        [('0', 40), ('2', 18)]
    """
    from fedpmt.pricing.cost_table import layer_table
    from fedpmt.simulation.assemble import make_price

    name, resolved, problem = priced(model, example, layers, settings, clients)
    return layer_table(name, make_price(resolved, problem))


def cost(
    model: nn.Module | str | None = None,
    example: Arrays | None = None,
    *,
    layers: Layers | None = None,
    clients: Source | str | None = None,
    **settings: Unpack[RunSettings],
) -> CostTable:
    """Price each depth of a model for one batch: operations, bytes and memory. Nothing is trained.

    Args:
        model: Any `nn.Module`, or `package.module:function`; without it, `task=` names a task.
        example: A batch of inputs, two samples or more; or `data=` names a data set whose inputs it takes.
        layers: The module's layers in the order of the forward pass, where those found are not the ones you want.
        clients: Clients' samples as `run` takes them, in place of an example; `samples` is their mean number.
        **settings: `batch`, `samples`, `epochs`, `depths`, `optimizer` and others that `fedpmt cost --help` lists.

    Returns:
        A table with `layers` and `depths`; printed, it is what `fedpmt cost` shows.

    Raises:
        SettingError: The model cannot run the example, or a setting cannot be used.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> [row.operations for row in cost(net, torch.zeros(2, 4), batch=10).depths]
        [658, 1178]
    """
    from fedpmt.pricing.cost_table import model_table
    from fedpmt.simulation.assemble import make_price

    given: dict[str, Any] = dict(settings)
    if model is None and not given.get("model") and str(given.get("task")) not in TASKS:
        # The paper's table is of its own batches and samples.
        given = {**_of_the_paper(given), **{key: value for key, value in given.items() if value is not None}}
    name, resolved, problem = priced(model, example, layers, given, clients)
    return model_table(name, make_price(resolved, problem), resolved.depths or problem.depths)


def plan(
    model: nn.Module | str | None = None,
    example: Arrays | None = None,
    *,
    layers: Layers | None = None,
    clients: Source | str | None = None,
    out: str | Path | None = None,
    **settings: Unpack[RunSettings],
) -> PlanTable:
    """Say what each device of a fleet would train, and how long that takes. Nothing is trained.

    Args:
        model: Any `nn.Module`, or `package.module:function`; without it, `task=` names a task.
        example: A batch of inputs, two samples or more; or `data=` names a data set whose inputs it takes.
        layers: The module's layers in the order of the forward pass, where those found are not the ones you want.
        clients: Clients' samples as `run` takes them, in place of an example: there is a device for each client, and
            `samples` is their mean number.
        out: Where to write a page (.html) that computes the plan again while its reader changes deadline, budget,
            precision and plan. It is one file and needs no server.
        **settings: `fleet` or `levels`, `deadline`, `full_seconds`, `samples`, `batch`, `epochs`, `depths` and others
            that `fedpmt plan --help` lists.

    Returns:
        A table with a row in `devices` for each kind of device; printed, it is what `fedpmt plan` shows.

    Raises:
        SettingError: The model cannot run the example, or a setting cannot be used.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> [(row.speed, row.depth) for row in plan(net, torch.zeros(2, 4), levels="1/2,1", deadline=15).devices]
        [(0.5, 1), (1.0, 2)]
    """
    from fedpmt.devices.fleet import make_fleet
    from fedpmt.methods.fedpmt import FedPMT
    from fedpmt.methods.registry import typed_options
    from fedpmt.pricing.plan_table import plan_table
    from fedpmt.report.planner import check_page
    from fedpmt.simulation.assemble import plan as make_plan

    if out is not None:
        check_page(Path(out))
    name, resolved, problem = priced(model, example, layers, settings, clients)
    fleet = make_fleet(resolved)
    planner = make_plan(resolved, problem, fleet, samples=resolved.samples)
    method = FedPMT(**typed_options("fedpmt", resolved.options))  # type: ignore[arg-type]
    share = None if resolved.plan == "paper" else method.share
    table = plan_table(
        name, planner, fleet, resolved.samples, resolved.deadline, plan=resolved.plan, share=share
    )
    if out is not None:
        _write_planner(Path(out), table, resolved, problem, method.share)
    return table


def _write_planner(path: Path, table: PlanTable, settings: Settings, problem: Problem, share: float) -> None:
    """Write the page of a plan, with prices in all precisions that the model can be trained in."""
    from fedpmt.devices.fleet import make_fleet
    from fedpmt.pricing.plan_prices import plan_prices
    from fedpmt.report.planner import write_planner
    from fedpmt.simulation.assemble import plan as make_plan

    fleet, own = make_fleet(settings), (settings.precision, settings.frozen_precision)
    others = (
        product(get_args(TrainedPrecision), get_args(FrozenPrecision)) if settings.mode == "exact" else ()
    )
    planners = {
        (trained, frozen): make_plan(
            settings.model_copy(update={"precision": trained, "frozen_precision": frozen}),
            problem,
            fleet,
            samples=settings.samples,
        )
        for trained, frozen in (own, *(pair for pair in others if pair != own))
    }
    limits = settings.limits
    choice = {
        "deadline": settings.deadline,
        "budget": limits
        and {"text": settings.budget, "resource": limits.resource, "amounts": limits.amounts},
        "precision": settings.precision,
        "frozen_precision": settings.frozen_precision,
        "plan": settings.plan,
        "share": share,
    }
    prices = plan_prices(table.task, planners, fleet, settings.samples)
    write_planner(path, {"version": __version__, **prices}, choice, str(table))


def profile(
    model: nn.Module | str | None = None,
    example: Arrays | None = None,
    *,
    layers: Layers | None = None,
    clients: Source | str | None = None,
    name: str = "this-machine",
    repeat: int = 5,
    **settings: Unpack[RunSettings],
) -> dict[str, Any]:
    """Measure this machine: how long each depth of a model takes to train, and how much memory it needs.

    Arguments are those of `plan`. `name` is what the machine is called in the row for the fleet's CSV; each depth is
    measured `repeat` times.
    """
    from fedpmt.simulation.profile import profile as measure
    from fedpmt.training.batches import placed

    task, resolved, problem = priced(model, example, layers, settings, clients, filled=True)
    return {"task": task, **measure(resolved, problem, placed(problem.data.shard(0)), name, repeat)}


def priced(
    model: nn.Module | str | None,
    example: Arrays | None,
    layers: Layers | None,
    settings: Mapping[str, Any],
    clients: Source | str | None = None,
    *,
    filled: bool = False,
) -> tuple[str, Settings, Problem]:
    """What prices and times are of: its name, its settings, and a problem, with samples for a device if `filled`."""
    if isinstance(example, tuple | list) and any(hasattr(one, "shape") for one in example):
        raise SettingError(
            f"example must be one array, or a dict of arrays by the names of forward's arguments "
            f"(got a {type(example).__name__} of {len(example)})"
        )
    given, model = with_model({**settings, "cohort": 1}, model, layers)
    given, optimizer, rate = own_training(given)
    if model is None:
        if clients:
            raise SettingError("clients needs a model of your own: a paper task has its own samples")
        resolved = settings_of(given)
        check(resolved)
        problem = dataclasses.replace(unfilled_problem(resolved), optimizer=optimizer, rate=rate)
        return resolved.task, resolved, problem
    if clients:
        given, first = _with_clients(given, clients)
        example = first if example is None else example
    if example is None and given.get("data") in (None, OWN_DATA):
        raise SettingError(
            "a model is priced by running an example: give inputs, their shape, data or clients"
        )
    resolved = settings_of({"data": OWN_DATA, **{key: one for key, one in given.items() if one is not None}})
    check(resolved)
    from fedpmt import own

    module = own.load_module(model, resolved.seed) if isinstance(model, str) else model
    if filled and example is None and is_own(resolved.data):
        from fedpmt.training.objective import CLASSIFICATION

        one = resolved.model_copy(update={"devices": 1})
        samples = Own(**own.load_samples("train", resolved.data, data_dir=resolved.data_dir)).samples
        problem = own_problem(one, module, samples, CLASSIFICATION)
    else:
        inputs = own.load_example(resolved.data, resolved.data_dir) if example is None else example
        problem = own.example_problem(module, inputs, resolved, resolved.samples if filled else 2)
    own.warn_of_one_layer(problem.model)
    name = resolved.model or type(module).__name__
    return name, resolved, dataclasses.replace(problem, optimizer=optimizer, rate=rate)


def _with_clients(given: Mapping[str, Any], clients: Source | str) -> tuple[dict[str, Any], Arrays]:
    """Settings with a device for each client and their mean number of samples; and two inputs, the first client's."""
    from fedpmt import own

    data = given.get("data")
    if data not in (None, OWN_DATA):
        raise SettingError(f"a model is priced with data or clients (got data = '{data}' and clients)")
    named = isinstance(clients, str)
    brought = own.load_samples("clients", clients) if named else {"clients": clients}
    samples = Own(**brought).samples
    assert samples is not None
    first = samples.train.take(slice(0, 2)).inputs
    return with_sizes({**given, "data": OWN_DATA}, samples), first


def _of_the_paper(given: Mapping[str, Any]) -> dict[str, int]:
    """The batch size and the number of samples of the paper's complexity table."""
    from fedpmt.models.nets import net

    chosen = net(str(given.get("task") or Settings.model_fields["task"].default))
    return {"batch": chosen.batch, "samples": find_dataset(chosen.data)[0].defaults.samples}
