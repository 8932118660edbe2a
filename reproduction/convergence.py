"""Theorem 1 against strongly convex problems: where its rate holds, what it leaves out, how far its bound is off."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fedpmt.pricing.plan import splitting_constant
from reproduction.artefact import Artefact, Picture
from reproduction.convergence_page import (
    STEPS,
    bound_of,
    bounds_table,
    broken_until,
    depths_figure,
    epsilons_table,
    floors_table,
    gaps_table,
    is_unbiased,
    plan_bound,
    plans_figure,
    plans_table,
    rate_figure,
    slopes_table,
    theorem_figure,
)
from reproduction.paper import flags
from reproduction.theory import studies
from reproduction.theory.bound import Interval, level, ratio, significant, slope
from reproduction.theory.descent import TURNS
from reproduction.theory.studies import DEPTHS, FEDAVG, FIXED, PLANNED_STEPS, REDRAWN, Scope
from reproduction.verdicts import Claim, Estimate, above, below, exact, settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reproduction.theory.descent import Trace
    from reproduction.theory.studies import Case, Floor, Theorem


QUICK = "**A quick run: far too short for the claims below, which are those of the full run. It shows the shape.**"
SETTING = f"""
Two strongly convex problems whose parameters are split in |L| = |I| = {DEPTHS} blocks: a quadratic, and l2-regularised
softmax regression on synthetic(α, β). A device of depth i trains the last i blocks; the server averages each block
over the devices that trained it (equation 7). {FEDAVG} is the same code with every device at full depth.
""".strip()


def convergence(*, quick: bool = False, seeds: Sequence[int] = range(10)) -> Artefact:
    """Run the studies and put them on a page; `quick` is a taste that shows the shape and not the numbers."""
    return build(Scope.of(seeds, quick), quick)


def build(scope: Scope, quick: bool = False) -> Artefact:
    """The artefact for studies of this length."""
    rates, own, gaps = studies.rate(scope), studies.theorem(scope), studies.gap(scope)
    coupled, floors, planned = studies.coupled(scope), studies.floor(scope), studies.plans(scope)
    cases = [*rates, coupled]
    count = f"{len(scope.seeds)} seeds" if len(scope.seeds) > 1 else "one seed"
    return Artefact(
        name="convergence",
        title="Convergence: Theorem 1 against convex problems",
        command=f"python -m reproduction convergence{flags(scope.seeds, quick=quick)}",
        text=_text(quick, rates, own, gaps, floors, coupled, planned),
        tables=(
            slopes_table(cases), epsilons_table(cases, own), bounds_table(own), gaps_table(gaps), floors_table(floors),
            plans_table(planned),
        ),
        pictures=(
            Picture(
                "convergence-rate", rate_figure(rates),
                f"Error against T + λ, even depths 1 to {DEPTHS}, τ = {STEPS}, mean of {count}. Fixed levels on "
                "non-i.i.d. data stop at the floor that the aggregation rule implies; all else falls with slope -1.",
            ),
            Picture(
                "convergence-theorem", theorem_figure(own),
                f"The step size of Theorem 1 on the i.i.d. quadratic, mean of {count}, and its bound in both forms. "
                "FedPMT's λ is that large because ε is small; the dashed run breaks the proof's condition. Without its "
                "factor L the bound starts below the error.",
            ),
            Picture(
                "convergence-depths", depths_figure(gaps, floors),
                f"What shallow depths cost, {count}. Above: error of FedPMT over FedAvg's on i.i.d. data with the same "
                "step sizes and draws, by mix of depths, τ = 1. Below: what fixed levels leave on other data, against "
                "Λ; bars: the same floor when the levels are given out in other ways. Levels redrawn each round have "
                "no floor, only not yet converged.",
            ),
            Picture(
                "convergence-plans", plans_figure(planned),
                f"Fixed levels, two classes per device, mean of {count}. The paper's plan stops at its floor, so do "
                "ours under a plain mean. With changes divided by steps, and by chances where parts are drawn, the "
                "error falls with slope -1 within the same budget.",
            ),
        ),
        claims=settle(claims(rates, gaps, own)),
        values=_values(scope, cases, own, gaps, floors) | {"plans": [_planned(case) for case in planned]},
    )  # fmt: skip


RATE = 0.9  # a slope of -1, within what the last decade of a run can tell


def claims(rates: Sequence[Case], gaps: Sequence[Case], own: Theorem) -> list[Claim]:
    """What Theorem 1 and its remarks say."""
    trace, constants = own.inside[1], own.assumed[1]
    printed, proof = (broken_until(trace, constants, form) for form in ("printed", "proof"))
    return [
        Claim(
            "rate",
            "the error of FedPMT falls like 1/T, as FedAvg's does",
            "III-C, Theorem 1",
            [
                below(
                    f"{case.problem}, {case.data}, {case.participation}, {trace.arm.name}",
                    _estimate(slope(trace), trace),
                    -RATE,
                    lambda one: Interval(one.mean, one.half).fixed(),
                )
                for case in rates
                for trace in case.traces
                if trace.arm.name != FEDAVG
            ],
            "slope",
            f"A slope of -1 against log(T + λ) is the theorem's; -{RATE} is what the last decade of a run can tell. "
            "Levels fixed and redrawn, i.i.d. and not, all devices and a sample.",
        ),
        Claim(
            "psi",
            "its gap to FedAvg grows with psi",
            "III-C, remark 2",
            [
                above(
                    f"{case.problem}, psi {_psi(poor):.1f} against {_psi(rich):.1f}",
                    _estimate(ratio(poor, rich), poor),
                    1.0,
                    lambda one: Interval(one.mean, one.half).text(),
                )
                for case in gaps
                for rich, poor in pairwise(sorted(case.traces[1:], key=_psi))
            ],
            "error with the larger psi over error with the smaller",
        ),
        Claim(
            "bound",
            "the bound lies above the error",
            "III-C, Theorem 1",
            [
                exact(form, not last, f"broken up to round {last:,}" if last else "never broken")
                for form, last in (("as printed", printed), ("as the proof gives it", proof))
            ],
            "the mean error over seeds",
        ),
    ]


def _estimate(found: Interval, trace: Trace) -> Estimate:
    seeds = len(trace.errors)
    return Estimate(found.mean, found.half, seeds, seeds)


def _psi(trace: Trace) -> float:
    return splitting_constant(trace.arm.shares)


def _text(
    quick: bool,
    rates: Sequence[Case],
    own: Theorem,
    gaps: Sequence[Case],
    floors: Sequence[Floor],
    coupled: Case,
    planned: Sequence[Case],
) -> str:
    """What was found, with the numbers of this run."""
    return "\n\n".join(
        [
            *([QUICK] if quick else []),
            SETTING,
            _what_holds(rates, gaps),
            _what_does_not(rates, floors),
            _what_restores(planned),
            _proposition([*rates, coupled]),
            _step_size(own),
            "The slips found in the derivation, with their places and what each changes, are in docs/theory.md.",
        ]
    )


def _what_holds(rates: Sequence[Case], gaps: Sequence[Case]) -> str:
    holding = [slope(trace) for case in rates for trace in case.traces if trace.arm.name != FIXED]
    poorest = [ratio(case.traces[-1], case.traces[0]).text() for case in gaps]
    expected = splitting_constant(gaps[0].traces[-1].arm.shares) / DEPTHS
    price = [
        ratio(trace, case[FEDAVG]).text()
        for case in rates
        for trace in case.traces
        if trace.arm.name == REDRAWN and case.participation == "full"
    ]
    return f"""
**What holds.** With i.i.d. data, or with levels redrawn each round, the error falls like 1/T, for all devices and
for a sample of them: slopes {_range(holding)} against log(T + λ). FedAvg has the same rate and a smaller constant, and
the gap widens with ψ as the depths get poorer. On the quadratic it is ψ / |I|: {poorest[0]} at the poorest mix, where
ψ / |I| is {expected:.2f}; on softmax regression, whose blocks are unequal and feel each other, it is {poorest[1]}.
Redrawing has a price on non-i.i.d. data, since it turns the devices' differences into noise that FedAvg with all
devices does not have: {" and ".join(price)} times FedAvg's error with even depths.
""".strip()


def _what_does_not(rates: Sequence[Case], floors: Sequence[Floor]) -> str:
    stuck = [slope(trace) for case in rates for trace in case.traces if trace.arm.name == FIXED]
    worst = max(floors, key=lambda one: one.computed / one.start)
    mildest = min((one for one in floors if one.problem == "softmax"), key=lambda one: one.heterogeneity)
    return f"""
**What does not.** With fixed levels and non-i.i.d. data the error stops falling (slopes {_range(stuck)}): each block is
averaged over other devices, so the method comes to rest at a point w° that is not w*. The floor is known exactly,
F(w°) - F* with Σ_k A_k ∘ ∇F_k(w°) = 0, and the runs end on it. At its worst ({worst.problem}, {worst.data}) it is
{significant(worst.computed)}, where the error before training was {significant(worst.start)}. Data dealt out at random
leave one too, {significant(mildest.computed)} of {significant(mildest.start)} with 100 samples a device: equal
distributions are not equal samples. **Theorem 1 does not cover this case:** at w° Proposition 1, summed over the
devices, reads 0 >= ε (F(w°) - F* + μ/2 ‖w° - w*‖²), which no ε > 0 satisfies.
""".strip()


def _what_restores(planned: Sequence[Case]) -> str:
    traces = [trace for case in planned for trace in case.traces if trace.arm.name != FEDAVG]
    right = [slope(trace) for trace in traces if is_unbiased(trace.arm)]
    wrong = [slope(trace) for trace in traces if not is_unbiased(trace.arm)]
    cost = {
        name: " and ".join(ratio(case[name], case[FEDAVG]).text() for case in planned)
        for name in ("traded, steps", "rotated, draws")
    }
    return f"""
**What restores the rate with fixed levels.** Two classes per device, four devices of each depth. A weak device has the
budget of its depth in τ = {PLANNED_STEPS} steps, and may spend it otherwise. *Traded*: all blocks in fewer steps.
*Rotated*: once in {TURNS} rounds, at random, all blocks in fewer steps; else its depth in all steps. Under a plain mean
both come to rest away from w*, as the paper's plan does (slopes {_range(wrong)}): a device that takes more steps, or
trains a block more often, counts for more. With changes divided by steps, and by the chance of training the block where
that is drawn (`normalise=steps`, `normalise=draws`), the slopes are {_range(right)}. Traded costs little:
{cost["traded, steps"]} times the error of FedAvg, whose weakest devices do twice the work. Rotated costs noise:
{cost["rotated, draws"]} times.
""".strip()


def _proposition(cases: Sequence[Case]) -> str:
    ours = [(case, trace) for case in cases for trace in case.traces if trace.arm.name != FEDAVG]
    without = [(case, trace) for case, trace in ours if not trace.constants.covered]
    falling = sum(trace.arm.name != FIXED for _, trace in without)
    alike = sum(case.data == "i.i.d." for case, _ in without)
    return f"""
**Proposition 1 is the weak joint.** Its ε, measured as the least ratio along the run, is not positive in
{len(without)} of {len(ours)} runs of FedPMT, {alike} of them on i.i.d. data; in {falling} of these the error falls
like 1/T all the same. The proof uses the inequality only summed over the devices. Where the mean of the aggregate
is the gradient of F (devices alike, whatever their depths; or levels redrawn) the sum loses nothing, and ε could be
1. Asked of each device alone, ε is small where a weak device's blocks are nearer to w* than the others, and negative
where blocks feel each other or devices pull apart.
""".strip()


def _step_size(own: Theorem) -> str:
    trace, constants, outside = own.inside[1], own.assumed[1], own.outside
    error = float(trace.errors[:, -1].mean())
    printed, proof = (bound_of(trace, constants, form) for form in ("printed", "proof"))
    met = (
        "so the run is covered" if trace.constants.epsilon >= constants.kept else "so the run is NOT covered"
    )
    early = [broken_until(trace, constants, form) for form in ("printed", "proof")]
    held = [
        f"below it up to round {last:,}" if last else "above it in every recorded round" for last in early
    ]
    return f"""
**The theorem's own step size** (quadratic, |I| = 3, |S| = 6) needs an ε before the run: {constants.kept:.3g} is
assumed, {trace.constants.epsilon:.3g} measured, {met}. It asks for λ = {trace.arm.offset:,.0f}. After
{int(trace.rounds[-1]):,} rounds the error is {significant(error)}, falling with slope {slope(trace).fixed()}; the bound
is {significant(printed)} as printed and {significant(proof)} as the proof gives it, a factor
L = {constants.smoothness:g} more: {math.log10(printed / error):.1f} and {math.log10(proof / error):.1f} powers of ten
above the error. As printed the bound is {held[0]}, as the proof gives it {held[1]}.
With λ = {outside.arm.offset:.0f} and ε = 1, outside the condition, the
same method is at {significant(float(outside.errors[:, -1].mean()))} after {int(outside.rounds[-1]):,} rounds.
""".strip()


def _range(values: Sequence[Interval]) -> str:
    # Adding zero turns a rounded -0.0 into 0.0.
    ends = [round(end(one.mean for one in values), 2) + 0.0 for end in (min, max)]
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def _values(
    scope: Scope, cases: Sequence[Case], own: Theorem, gaps: Sequence[Case], floors: Sequence[Floor]
) -> dict[str, Any]:
    return {
        "scope": asdict(scope),
        "rate": [
            {
                "problem": case.problem,
                "data": case.data,
                "participation": case.participation,
                "floor": case.floor,
                "arms": [_arm(trace, case[FEDAVG]) for trace in case.traces],
            }
            for case in cases
        ],
        "theorem": [
            {
                **_arm(trace, own.inside[0]),
                "assumed_epsilon": constants.kept,
                "broken_until": {form: broken_until(trace, constants, form) for form in ("printed", "proof")},
                "bound": {form: bound_of(trace, constants, form) for form in ("printed", "proof")},
                "bound_appendix": {
                    form: bound_of(trace, constants, form, "appendix") for form in ("printed", "proof")
                },
            }
            for trace, constants in zip(own.inside, own.assumed, strict=True)
        ],
        "outside": _arm(own.outside, None),
        "gap": [
            {"problem": case.problem, "arms": [_arm(trace, case.traces[0]) for trace in case.traces]}
            for case in gaps
        ],
        "floor": [
            {
                "problem": one.problem,
                "data": one.data,
                "heterogeneity": one.heterogeneity,
                "start": one.start,
                "computed": one.computed,
                "assigned": one.assigned.tolist(),
                "fixed": _arm(one.fixed, None),
                "redrawn": _arm(one.redrawn, None),
            }
            for one in floors
        ],
    }


def _planned(case: Case) -> dict[str, Any]:
    return {
        "problem": case.problem,
        "heterogeneity": case.heterogeneity,
        "arms": [
            {
                **_arm(trace, case[FEDAVG]),
                "plan": trace.arm.plan,
                "normalise": trace.arm.normalise,
                "rest": rest,
                "bound": plan_bound(trace) if is_unbiased(trace.arm) else None,
            }
            for trace, rest in zip(case.traces, case.rests, strict=True)
        ],
    }


def _arm(trace: Trace, base: Trace | None) -> dict[str, Any]:
    return {
        "name": trace.arm.name,
        "counts": list(trace.arm.counts),
        "psi": splitting_constant(trace.arm.shares),
        "offset": trace.arm.offset,
        "rounds": trace.rounds.tolist(),
        "errors": trace.errors.mean(axis=0).tolist(),
        "slope": _pair(slope(trace)),
        "level": _pair(level(trace)),
        "ratio": None if base is None else _pair(ratio(trace, base)),
        "constants": asdict(trace.constants),
        "failing": trace.failing,
        "summed": trace.summed,
    }


def _pair(value: Interval) -> list[float | None]:
    return [value.mean, value.half if math.isfinite(value.half) else None]
