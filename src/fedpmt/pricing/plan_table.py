"""A plan as a table: what each kind of device trains, what it takes, and ψ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedpmt.parts.depth import full
from fedpmt.parts.part import mask
from fedpmt.pricing.plan import splitting_constant
from fedpmt.pricing.price import Mode
from fedpmt.pricing.text_table import WIDTH, text_table, wrap
from fedpmt.types import shown_bytes, shown_joules

if TYPE_CHECKING:
    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.pricing.plan import Planner

MOST_ROWS = 100


class PlanRow(BaseModel):
    """What devices of one kind train, and what a round takes there."""

    model_config = ConfigDict(frozen=True)
    name: str
    level: int
    devices: int
    speed: float
    depth: int
    frozen: tuple[str, ...]  # layers that are run forward only
    trains_from: str  # the first layer that is trained
    seconds: float
    joules: float | None = None  # of training and transfer; None where the fleet states no watts
    fits: bool  # in time and in memory
    upload_bytes: int
    download_bytes: int
    memory_bytes: int
    ratio: float  # of the full model's operations
    steps: int  # that it takes in a round
    all_steps: int  # that a whole round has
    deeper_steps: (
        int | None
    )  # that one layer more would leave, 0 where there is no memory for it; None: no layer more


class PlanTable(BaseModel):
    """What each kind of device of a fleet trains, slowest first."""

    model_config = ConfigDict(frozen=True)
    task: str  # the net of the paper, or the user's class
    assign: Literal["level", "deadline"]
    plan: str = "paper"
    share: float = 1.0  # of its steps, the least that a device is left with for a deeper part
    mode: Mode
    deadline: float | None  # what depths are fitted to
    fitted: bool  # whether the deadline was found here, for want of a given one
    devices: tuple[PlanRow, ...]
    psi: float | None  # None: infinite, since some layer is trained by nobody
    uncovered: tuple[str, ...]  # layers that no device trains
    note: str | None  # what to change then
    round_seconds: float
    fedavg_round_seconds: float
    base_bytes: int = 0  # what a device downloads once, before its first round
    base_seconds: float = 0.0  # how long the slowest link takes for it

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """Return the plan as text of at most this many columns."""
        deadline = "none" if self.deadline is None or self.fitted else f"{self.deadline:g} s"
        title = f"{self.task}, assigned by {self.assign}, prices {self.mode}, deadline {deadline}"
        if self.plan != "paper":
            title = f"{title}, plan {self.plan}"
        columns, rows = ["device", "count", "speed", "depth", "trains from"], self._rows()
        # 80 columns have no room for one more: the other is in `--json`.
        energy = self.devices[0].joules is not None
        if self.plan == "paper":
            columns += ["seconds", "fits", "energy" if energy else "upload", "memory"]
        else:
            columns += ["steps", "deeper", "seconds", "energy" if energy else "memory"]
            rows = self._traded_rows()
        table = text_table(title, columns, rows, names=(0, 4), width=width)
        return "\n".join([table, *(line for text in self._sentences() for line in wrap(text, width))])

    def _traded_rows(self) -> list[list[str]]:
        return [
            [
                *cells[:5],
                f"{row.steps} of {row.all_steps}",
                "-" if row.deeper_steps is None else str(row.deeper_steps or "no memory"),
                cells[5],
                cells[8] if row.joules is None else cells[7],
            ]
            for row, cells in zip(self.devices, self._rows(), strict=True)
        ]

    def _rows(self) -> list[list[str]]:
        return [
            [
                row.name or f"level {row.level}",
                f"{row.devices:,}",
                f"{row.speed:,.3f}",
                str(row.depth),
                row.trains_from,
                f"{row.seconds:,.1f}",
                "yes" if row.fits else "no",
                shown_bytes(row.upload_bytes) if row.joules is None else shown_joules(row.joules),
                shown_bytes(row.memory_bytes),
            ]
            for row in self.devices
        ]

    def _sentences(self) -> list[str]:
        down = shown_bytes(max(row.download_bytes for row in self.devices))
        said = [f"each device downloads {down}{' a round' if self.base_bytes else ''}"]
        if self.plan != "paper":
            said.append(
                f"each trains the deepest part that leaves {100 * self.share:.0f} % of its steps or more; deeper: the "
                "steps that one layer more would leave"
            )
        if self.plan == "rotated":
            said.append(
                "now and then, a device trains all layers it has the memory for, in the steps that leaves"
            )
        late = sum(row.devices for row in self.devices if not row.fits)
        if self.plan != "paper" and late:
            said.append(
                f"{late} of {sum(row.devices for row in self.devices)} devices cannot even take one step"
            )
        if self.base_bytes:
            took = f", {self.base_seconds:,.1f} s on the slowest link" if self.base_seconds else ""
            said.append(f"base, sent once: {shown_bytes(self.base_bytes)}{took}; no deadline applies to it")
        if self.fitted:
            said.append(
                f"depths are fitted to {self.deadline:.1f} s, the tightest deadline that leaves nobody out "
                "and lets the fastest device train everything"
            )
        psi = "infinite" if self.psi is None else f"{self.psi:,.3f}"
        said.append(
            f"a FedPMT round takes {self.round_seconds:,.1f} s, a FedAvg round "
            f"{self.fedavg_round_seconds:,.1f} s; psi is {psi}"
        )
        return [*said, *([] if self.note is None else [self.note])]


def plan_table(
    task: str,
    planner: Planner,
    fleet: Fleet,
    samples: int,
    deadline: float | None,
    *,
    plan: str = "paper",
    share: float | None = None,
) -> PlanTable:
    """One row per kind of device, slowest first; in a fleet of very many kinds, one per level and depth.

    With a `share`, devices trade samples for layers, and that share of their steps is the least they are left with.
    """
    kinds = fleet.profiles if len(fleet.profiles) <= MOST_ROWS else _groups(planner, fleet, samples)
    rows = tuple(_row(planner, device, count, samples, share) for device, count in kinds)
    chosen = np.repeat([row.depth for row in rows], [row.devices for row in rows])
    shares = np.bincount(chosen - 1, minlength=len(planner.depths)) / len(fleet)
    psi = splitting_constant(shares.tolist())
    slowest = float(planner.seconds_of(fleet, full(planner.structure), samples).max())
    limit = math.inf if deadline is None else deadline
    reached = max((row for row in rows if row.fits), key=lambda row: row.depth, default=None)
    names = tuple(layer.name for layer in planner.structure.layers)
    uncovered = names if reached is None else reached.frozen
    by_deadline = planner.assign == "deadline"
    return PlanTable(
        task=task,
        assign=planner.assign,
        plan=plan,
        share=1.0 if share is None else share,
        mode=planner.price.mode,
        deadline=planner.deadline if by_deadline else deadline,
        fitted=by_deadline and deadline is None,
        devices=rows,
        psi=psi if math.isfinite(psi) else None,
        uncovered=uncovered,
        note=planner.untrained(uncovered, fleet, samples) if uncovered else None,
        round_seconds=min(limit, max(row.seconds for row in rows)),
        fedavg_round_seconds=min(limit, slowest),
        base_bytes=planner.structure.base_bytes,
        base_seconds=max(planner.structure.base_bytes / device.downlink for device, _ in kinds),
    )


def _groups(planner: Planner, fleet: Fleet, samples: int) -> list[tuple[Device, int]]:
    """Devices of one level and depth together, each group shown by its slowest."""
    groups = []
    for members in planner.groups(fleet, samples):
        slowest = fleet.device(int(members[np.argmin(fleet.speeds[members])]))
        groups.append((replace(slowest, name=f"level {slowest.level}, the slowest of"), len(members)))
    return groups


def _row(planner: Planner, device: Device, count: int, samples: int, share: float | None) -> PlanRow:
    plan = planner.plan(device, samples)
    every = plan.meter.steps
    part, steps = (
        (plan.deepest(planner.depths), every) if share is None else plan.trade(planner.depths, share)
    )
    depth = planner.depths.index(part) + 1
    down, up = planner.traffic(part)
    trained = mask(planner.structure, part)
    names = [layer.name for layer in planner.structure.layers]
    usage = plan.meter.usage(part, steps)
    return PlanRow(
        name=device.name,
        level=device.level,
        devices=count,
        speed=device.speed,
        depth=depth,
        frozen=tuple(name for name, on in zip(names, trained, strict=True) if not on),
        trains_from=next(name for name, on in zip(names, trained, strict=True) if on),
        seconds=usage.seconds,
        joules=None if device.watts is None else usage.joules,
        fits=usage <= plan.room
        if share is not None or plan.budgeted
        else planner.fits(device, part, samples),
        upload_bytes=up,
        download_bytes=down,
        memory_bytes=planner.price(part).memory_bytes,
        ratio=planner.price(part).share,
        steps=steps,
        all_steps=every,
        deeper_steps=plan.meter.affordable(planner.depths[depth], plan.room)
        if depth < len(planner.depths)
        else None,
    )
