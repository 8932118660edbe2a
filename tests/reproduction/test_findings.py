"""What pages say of their numbers: findings, and comparisons of methods."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from report_samples import run

import fedpmt
from fedpmt import api
from reproduction import accuracy, studies
from reproduction.__main__ import program
from reproduction.boards import EQUAL_TIME, compare, rows_of, shown_on_chart, tables_of, text_of
from reproduction.comparison import (
    FIXED,
    LAYERS,
    LEARNED,
    MASKED,
    NESTED,
    NOTES,
    OWN,
    PRINTED,
    RANDOM,
    ROLLS,
    YES,
    Row,
    differs,
    observe,
)
from reproduction.entrants import KNOWN, SAME
from reproduction.findings import (
    FINDINGS,
    LIKELY,
    NOT_SEEN,
    OPEN,
    SEEN,
    UNKNOWN,
    UNLIKELY,
    Finding,
    findings,
    jumps,
    reached_bytes,
    reached_seconds,
)
from reproduction.library import Library
from reproduction.natural import Entrant
from reproduction.paper import IID, TWO_CLASSES, Scope
from reproduction.readings import WATTS, Arrival, accuracy_at, final, joules, log_ratios, reaching
from reproduction.tuned import (
    ALL,
    AT_THE_RATE,
    BUFFERED,
    CIFAR10_ALL,
    CIFAR10_CASES,
    EMBEDDED,
    EMBEDDED_CASES,
    GRID,
    OTHER_RATES,
    OURS,
    PLAIN_TRIAL,
    TABLE_II,
    WEIGHTS,
    Trial,
    steps_of,
)
from reproduction.verdicts import (
    FAILS,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    Case,
    Claim,
    Estimate,
    above,
    below,
    exact,
    near,
    not_run,
    pair,
    settle,
    times,
)

if TYPE_CHECKING:
    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings


sys.path.insert(0, str(Path(__file__).parents[1] / "report"))


def pairs(*leads: float) -> Estimate | None:
    """Differences on equal seeds."""
    return Estimate.of(leads)


def settled(*cases: Case) -> list[str]:
    """The verdicts of cases that are one family."""
    return [case.verdict for case in settle([Claim("", "", "", cases)])[0].cases]


def test_pairs_decide_what_means_alone_do_not() -> None:
    """Seeds differ by 10 points; on each of them one method is 1 point ahead."""
    ours = {seed: 0.5 + 0.02 * seed for seed in range(6)}
    theirs = {seed: value - 0.01 + 0.001 * (-1) ** seed for seed, value in ours.items()}
    leads = pair(lambda mine, other: mine - other, ours, theirs)
    assert settled(above("paired", Estimate.of(leads))) == [HOLDS]
    assert settled(below("paired", Estimate.of(leads))) == [FAILS]
    crossed = [mine - other for mine, other in zip(ours.values(), reversed(theirs.values()), strict=True)]
    assert settled(above("not paired", Estimate.of(crossed))) == [UNDECIDED]


def test_a_mean_of_1_15_against_1_14_decides_nothing() -> None:
    gains = [math.log(1.15 / 1.14) + noise for noise in (-0.1, 0.0, 0.1)]
    assert settled(above("more", Estimate.of(gains), show=times)) == [UNDECIDED]


def test_one_case_among_many_needs_more() -> None:
    lead = above("here", pairs(0.02, 0.03, 0.025))  # p = 0.013
    noise = [above(f"{number}", pairs(0.01, -0.01, 0.002)) for number in range(9)]
    assert settled(lead) == [HOLDS]
    assert settled(lead, *noise) == [UNDECIDED] * 10


@pytest.mark.parametrize(
    ("leads", "verdict"),
    [
        ((0.001, -0.002, 0.0005), HOLDS),
        ((-0.051, -0.052, -0.05), FAILS),
        ((0.051, 0.052, 0.05), FAILS),
        ((0.018, 0.022, 0.015), UNDECIDED),  # the interval crosses the margin
        ((0.0,), UNDECIDED),
    ],
)
def test_alike_means_within_the_margin(leads: tuple[float, ...], verdict: str) -> None:
    assert settled(near("here", Estimate.of(leads), 0.02)) == [verdict]


def test_equal_differences_are_counted() -> None:
    """Rounds lie on a grid, so three seeds can give the same: then the sign test decides, 2 / 2^n."""
    few, many = (above("here", pairs(*[0.6] * count)) for count in (3, 10))
    assert few.p == 0.25
    assert many.p == pytest.approx(0.00195, abs=1e-5)


def test_what_has_no_seeds_or_no_runs() -> None:
    assert settled(exact("a", True, ""), exact("b", False, ""), not_run("c")) == [HOLDS, FAILS, NOT_RUN]
    assert above("d", Estimate.of([])).verdict == NOT_RUN
    claim = settle([Claim("name", "text", "IV", [above("here", pairs(1.0, 1.1)), not_run("there")])])[0]
    assert Claim.read(json.loads(json.dumps(claim.values()))) == claim


def curve(seed: int, early: float, late: float) -> RunRecord:
    """A hundred rounds: the first half at one accuracy, the second at another."""
    return run([(early if place < 50 else late) + 0.001 * seed for place in range(100)], seed=seed)


def test_a_lead_is_judged_round_by_round() -> None:
    lines: dict[tuple[str, int | None], dict[int, RunRecord]] = {
        line: {seed: curve(seed, 0.5, 0.9) for seed in range(4)} for line in accuracy.lines_of("cnn-mnist")
    }
    ahead = {seed: curve(seed, 0.6 + 0.002 * seed, 0.8 - 0.002 * seed) for seed in range(4)}
    found: accuracy.Runs = {("cnn-mnist", IID): {**lines, ("fedpmt", 4): ahead, ("fedpmt", 2): ahead}}
    leads = accuracy.leads_by_round(found)
    assert [(claim.name, claim.verdict) for claim in leads] == [
        ("round 50", "holds in all 2 cases"), ("round 100", "fails in all 2 cases"),
    ]  # fmt: skip
    assert accuracy.horizon_text(leads) == "up to round 50 it holds in most cases (in 2 of 2 there)"
    claims = {claim.name: claim for claim in settle(accuracy.claims(found, leads))}
    assert claims["lead"].verdict == "fails in all 2 cases"
    assert claims["like-fedavg"].verdict == "fails"
    assert claims["two-classes"].verdict == NOT_RUN


def test_a_target_that_is_never_reached_weakens_a_lead_and_does_not_turn_it() -> None:
    early, late, never = Arrival(10, 10.0, True), Arrival(20, 90.0, True), Arrival(99, 50.0, False)

    def ratio(ours: Arrival, theirs: Arrival) -> list[float]:
        return log_ratios({0: ours}, {0: theirs}, lambda one: one.seconds)

    assert ratio(early, late) == [math.log(9)]
    assert ratio(early, never) == [math.log(5)]
    assert ratio(never, late) == [0.0]  # the clock of those who never get there may have run shorter
    assert ratio(never, never) == []


def option_runs(added: int, late: float) -> studies.BySeed:
    """Three seeds whose replies carry some more bytes than the hundred of a round."""
    runs = {seed: curve(seed, 0.5, late) for seed in range(3)}
    return {
        seed: one.model_copy(
            update={"rounds": tuple(step.model_copy(update={"overhead_bytes": added}) for step in one.rounds)}
        )
        for seed, one in runs.items()
    }


def test_option_two_is_judged_by_bytes_and_accuracy() -> None:
    def judge(split: str, added: int, late: float) -> list[str]:
        missing: studies.BySeed = {}
        found: studies.Found = {
            option: {one: runs if one == split else missing for one in studies.BOTH}
            for option, runs in (
                (studies.OPTION_I, option_runs(added, 0.9)),
                (studies.OPTION_II, option_runs(added, late)),
            )
        }
        return [case.verdict for case in settle([studies.option_claim(found)])[0].cases]

    assert judge(IID, 0, 0.9) == [HOLDS, HOLDS, NOT_RUN, NOT_RUN]
    assert judge(TWO_CLASSES, 1, 0.9) == [
        NOT_RUN,
        NOT_RUN,
        FAILS,
        HOLDS,
    ]  # one byte in a hundred is not marginal
    assert judge(IID, 0, 0.8)[1] == UNDECIDED  # three equal differences of 10 points: the sign test


def test_variations_play_only_what_the_figure_lacks() -> None:
    scope = Scope([0])
    figure = {one.model_dump_json() for one in accuracy.runs(scope)}
    added = {one.model_dump_json(): one.task for one in studies.variation_runs(scope)}
    assert Counter(task for key, task in added.items() if key not in figure) == {
        "cnn-cifar10": 36, "fcnn-mnist": 10, "cnn-mnist": 10,
    }  # fmt: skip
    assert {one.task for one in studies.variation_runs(Scope([0], quick=True))} == {"fcnn-mnist", "cnn-mnist"}


def ended(*accuracies: float) -> list[RunRecord]:
    """One run for each final accuracy, of seeds 0, 1, ..; a round takes ten seconds and sends a hundred bytes."""
    return [run([accuracy / 2, accuracy], seed=seed) for seed, accuracy in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("firsts", "seconds", "verdict"),
    [
        ((0.8, 0.81, 0.82), (0.7, 0.71, 0.72), SEEN),
        ((0.7, 0.71, 0.72), (0.8, 0.81, 0.82), NOT_SEEN),
        ((0.8, 0.70, 0.75), (0.7, 0.80, 0.74), OPEN),
        ((0.8, 0.71, 0.75), (0.7, 0.70, 0.70), LIKELY),
        ((0.7, 0.70, 0.70), (0.8, 0.71, 0.75), UNLIKELY),
        ((0.8, 0.7), (0.8, 0.7), OPEN),
        ((0.8,), (0.7,), SEEN),
        ((0.7,), (0.8,), NOT_SEEN),
        ((), (0.8,), UNKNOWN),
    ],
)
def test_verdicts_need_more_than_the_interval(
    firsts: tuple[float, ...], seconds: tuple[float, ...], verdict: str
) -> None:
    finding = Finding("", "", "a", "b", final, more=True)
    assert finding.verdict(ended(*firsts), ended(*seconds))[0] == verdict


def test_who_never_reaches_the_target_is_behind() -> None:
    finding = Finding("", "", "a", "b", reached_seconds)
    assert finding.verdict(ended(0.6, 0.6), ended(0.4, 0.4)) == (SEEN, "2 of 2")
    assert finding.verdict(ended(0.4, 0.4), ended(0.6, 0.6)) == (NOT_SEEN, "0 of 2")
    assert finding.verdict(ended(0.6, 0.4), ended(0.4, 0.6)) == (OPEN, "1 of 2")
    assert finding.verdict(ended(0.4), ended(0.4))[0] == UNKNOWN
    # At 20 s and after 200 bytes; with 1.2 already at 10 s.
    assert [reached_seconds(one) for one in ended(0.6, 1.2)] == [20.0, 10.0]
    assert [reached_bytes(one) for one in ended(0.6, 1.2)] == [200.0, 100.0]


def test_what_is_not_there_can_also_say_nothing() -> None:
    """Never reached is behind; what a run that broke off would have spent is not known."""
    firsts, seconds = ended(0.5, 0.5, 0.5), ended(0.5, 0.5, 0.5)
    told: dict[int, float | None] = {
        id(run): spent for run, spent in zip(firsts, (1.0, None, 3.0), strict=True)
    }
    told |= {id(run): spent for run, spent in zip(seconds, (2.0, 4.0, 4.0), strict=True)}
    for reaches, verdict in ((True, OPEN), (False, SEEN)):
        finding = Finding("", "", "a", "b", lambda run: told[id(run)], reaches=reaches)
        assert finding.verdict(firsts, seconds) == (verdict, "2 of 3")


def test_one_of_several_seeds_decides_nothing() -> None:
    sooner = Finding("", "", "a", "b", reached_seconds)
    assert sooner.verdict(ended(0.6, 0.3, 0.3), ended(0.3, 0.3, 0.3)) == (OPEN, "1 of 3")
    assert sooner.verdict(ended(0.6, 0.6, 0.3), ended(0.3, 0.3, 0.3)) == (SEEN, "2 of 3")
    higher = Finding("", "", "a", "b", final, more=True)
    assert higher.verdict(ended(0.8, 0.8, 0.8), ended(0.3)) == (
        OPEN,
        "1 of 3",
    )  # the others are not there yet


def test_a_target_is_reached_by_a_mean_not_by_a_jump() -> None:
    """Twenty evaluations, so the mean of two: one at 0.9 between zeros makes 0.45, and the 12th and 13th 0.5."""
    jumpy = run([0.0, 0.0, 0.9, 0.0, *[0.0] * 7, 0.5, 0.5, *[0.6] * 7])
    found = reaching(jumpy, 0.5)
    assert found is not None
    assert (found.round, found.seconds, found.bytes_up) == (13, 130.0, 1300)
    assert reached_seconds(jumpy) == 130.0
    assert reaching(jumpy, 0.61) is None
    # With two classes per device the papers' findings are read at 40 %.
    assert reached_seconds(run([0.1, 0.42], partition=TWO_CLASSES)) == 20.0
    assert reached_seconds(run([0.1, 0.42], partition=IID)) is None


def test_a_margin_and_jumps() -> None:
    close = Finding("", "", "a", "b", final, more=True, margin=0.01)
    assert close.verdict(ended(0.795), ended(0.8))[0] == SEEN
    assert close.verdict(ended(0.78), ended(0.8))[0] == NOT_SEEN
    calm, wild = run([0.1, 0.9, 0.5, 0.5, 0.5, 0.5]), run([0.5, 0.5, 0.5, 0.3, 0.6, 0.3])
    assert jumps(calm) == 0
    assert jumps(wild) == pytest.approx(0.3)


def test_findings_are_about_entrants() -> None:
    for finding in FINDINGS:
        assert {finding.first, finding.second} <= set(KNOWN)
        assert set(finding.panels) <= {IID, TWO_CLASSES}


def test_a_finding_needs_both_sides() -> None:
    found = {(IID, "fedrolex"): ended(0.8), (IID, "heterofl"): ended(0.7), (IID, "feddrop"): []}
    judged = {one["finding"]: one["verdict"] for one in findings(found)}
    assert judged == {
        "FedRolex ends above HeteroFL": SEEN,
        "HeteroFL ends above random dropout": UNKNOWN,
        "FedRolex ends above random dropout": UNKNOWN,
    }


def test_the_end_is_the_last_tenth_of_the_rounds() -> None:
    long = run([*[0.1] * 18, 0.5, 0.7])
    assert final(long) == pytest.approx(0.6)
    assert final(run([0.1, None, 0.3, None])) == 0.3


@pytest.mark.parametrize(
    ("name", "row", "rest"),
    [
        (
            "fedpmt",
            ("Yes", "overlap mean", YES, f"{YES} up only", LAYERS, "-"),
            ("weights", "averages", "-", "global"),
        ),
        ("fedrolex", ("Yes", "overlap mean", YES, YES, ROLLS, "-"), ("weights", "averages", "-", "global")),
        ("fedmp", ("Yes", "fill mean", YES, YES, LEARNED, "-"), ("weights", "averages", "-", "global")),
        (
            "prunefl",
            ("No", "mean under one mask", "-", "-", MASKED, "-"),
            ("weights, squared gradients", "averages", "tensors", "global"),
        ),
        ("slimfl", ("No", "overlap mean", "-", "-", NESTED, "-"), ("weights", "averages", "-", "global")),
        (
            "feddf",
            ("Yes", "mean of each prototype, then distillation", YES, YES, OWN, "unlabelled, labelled"),
            ("weights", "trains", "-", "global"),
        ),
        (
            "comet",
            ("Yes", "clusters of answers, for distillation", YES, "-", OWN, "unlabelled"),
            ("answers", "clusters", "a net", "personal"),
        ),
    ],
)
def test_a_row_is_what_the_method_does(name: str, row: tuple[str, ...], rest: tuple[str, ...]) -> None:
    found = observe(name)
    assert astuple(found.row) == row
    assert (found.up, found.server, found.keeps, found.evaluates) == rest


def test_words_for_the_same_thing_are_no_correction() -> None:
    assert not differs(PRINTED["feddrop"], Row("Yes", "overlap mean", YES, YES, RANDOM, "-"))
    assert not differs(PRINTED["fedavg"], Row("No", "mean", "-", "-", "whole", "-"))
    assert not differs(PRINTED["feddf"], Row("Yes", "mean, then distillation", "-", "-", OWN, "unlabelled"))
    assert differs(PRINTED["feddf"], Row("Yes", "mean", "-", "-", OWN, "unlabelled"))
    assert differs(PRINTED["fedmp"], Row("Yes", "fill mean", YES, YES, RANDOM, "-"))
    assert differs(PRINTED["heterofl"], Row("Yes", "overlap mean", YES, YES, FIXED, "-"))


@pytest.mark.slow
def test_every_correction_is_argued(tmp_path: Path) -> None:
    assert program(["comparison", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "comparison.json").read_text())
    assert set(numbers["corrected"]) == set(NOTES)
    published = Path(__file__).parents[2] / "docs" / "results" / "comparison.json"
    assert numbers["rows"] == json.loads(published.read_text())["rows"]


def test_a_lead_is_sure_only_after_correction_for_all_that_are_compared() -> None:
    ours = {OURS: ended(0.70, 0.71, 0.72, 0.70)}
    rivals = {
        "behind": ended(0.60, 0.61, 0.62, 0.61),
        "ahead": ended(0.80, 0.81, 0.82, 0.81),
        "even": ended(0.71, 0.70, 0.71, 0.71),
    }
    case = EMBEDDED_CASES[0]
    verdicts = compare([(case, {**ours, **rivals})])
    assert {rival: one.text for (_, rival), one in verdicts.items()} == {
        "behind": "FedPMT ahead",
        "ahead": "FedPMT behind",
        "even": "undecided",
    }
    assert verdicts[case.name, "behind"].lead.mean == pytest.approx(0.0975)
    for one in verdicts.values():
        assert one.corrected >= one.chance
    # One seed decides nothing, and neither does a rival that shares none.
    alone = compare([(case, {OURS: ended(0.7), "rival": ended(0.1)})])
    assert [one.text for one in alone.values()] == ["undecided"]
    assert compare([(case, {"rival": ended(0.1)})]) == {}


def test_what_did_best_on_validation_data_plays() -> None:
    """Every trial is scored on validation data, of seeds that do not count; a missing one decides nothing yet."""
    case, scope, entrant = EMBEDDED_CASES[0], Scope([0, 1]), WEIGHTS[0]
    wanted = [case.trial(scope, entrant, trial, seed) for trial in GRID for seed in case.trial_seeds]
    assert {(one.score_on, one.seed in scope.seeds) for one in wanted} == {("validation", False)}
    assert len({one.model_dump_json() for one in wanted}) == len(wanted)

    class Played:
        def __init__(self, missing: int = -1) -> None:
            self.missing = missing

        def find(self, settings: Settings) -> RunRecord | None:
            place = wanted.index(settings)
            # The best is the fourth setting, though its first seed is the worst of all.
            score = {6: 0.1, 7: 0.99}.get(place, 0.5)
            return None if place == self.missing else run([score] * 6, seed=settings.seed)

    assert case.chosen(Played(), scope, entrant) == GRID[3]  # type: ignore[arg-type]
    assert case.chosen(Played(5), scope, entrant) is None  # type: ignore[arg-type]
    final = case.run(scope, entrant, GRID[3], 1)
    assert (final.score_on, final.seed, final.plan) == ("test", 1, "traded")
    assert (final.server_optimizer, final.lr) == ("momentum", wanted[7].lr)


def test_other_rates_are_tried_with_the_step_that_did_best() -> None:
    """So that five trials tune both rates; the choice waits for all of them."""
    case, scope, entrant = CIFAR10_CASES[0], Scope([0]), WEIGHTS[0]
    first = [case.trial(scope, entrant, trial, 100) for trial in AT_THE_RATE]
    further = [Trial(rate, AT_THE_RATE[1].server) for rate in OTHER_RATES]
    then = [case.trial(scope, entrant, trial, 100) for trial in further]

    class Played:
        def __init__(self, scores: list[float]) -> None:
            self.scores = scores

        def find(self, settings: Settings) -> RunRecord | None:
            place = [*first, *then].index(settings)
            return run([self.scores[place]] * 6) if place < len(self.scores) else None

    def found(*scores: float) -> tuple[list[Settings], Trial | None]:
        library: Any = Played(list(scores))
        return case.trials(library, scope, entrant), case.chosen(library, scope, entrant)

    assert found(0.1, 0.3) == (first, None)
    assert found(0.1, 0.3, 0.2, 0.4) == ([*first, *then], None)
    assert found(0.1, 0.3, 0.2, 0.4, 0.2) == ([*first, *then], further[0])
    assert found(0.1, 0.3, 0.2, 0.2, 0.2) == ([*first, *then], AT_THE_RATE[1])
    assert case.choices(entrant) == TABLE_II.choices(TABLE_II.entrants[0]) == 5


def test_for_speed_a_method_plays_the_setting_that_is_soonest_at_each_target() -> None:
    """The first setting is best in the end, the second soonest at 60 %; nobody is at 55 % but the third, at once."""
    case, scope, entrant = CIFAR10_CASES[0], Scope([0]), WEIGHTS[0]
    rising: list[list[float | None]] = [
        [0.1, 0.1, 0.1, 0.1, 0.7, 0.9],
        [0.1, 0.1, 0.1, 0.65, 0.6, 0.6],
        [0.58] * 6,
    ]

    class Played:
        def find(self, settings: Settings) -> RunRecord:
            first = [case.trial(scope, entrant, trial, 100) for trial in AT_THE_RATE]
            return run(rising[first.index(settings)] if settings in first else [0.1] * 6)

    library: Any = Played()
    assert case.settings_of(library, scope, entrant) == [
        AT_THE_RATE[0],
        *(AT_THE_RATE[place] for place in (2, 2, 1)),
    ]
    assert TABLE_II.settings_of(library, scope, entrant) == [AT_THE_RATE[0]]


def test_who_is_as_soon_as_the_champion_is_level_with_it() -> None:
    case = replace(EMBEDDED_CASES[0], targets=(0.6,))
    runs = {OURS: ended(0.7, 0.7), "FedAvg": ended(0.8, 0.8)}
    text = text_of(case, rows_of(case, runs, {}), {})
    assert text.endswith(
        "- 60 %: FedPMT, traded after 0.3 min, level with FedAvg; 1.0 times sooner than FedAvg."
    )


def test_settings_are_carried_over_from_the_same_form_of_a_method() -> None:
    """FedPMT has four forms: two plans on two clocks."""
    case, scope = CIFAR10_ALL.cases[1], Scope([0])
    assert case.tuned_on is EMBEDDED.cases[1]
    ours = {entrant.title: entrant for entrant in ALL if entrant.method == "fedpmt"}
    assert len(ours) == 4

    class Played:
        def find(self, settings: Settings) -> RunRecord:
            best = (
                settings.plan == "traded"
                and settings.clock == "events"
                and settings.server_optimizer != "none"
            )
            return run([0.5 + 0.1 * best + 0.01 * settings.lr] * 6)

    library: Any = Played()
    chosen = {title: case.chosen(library, scope, entrant) for title, entrant in ours.items()}
    momentum = {title for title, trial in chosen.items() if trial is not None and trial.server}
    assert momentum == {f"{OURS}, buffered"}
    assert {trial.rate for trial in chosen.values() if trial is not None} == {2.0}
    assert not case.trials(library, scope, ours[OURS])


def test_a_method_without_rounds_has_as_many_replies_and_all_methods_choose_from_what_they_can() -> None:
    case, scope = EMBEDDED.cases[0], Scope([0])
    choices = {}
    for entrant in ALL:
        choices[entrant.title] = len(case.trials_of(entrant))
        for one in (case.base(scope, entrant, 0), case.trial(scope, entrant, PLAIN_TRIAL, 100)):
            replies = one.buffer or one.cohort
            assert one.rounds * replies == 100 * 10
            assert one.eval_every * replies in (2 * 10, 8 * 10)  # devices' own nets are tested less often
            if entrant.title != "FedDF":
                api.check(one)
    assert {title for title, count in choices.items() if count == 1} == {"FedDF"}
    assert {title for title, count in choices.items() if count == 3} == {"COMET", "FedGKT", "PruneFL"}
    assert set(choices.values()) == {1, 3, 6}
    gkt = next(one for one in ALL if one.method == "fedgkt")
    assert case.run(scope, gkt, GRID[-1], 0).options["rate"] == 0.002
    assert steps_of(case.base(scope, WEIGHTS[0], 0), 7) == 7


def test_methods_that_are_others_under_this_budget(tmp_path: Path) -> None:
    case, hashes = EMBEDDED_CASES[1], {}
    for name in {*SAME, *SAME.values()}:
        one = case.run(Scope([0]), Entrant(name, name), GRID[1], 0)
        few = one.model_copy(update={"rounds": 8, "eval_every": 8, "workers": 1})
        result = api.start(api.request_of(few), tmp_path / name).result
        assert result is not None
        hashes[name] = result.weights_sha256
    assert {name: hashes[other] for name, other in SAME.items()} == {name: hashes[name] for name in SAME}
    assert hashes["fedpmt"] != hashes["fedavg"]


@pytest.mark.parametrize(
    "settings", [{"deadline": 14, "failure": 0.3}, {"clock": "events", "deadline": 14}, {}]
)
def test_energy_from_a_record_is_that_of_the_simulator(settings: dict[str, Any]) -> None:
    watts = {f"watts_{key}": value for key, value in vars(WATTS).items()}
    fleet = [fedpmt.Device(speed=speed, uplink_mbps=8, count=3, **watts) for speed in (0.25, 0.5, 1)]
    ended = fedpmt.run(
        "fedavg", fleet=fleet, data="synthetic", cohort=6, samples=20, rounds=4, eval_every=4, **settings
    )
    assert ended.result is not None
    assert ended.result.joules == pytest.approx(joules(ended))
    assert joules(ended, 2) == pytest.approx(sum(step.joules or 0.0 for step in ended.rounds[:2]))


def test_the_page_says_where_a_method_without_rounds_is_ahead() -> None:
    """The champion's rounds end after 20 s. The rival is far ahead then, and behind at its own end."""

    def rise(*scores: float) -> list[RunRecord]:
        return [run([one + seed / 1000 for one in scores], seed=seed, clock="events") for seed in range(4)]

    case = replace(
        EMBEDDED_CASES[0], entrants=(WEIGHTS[0], Entrant("rival", "fedbuff", BUFFERED)), targets=(0.6, 0.7)
    )
    runs = {OURS: ended(0.70, 0.71, 0.72, 0.70), "rival": rise(0.65, 0.8, 0.4, 0.4)}
    assert accuracy_at(runs["rival"][0], 9.9) == 0
    assert accuracy_at(runs["rival"][0], 25) == 0.8
    verdicts = {rival: one for (_, rival), one in compare([(case, runs)]).items()}
    assert {rival: one.text for rival, one in verdicts.items()} == {
        "rival": "FedPMT ahead",
        f"rival{EQUAL_TIME}": "FedPMT behind",
    }
    rows = rows_of(case, runs, {})
    text = text_of(case, rows, verdicts)
    assert "- Significantly more accurate after as many replies: none.\n" in text
    assert "- Significantly more accurate in equal time: rival (80.2 %).\n" in text
    assert "- Sooner at 60 %: rival (0.2 min).\n" in text
    # In each round two devices draw 3 W for 5 s of training and 0.4 W for 5 s of waiting.
    assert {row["title"]: row["joules"] for row in rows} == {
        OURS: 2 * 2 * 17.0,
        "rival": pytest.approx(4 * 2 * 17.0),
    }
    assert tables_of(case, rows, verdicts)[0].title.endswith(": what came out")
    over = [{**row, "over_budget": 0.5 if row["title"] == "rival" else 0.0} for row in rows]
    titles = [table.title.partition(": ")[2] for table in tables_of(case, over, verdicts)]
    assert titles[:2] == ["within the budget", "over the budget"]
    assert shown_on_chart([rows], OURS) == [OURS, "rival"]
    # Where nothing is to be reached, tables have no times to it.
    bare = replace(case, targets=())
    (table, *_) = tables_of(bare, rows_of(bare, runs, {}), verdicts)
    assert table.columns == ("method", "clock", "accuracy, %", "in equal time, %", "whole run", "energy")


def test_the_page_names_who_was_not_played(tmp_path: Path) -> None:
    """An empty library: everybody, each method once."""
    page = EMBEDDED.page(Library(tmp_path / "records", tmp_path / "work", 1), Scope([0]))
    (line,) = [line for line in page.text.splitlines() if line.startswith("Not played yet")]
    titles = line.removesuffix(".").partition(": ")[2]
    assert titles == ", ".join(dict.fromkeys(one.title for one in ALL))
