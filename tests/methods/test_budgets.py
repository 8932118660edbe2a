"""Equal budgets: every method gets the largest part that a device can pay for, as the clock and the wire charge it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from benches import Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpmt import api
from fedpmt.devices.fleet import Watts, make_fleet
from fedpmt.methods.averaging import Composed
from fedpmt.methods.base import Round
from fedpmt.methods.feddrop import FedDrop
from fedpmt.methods.fedmp import FedMP
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.methods.fedprox import FedProx
from fedpmt.methods.fjord import FjORD
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.methods.ist import IST
from fedpmt.methods.proximal import Proximal
from fedpmt.methods.prunefl import PruneFL
from fedpmt.methods.registry import create
from fedpmt.methods.slimfl import SlimFL
from fedpmt.models.structure import HIDDEN
from fedpmt.parts.depth import full, suffixes
from fedpmt.parts.mask import prunable
from fedpmt.parts.width import (
    disjoint_channels,
    first_channels,
    hidden_groups,
    kept_count,
    narrow,
    rolling_channels,
    thinned,
)
from fedpmt.pricing.meter import download_bytes, upload_bytes
from fedpmt.resources import RESOURCES, ROUNDING, parse_budget
from fedpmt.seeds import Seeds
from fedpmt.simulation.assemble import assemble, extra_of, plan
from fedpmt.simulation.bookkeeping import record_device
from fedpmt.simulation.cohort import assign
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.methods.base import Method
    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Meter
    from fedpmt.resources import Resource
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.simulation.loop import Federation

PER_DEVICE = ("fedpmt", "feddrop", "heterofl", "fedrolex", "fjord", "fedmp", "ist")
ACTIONS = {
    **dict.fromkeys(PER_DEVICE, dict.fromkeys(RESOURCES, "device")),
    **dict.fromkeys(("fedavg", "scaffold", "slimfl"), dict.fromkeys(RESOURCES, "none")),
    "fedprox": {**dict.fromkeys(RESOURCES, "none"), "operations": "work", "time": "work", "energy": "work"},
    "prunefl": {**dict.fromkeys(RESOURCES, "shared"), "memory": "none"},
    "feddf": dict.fromkeys(RESOURCES, "device"),
    "comet": {**dict.fromkeys(RESOURCES, "device"), "bytes": "none", "upload": "none"},
    **dict.fromkeys(("fedgkt", "fedgen"), dict.fromkeys(RESOURCES, "none")),
    **dict.fromkeys(("depthfl", "inclusivefl"), dict.fromkeys(RESOURCES, "device")),
    "fiarse": {**dict.fromkeys(RESOURCES, "device"), "memory": "none"},
    "fedepth": {**dict.fromkeys(RESOURCES, "none"), "memory": "device"},
}
LEVELS = 4
ROUND = 3
"""Any but the first: a window that rolls has rolled on by then."""


RUN: dict[str, Any] = {
    **{
        "task": "cnn-mnist",
        "data": "synthetic",
        "levels": "1/4,1/3,1/2,1",
        "assign": "level",
        "budget": "operations",
    },
    **{"devices": 8, "samples": 40, "cohort": 8, "epochs": 2},
}


@cache
def priced() -> Federation:
    """FedAvg on CNN-MNIST, four levels, with links slow enough to matter, and watts; nobody trains."""
    chosen = api.settings_of({**RUN, "method": "fedavg"})
    with assemble(chosen, api.paper_problem_of(chosen), api.method_of(chosen), Path(mkdtemp())) as made:
        links = np.array([2e4, 3e4, 1e5, 1e9] * 2)
        watts = np.array([[2.0, 1.0, 0.2], [3.0, 0.5, 0.2], [4.0, 2.0, 0.0], [60.0, 5.0, 20.0]] * 2)
        fleet = replace(make_fleet(chosen), uplinks=links, downlinks=4 * links, watts=watts)
        return replace(made, fleet=fleet)


def federation(name: str, **options: Any) -> Federation:
    """The same devices under another method; a price that was measured is measured for all."""
    chosen = api.settings_of({**RUN, "method": name, "options": options})
    return with_method(replace(priced(), settings=chosen), api.method_of(chosen))


def with_method(made: Federation, method: Method[Any, Any]) -> Federation:
    """The same devices under this method."""
    extra = extra_of(method, made.planner.price, made.planner.structures)
    return replace(made, method=method, planner=replace(made.planner, extra=extra))


def under(name: str, budget: str, **options: Any) -> Federation:
    """The same with another budget."""
    made = federation(name, **options)
    chosen = made.settings.model_copy(update={"budget": budget})
    return replace(made, settings=chosen, planner=replace(made.planner, budget=parse_budget(budget)))


def ask(made: Federation, device: int) -> tuple[Assignment, float, float]:
    """What a device is asked to do, what that takes and what it may take, as recorded."""
    round_ = Round(ROUND, made.planner.price, Seeds(0, ROUND), cohort=tuple(range(8)))
    one = assign(made, made.start(), made.fleet.device(device), round_)
    found = record_device(made, one, "arrived", ROUND)
    assert found.used is not None
    assert found.budget is not None
    assert found.over_budget == (found.used > found.budget * (1 + ROUNDING))
    return one, found.used, found.budget


def choices(made: Federation, device: int) -> list[Part]:
    """All parts that a method could give this device, smallest first, cut here by hand."""
    structure = made.problem.model.structure
    axes = structure.require_axes("this test")
    name = made.settings.method
    if name == "fedpmt":
        return list(suffixes(structure, LEVELS))
    if name == "fjord":
        return list(FjORD().widths(structure))
    parts = []
    for step in range(1, 101):
        rate = step / 100
        if name in ("heterofl", "fedrolex"):
            start = ROUND if name == "fedrolex" else 0
            pick = lambda size, count, start=start: rolling_channels(size, count, start)  # noqa: E731
            parts.append(thinned(structure, axes, rate, HIDDEN, pick, derivable=True))
        elif name == "ist":
            rng = Seeds(0, ROUND)("deal", None)
            kept = {
                group.name: np.sort(
                    disjoint_channels(group.size, 2, rng)[device % 2][: kept_count(group.size, rate)]
                )
                for group in hidden_groups(axes)
            }
            parts.append(narrow(structure, axes, kept, ""))
        else:
            parts.append(thinned(structure, axes, rate, HIDDEN, first_channels))
    return parts


def meter(made: Federation, device: int) -> Meter:
    """What rounds take on a device, by what the method's local work adds to them."""
    return made.planner.plan(made.fleet.device(device), 40).meter


def length(made: Federation, part: Part, device: int) -> tuple[int, int]:
    """What tells parts of a method apart by size alone: bytes down and up."""
    structure, complete = made.problem.model.structure, meter(made, device).complete(part)
    return download_bytes(complete, structure), upload_bytes(complete, structure)


def takes(made: Federation, part: Part, device: int) -> float:
    """What a part takes of what the budget limits, for a whole round, from the clock and the wire."""
    chosen, place, structure = made.settings, made.fleet.device(device), made.problem.model.structure
    part = meter(made, device).complete(part)
    cost, up = meter(made, device).cost(part), upload_bytes(part, structure)
    down = download_bytes(part, structure) + part.overhead_bytes
    resource: Resource = parse_budget(str(chosen.budget)).resource
    if resource == "operations":
        cached = made.planner.price.cached
        return cost.round_operations(samples=40, epochs=chosen.epochs, batch=chosen.batch, cached=cached)
    if resource in ("time", "energy"):
        times = made.planner.times
        training, transfer = times.training(place, cost, 40), times.transfer(place, down, up)
        watts = place.watts if resource == "energy" and place.watts is not None else Watts(1.0, 1.0, 0.0)
        return watts.computing * training + watts.sending * transfer
    return float({"bytes": down + up, "upload": up, "memory": cost.memory_bytes}[resource])


@pytest.mark.parametrize("name", ACTIONS)
def test_each_method_declares_how_a_budget_acts_on_it(name: str) -> None:
    options = api.settings_of({"method": name, "budget": "operations"}).options
    method = create(name, options, {"depths": None, "splitting": "server"})
    assert {resource: method.traits.action(resource) for resource in RESOURCES} == ACTIONS[name]


def test_what_the_user_fixes_no_budget_acts_on() -> None:
    fixed: list[Method[Any, Any]] = [
        HeteroFL(rate=0.5),
        FedMP(),
        FedMP(bandit=False, ratio=0.5),
        PruneFL(density=0.5),
    ]
    assert {method.traits.action("operations") for method in fixed} == {"none"}
    assert SlimFL(fit=True).traits.action("operations") == "device"
    assert IST().traits.action("memory") == "device"


@pytest.mark.parametrize("resource", RESOURCES)
@pytest.mark.parametrize("name", PER_DEVICE)
@settings(max_examples=10)
@given(share=st.none() | st.floats(0.005, 1.0), device=st.integers(0, LEVELS - 1))
def test_the_part_is_the_largest_within_the_budget(
    name: str, resource: str, share: float | None, device: int
) -> None:
    """Its price is within, every larger one's is not; where none is, it is the smallest and marked."""
    # Classes that a device does not hold would save some more, which rates are not fitted to.
    options = {"masked": False} if name in ("heterofl", "fedrolex") else {}
    made = under(name, resource if share is None else f"{resource}={share!r}", **options)
    one, used, budget = ask(made, device)
    assert used == pytest.approx(takes(made, one.part, device), rel=1e-12)
    own = suffixes(made.problem.model.structure, LEVELS)
    if share is None:
        assert budget == pytest.approx(takes(under("fedpmt", resource), own[device], device), rel=1e-12)
    if share is None and name == "fedpmt":
        assert one.part.label == own[device].label
        return
    parts = choices(made, device)
    own_length = length(made, one.part, device)
    place = max(index for index, part in enumerate(parts) if length(made, part, device) == own_length)
    if used > budget * (1 + 2 * ROUNDING):
        assert own_length == length(made, parts[0], device)
    # A rate's price grows with it; the few depths of the others are looked at one by one.
    larger = parts[place + 1 :] if name in ("fedpmt", "fjord") else parts[place + 1 : place + 2]
    assert all(takes(made, part, device) > budget for part in larger)


def test_rates_are_fitted_to_the_slice_whatever_classes_a_device_holds() -> None:
    for name in ("heterofl", "fedrolex"):
        for device in range(LEVELS):
            whole, masked = (ask(under(name, "upload", masked=masked), device) for masked in (False, True))
            assert whole[0].part.label == masked[0].part.label
            assert masked[1] <= whole[1] <= whole[2]


@pytest.mark.parametrize("prefix", ["cache", "recompute"])
@pytest.mark.parametrize("resource", RESOURCES)
def test_fedpmt_matched_against_itself_has_its_own_depths(resource: str, prefix: str) -> None:
    """Even where a wider part would hold less memory, since it keeps no cache."""
    made = under("fedpmt", resource)
    if prefix == "recompute":
        chosen = made.settings.model_copy(update={"prefix": prefix})
        made = replace(made, settings=chosen, planner=plan(chosen, made.problem, made.fleet))
    for device in range(LEVELS):
        one, used, budget = ask(made, device)
        assert one.part.label == f"depth {device + 1}"
        assert used == pytest.approx(budget, rel=1e-12)


@pytest.mark.parametrize("budget", ["operations", "operations=0.3", "time", "time=4s", "energy=12J"])
def test_fedprox_takes_as_many_steps_as_are_paid_for(budget: str) -> None:
    made = under("fedprox", budget)
    for device in range(LEVELS):
        one, used, limit = ask(made, device)
        steps = one.task.steps or 8
        whole = takes(made, full(made.problem.model.structure), device)
        sending = {"time": 1.0, "energy": one.device.watts.sending if one.device.watts else 0.0}
        fixed = one.transfer * sending.get(budget.partition("=")[0], 0.0)
        assert used == pytest.approx((whole - fixed) * steps / 8 + fixed, rel=1e-9)
        assert used <= limit * (1 + ROUNDING) or steps == 1
        assert steps == 8 or (whole - fixed) * (steps + 1) / 8 + fixed > limit


@pytest.mark.parametrize("name", ["fedprox", "fedavg", "scaffold", "slimfl"])
def test_what_no_budget_changes_is_marked_and_not_cut(name: str) -> None:
    for budget in ("upload=0.5", "memory=0.5", "bytes=100kB"):
        one, used, limit = ask(under(name, budget), 0)
        assert used > limit
        assert one.task.steps is None
        structure = under(name, budget).problem.model.structure
        assert one.part.sent == full(structure).sent


def test_distillation_control_variates_and_lists_are_paid_for() -> None:
    structure = federation("fedavg").problem.model.structure
    everything = 4 * structure.size(structure.tensors)
    assert ask(under("scaffold", "bytes"), 3)[1] == 4 * everything  # w and c down, w and Δc up
    assert ask(under("fedavg", "bytes"), 3)[1] == 2 * everything
    one, used, _ = ask(under("feddrop", "bytes"), 0)
    assert used == one.bytes_down + one.bytes_up + one.part.overhead_bytes
    assert one.part.overhead_bytes > 0
    assert one.transfer == pytest.approx((used - one.bytes_up) / 8e4 + one.bytes_up / 2e4)
    plain, distilled = (under("fjord", "operations=0.5", distil=distil) for distil in (False, True))
    for made in (plain, distilled):
        one, used, limit = ask(made, 0)
        assert used <= limit
    # Two passes in one step: a budget pays for less.
    assert len(ask(distilled, 0)[0].part.inner) < len(ask(plain, 0)[0].part.inner)


def test_a_device_that_chooses_pays_once_for_what_the_method_adds() -> None:
    """A limit of just what depth 2 takes with the proximal term is enough for it."""
    method = Composed(parts=FedPMT(splitting="device"), local=Proximal(0.1))
    made = under("fedpmt", "operations=0.5")
    chosen = made.settings.model_copy(update={"splitting": "device"})
    made = with_method(replace(made, settings=chosen), method)
    structure = made.problem.model.structure
    depth, whole = suffixes(structure, LEVELS)[1], full(structure)
    exactly = meter(made, 0).usage(depth).operations
    # A share is of what the whole model takes, whatever a method adds to it.
    share = exactly / replace(meter(made, 0), extra=None).usage(whole).operations
    made = replace(made, planner=replace(made.planner, budget=parse_budget(f"operations={share!r}")))
    one, used, limit = ask(made, 0)
    assert one.part.label == depth.label
    assert used == pytest.approx(limit) == pytest.approx(exactly)


@pytest.mark.parametrize("resource", ["upload", "bytes", "operations", "time", "energy"])
def test_prunefl_has_the_density_of_the_weakest(resource: str) -> None:
    """On the 0.01 grid; products with pruned weights are free where the density is chosen."""
    made = under("prunefl", resource)
    structure, density = made.problem.model.structure, made.start().state.limit
    weights = structure.size(prunable(structure))
    rest = structure.size(structure.tensors) - weights

    def fits(rate: float) -> bool:
        ok = []
        for device in range(LEVELS):
            place = made.fleet.device(device)
            limit = made.planner.plan(place, 40).limit.of(parse_budget(resource).resource)
            active = 4 * (rest + int(rate * weights))
            down = active + -(-weights // 8)
            price = made.planner.price
            work = rate * price.round_operations(price.full, samples=40, epochs=2)
            training = rate * made.planner.times.training(place, price.full, 40)
            transfer = made.planner.times.transfer(place, down, active)
            assert place.watts is not None
            taken = {
                "upload": active,
                "bytes": down + active,
                "operations": work,
                "time": training + transfer,
                "energy": place.watts.computing * training + place.watts.sending * transfer,
            }
            ok.append(taken[resource] <= limit * (1 + ROUNDING))
        return all(ok)

    assert fits(density) or density == 0.01
    assert not fits(density + 0.01)


def test_a_fleet_of_very_many_kinds_has_a_weakest_too() -> None:
    chosen = api.settings_of(
        {"levels": "lognormal:0.7", "devices": 5000, "cohort": 5, "budget": "time=30s", "data": "synthetic"}
    )
    fleet = make_fleet(chosen)
    planner = plan(chosen, api.paper_problem_of(chosen), fleet)
    slowest = planner.plan(fleet.device(int(np.argmin(fleet.speeds))), chosen.samples)
    assert planner.weakest(fleet, chosen.samples) == slowest


def test_without_a_budget_the_planned_depth_stands_whatever_else_the_work_takes() -> None:
    """With a proximal term the whole model takes more than its plain price: it is trained all the same."""
    chosen = api.settings_of({key: value for key, value in RUN.items() if key != "budget"})
    method = Composed(parts=FedPMT(), local=Proximal(0.1))
    with assemble(chosen, api.paper_problem_of(chosen), method, Path(mkdtemp())) as made:
        _, assignments = made.open(made.start())
        labels = {one.device.level: one.part.label for one in assignments}
    assert labels == {level: f"depth {level}" for level in range(1, LEVELS + 1)}


def test_a_rotated_plan_says_what_could_have_been_drawn() -> None:
    """With probability 1 / R all layers in the steps that are left for them, else the traded pair."""
    bench = Bench(FedPMT(plan="rotated", every=3, share=1.0), batch=2)  # four steps
    masks = FedPMT().masks(bench.state)
    budget = 0.5 * bench.price(masks[-1]).sustained
    tasks = [bench.task(0, index, budget) for index in range(300)]
    usual, other = tasks[0].chances
    assert (usual.probability, other.probability) == (1 - 1 / 3, 1 / 3)
    assert set(usual.part.trained) < set(masks[-1].trained)
    assert usual.steps == 4
    assert (set(other.part.trained), other.steps) == (set(masks[-1].trained), 2)
    drawn = [(set(task.offer[0].trained), task.steps or 4) for task in tasks]
    pairs = [(set(one.part.trained), one.steps) for one in (usual, other)]
    assert all(pair in pairs for pair in drawn)
    assert np.mean([pair == pairs[1] for pair in drawn]) == pytest.approx(1 / 3, abs=0.08)


def test_the_mean_counts_the_steps_that_the_server_asked_for() -> None:
    """4 steps and 2, equal weights: τ_eff = 3, and 3 (Δ_1 / 4 + Δ_2 / 2) / 2, whatever the devices say."""
    bench = Bench(FedProx(mu=0.0, normalise="steps"), batch=2)
    whole = bench.price(full(bench.model.structure)).sustained
    replies = [bench.reply(device, budget=share * whole) for device, share in enumerate((1.0, 0.5))]
    assert [reply.steps for reply in replies] == [4, 2]
    claims = [replace(reply, scalars={"tau": 1.0, "steps": 99}) for reply in replies]
    before, after = bench.state.tensors, bench.aggregate(claims).state.tensors
    for name in before:
        one, other = (reply.update[name].double() for reply in replies)
        expected = before[name] + 3 * (one / 4 + other / 2) / 2
        np.testing.assert_allclose(after[name], expected, atol=1e-6)


def test_zeros_in_place_of_what_others_train_cannot_be_normalised() -> None:
    with pytest.raises(
        SettingError, match=r"feddrop.normalise must be none with aggregation = zero \(got steps"
    ):
        FedDrop(aggregation="zero", normalise="steps")
