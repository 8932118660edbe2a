"""Figure 1 of the paper (label fig1): test accuracy against rounds, three nets, i.i.d. and two classes per device.

The paper gives no numbers with its curves; what its text says of them is checked here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from fedpmt.models.nets import net
from fedpmt.report.drawing import curve
from fedpmt.report.quantities import Spread
from fedpmt.report.tables import evaluated
from fedpmt.report.theme import INK, PALETTE, RESERVED, new_figure, themed
from reproduction.artefact import Artefact, Picture, Table
from reproduction.paper import DATA, IID, PARTITIONS, TITLES, TWO_CLASSES, Experiment, seeds_text
from reproduction.readings import Arrival, fluctuation, guess, log_ratios, smooth
from reproduction.verdicts import (
    HOLDS,
    Claim,
    Estimate,
    above,
    below,
    near,
    pair,
    percent,
    settle,
    times,
    undecided,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library
    from reproduction.paper import Scope
    from reproduction.verdicts import Case

Line = tuple[str, int | None]  # method and |I|; FedAvg has no depths
Panel = tuple[str, str]
NAMES = {"fedpmt": "FedPMT", "feddrop": "FedDrop", "fedavg": "FedAvg"}
DASHED: Any = (0, (4, 1.6))
TAIL = 5
"""Evaluations that an accuracy is the mean of: with two classes per device curves jump."""

ABOVE, BELOW = 0.90, 0.60
"""The paper: with two classes per device and |I| = 4, FedPMT is above the one, FedDrop below the other."""

ALIKE = 0.02
"""How far apart two final accuracies may be that the paper calls similar, or their margin negligible."""

STEP = 50
"""Rounds from one look at FedPMT's lead to the next: the paper does not say how many rounds its figure shows."""

SOON = {
    ("mnist", IID): 0.9,
    ("mnist", TWO_CLASSES): 0.8,
    ("cifar10", IID): 0.55,
    ("cifar10", TWO_CLASSES): 0.45,
}
"""Accuracies whose rounds are counted: on CIFAR-10 the middle ones of the paper's Table II."""

FIGURE = "IV-C, figure 1"
FEDDROP_VARIED = "FedDrop's averaging, scaling and scope are varied in [studies](studies.md)."
LEVELS_VARIED = "Levels that are redrawn in each round are in [studies](studies.md)."


def lines_of(task: str) -> list[Line]:
    """The five lines of a panel."""
    large, small = net(task).depths
    return [("fedavg", None), ("fedpmt", small), ("fedpmt", large), ("feddrop", small), ("feddrop", large)]


def line_name(line: Line) -> str:
    """As the legend has it.

    >>> line_name(("fedpmt", 4)), line_name(("fedavg", None))
    ('FedPMT, |I| = 4', 'FedAvg')
    """
    method, depths = line
    return NAMES[method] + (f", |I| = {depths}" if depths else "")


def settings_of(scope: Scope, panel: Panel, line: Line, seed: int) -> Settings:
    """One run of a panel."""
    return scope.settings(line[0], panel[0], panel[1], seed, line[1])


def panels_of(scope: Scope) -> list[Panel]:
    """Above i.i.d., below two classes per device; a column per net."""
    return [(task, partition) for partition in (IID, TWO_CLASSES) for task in scope.tasks]


def runs(scope: Scope) -> list[Settings]:
    """All runs, seed by seed, so that the first seed of all panels is there first."""
    return [
        settings_of(scope, panel, line, seed)
        for seed in scope.seeds
        for panel in panels_of(scope)
        for line in lines_of(panel[0])
    ]


Runs = dict[Panel, dict[Line, dict[int, "RunRecord"]]]
"""By panel, line and seed."""

Readings = dict[Panel, dict[Line, dict[int, float]]]


def make(library: Library, scope: Scope) -> Artefact:
    """The six panels, the final accuracies, FedPMT's lead round by round, and what of the paper's text holds."""
    found: Runs = {
        panel: {line: _found(library, scope, panel, line) for line in lines_of(panel[0])}
        for panel in panels_of(scope)
    }
    finals = read(found, final)
    seeds: dict[str, set[int]] = {}
    for (task, _), lines in found.items():
        seeds.setdefault(task, set()).update(map(len, lines.values()))
    about = "lines are means, bands reach from the worst to the best seed"
    caption = f"Test accuracy against rounds, {counted(seeds)}; {about}."
    lead = (
        f"FedPMT's lead over FedDrop at equal operations against the round, in points, {counted(seeds)}: the mean of "
        f"{TAIL} evaluations, over seeds, with 95 % intervals. Above zero FedPMT is ahead. Early rounds may "
        "leave the axis."
    )
    leads = leads_by_round(found)
    return Artefact(
        "accuracy",
        "Accuracy of FedPMT, FedDrop and FedAvg (the paper's Figure 1)",
        f"python -m reproduction accuracy{scope.suffix}",
        "FedPMT and FedDrop at equal operations (mode `paper`), FedAvg as the upper bound. Settings are the paper's: "
        "plain SGD, one epoch, levels fixed per device and equally many of each in a round.",
        [_finals_table(finals), _fluctuation_table(read(found, fluctuation)), _horizon_table(leads)],
        [Picture("accuracy", draw(found), caption), Picture("accuracy-lead", draw_leads(found), lead)],
        {
            "final": _values(finals),
            "seeds": {task: sorted(counts) for task, counts in seeds.items()},
            "lead": [claim.values() for claim in leads],
        },
        settle(claims(found, leads)),
    )


def read(found: Runs, of: Callable[[RunRecord], float | None]) -> Readings:
    """One number of every run that has it."""
    return {
        panel: {
            line: {seed: value for seed, run in members.items() if (value := of(run)) is not None}
            for line, members in lines.items()
        }
        for panel, lines in found.items()
    }


def counted(seeds: Mapping[str, Collection[int]]) -> str:
    """How many seeds the lines of each net have, in words.

    >>> counted({"fcnn-mnist": {3}, "cnn-mnist": {3}}), counted({"cnn-mnist": {10}, "cnn-cifar10": {2, 3}})
    ('3 seeds', 'CNN-MNIST 10 seeds, CNN-CIFAR10 2 to 3 seeds')
    """
    words = {task: seeds_text(counts) for task, counts in seeds.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{TITLES[task]} {text}" for task, text in words.items())


def _found(library: Library, scope: Scope, panel: Panel, line: Line) -> dict[int, RunRecord]:
    every = {seed: library.find(settings_of(scope, panel, line, seed)) for seed in scope.seeds}
    return {seed: run for seed, run in every.items() if run is not None}


def final(run: RunRecord) -> float:
    """The accuracy a run ends with; that of a guess where it diverged."""
    return height(run, len(run.rounds))


def height(run: RunRecord, place: int) -> float:
    """The mean of the last evaluations up to a round; a guess where the run diverged."""
    last = [accuracy for step, accuracy in evaluated(run) if step.round <= place][-TAIL:]
    return guess(run) if run.diverged or not last else sum(last) / len(last)


@themed
def draw(found: Runs) -> Figure:
    """Rows are partitions, columns are nets."""
    tasks = list(dict.fromkeys(task for task, _ in found))
    partitions = list(dict.fromkeys(partition for _, partition in found))
    figure = new_figure(3.4 * len(tasks), 2.7 * len(partitions) + 0.5)
    grid = figure.subplots(len(partitions), len(tasks), squeeze=False, sharey="col")
    dashes = {}
    for (task, partition), lines in found.items():
        axes = grid[partitions.index(partition)][tasks.index(task)]
        large = net(task).depths[0]
        for line, members in lines.items():
            shape = curve(list(members.values()), "rounds")
            if shape is None:
                continue
            method, depths = line
            colour = PALETTE[RESERVED[method]]
            style: Any = "-" if depths in (None, large) else DASHED
            dashes[method, depths == large] = style
            if len(members) > 1:
                axes.fill_between(shape.place, shape.low, shape.high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(shape.place, shape.mean, color=colour, linestyle=style, linewidth=1.4)
        axes.set_title(f"{TITLES[task]}, {PARTITIONS[partition]}")
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round")
    for row in grid:
        row[0].set_ylabel("test accuracy")
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    colours = {method: PALETTE[RESERVED[method]] for method in NAMES}
    large = "|I| = 4 (CIFAR10: 5)"
    entries: list[tuple[str, str, Any]] = [("FedAvg", colours["fedavg"], "-")]
    for method in ("fedpmt", "feddrop"):
        entries += [
            (f"{NAMES[method]}, |I| = 2", colours[method], DASHED),
            (f"{NAMES[method]}, {large}", colours[method], "-"),
        ]
    handles = [Line2D([], [], color=colour, linestyle=style) for _, colour, style in entries]
    figure.legend(handles, [name for name, _, _ in entries], loc="outside lower center", ncols=len(entries))


LeadCurve = tuple[list[int], list[Estimate]]


def lead_curve(ours: Mapping[int, RunRecord], theirs: Mapping[int, RunRecord]) -> LeadCurve:
    """Our lead at every evaluation, in points, on equal seeds."""
    both = sorted(ours.keys() & theirs.keys())
    places = [step.round for step, _ in evaluated(ours[both[0]])][TAIL - 1 :] if both else []
    found = [
        Estimate.of([100 * (height(ours[seed], place) - height(theirs[seed], place)) for seed in both])
        for place in places
    ]
    return places, [one for one in found if one is not None]


@themed
def draw_leads(found: Runs) -> Figure:
    """FedPMT's lead over FedDrop, a panel per net and split as in the figure."""
    tasks = list(dict.fromkeys(task for task, _ in found))
    partitions = list(dict.fromkeys(partition for _, partition in found))
    figure = new_figure(3.4 * len(tasks), 2.5 * len(partitions) + 0.4)
    grid = figure.subplots(len(partitions), len(tasks), squeeze=False)
    for (task, partition), lines in found.items():
        axes = grid[partitions.index(partition)][tasks.index(task)]
        large, small = (
            lead_curve(lines["fedpmt", count], lines["feddrop", count]) for count in net(task).depths
        )
        _draw_lead_panel(axes, large, small)
        axes.set_title(f"{TITLES[task]}, {PARTITIONS[partition]}")
        axes.set_xlabel("round")
    for row in grid:
        row[0].set_ylabel("lead, points")
    colour = PALETTE[RESERVED["fedpmt"]]
    handles = [Line2D([], [], color=colour, linestyle=style) for style in (DASHED, "-")]
    figure.legend(handles, ["|I| = 2", "|I| = 4 (CIFAR10: 5)"], loc="outside lower center", ncols=2)
    return figure


def _draw_lead_panel(axes: Axes, large: LeadCurve, small: LeadCurve) -> None:
    """Two lines with their intervals; the first rounds, a race of their own, may leave the axis."""
    colour, heights = PALETTE[RESERVED["fedpmt"]], [0.0]
    axes.axhline(0, color=INK, linewidth=0.8)
    for (places, leads), style in ((large, "-"), (small, DASHED)):
        means = [one.mean for one in leads]
        if leads and leads[0].runs > 1:
            low, high = ([one.mean + sign * one.half for one in leads] for sign in (-1, 1))
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(places, means, color=colour, linestyle=style, linewidth=1.4)
        heights += [mean for place, mean in zip(places, means, strict=True) if place >= 2 * STEP]
    pad = 0.25 * (max(heights) - min(heights)) + 0.5
    axes.set_ylim(min(heights) - pad, max(heights) + pad)
    axes.set_xlim(left=0)


def _finals_table(finals: Readings) -> Table:
    note = f"Mean of the last {TAIL} evaluations, in %; ± is the standard deviation over seeds."
    return Table("Final accuracy (after the method: |I|)", COLUMNS, _rows(finals), note)


def _fluctuation_table(found: Readings) -> Table:
    note = (
        "The standard deviation of the steps from one evaluation to the next, over the second half of the rounds, in "
        "points; ± is the standard deviation over seeds."
    )
    return Table("How far a curve jumps (after the method: |I|)", COLUMNS, _rows(found, 2), note)


COLUMNS = ("panel", "FedAvg", "FedPMT, 2", "FedPMT, 4 or 5", "FedDrop, 2", "FedDrop, 4 or 5")


def _rows(found: Readings, digits: int = 1) -> list[list[str]]:
    return [
        [f"{TITLES[task]}, {PARTITIONS[partition]}"]
        + [spread_text(Spread.of(members.values()), digits) for members in lines.values()]
        for (task, partition), lines in found.items()
    ]


def spread_text(found: Spread | None, digits: int = 1) -> str:
    """A mean over seeds, in percent."""
    if found is None:
        return "-"
    spread = f" ± {100 * found.deviation:.{digits}f}" if found.count > 1 else ""
    return f"{100 * found.mean:.{digits}f}{spread}"


def leads_by_round(found: Runs) -> list[Claim]:
    """FedPMT's lead over FedDrop every 50 rounds, a claim per round; all of them are a family of their own."""
    longest = max((len(run.rounds) for _, _, run in _every(found)), default=0)
    return settle(
        [
            Claim(
                f"round {place}",
                f"FedPMT is above FedDrop at round {place}",
                FIGURE,
                _leads(_at(found, place)),
            )
            for place in range(STEP, longest + 1, STEP)
        ]
    )


def _every(found: Runs) -> list[tuple[Panel, Line, RunRecord]]:
    return [
        (panel, line, run)
        for panel, lines in found.items()
        for line, members in lines.items()
        for run in members.values()
    ]


def _at(found: Runs, place: int) -> Readings:
    """Accuracies at a round, of panels that have got so far."""
    there = {panel for panel, _, run in _every(found) if len(run.rounds) >= place}
    every = read(found, lambda run: height(run, place))
    return {panel: lines for panel, lines in every.items() if panel in there}


def _horizon_table(leads: list[Claim]) -> Table:
    names = list(dict.fromkeys(case.where for claim in leads for case in claim.cases))
    by_round = [{case.where: case.verdict for case in claim.cases} for claim in leads]
    note = (
        f"Whether FedPMT is above FedDrop at that round, by the mean of {TAIL} evaluations, judged by the "
        "[rules](README.md#how-claims-are-judged) with all cells of this table as one family. The paper does not say "
        "how many rounds its figure shows."
    )
    return Table(
        "FedPMT above FedDrop, round by round",
        ("case", *(claim.name for claim in leads)),
        [[name, *(found.get(name, "-") for found in by_round)] for name in names],
        note,
        words=True,
    )


def horizon_text(leads: list[Claim]) -> str:
    """Up to which round FedPMT's lead holds in most cases, in words."""
    most = [claim for claim in leads if claim.count(HOLDS) > len(claim.cases) / 2]
    if not most:
        best = max(leads, key=lambda claim: claim.count(HOLDS), default=None)
        found = best.count(HOLDS) if best else 0
        return (
            f"it holds in most cases at no round (at best in {found}, at {best.name})"
            if best and found
            else ""
        )
    last = most[-1]
    return f"up to {last.name} it holds in most cases (in {last.count(HOLDS)} of {len(last.cases)} there)"


def claims(found: Runs, leads: list[Claim]) -> list[Claim]:
    """What the text says of the curves, in panels that have all their lines."""
    whole = {panel: lines for panel, lines in found.items() if all(lines.values())}
    finals = read(whole, final)
    return [
        Claim(
            "lead",
            "FedPMT ends above FedDrop at the same operations",
            FIGURE,
            _leads(finals),
            "FedPMT's lead",
            f"{FEDDROP_VARIED} The table above has the verdict at earlier rounds.",
            horizon_text(leads),
        ),
        Claim(
            "levels",
            "FedPMT and FedDrop both end higher with |I| = 2 than with 4 (CIFAR10: 5)",
            FIGURE,
            _rises(finals),
            "higher by",
        ),
        Claim(
            "sooner",
            "with |I| = 2 both converge faster than with 4 (CIFAR10: 5)",
            FIGURE,
            _sooner(whole),
            "rounds with 4 or 5 over rounds with 2",
            "Rounds until the mean of "
            f"{TAIL} evaluations is at "
            + ", ".join(
                f"{100 * goal:.0f} % ({data} {PARTITIONS[split]})" for (data, split), goal in SOON.items()
            )
            + ".",
        ),
        Claim(
            "like-fedavg",
            f"FedPMT with |I| = 2 ends like FedAvg (within {100 * ALIKE:.0f} points), i.i.d. and not",
            FIGURE,
            _gaps(finals, 1),
            "FedPMT less FedAvg",
            LEVELS_VARIED,
        ),
        Claim(
            "like-fedavg-deep",
            f"on the CNNs so does FedPMT with |I| = 4 or 5 (within {100 * ALIKE:.0f} points)",
            FIGURE,
            _gaps({panel: lines for panel, lines in finals.items() if panel[0] != "fcnn-mnist"}, 0),
            "FedPMT less FedAvg",
            LEVELS_VARIED,
        ),
        Claim(
            "fluctuation",
            "on the CNNs with |I| = 4 or 5 FedPMT fluctuates more with two classes per device than i.i.d.",
            FIGURE,
            _jumps(read(whole, fluctuation)),
            "two classes over i.i.d.",
            "The standard deviation of the steps from one evaluation to the next.",
        ),
        Claim(
            "furthest",
            "FedPMT with |I| = 4 is further from FedAvg on the FCNN than on the CNNs",
            FIGURE,
            _furthest(finals),
            "gap on the FCNN less gap here",
        ),
        Claim(
            "two-classes",
            "FedPMT's lead over FedDrop is larger with two classes per device than i.i.d.",
            FIGURE,
            _widens(finals),
            "lead with two classes less lead i.i.d.",
        ),
        Claim(
            "above-90",
            f"MNIST, two classes, |I| = 4: FedPMT reaches more than {100 * ABOVE:.0f} %",
            FIGURE,
            [above(TITLES[task], one, ABOVE, percent) for task, one in _two_classes(finals, "fedpmt")],
            "FedPMT",
            LEVELS_VARIED,
        ),
        Claim(
            "below-60",
            f"there FedDrop stays below {100 * BELOW:.0f} %",
            FIGURE,
            [below(TITLES[task], one, BELOW, percent) for task, one in _two_classes(finals, "feddrop")],
            "FedDrop",
            FEDDROP_VARIED,
        ),
    ]


def _name(panel: Panel, more: object = "") -> str:
    task, partition = panel
    return f"{TITLES[task]} {PARTITIONS[partition]}{more}"


def _leads(found: Readings) -> list[Case]:
    return [
        above(_name(panel, f", |I| = {count}"), _less(lines["fedpmt", count], lines["feddrop", count]))
        for panel, lines in found.items()
        for count in reversed(net(panel[0]).depths)
    ]


def _less(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    return Estimate.of(pair(lambda mine, other: mine - other, ours, theirs))


def _rises(found: Readings) -> list[Case]:
    return [
        above(f"{NAMES[method]} {_name(panel)}", _less(lines[method, small], lines[method, large]))
        for panel, lines in found.items()
        for large, small in [net(panel[0]).depths]
        for method in ("fedpmt", "feddrop")
    ]


def _sooner(found: Runs) -> list[Case]:
    cases = []
    for panel, lines in found.items():
        goal = SOON.get((DATA[panel[0]], panel[1]))
        large, small = net(panel[0]).depths
        for method in ("fedpmt", "feddrop"):
            when = {
                count: {
                    seed: Arrival.of(run, goal or 1.0, smooth(run, TAIL))
                    for seed, run in lines[method, count].items()
                }
                for count in (small, large)
            }
            where = f"{NAMES[method]} {_name(panel)}"
            ratio = Estimate.of(log_ratios(when[small], when[large], lambda one: one.round))
            cases.append(
                undecided(where, "not reached") if ratio is None else above(where, ratio, show=times)
            )
    return cases


def _gaps(found: Readings, place: int) -> list[Case]:
    """How far FedPMT ends from FedAvg with the larger (0) or the smaller (1) number of depths."""
    return [
        near(_name(panel), _less(lines["fedpmt", net(panel[0]).depths[place]], lines["fedavg", None]), ALIKE)
        for panel, lines in found.items()
    ]


def _jumps(found: Readings) -> list[Case]:
    cases = []
    for (task, partition), lines in found.items():
        other = found.get((task, TWO_CLASSES))
        if task != "fcnn-mnist" and partition == IID and other is not None:
            line = ("fedpmt", net(task).depths[0])
            grown = pair(lambda apart, alike: math.log(apart / alike), other[line], lines[line])
            cases.append(above(TITLES[task], Estimate.of(grown), show=times))
    return cases


def _furthest(found: Readings) -> list[Case]:
    cases = []
    for (task, partition), lines in found.items():
        full = found.get(("fcnn-mnist", partition))
        if task != "fcnn-mnist" and full is not None:
            further = pair(
                lambda best, ours, other_best, other: (best - ours) - (other_best - other),
                full["fedavg", None],
                full["fedpmt", 4],
                lines["fedavg", None],
                lines["fedpmt", net(task).depths[0]],
            )
            cases.append(above(_name((task, partition)), Estimate.of(further)))
    return cases


def _widens(found: Readings) -> list[Case]:
    cases = []
    for (task, partition), lines in found.items():
        other = found.get((task, TWO_CLASSES))
        if partition != IID or other is None:
            continue
        for count in reversed(net(task).depths):
            ours, theirs = ("fedpmt", count), ("feddrop", count)
            wider = pair(
                lambda pmt, drop, alike_pmt, alike_drop: (pmt - drop) - (alike_pmt - alike_drop),
                other[ours], other[theirs], lines[ours], lines[theirs],
            )  # fmt: skip
            cases.append(above(f"{TITLES[task]}, |I| = {count}", Estimate.of(wider)))
    return cases


def _two_classes(found: Readings, method: str) -> list[tuple[str, Estimate | None]]:
    return [
        (task, Estimate.of(list(lines[method, 4].values())))
        for (task, partition), lines in found.items()
        if partition == TWO_CLASSES and net(task).depths[0] == 4
    ]


def _values(finals: Readings) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "partition": partition,
            "method": method,
            "depths": depths,
            "mean": found.mean if found else None,
            "deviation": found.deviation if found else None,
            "seeds": found.count if found else 0,
        }
        for (task, partition), lines in finals.items()
        for (method, depths), members in lines.items()
        for found in [Spread.of(members.values())]
    ]


ACCURACY = Experiment("accuracy", "six panels of accuracy against rounds, Figure 1", runs, make)
