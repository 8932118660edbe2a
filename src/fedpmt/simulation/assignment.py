"""What each device of a round is asked to do, and what that takes of it: found once, before anybody trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedpmt.devices.fleet import drifted
from fedpmt.resources import Resources
from fedpmt.settings import parse_drift
from fedpmt.training.messages import Client, Task

if TYPE_CHECKING:
    from fedpmt.devices.fleet import Device
    from fedpmt.methods.base import Round
    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Plan
    from fedpmt.simulation.loop import Federation, Progress


@dataclass(frozen=True)
class Assignment:
    """A device of the round with its task, and what the clock makes of it."""

    device: Device
    task: Task
    part: Part
    samples: int
    plan: Plan  # what it may spend
    usage: Resources  # what it spends
    seconds: float  # T_k, training and transfer
    transfer: float  # of these seconds, on the link
    bytes_down: int
    bytes_up: int
    able: bool = True  # whether the part fits into the device's memory
    reason: str = ""  # why its reply did not count, where somebody said


def assign(federation: Federation, progress: Progress, device: Device, round_: Round) -> Assignment:
    """Give a device its task, and find out what it will take."""
    settings, data = federation.settings, federation.problem.data
    samples = data.samples(device.id)
    speed = (progress.speeds or {}).get(device.id, device.speed)  # as the server knows it
    plan = federation.planner.plan(replace(device, speed=speed), samples)
    known = settings.splitting == "server"
    client = Client(
        device.id,
        device.level if known else None,
        speed if known else None,
        samples,
        plan.meter.steps,
        data.label_counts(device.id) if federation.needs_labels else None,
        plan if known else None,
    )
    task = federation.method.assign(progress.state, client, round_)
    task = replace(task, offer=tuple(plan.meter.complete(part) for part in task.offer))
    if progress.accepted is not None:
        task = replace(task, accepted_round=progress.accepted.get(device.id))
    drift = parse_drift(settings.drift)
    if drift is not None:
        device = drifted(device, drift, round_.index, settings.partition_seed)
    return account(federation, device, task, choose(federation, device, task, samples), samples, plan)


def choose(federation: Federation, device: Device, task: Task, samples: int) -> Part:
    """The part that a device takes of those on offer: the largest that it can afford, else the smallest (Option II)."""
    if len(task.offer) == 1:
        return task.offer[0]
    # Parts on offer are complete: what the method's work adds to them is not to be added again.
    plan, price = federation.planner.plan(device, samples), federation.planner.price
    affordable = [part for part in task.offer[: plan.depth] if plan.meter.quote(part).usage <= plan.limit]
    if affordable:
        return max(affordable, key=lambda part: price(part).operations)
    return min(task.offer, key=lambda part: price(part).operations)


def account(
    federation: Federation, device: Device, task: Task, part: Part, samples: int, plan: Plan
) -> Assignment:
    """What it will take a device to do its task with this part."""
    meter = plan.meter if plan.meter.device.speed == device.speed else replace(plan.meter, device=device)
    quote = meter.quote(part, steps_asked(federation, task, samples))
    usage = quote.usage
    if usage.memory > device.memory:
        # It says so at once: nothing is sent and nobody waits.
        usage = Resources(usage.operations, memory=usage.memory)
        return Assignment(device, task, part, samples, plan, usage, 0.0, 0.0, 0, 0, able=False)
    seconds, down, up = usage.seconds, quote.download, quote.upload
    return Assignment(device, task, part, samples, plan, usage, seconds, quote.transfer, down, up)


def steps_asked(federation: Federation, task: Task, samples: int) -> int:
    """The steps of a local round that a task asks for."""
    local = federation.local(0)
    if task.epochs is not None:
        local = replace(local, epochs=task.epochs)
    return local.steps(samples, task.steps)
