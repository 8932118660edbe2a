"""Figure 1 of the paper (label fig1): test accuracy against rounds, three nets, i.i.d. and two classes per device.

The paper gives no numbers with its curves; what its text says of them is checked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from fedpmt.models.nets import net
from fedpmt.report.drawing import curve
from fedpmt.report.quantities import Spread
from fedpmt.report.tables import evaluated
from fedpmt.report.theme import PALETTE, RESERVED, new_figure, themed
from reproduction.artefact import Artefact, Case, Claim, Picture, Table
from reproduction.paper import IID, PARTITIONS, TITLES, TWO_CLASSES, Experiment, seeds_text
from reproduction.readings import guess

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library
    from reproduction.paper import Scope

Line = tuple[str, int | None]  # method and |I|; FedAvg has no depths
Panel = tuple[str, str]
NAMES = {"fedpmt": "FedPMT", "feddrop": "FedDrop", "fedavg": "FedAvg"}
TAIL = 5
"""The final accuracy is the mean of so many last evaluations: with two classes per device curves jump."""

ABOVE, BELOW = 0.90, 0.60
"""The paper: with two classes per device and |I| = 4, FedPMT is above the one, FedDrop below the other."""

ALIKE = 0.02
"""How far apart two final accuracies may be that the paper calls similar, or their margin negligible."""

FIGURE = "IV-C, figure 1"
FEDDROP_VARIED = "FedDrop's averaging, scaling and scope ([studies](studies.md))"
LEVELS_VARIED = "levels fixed or redrawn ([studies](studies.md))"


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


def make(library: Library, scope: Scope) -> Artefact:
    """The six panels, the final accuracies, and what of the paper's text holds."""
    found: dict[Panel, dict[Line, list[RunRecord]]] = {
        panel: {line: _found(library, scope, panel, line) for line in lines_of(panel[0])}
        for panel in panels_of(scope)
    }
    finals = {
        panel: {line: Spread.of(final(run) for run in members) for line, members in lines.items()}
        for panel, lines in found.items()
    }
    seeds: dict[str, set[int]] = {}
    for (task, _), lines in found.items():
        seeds.setdefault(task, set()).update(map(len, lines.values()))
    about = "lines are means, bands reach from the worst to the best seed"
    caption = f"Test accuracy against rounds, {counted(seeds)}; {about}."
    return Artefact(
        "accuracy",
        "Accuracy of FedPMT, FedDrop and FedAvg (the paper's Figure 1)",
        f"python -m reproduction accuracy{scope.suffix}",
        "FedPMT and FedDrop at equal operations (mode `paper`), FedAvg as the upper bound. Settings are the paper's: "
        "plain SGD, one epoch, levels fixed per device and equally many of each in a round.",
        [
            _finals_table(finals),
        ],
        [Picture("accuracy", draw(found), caption)],
        {"final": _values(finals), "seeds": {task: sorted(counts) for task, counts in seeds.items()}},
        claims(finals),
    )


def counted(seeds: Mapping[str, Collection[int]]) -> str:
    """How many seeds the lines of each net have, in words.

    >>> counted({"fcnn-mnist": {3}, "cnn-mnist": {3}}), counted({"cnn-mnist": {10}, "cnn-cifar10": {2, 3}})
    ('3 seeds', 'CNN-MNIST 10 seeds, CNN-CIFAR10 2 to 3 seeds')
    """
    words = {task: seeds_text(counts) for task, counts in seeds.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{TITLES[task]} {text}" for task, text in words.items())


def _found(library: Library, scope: Scope, panel: Panel, line: Line) -> list[RunRecord]:
    every = [library.find(settings_of(scope, panel, line, seed)) for seed in scope.seeds]
    return [run for run in every if run is not None]


def final(run: RunRecord) -> float:
    """The accuracy a run ends with; that of a guess where it diverged."""
    if run.diverged:
        return guess(run)
    last = [accuracy for _, accuracy in evaluated(run)][-TAIL:]
    return sum(last) / len(last)


@themed
def draw(found: dict[Panel, dict[Line, list[RunRecord]]]) -> Figure:
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
            shape = curve(members, "rounds")
            if shape is None:
                continue
            method, depths = line
            colour = PALETTE[RESERVED[method]]
            style: Any = "-" if depths in (None, large) else (0, (4, 1.6))
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
            (f"{NAMES[method]}, |I| = 2", colours[method], (0, (4, 1.6))),
            (f"{NAMES[method]}, {large}", colours[method], "-"),
        ]
    handles = [Line2D([], [], color=colour, linestyle=style) for _, colour, style in entries]
    figure.legend(handles, [name for name, _, _ in entries], loc="outside lower center", ncols=len(entries))


Finals = dict[Panel, dict[Line, Spread | None]]


def _finals_table(finals: Finals) -> Table:
    rows = [
        [
            f"{TITLES[task]}, {PARTITIONS[partition]}",
            *(percent(found) for found in lines.values()),
        ]
        for (task, partition), lines in finals.items()
    ]
    columns = ("panel", "FedAvg", "FedPMT, 2", "FedPMT, 4 or 5", "FedDrop, 2", "FedDrop, 4 or 5")
    note = f"Mean of the last {TAIL} evaluations, in %; ± is the standard deviation over seeds."
    return Table("Final accuracy (after the method: |I|)", columns, rows, note)


def percent(found: Spread | None) -> str:
    """A mean over seeds, in percent."""
    if found is None:
        return "-"
    spread = f" ± {100 * found.deviation:.1f}" if found.count > 1 else ""
    return f"{100 * found.mean:.1f}{spread}"


def claims(finals: Finals) -> list[Claim]:
    """What the text says of the curves, in panels that have all their lines."""
    whole = {panel: lines for panel, lines in finals.items() if all(found for found in lines.values())}
    mean = {
        panel: {line: found.mean for line, found in lines.items() if found} for panel, lines in whole.items()
    }
    return [
        Claim("FedPMT ends above FedDrop at the same operations", FIGURE, _leads(mean), FEDDROP_VARIED),
        Claim(
            "FedPMT and FedDrop both end higher with |I| = 2 than with 4 (CIFAR10: 5)", FIGURE, _rises(mean)
        ),
        Claim(
            f"FedPMT with |I| = 2 ends like FedAvg (within {100 * ALIKE:.0f} points), i.i.d. and not",
            FIGURE,
            _gaps(mean, 1),
            LEVELS_VARIED,
        ),
        Claim(
            f"on the CNNs so does FedPMT with |I| = 4 or 5 (within {100 * ALIKE:.0f} points)",
            FIGURE,
            _gaps({panel: lines for panel, lines in mean.items() if panel[0] != "fcnn-mnist"}, 0),
            LEVELS_VARIED,
        ),
        Claim(
            "FedPMT with |I| = 4 is further from FedAvg on the FCNN than on the CNNs", FIGURE, _furthest(mean)
        ),
        Claim(
            "FedPMT's lead over FedDrop is larger with two classes per device than i.i.d.",
            FIGURE,
            _widens(mean),
        ),
        Claim(
            f"MNIST, two classes, |I| = 4: FedPMT reaches more than {100 * ABOVE:.0f} %",
            FIGURE,
            [
                Case(TITLES[task], value > ABOVE, f"{100 * value:.1f} %")
                for task, value in _two_classes(mean, "fedpmt")
            ],
            LEVELS_VARIED,
        ),
        Claim(
            f"there FedDrop stays below {100 * BELOW:.0f} %",
            FIGURE,
            [
                Case(TITLES[task], value < BELOW, f"{100 * value:.1f} %")
                for task, value in _two_classes(mean, "feddrop")
            ],
            FEDDROP_VARIED,
        ),
    ]


Means = dict[Panel, dict[Line, float]]


def _name(panel: Panel, more: object = "") -> str:
    task, partition = panel
    return f"{TITLES[task]} {PARTITIONS[partition]}{more}"


def _leads(mean: Means) -> list[Case]:
    cases = []
    for panel, lines in mean.items():
        for count in reversed(net(panel[0]).depths):
            lead = lines["fedpmt", count] - lines["feddrop", count]
            cases.append(Case(_name(panel, f", |I| = {count}"), lead > 0, _points(lead)))
    return cases


def _rises(mean: Means) -> list[Case]:
    cases = []
    for panel, lines in mean.items():
        large, small = net(panel[0]).depths
        for method in ("fedpmt", "feddrop"):
            rise = lines[method, small] - lines[method, large]
            cases.append(Case(f"{NAMES[method]} {_name(panel)}", rise > 0, _points(rise)))
    return cases


def _gaps(mean: Means, place: int) -> list[Case]:
    """How far FedPMT ends from FedAvg with the larger (0) or the smaller (1) number of depths."""
    cases = []
    for panel, lines in mean.items():
        gap = lines["fedavg", None] - lines["fedpmt", net(panel[0]).depths[place]]
        cases.append(Case(_name(panel), gap <= ALIKE, _points(-gap)))
    return cases


def _furthest(mean: Means) -> list[Case]:
    gap = {
        panel: lines["fedavg", None] - lines["fedpmt", net(panel[0]).depths[0]]
        for panel, lines in mean.items()
    }
    cases = []
    for (task, partition), other in gap.items():
        full = gap.get(("fcnn-mnist", partition))
        if task != "fcnn-mnist" and full is not None:
            shown = f"{100 * full:.1f} points on the FCNN, {100 * other:.1f} here"
            cases.append(Case(_name((task, partition)), full > other, shown))
    return cases


def _widens(mean: Means) -> list[Case]:
    cases = []
    for (task, partition), lines in mean.items():
        other = mean.get((task, TWO_CLASSES))
        if partition != IID or other is None:
            continue
        for count in reversed(net(task).depths):
            alike, apart = (found["fedpmt", count] - found["feddrop", count] for found in (lines, other))
            where = f"{TITLES[task]}, |I| = {count}"
            cases.append(Case(where, apart > alike, f"{_points(alike)} i.i.d., {_points(apart)} two classes"))
    return cases


def _two_classes(mean: Means, method: str) -> list[tuple[str, float]]:
    return [
        (task, lines[method, 4])
        for (task, partition), lines in mean.items()
        if partition == TWO_CLASSES and net(task).depths[0] == 4
    ]


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _values(finals: Finals) -> list[dict[str, Any]]:
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
        for (method, depths), found in lines.items()
    ]


ACCURACY = Experiment("accuracy", "six panels of accuracy against rounds, Figure 1", runs, make)
