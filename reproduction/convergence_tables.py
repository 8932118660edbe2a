"""The tables of the artefact `convergence`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedpmt.pricing.plan import splitting_constant
from reproduction.artefact import Table
from reproduction.theory.bound import least_offset, loss_bound
from reproduction.theory.rates import level, ratio, significant, slope
from reproduction.theory.studies import DEPTHS, FEDAVG

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from fedpmt.pricing.plan import Definition
    from reproduction.theory.bound import Constants, Form
    from reproduction.theory.descent import Trace
    from reproduction.theory.studies import Case, Floor, Theorem

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


def _ends(values: np.ndarray) -> str:
    return f"{significant(float(values.min()), 2)} to {significant(float(values.max()), 2)}"
