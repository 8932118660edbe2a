"""Figure 1 of the paper (label fig1): test accuracy against rounds, three nets, i.i.d. and two classes per device.

The paper gives no numbers with its curves; what its text says of them is checked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from fedpmt.experiments.artefact import Artefact, Picture, Table
from fedpmt.experiments.paper import IID, PARTITIONS, TITLES, TWO_CLASSES, Experiment, seeds_text
from fedpmt.models.nets import net
from fedpmt.report.drawing import curve
from fedpmt.report.quantities import Spread
from fedpmt.report.tables import evaluated
from fedpmt.report.theme import PALETTE, RESERVED, new_figure, themed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedpmt.experiments.library import Library
    from fedpmt.experiments.paper import Scope
    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings

Line = tuple[str, int | None]  # method and |I|; FedAvg has no widths
Panel = tuple[str, str]
NAMES = {"fedpmt": "FedPMT", "feddrop": "FedDrop", "fedavg": "FedAvg"}
TAIL = 5
"""The final accuracy is the mean of so many last evaluations: with two classes per device curves jump."""

ABOVE, BELOW = 0.90, 0.60
"""The paper: with two classes per device and |I| = 4, FedPMT is above the one, FedDrop below the other."""


def lines_of(task: str) -> list[Line]:
    """The five lines of a panel."""
    large, small = net(task).widths
    return [("fedavg", None), ("fedpmt", small), ("fedpmt", large), ("feddrop", small), ("feddrop", large)]


def line_name(line: Line) -> str:
    """As the legend has it.

    >>> line_name(("fedpmt", 4)), line_name(("fedavg", None))
    ('FedPMT, |I| = 4', 'FedAvg')
    """
    method, widths = line
    return NAMES[method] + (f", |I| = {widths}" if widths else "")


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
    claims = [*_claims(finals)]
    counts = sorted({len(members) for lines in found.values() for members in lines.values()})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if counts[0] != counts[-1] else seeds_text(range(counts[0]))
    caption = f"Test accuracy against rounds, {seeds}; lines are means, bands reach from the worst to the best seed."
    return Artefact(
        "accuracy",
        "Accuracy of FedPMT, FedDrop and FedAvg (the paper's Figure 1)",
        f"fedpmt reproduce accuracy{scope.suffix}",
        "FedPMT and FedDrop at equal operations (mode `paper`), FedAvg as the upper bound. Settings are the paper's: "
        "plain SGD, one epoch, levels fixed per device and equally many of each in a round.",
        [
            _finals_table(finals),
            Table("What the paper says of its figure", ("claim", "holds in", "numbers"), claims),
        ],
        [Picture("accuracy", draw(found), caption)],
        {"final": _values(finals), "seeds": counts, "claims": claims},
    )


def _found(library: Library, scope: Scope, panel: Panel, line: Line) -> list[RunRecord]:
    every = [library.find(settings_of(scope, panel, line, seed)) for seed in scope.seeds]
    return [run for run in every if run is not None]


def final(run: RunRecord) -> float:
    """The accuracy a run ends with."""
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
        large = net(task).widths[0]
        for line, members in lines.items():
            shape = curve(members, "rounds")
            if shape is None:
                continue
            method, widths = line
            colour = PALETTE[RESERVED[method]]
            style: Any = "-" if widths in (None, large) else (0, (4, 1.6))
            dashes[method, widths == large] = style
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
    return Table("Final accuracy, behind the method |I|", columns, rows, note)


def percent(found: Spread | None) -> str:
    """A mean over seeds, in percent."""
    if found is None:
        return "-"
    spread = f" ± {100 * found.deviation:.1f}" if found.count > 1 else ""
    return f"{100 * found.mean:.1f}{spread}"


def _claims(finals: Finals) -> list[list[str]]:
    """What the text says of the curves, counted over panels that have all their lines."""
    whole = {panel: lines for panel, lines in finals.items() if all(found for found in lines.values())}
    checks: list[tuple[str, list[tuple[Panel, bool, str]]]] = [
        ("FedPMT ends above FedDrop, both |I|", []),
        ("both end higher with |I| = 2 than with 4 or 5", []),
        ("FedPMT with |I| = 2 ends within 1 point of FedAvg", []),
        ("two classes, |I| = 4: FedPMT above 90 %", []),
        ("two classes, |I| = 4: FedDrop below 60 %", []),
    ]
    for panel, lines in whole.items():
        task, partition = panel
        large, small = net(task).widths
        mean = {line: found.mean for line, found in lines.items() if found is not None}
        gaps = [mean["fedpmt", count] - mean["feddrop", count] for count in (small, large)]
        checks[0][1].append((panel, min(gaps) > 0, _points(min(gaps))))
        rises = [mean[method, small] - mean[method, large] for method in ("fedpmt", "feddrop")]
        checks[1][1].append((panel, min(rises) > 0, _points(min(rises))))
        gap = mean["fedavg", None] - mean["fedpmt", small]
        checks[2][1].append((panel, gap <= 0.01, _points(-gap)))
        if partition == TWO_CLASSES and large == 4:
            pmt, drop = mean["fedpmt", large], mean["feddrop", large]
            checks[3][1].append((panel, pmt > ABOVE, f"{100 * pmt:.1f} %"))
            checks[4][1].append((panel, drop < BELOW, f"{100 * drop:.1f} %"))
    return [
        [
            claim,
            f"{sum(holds for _, holds, _ in cases)} of {len(cases)} panels",
            "; ".join(f"{TITLES[task]} {PARTITIONS[part]}: {text}" for (task, part), _, text in cases),
        ]
        for claim, cases in checks
    ]


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


def _values(finals: Finals) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "partition": partition,
            "method": method,
            "widths": widths,
            "mean": found.mean if found else None,
            "deviation": found.deviation if found else None,
            "seeds": found.count if found else 0,
        }
        for (task, partition), lines in finals.items()
        for (method, widths), found in lines.items()
    ]


ACCURACY = Experiment("accuracy", "six panels of accuracy against rounds, Figure 1", runs, make)
