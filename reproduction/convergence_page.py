"""The figures and tables of the artefact `convergence`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.pricing.plan import splitting_constant
from fedpmt.report.theme import INK, MUTED, PALETTE, RESERVED, new_figure, themed
from reproduction.artefact import Table
from reproduction.theory.bound import (
    least_offset,
    level,
    loss_bound,
    ratio,
    significant,
    slope,
    unbiased_bound,
)
from reproduction.theory.descent import Pairs
from reproduction.theory.studies import DEPTHS, FEDAVG, FEDPMT, FIXED, PLANNED_STEPS, REDRAWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedpmt.pricing.plan import Definition
    from reproduction.theory.bound import Constants, Form
    from reproduction.theory.descent import Arm, Trace
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
    _draw_slope(axes, [trace for case in group for trace in case.traces])


def _draw_slope(axes: Axes, traces: Sequence[Trace]) -> None:
    """A line of slope -1 below the lowest curve, and axes on which it is straight."""
    times = traces[0].times
    late = times[times >= times[-1] / 8]
    height = 0.4 * min(float(trace.errors.mean(axis=0)[-1]) for trace in traces)
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
def depths_figure(gaps: Sequence[Case], floors: Sequence[Floor]) -> Figure:
    """What shallow depths cost: a factor on i.i.d. data, and a floor where levels are fixed and data are not."""
    figure = new_figure(8.6, 7.6)
    grid = figure.subplots(2, 2)
    grid[0][1].sharey(grid[0][0])
    _draw_gaps(grid[0], gaps)
    _draw_floors(grid[1], floors)
    handles, labels = grid[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _draw_gaps(row: Sequence[Axes], cases: Sequence[Case]) -> None:
    """Error over FedAvg's against ψ, a panel per problem."""
    for axes, case in zip(row, cases, strict=True):
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
    row[0].set_ylabel("error, times FedAvg's")


def _plain_ticks(axes: Axes, across: Sequence[float], up: Sequence[float]) -> None:
    axes.set_xticks(across, [f"{value:g}" for value in across])
    axes.set_yticks(up, [f"{value:g}" for value in up])
    axes.minorticks_off()


def _draw_floors(row: Sequence[Axes], floors: Sequence[Floor]) -> None:
    """What remains with fixed levels against Λ, and with levels redrawn."""
    kinds = list(dict.fromkeys(one.problem for one in floors))
    for axes, kind in zip(row, kinds, strict=True):
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
    row[0].set_ylabel("F(w) - F* after the last round")


PLAN_LOOKS = {
    FEDAVG: (THEIRS, (), "FedAvg, beyond the budget"),
    "paper, none": (STUCK, (), "paper"),
    "traded, none": (OTHER, (5, 2), "traded, plain mean"),
    "traded, steps": (OTHER, (), "traded, by steps"),
    "rotated, none": (OURS, (5, 2), "rotated, plain mean"),
    "rotated, steps": (OURS, (1.5, 1.5), "rotated, by steps"),
    "rotated, draws": (OURS, (), "rotated, by steps and chances"),
}


@themed
def plans_figure(cases: Sequence[Case]) -> Figure:
    """Error against t + λ under each plan and mean, a panel per problem."""
    figure = new_figure(8.6, 4.2)
    panels = figure.subplots(1, 2)
    for axes, case in zip(panels, cases, strict=True):
        for trace in case.traces:
            colour, dashes, label = PLAN_LOOKS[trace.arm.name]
            _curve(axes, trace, trace.times, colour, dashes, label)
        _draw_slope(axes, case.traces)
        axes.set_xlabel("T + λ")
        axes.set_title(f"{case.problem}, two classes, levels fixed")
    panels[0].set_ylabel(ERROR)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


STEPS = 2  # τ in all studies but the gap's


def slopes_table(cases: Sequence[Case]) -> Table:
    """How fast each arm's error falls."""
    rows = []
    for case in cases:
        base = case[FEDAVG]
        for trace in case.traces:
            against = "" if trace is base else ratio(trace, base).text()
            rows.append(
                (f"{case.problem}, {case.data}, {case.participation}", trace.arm.name, f"{trace.arm.offset:.0f}",
                 f"{trace.rounds[-1]:,}", slope(trace).fixed(), level(trace).text(), against)
            )  # fmt: skip
    return Table(
        "The rate",
        ("problem, data, participation", "arm", "λ", "T", "slope", "F - F* at the end", "times FedAvg"),
        rows,
        "Slope of log(F - F*) against log(T + λ) over the last decade of rounds, mean over seeds and 95 % interval. "
        "Theorem 1 says -1 or steeper. The ratio to FedAvg is over the same rounds.",
    )


def epsilons_table(cases: Sequence[Case], own: Theorem) -> Table:
    """Where Proposition 1 holds."""
    rows = []
    every = [
        (f"{case.problem}, {case.data}, {case.participation}", trace)
        for case in cases
        for trace in case.traces
    ]
    every += [("quadratic of the theorem, i.i.d., full", trace) for trace in (*own.inside, own.outside)]
    for where, trace in every:
        epsilon = trace.constants.epsilon
        rows.append(
            (where, f"{trace.arm.name}, λ = {trace.arm.offset:,.0f}", significant(epsilon), f"{trace.failing:.1%}",
             "yes" if epsilon > 0 else "no: ε <= 0", significant(trace.summed))
        )  # fmt: skip
    return Table(
        "ε of Proposition 1",
        (
            "problem, data, participation",
            "arm",
            "least ratio, ε",
            "points where no ε > 0 will do",
            "covered",
            "least ratio, summed over devices",
        ),
        rows,
        "The least |S| ⟨w_k - w*, A_k ∘ ∇F_k(w_k)⟩ / (F_k(w_k) - F_k(w*) + μ/2 ‖w_k - w*‖²) over seeds, recorded "
        "rounds, devices and local steps with a positive denominator. The theorem needs it positive and takes at most "
        "1. The proof uses both sides only summed over the cohort: the last column.",
    )


def bound_of(
    trace: Trace,
    constants: Constants,
    form: Form,
    definition: Definition = "lemma",
    rounds: int | None = None,
) -> float:
    """Theorem 1 for one run; with the appendix's ψ for the least λ, since that is larger than what the run used."""
    return loss_bound(
        constants, trace.arm.shares, cohort=trace.arm.cohort, rounds=rounds or int(trace.rounds[-1]), steps=STEPS,
        offset=trace.arm.offset if definition == "lemma" else None, form=form, definition=definition,
    )  # fmt: skip


def broken_until(trace: Trace, constants: Constants, form: Form) -> int:
    """The last recorded round at which the error is above the bound; 0 if it never is."""
    errors = trace.errors.mean(axis=0)
    broken = [
        int(t)
        for t, error in zip(trace.rounds, errors, strict=True)
        if error > bound_of(trace, constants, form, rounds=int(t))
    ]
    return max(broken, default=0)


def bounds_table(own: Theorem) -> Table:
    """The bound above the error."""
    rows, notes = [], []
    for trace, known in zip(own.inside, own.assumed, strict=True):
        last, shares, cohort = int(trace.rounds[-1]), trace.arm.shares, trace.arm.cohort
        for rounds in (1, *sorted({last // 1000, last // 100, last // 10, last})):
            place = int(abs(trace.rounds - rounds).argmin())
            t, error = int(trace.rounds[place]), float(trace.errors[:, place].mean())
            printed, proof = (bound_of(trace, known, form, rounds=t) for form in ("printed", "proof"))
            rows.append(
                (trace.arm.name, f"{t:,}", significant(error), significant(printed),
                 "yes" if printed >= error else "NO", significant(proof), f"{math.log10(proof / error):.1f}")
            )  # fmt: skip
        wide = splitting_constant(shares, "appendix", cohort)
        notes.append(
            f"{trace.arm.name}: ψ = {significant(splitting_constant(shares))}, ε = {significant(known.kept)} "
            f"(measured {significant(trace.constants.epsilon)}), λ = {trace.arm.offset:,.0f}, "
            f"μ = {known.strong_convexity:g}, L = {known.smoothness:g}, G² = {significant(known.gradient_square)}, "
            f"δ² = {significant(known.noise)}, Λ = {significant(known.heterogeneity)}, "
            f"Γ_1 = {significant(known.distance)}. With the appendix's ψ = {significant(wide)} the least λ would be "
            f"{least_offset(known, shares, cohort, 'appendix'):,.0f}, and the proof's bound after {last:,} rounds "
            f"{significant(bound_of(trace, known, 'proof', 'appendix'))}."
        )
    return Table(
        "The bound and the error, step size of Theorem 1",
        ("arm", "T", "error", "bound, printed", "it holds", "bound, proof", "powers of ten above the error"),
        rows,
        " ".join(notes),
    )


def gaps_table(gaps: Sequence[Case]) -> Table:
    """What poorer depths cost."""
    rows = []
    for index, trace in enumerate(gaps[0].traces):
        psi = splitting_constant(trace.arm.shares)
        ratios = [ratio(case.traces[index], case.traces[0]).text() if index else "1" for case in gaps]
        rows.append(
            ("-".join(map(str, trace.arm.counts)) + (" (FedAvg)" if not index else ""), significant(psi),
             significant(splitting_constant(trace.arm.shares, "appendix", trace.arm.cohort), 4),
             significant(psi / DEPTHS), *ratios)
        )  # fmt: skip
    return Table(
        "The gap against ψ",
        (
            "devices of depth 1-2-3-4",
            "ψ",
            "ψ, appendix",
            "ψ / |I|",
            *(f"error / FedAvg's, {c.problem}" for c in gaps),
        ),
        rows,
        "I.i.d. data, τ = 1, the same step sizes and random draws for every mix; last decade of rounds.",
    )


def floors_table(floors: Sequence[Floor]) -> Table:
    """What fixed levels leave."""
    rows = [
        (f"{one.problem}, {one.data}", significant(one.heterogeneity), significant(one.start), level(one.fixed).text(),
         significant(one.computed), _ends(one.assigned),
         level(one.redrawn).text(), slope(one.redrawn).fixed())
        for one in floors
    ]  # fmt: skip
    return Table(
        "The floor of fixed levels",
        ("problem, data", "Λ", "before training", "levels fixed, measured", "computed", "other assignments",
         "levels redrawn, measured", "its slope"),
        rows,
        "F - F*. Computed: at the point where Σ_k A_k ∘ ∇F_k = 0, which is where fixed levels come to rest. "
        "Full participation, four devices of each depth. The redrawn arm is still falling.",
    )  # fmt: skip


DIVIDED = {"none": "nothing", "steps": "steps", "draws": "steps and chances"}


def plans_table(cases: Sequence[Case]) -> Table:
    """How fast the error falls under each plan and mean, within one budget."""
    rows = []
    for case in cases:
        base = case[FEDAVG]
        for trace, rest in zip(case.traces, case.rests, strict=True):
            arm, own = trace.arm, trace is base
            rows.append(
                (case.problem, FEDAVG if own else arm.plan, DIVIDED[arm.normalise],
                 slope(trace).fixed(), level(trace).text(), significant(rest) if rest > ROUNDED else "w*",
                 "" if own else ratio(trace, base).text(),
                 significant(plan_bound(trace)) if is_unbiased(arm) else "")
            )  # fmt: skip
    return Table(
        "Plans within one budget: two classes per device, levels fixed",
        (
            "problem",
            "plan",
            "changes are divided by",
            "slope",
            "F - F* at the end",
            "computed, where it rests",
            "times FedAvg",
            "bound at the end",
        ),
        rows,
        f"All devices, four of each depth, at most τ = {PLANNED_STEPS} steps; λ = "
        f"{' and '.join(f'{case.traces[0].arm.offset:.0f}' for case in cases)}, "
        f"T = {' and '.join(f'{case.traces[0].rounds[-1]:,}' for case in cases)}. FedAvg is beyond the budget of "
        "all but the strongest devices. The last column is the bound of the unbiased mean (docs/theory.md).",
    )


ROUNDED = 1e-9  # what Newton's method may leave of an error of zero


def is_unbiased(arm: Arm) -> bool:
    """Whether the mean is right: nothing is drawn and steps count, or draws do, or all devices do the same."""
    return arm.name == FEDAVG or (arm.plan, arm.normalise) in (("traded", "steps"), ("rotated", "draws"))


def plan_bound(trace: Trace, rounds: int | None = None) -> float:
    """The bound of the unbiased mean for one run."""
    pairs = Pairs.of(trace.arm, PLANNED_STEPS)
    return unbiased_bound(
        trace.constants,
        chance=float(pairs.chances[0, 1]) or 1.0,
        cohort=trace.arm.cohort,
        rounds=rounds or int(trace.rounds[-1]),
        steps=PLANNED_STEPS,
        mean_steps=float((pairs.chances * pairs.steps).sum(axis=1).mean()),
        offset=trace.arm.offset,
    )


def _ends(values: np.ndarray) -> str:
    return f"{significant(float(values.min()), 2)} to {significant(float(values.max()), 2)}"
