"""The figures of the artefact `convergence`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.pricing.plan import splitting_constant
from fedpmt.report.theme import INK, MUTED, PALETTE, RESERVED, new_figure, themed
from reproduction.theory.bound import loss_bound
from reproduction.theory.rates import level, ratio
from reproduction.theory.studies import DEPTHS, FEDAVG, FEDPMT, FIXED, REDRAWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from reproduction.theory.bound import Form
    from reproduction.theory.descent import Trace
    from reproduction.theory.studies import Case, Floor, Theorem

OURS, THEIRS, STUCK, OTHER = PALETTE[RESERVED["fedpmt"]], PALETTE[RESERVED["fedavg"]], PALETTE[3], PALETTE[2]
ERROR = "F(w) - F*, mean over seeds"

LOOKS = {
    (FEDAVG, "i.i.d."): (THEIRS, (), "FedAvg, i.i.d."),
    (FEDPMT, "i.i.d."): (OURS, (), "FedPMT, i.i.d."),
    (FEDAVG, "non-i.i.d."): (THEIRS, (5, 2), "FedAvg, non-i.i.d."),
    (REDRAWN, "non-i.i.d."): (OURS, (5, 2), "FedPMT, non-i.i.d., levels redrawn"),
    (FIXED, "non-i.i.d."): (STUCK, (6, 2, 1.5, 2), "FedPMT, non-i.i.d., levels fixed"),
}


SOLID = (None, None)
BOUNDS: tuple[tuple[Form, Any, str], ...] = (
    ("proof", SOLID, "bound, as the proof gives it"),
    ("printed", (1.5, 1.5), "bound, as printed"),
)


@themed
def rate_figure(cases: Sequence[Case]) -> Figure:
    """Error against t + λ, a panel per problem and participation."""
    figure = new_figure(8.6, 6.4)
    problems = list(dict.fromkeys(case.problem for case in cases))
    grid = figure.subplots(2, 2, sharex="row", sharey="row")
    for row, problem in zip(grid, problems, strict=True):
        for axes, participation in zip(row, ("full", "sampled"), strict=True):
            group = [case for case in cases if (case.problem, case.participation) == (problem, participation)]
            _draw_rates(axes, group)
            axes.set_title(
                f"{problem}, {'all devices' if participation == 'full' else 'half of the devices'}"
            )
        row[0].set_ylabel(ERROR)
    for axes in grid[-1]:
        axes.set_xlabel("T + λ")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _draw_rates(axes: Axes, group: Sequence[Case]) -> None:
    for case in group:
        for trace in case.traces:
            colour, dashes, label = LOOKS[trace.arm.name, case.data]
            _curve(axes, trace, trace.times, colour, dashes, label)
            if trace.arm.name == FIXED:
                axes.axhline(case.floor, color=STUCK, linewidth=0.9, alpha=0.7, label="its floor, computed")
    times = group[0].traces[0].times
    late = times[times >= times[-1] / 8]
    height = 0.4 * min(float(trace.errors.mean(axis=0)[-1]) for case in group for trace in case.traces)
    axes.plot(late, height * late[-1] / late, color=INK, linewidth=0.9, label="slope -1")
    axes.set(xscale="log", yscale="log")


def _curve(
    axes: Axes, trace: Trace, places: np.ndarray, colour: str, dashes: tuple[float, ...], label: str
) -> None:
    axes.plot(
        places,
        trace.errors.mean(axis=0),
        color=colour,
        dashes=dashes or SOLID,
        linewidth=1.5,
        label=label,
    )


@themed
def theorem_figure(study: Theorem) -> Figure:
    """The theorem's own step size: error, the bound in both forms, and a λ outside the condition."""
    figure = new_figure(8.6, 4.4)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, trace, constants in zip(panels, study.inside[::-1], study.assumed[::-1], strict=True):
        arm = trace.arm
        colour = OURS if arm.name == FEDPMT else THEIRS
        for form, dashes, label in BOUNDS:
            bound = [
                loss_bound(
                    constants, arm.shares, cohort=arm.cohort, rounds=t, steps=2, offset=arm.offset, form=form
                )
                for t in trace.rounds.tolist()
            ]
            axes.plot(trace.rounds, bound, color=MUTED, dashes=dashes, linewidth=1.3, label=label)
        _curve(
            axes, trace, trace.rounds, colour, (), f"{arm.name}, λ = {arm.offset:,.0f}, ε = {arm.epsilon:.3g}"
        )
        if arm.name == FEDPMT:
            other = study.outside
            _curve(
                axes, other, other.rounds, OTHER, (5, 2),
                f"FedPMT, λ = {other.arm.offset:,.0f}, ε = 1: outside the condition",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="T, rounds")
        axes.set_title(f"{arm.name}, step size of Theorem 1")
        axes.legend(loc="lower left")
    panels[0].set_ylabel(ERROR)
    return figure


@themed
def gap_figure(cases: Sequence[Case]) -> Figure:
    """Error over FedAvg's against ψ, a panel per problem."""
    figure = new_figure(8.6, 3.9)
    for axes, case in zip(figure.subplots(1, 2, sharey=True), cases, strict=True):
        base, *others = case.traces
        psi = [splitting_constant(trace.arm.shares) for trace in others]
        ratios = [ratio(trace, base) for trace in others]
        line = np.array([DEPTHS, 1.1 * max(psi)])
        axes.plot(line, line / DEPTHS, color=MUTED, dashes=(5, 2), linewidth=1.1, label="ψ / |I|")
        axes.plot([DEPTHS], [1.0], "s", color=THEIRS, markersize=6, label="FedAvg: every device trains all")
        halves = [value.half if np.isfinite(value.half) else 0.0 for value in ratios]
        axes.errorbar(
            psi, [value.mean for value in ratios], yerr=halves, fmt="o", color=OURS, markersize=5, capsize=3,
            linewidth=1.2, label="FedPMT, 95 % interval",
        )  # fmt: skip
        for trace, place, value in zip(others, psi, ratios, strict=True):
            axes.annotate(
                "-".join(map(str, trace.arm.counts)), (place, value.mean), xytext=(7, -9), textcoords="offset points",
                fontsize=8, color=MUTED,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="ψ of the mix (labels: devices of depth 1-2-3-4)")
        _plain_ticks(axes, [4, 8, 16, 32], [1, 2, 4, 8])
        axes.set_title(f"{case.problem}, i.i.d.")
        axes.legend(loc="upper left")
    figure.axes[0].set_ylabel("error, times FedAvg's")
    return figure


def _plain_ticks(axes: Axes, across: Sequence[float], up: Sequence[float]) -> None:
    axes.set_xticks(across, [f"{value:g}" for value in across])
    axes.set_yticks(up, [f"{value:g}" for value in up])
    axes.minorticks_off()


@themed
def floor_figure(floors: Sequence[Floor]) -> Figure:
    """What remains with fixed levels against Λ, beside levels redrawn."""
    figure = new_figure(8.6, 3.9)
    kinds = list(dict.fromkeys(one.problem for one in floors))
    for axes, kind in zip(figure.subplots(1, 2), kinds, strict=True):
        group = sorted((one for one in floors if one.problem == kind), key=lambda one: one.heterogeneity)
        across = np.array([one.heterogeneity for one in group])
        ends = np.array([(one.assigned.min(), one.assigned.max()) for one in group]).T
        axes.vlines(
            across, *ends, color=STUCK, alpha=0.3, linewidth=6, label="computed, levels given out otherwise"
        )
        axes.plot(
            across,
            [one.computed for one in group],
            "_",
            color=INK,
            markersize=15,
            label="computed, F(w°) - F*",
        )
        for name, colour, mark in (("fixed", STUCK, "o"), ("redrawn", OURS, "^")):
            values = [level(getattr(one, name)) for one in group]
            halves = [value.half if np.isfinite(value.half) else 0.0 for value in values]
            axes.errorbar(
                across, [value.mean for value in values], yerr=halves, fmt=mark, color=colour, markersize=5,
                capsize=2, linewidth=1, label=f"measured, levels {name}",
            )  # fmt: skip
        axes.plot(
            across, [one.start for one in group], ":", color=MUTED, linewidth=1.2, label="before training"
        )
        axes.set(xscale="log", yscale="log", xlabel="Λ = F* - mean of F_k*")
        axes.set_title(kind)
    figure.axes[0].set_ylabel("F(w) - F* after the last round")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure
