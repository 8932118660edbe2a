"""What the script of the page draws: curves and rounds as plain numbers, small enough to embed.

The numbers are those of the records. Lists that are the same for several curves (rounds, times) are kept once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedpmt.records import ACCURACY
from fedpmt.report.drawing import AXES, curve, places, scores
from fedpmt.report.figures import (
    choose_round,
    deadline_of,
    is_stepped,
    level_names,
    levels_of,
    seconds_of,
    start_of,
)
from fedpmt.report.groups import clean
from fedpmt.report.tables import OUTCOMES, score_names
from fedpmt.report.theme import PALETTE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fedpmt.records import ClientScores, RoundRecord, RunRecord
    from fedpmt.report.drawing import Against, Values
    from fedpmt.report.groups import Group
    from fedpmt.report.markup import Material

DIGITS = 7
"""Figures of a number that are kept: more than a screen can show, fewer than a record has."""

BARS = 12_000
"""The most bars (devices in rounds) that a page carries; with more, some rounds are left out."""

UNITS = {"rounds": "plain", "seconds": "time", "bytes": "bytes", "joules": "joules"}


@dataclass(frozen=True)
class Measure:
    """A number that a run has by round, and how it is shown."""

    key: str
    title: str
    unit: str  # "percent", "plain" or "joules"
    values: Callable[[RunRecord], Values]


@dataclass
class Pool:
    """Lists of numbers, each kept once and referred to by its position."""

    lists: list[list[float]] = field(default_factory=list)
    _known: dict[tuple[float, ...], int] = field(default_factory=dict)

    def add(self, numbers: Iterable[float]) -> int:
        """Keep a list and return its position."""
        rounded = tuple(round_number(number) for number in numbers)
        if rounded not in self._known:
            self._known[rounded] = len(self.lists)
            self.lists.append(list(rounded))
        return self._known[rounded]


def round_number(number: float) -> float:
    """A number with as many figures as are worth embedding; whole ones as integers.

    >>> round_number(0.123456789), round_number(3.0)
    (0.1234568, 3)
    """
    shown = float(f"{number:.{DIGITS}g}")
    return int(shown) if shown.is_integer() and abs(shown) < 1e15 else shown


def chart_data(material: Material) -> dict[str, Any]:
    """Everything that the script draws, as JSON values."""
    pool, found = Pool(), measures(material)
    groups = [_group(material, group, found, pool) for group in material.groups]
    used = {axis for group in groups for one in group["curves"].values() for axis in one["x"]}
    drawn = {key for group in groups for key in group["curves"]}
    return {
        "groups": groups,
        "measures": [
            {"key": one.key, "title": one.title, "unit": one.unit} for one in found if one.key in drawn
        ],
        "axes": [
            {"key": key, "title": title, "unit": UNITS[key]}
            for key, (title, _) in AXES.items()
            if key in used
        ],
        "lists": pool.lists,
        "busy": _busy(material.groups),
    }


def _group(material: Material, group: Group, found: Sequence[Measure], pool: Pool) -> dict[str, Any]:
    look = material.looks[group.line]
    curves = {one.key: drawn for one in found if (drawn := _curve(group, one, pool)) is not None}
    return {
        "line": group.line,
        "panel": group.panel,
        "colour": PALETTE.index(look.colour),
        "dashes": list(look.dashes),
        "seeds": len(group.runs),
        "score": group.score_name,
        "percent": group.score_name == ACCURACY,
        "curves": curves,
    }


def _curve(group: Group, measure: Measure, pool: Pool) -> dict[str, Any] | None:
    """A curve of a group against each axis that all its runs have; None where there is none."""
    axes: list[Against] = ["rounds", "seconds", "bytes", "joules"]
    known = [axis for axis in axes if all(places(run, axis) for run in group.runs if measure.values(run))]
    drawn = {axis: found for axis in known if (found := curve(group.runs, axis, measure.values)) is not None}
    if "rounds" not in drawn:
        return None
    whole = drawn["rounds"]
    several = len(group.runs) > 1
    return {
        "x": {axis: pool.add(found.place.tolist()) for axis, found in drawn.items()},
        "mean": pool.add(whole.mean.tolist()),
        **({"low": pool.add(whole.low.tolist()), "high": pool.add(whole.high.tolist())} if several else {}),
    }


def measures(material: Material) -> list[Measure]:
    """The numbers by round that runs may have: scores, losses, privacy, energy and fairness."""
    unit = "percent" if material.score_name == ACCURACY else "plain"
    others = [
        Measure(f"score:{name}", name, "plain", lambda run, name=name: _other(run, name))
        for name in score_names(material.runs)
    ]
    return [
        Measure("score", f"test {material.score_name}", unit, scores),
        Measure("loss", "test loss", "plain", lambda run: _of(run, lambda step: step.loss)),
        *others,
        Measure("training", "training loss", "plain", lambda run: _metric(run, "train_loss")),
        Measure("epsilon", "privacy spent (ε)", "plain", lambda run: _metric(run, "epsilon")),
        Measure("energy", "energy used", "joules", _energy),
        Measure("mean", "clients: mean", unit, lambda run: _clients(run, lambda one: one.mean)),
        Measure(
            "worst", "clients: worst tenth", unit, lambda run: _clients(run, lambda one: one.worst_tenth)
        ),
        Measure("spread", "clients: spread", unit, lambda run: _clients(run, lambda one: one.spread)),
    ]


def _of(run: RunRecord, value: Callable[[RoundRecord], float | None]) -> dict[int, float]:
    found = {step.round: value(step) for step in run.rounds}
    return {number: one for number, one in found.items() if one is not None and math.isfinite(one)}


def _metric(run: RunRecord, name: str) -> dict[int, float]:
    return _of(run, lambda step: step.metrics.get(name))


def _other(run: RunRecord, name: str) -> dict[int, float]:
    return _of(run, lambda step: {clean(key): value for key, value in step.scores.items()}.get(name))


def _clients(run: RunRecord, value: Callable[[ClientScores], float]) -> dict[int, float]:
    return _of(run, lambda step: None if step.clients is None else value(step.clients))


def _energy(run: RunRecord) -> dict[int, float]:
    if any(step.joules is None for step in run.rounds):
        return {}
    spent = accumulate(step.joules or 0.0 for step in run.rounds)
    return {step.round: total for step, total in zip(run.rounds, spent, strict=True)}


def _busy(groups: Sequence[Group]) -> dict[str, Any]:
    """Who was busy when, in the first run with rounds of each group."""
    chosen = [
        (position, run)
        for position, group in enumerate(groups)
        if (run := next((one for one in group.runs if one.rounds), None)) is not None
    ]
    numbers = _rounds([run for _, run in chosen])
    parts: dict[str, int] = {}
    panels: list[dict[str, Any]] = []
    steps: list[RoundRecord] = []
    for position, run in chosen:
        drawn = list(
            {step.round: step for number in numbers for step in choose_round([run], number)}.values()
        )
        steps += drawn
        panels.append(
            {
                "group": position,
                "seed": clean(run.settings.get("seed", "")),
                "deadline": deadline_of(run),
                "rounds": [_step(step, parts) for step in drawn],
            }
        )
    names, colours = level_names(steps), levels_of(steps)
    levels = {str(level): {"name": names[level], "colour": colours[level]} for level in names}
    return {
        "numbers": numbers,
        "parts": list(parts),
        "outcomes": list(OUTCOMES),
        "levels": levels,
        "panels": panels,
    }


def _rounds(runs: Sequence[RunRecord]) -> list[int]:
    """The rounds that a reader can choose from: evenly spread over all, as many as a page can carry."""
    every = sorted({step.round for run in runs for step in run.rounds})
    bars = sum(max(len(step.devices) for step in run.rounds) for run in runs)
    most = max(1, BARS // max(bars, 1))
    if len(every) <= most:
        return every
    if most == 1:
        return every[-1:]
    return [every[round(place * (len(every) - 1) / (most - 1))] for place in range(most)]


def _step(step: RoundRecord, parts: dict[str, int]) -> dict[str, Any]:
    devices = sorted(step.devices, key=lambda device: (device.level, device.device))
    bars = [
        [
            device.device,
            device.level,
            round_number(device.speed),
            parts.setdefault(clean(device.part), len(parts)),
            _short(start_of(device, step)),
            _short(seconds_of(device, step)),
            _short(min(max(device.transfer_seconds, 0.0), seconds_of(device, step))),
            OUTCOMES.index(device.outcome),
        ]
        for device in devices
    ]
    return {
        "round": step.round,
        "seconds": _short(step.round_seconds),
        "stepped": is_stepped(step),
        "bars": bars,
    }


def _short(seconds: float) -> float:
    return round_number(float(f"{seconds:.4g}"))
