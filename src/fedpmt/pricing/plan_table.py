"""A plan as a table: what each kind of device trains, what it takes, what keeps it from more, and ψ."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from fedpmt.parts.depth import full
from fedpmt.parts.part import mask
from fedpmt.pricing.plan import list_names, round_up, splitting_constant
from fedpmt.pricing.price import Mode
from fedpmt.pricing.text_table import WIDTH, text_table, wrap
from fedpmt.resources import ROUNDING
from fedpmt.types import SettingError, shown_bytes, shown_joules, shown_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.parts.part import Part
    from fedpmt.pricing.meter import Plan
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
    fits: bool  # in time, in memory and within the budget
    binds: tuple[str, ...]  # what keeps it from one layer more, or from taking part at all if it does not fit
    upload_bytes: int
    download_bytes: int
    memory_bytes: int
    ratio: float  # of the full model's operations
    steps: int  # that it takes in a round
    all_steps: int  # that a whole round has
    deeper_steps: (
        int | None
    )  # that one layer more would leave, 0 where there is no memory for it; None: no layer more


class PlanStep(BaseModel):
    """The next larger deadline, or memory of a kind of device, that changes the plan; and what it buys."""

    model_config = ConfigDict(frozen=True)
    amount: float  # seconds, or bytes
    name: str  # the kind of device that it helps; of several, the slowest
    devices: int  # that would train more
    trains_from: str
    psi: float | None  # then; None: infinite


class PlanTable(BaseModel):
    """What each kind of device of a fleet trains, slowest first."""

    model_config = ConfigDict(frozen=True)
    task: str  # the net of the paper, or the user's class
    assign: Literal["level", "deadline"]
    plan: str = "paper"
    share: float = 1.0  # of its steps, the least that a device is left with for a deeper part
    mode: Mode
    samples: int  # of a device
    full_seconds: float  # what speed 1 takes for one epoch of the full model on them
    deadline: float | None  # what depths are fitted to
    fitted: bool  # whether the deadline was found here, for want of a given one
    devices: tuple[PlanRow, ...]
    layers: int
    depths: int  # |I|
    psi: float | None  # None: infinite, since some layer is trained by nobody
    uncovered: tuple[str, ...]  # layers that no device trains
    note: str | None  # what to change then
    round_seconds: float
    fedavg_round_seconds: float
    least_deadline: float | None  # the smallest that keeps every device in; None: no deadline does
    more_time: PlanStep | None = None  # None where no deadline changes anything, or it is not looked for
    more_memory: PlanStep | None = None
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
        rows = [self._cells(row) for row in self.devices]
        columns = list(rows[0])
        names = [columns.index(name) for name in ("device", "trains from", "limit")]
        table = text_table(title, columns, [list(row.values()) for row in rows], names=names, width=width)
        return "\n".join([table, *(line for text in self._sentences() for line in wrap(text, width))])

    def _cells(self, row: PlanRow) -> dict[str, str]:
        """The columns of a row; 80 characters have room for some only, and `--json` has all."""
        spent = {"upload": shown_bytes(row.upload_bytes)}
        if row.joules is not None:
            spent = {"energy": shown_joules(row.joules)}
        if self.plan != "paper":
            spent = {}
        return {
            "device": row.name or f"level {row.level}",
            "count": f"{row.devices:,}",
            "speed": f"{row.speed:,.3g}" if row.speed < 100 else f"{row.speed:,.0f}",
            "depth": str(row.depth),
            "trains from": row.trains_from,
            **({} if self.plan == "paper" else {"steps": f"{row.steps} of {row.all_steps}"}),
            "seconds": _shown_seconds(row.seconds),
            "limit": ("" if row.fits else "out: ") + (", ".join(row.binds) or "-"),
            **spent,
            "memory": shown_memory(row.memory_bytes),
        }

    def _sentences(self) -> list[str]:
        down = shown_bytes(max(row.download_bytes for row in self.devices))
        note = [] if self.note is None else [f"{self.note[:1].upper()}{self.note[1:]}."]
        said = [*note, *self._about_time(), self._about_psi()]
        said += [*self._about_steps(), *self._about_trading(), *self._about_base()]
        if any(row.binds for row in self.devices):
            said.append("Limit: what keeps a device from training one layer more.")
        return [
            *said,
            f"Each device downloads {down} a round. Speed 1 trains one epoch of the full model on {self.samples:,} "
            f"samples in {self.full_seconds:g} s.",
        ]

    def _about_trading(self) -> list[str]:
        if self.plan == "paper":
            return []
        left = [row.deeper_steps for row in self.devices if row.deeper_steps is not None]
        more = f"; one layer more would leave {min(left)} to {max(left)} of them" if left else ""
        part = f"the deepest part that leaves {100 * self.share:.0f} % of its steps or more"
        fewer = sum(row.devices for row in self.devices if row.steps < self.share * row.all_steps)
        if fewer == sum(row.devices for row in self.devices):
            said = [
                f"No device can train {part}: each trains the smallest part, in the steps that it can afford."
            ]
        else:
            said = [f"Each trains {part}{more}."]
            if fewer:
                said.append(
                    f"{fewer:,} devices have too little for that: they train the smallest part, in the steps that they "
                    "can afford."
                )
        if self.plan == "rotated":
            said.append(
                "Every few rounds (fedpmt.every) a device trains all layers that it has the memory for, in as many "
                "steps as its budget leaves."
            )
        return said

    def _about_base(self) -> list[str]:
        if not self.base_bytes:
            return []
        took = f", {_shown_seconds(self.base_seconds)} s on the slowest link" if self.base_seconds else ""
        return [f"Base, sent once: {shown_bytes(self.base_bytes)}{took}; no deadline applies to it."]

    def _about_time(self) -> list[str]:
        said = []
        if self.fitted:
            said.append(
                f"Depths are fitted to {round_up(self.deadline or 0.0)} s, the tightest deadline that leaves nobody "
                "out and lets the fastest device train everything."
            )
        out = [row for row in self.devices if not row.fits]
        if out:
            said.append(
                f"{sum(row.devices for row in out):,} of {sum(row.devices for row in self.devices):,} devices take no "
                f"part: {list_names([_shown_name(row) for row in out])}."
            )
        if self.least_deadline is None:
            said.append("No deadline keeps every device in: some lack memory or budget.")
        elif not self.fitted:
            said.append(
                f"The smallest deadline that keeps every device in is {round_up(self.least_deadline)} s."
            )
        said.append(
            f"A FedPMT round takes {_shown_seconds(self.round_seconds)} s, a FedAvg round "
            f"{_shown_seconds(self.fedavg_round_seconds)} s."
        )
        return said

    def _about_psi(self) -> str:
        """What ψ means for this plan: its error after as many rounds, compared with that of FedAvg (docs/theory.md)."""
        if self.psi is None:
            return "psi is infinite: some layers are trained by nobody."
        if self.psi <= self.depths * (1 + ROUNDING):
            return (
                f"psi is {self.depths}, its smallest value: every device trains every layer, as with FedAvg."
            )
        said = f"psi is {self.psi:.3g}, and {self.depths} if every device trained every layer"
        if self.plan != "paper":
            return f"{said}. What it says of the error holds for equal steps, which this plan does not give."
        return (
            f"{said}: in theory, the error after the same number of rounds is about {self.psi / self.depths:.3g} times "
            "as large."
        )

    def _about_steps(self) -> list[str]:
        said = []
        if self.more_time is not None:
            said.append(f"With --deadline {round_up(self.more_time.amount)}, {_bought(self.more_time)}.")
        if self.more_memory is not None:
            need = shown_memory(self.more_memory.amount)
            said.append(f"With {need} of memory on {self.more_memory.name}, {_bought(self.more_memory)}.")
        return said


def _bought(step: PlanStep) -> str:
    psi = "" if step.psi is None else f", and psi falls to {step.psi:.3g}"
    verb = "trains" if step.devices == 1 else "train"
    return f"{step.devices:,} of {step.name} {verb} from {step.trains_from} on{psi}"


def _shown_name(row: PlanRow) -> str:
    return f"{row.name or f'level {row.level}'} ({', '.join(row.binds)})"


def _shown_seconds(seconds: float) -> str:
    """Seconds with at least three significant digits, as far as a plan needs them.

    >>> [_shown_seconds(value) for value in (1234.5, 24.37, 4.186, 0.02557)]
    ['1,234.5', '24.4', '4.2', '0.0256']
    """
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.3g}"


@dataclass(frozen=True)
class Planning:
    """A planner at work on kinds of devices; of a table, what depends on the deadline and on devices' memory."""

    planner: Planner
    kinds: Sequence[tuple[Device, int]]
    samples: int
    share: float | None = None  # of the steps, the least that a traded plan leaves; None: the paper's plan
    latest: float = math.inf  # after which replies are dropped

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """One row for each kind."""
        return tuple(self._row(device, count) for device, count in self.kinds)

    @cached_property
    def psi(self) -> float:
        """ψ of those that take part, as shares of all devices."""
        trained = np.zeros(len(self.planner.depths))
        for row in self.rows:
            trained[row.depth - 1] += row.devices if row.fits else 0
        return splitting_constant((trained / sum(row.devices for row in self.rows)).tolist())

    @property
    def by_deadline(self) -> bool:
        """Whether depths depend on the deadline."""
        budget = self.planner.budget
        return self.planner.assign == "deadline" and (budget is None or budget.planned)

    def least_deadline(self, fleet: Fleet) -> float | None:
        """Find the smallest deadline that keeps every device in; None where memory or a budget keeps some out."""
        if self.by_deadline:
            # What is traded within a budget is worth what the planned depth costs.
            traded = self.share is not None and self.planner.budget is None
            return self.planner.least_deadline(
                fleet, self.samples, 1 / self.rows[0].all_steps if traded else 1.0
            )
        out = any(set(row.binds) - {"time", "upload", "download"} for row in self.rows if not row.fits)
        return None if out else max(row.seconds for row in self.rows)

    def more_time(self) -> PlanStep | None:
        """Find the next larger deadline with which some device trains more."""
        if not self.by_deadline:
            return None
        now = self.planner.deadline * (1 + 2 * ROUNDING)
        found = sorted({one for device, _ in self.kinds for one in self._ends(device) if one > now})

        def with_deadline(seconds: float) -> Planning:
            planner = replace(self.planner, deadline=seconds)
            return replace(self, planner=planner, latest=max(seconds, self.latest))

        place = bisect_left(found, True, key=lambda one: bool(self._gains(with_deadline(one))))
        return None if place == len(found) else self._step(found[place], with_deadline(found[place]))

    def more_memory(self) -> PlanStep | None:
        """Find the kind of device that trains more with the least additional memory."""
        if not self.by_deadline:
            return None
        best: tuple[float, PlanStep] | None = None
        for place, (device, _) in enumerate(self.kinds):
            for part in self.planner.depths:
                need = float(self.planner.price(part, self.samples).memory_bytes)
                if need <= device.memory or (best is not None and need - device.memory >= best[0]):
                    continue
                kinds = [*self.kinds]
                kinds[place] = (replace(device, memory=need), kinds[place][1])
                step = self._step(need, replace(self, kinds=kinds))
                best = best if step is None else (need - device.memory, step)
        return None if best is None else best[1]

    def _ends(self, device: Device) -> list[float]:
        """When a device would be ready with each part: in all steps, and in as few as a traded plan leaves."""
        plan = self.planner.plan(device, self.samples)
        steps = {plan.meter.steps, self._wanted(plan), *([] if self.share is None else [1])}
        return [plan.meter.usage(part, one).seconds for part in self.planner.depths for one in steps]

    def _gains(self, other: Planning) -> list[PlanRow]:
        """Rows of another planning that train deeper, or at all, compared with this one."""
        return [
            then
            for now, then in zip(self.rows, other.rows, strict=True)
            if then.fits and (then.depth > now.depth or not now.fits)
        ]

    def _step(self, amount: float, other: Planning) -> PlanStep | None:
        gains = self._gains(other)
        if not gains:
            return None
        name, psi = gains[0].name or f"level {gains[0].level}", other.psi
        return PlanStep(
            amount=amount,
            name=name,
            devices=sum(
                row.devices for row in gains if row.name == gains[0].name and row.level == gains[0].level
            ),
            trains_from=gains[0].trains_from,
            psi=psi if math.isfinite(psi) else None,
        )

    def _wanted(self, plan: Plan) -> int:
        """Steps that a device must be left with."""
        every = plan.meter.steps
        return every if self.share is None else max(1, math.ceil(self.share * every * (1 - ROUNDING)))

    def _row(self, device: Device, count: int) -> PlanRow:
        planner, plan = self.planner, self.planner.plan(device, self.samples)
        every = plan.meter.steps
        part, steps = (
            (plan.deepest(planner.depths), every)
            if self.share is None
            else plan.trade(planner.depths, self.share)
        )
        depth = planner.depths.index(part) + 1
        deeper = planner.depths[depth] if depth < len(planner.depths) else None
        down, up = planner.traffic(part)
        trained = mask(planner.structure, part)
        names = [layer.name for layer in planner.structure.layers]
        usage = plan.meter.usage(part, steps)
        fits = usage.seconds <= self.latest * (1 + ROUNDING) and (
            usage <= plan.room
            if self.share is not None or plan.budgeted
            else planner.fits(device, part, self.samples)
        )
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
            fits=fits,
            binds=self._outside(plan, part, steps) if not fits else self._binds(plan, deeper),
            upload_bytes=up,
            download_bytes=down,
            memory_bytes=planner.price(part).memory_bytes,
            ratio=planner.price(part).share,
            steps=steps,
            all_steps=every,
            deeper_steps=None if deeper is None else plan.meter.affordable(deeper, plan.room),
        )

    def _binds(self, plan: Plan, deeper: Part | None) -> tuple[str, ...]:
        """Name what keeps a device that takes part from the next deeper part; nothing where it trains everything."""
        if deeper is None:
            return ()
        if self.planner.assign == "level" and self.planner.budget is None:
            return ("level",)
        return self._outside(plan, deeper, self._wanted(plan), granted=True)

    def _outside(self, plan: Plan, part: Part, steps: int, *, granted: bool = False) -> tuple[str, ...]:
        """Name the limits that a part exceeds in these steps.

        A device that takes part, with what it is `granted`, may be late: without a deadline nobody is dropped.
        """
        usage, device = plan.meter.usage(part, steps), plan.meter.device
        found = []
        end = self.planner.deadline if self.by_deadline else math.inf
        end = end if granted else min(end, self.latest)
        if usage.seconds > end * (1 + ROUNDING):
            found.append(self._slow(plan, part, steps, end))
        held = device.memory if not granted or self.planner.assign == "deadline" else math.inf
        if usage.memory > held:
            found.append("memory")
        budget = self.planner.budget
        # A budget as planned is what the planned depth takes, which only deadline and memory have decided.
        deeper = plan.depth is not None and self.planner.depths.index(part) >= plan.depth
        if budget is not None and not (budget.planned and deeper):
            exceeded = usage.of(budget.resource) > plan.limit.of(budget.resource) * (1 + ROUNDING)
            found += [budget.resource] if exceeded and budget.resource not in found else []
        return tuple(found)

    def _slow(self, plan: Plan, part: Part, steps: int, end: float) -> str:
        """Tell a slow link from a slow processor: without transfers, would the device be in time?"""
        quote = plan.meter.quote(plan.meter.complete(part), steps)
        if quote.usage.seconds - quote.transfer > end * (1 + ROUNDING):
            return "time"
        device, (down, up) = plan.meter.device, self.planner.traffic(part)
        return "upload" if up / device.uplink >= down / device.downlink else "download"


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

    Raises:
        SettingError: No device can take part.
    """
    latest = math.inf if deadline is None else deadline
    kinds = planner.kinds(fleet)
    few = len(kinds) <= MOST_ROWS
    kinds = kinds if few else _groups(planner, fleet, samples)
    planning = Planning(planner, kinds, samples, share, latest)
    rows, psi = planning.rows, planning.psi
    reached = max((row for row in rows if row.fits), key=lambda row: row.depth, default=None)
    if reached is None:
        raise SettingError(planner.explain_refusal(fleet, samples, rows[-1].steps / rows[-1].all_steps))
    by_deadline = planner.assign == "deadline"
    return PlanTable(
        task=task,
        assign=planner.assign,
        plan=plan,
        share=1.0 if share is None else share,
        mode=planner.price.mode,
        samples=samples,
        full_seconds=planner.times.full_seconds,
        deadline=planner.deadline if by_deadline else deadline,
        fitted=by_deadline and deadline is None,
        devices=rows,
        layers=len(planner.structure.layers),
        depths=len(planner.depths),
        psi=psi if math.isfinite(psi) else None,
        uncovered=reached.frozen,
        note=planner.untrained(reached.frozen, fleet, samples) if reached.frozen else None,
        round_seconds=min(latest, max(row.seconds for row in rows)),
        fedavg_round_seconds=min(
            latest, float(planner.seconds_of(fleet, full(planner.structure), samples).max())
        ),
        least_deadline=planning.least_deadline(fleet),
        more_time=planning.more_time() if few else None,
        more_memory=planning.more_memory() if few else None,
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
