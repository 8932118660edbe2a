"""Every method at rates of its own, chosen by one rule: what it reaches, in what time, and who is ahead of FedPMT.

For each task every method gets the same number of trials on validation data, which no device holds and no test sees: a
small grid of its devices' rate and of the server's step. What does best there plays the runs that count. Runs of all
seeds are compared in pairs, and the family of comparisons on a page is corrected by Holm's rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from scipy.stats import ttest_rel

from fedpmt import api
from fedpmt.report.quantities import show, time_unit
from fedpmt.report.tables import evaluated
from fedpmt.settings import resolve
from reproduction import entrants as leaderboard
from reproduction.artefact import Artefact, Picture, Table
from reproduction.completion_time import DEADLINE
from reproduction.natural import PEOPLE, ROLES, Contest, Entrant, draw_panels
from reproduction.paper import IID, PARTITIONS, TWO_CLASSES, Experiment, Scope, seeds_text
from reproduction.readings import TAIL, final
from reproduction.scores import minutes, percent, seconds_to
from reproduction.verdicts import CONFIDENCE, Estimate, holm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library

RATES = (0.5, 1.0, 2.0)
"""Rates of devices that are tried, as multiples of the task's own."""

SERVERS: tuple[Mapping[str, Any], ...] = ({}, {"server_optimizer": "momentum", "server_lr": 0.3})
"""Steps of the server that are tried: the mean as it is, and momentum 0.9 at rate 0.3."""

TRIAL_SEEDS = (100, 101)
"""Of the trials: none of the seeds that count."""

QUICK_ENTRANTS = 3

LIKELY = 0.05
"""A difference is sure where its corrected p-value is below this."""

OURS, PAPER = "FedPMT, traded", "FedPMT"
TRADED = {"plan": "traded"}
WEIGHTS = (
    Entrant(OURS, "fedpmt", TRADED),
    Entrant(PAPER, "fedpmt"),
    *(
        Entrant(leaderboard.KNOWN[name].title, name)
        for name in ("fedavg", "heterofl", "fedrolex", "fedmp", "fedprox", "feddrop", "fjord", "scaffold")
    ),
)
"""FedPMT in its two forms, and methods that exchange weights, those first that were best on the leaderboard."""

BEST = WEIGHTS[:6]


@dataclass(frozen=True)
class Trial:
    """One point of the grid."""

    rate: float  # a multiple of the task's own
    server: Mapping[str, Any]

    def settings(self, usual: float) -> dict[str, Any]:
        """As settings, for a task with this usual rate."""
        return {"lr": float(f"{self.rate * usual:.3g}"), **self.server}


GRID = tuple(Trial(rate, server) for rate, server in product(RATES, SERVERS))
ADAM = {"server_optimizer": "adam", "server_lr": 0.01}
AT_THE_RATE = tuple(Trial(1.0, server) for server in (*SERVERS, ADAM))
"""Where a trial takes minutes: the task's own rate, with three steps of the server."""


@dataclass(frozen=True)
class Case:
    """A task and a split on which methods are compared."""

    name: str
    title: str
    data: str
    partition: str
    targets: tuple[float, ...]
    rounds: int
    trial_rounds: int
    validation: float  # share of the training set that trials are scored on
    entrants: Sequence[Entrant] = WEIGHTS
    more: Mapping[str, Any] = field(default_factory=dict)
    trial_seeds: Sequence[int] = TRIAL_SEEDS
    grid: Sequence[Trial] = GRID  # what a method may choose from
    people: Contest | None = None  # whose task it is, where that is no leaderboard's
    fixed: Trial | None = None  # of all entrants, without trials: forms of one method
    champion: str = OURS  # whom the others are set against
    reading: Callable[[RunRecord], float] = final  # what a run comes to

    def base(self, scope: Scope, entrant: Entrant, seed: int) -> Settings:
        """A run as on the leaderboard: the same fleet, budget and held-out data; or as on the page of people."""
        if self.people is not None:
            form = Entrant(entrant.title, entrant.method, {"budget": leaderboard.BUDGET, **entrant.settings})
            return self.people.of(replace(scope, quick=False), form, seed)
        contest = leaderboard.Contest([seed], self.data, rounds=self.rounds, data_dir=scope.data_dir)
        known = leaderboard.KNOWN.get(entrant.method, leaderboard.KNOWN["fedpmt"])
        given = contest.settings(known, self.partition, seed).model_dump()
        options = {**given["options"], **entrant.settings.get("options", {})}
        more = {**self.more, **entrant.settings, "options": options, "method": entrant.method}
        return api.settings_of({**given, **more})

    def trial(self, scope: Scope, entrant: Entrant, trial: Trial, seed: int) -> Settings:
        """A run that is scored on validation data."""
        base = self.base(scope, entrant, seed)
        changed = {
            **trial.settings(base.lr),
            "rounds": 2 if scope.quick else self.trial_rounds,
            "validation": self.validation,
            "score_on": "validation",
        }
        return api.settings_of(resolve({**base.model_dump(), **changed}).model_dump())

    def run(self, scope: Scope, entrant: Entrant, trial: Trial, seed: int) -> Settings:
        """A run that counts."""
        base = self.base(scope, entrant, seed)
        tuned = {**trial.settings(base.lr), **entrant.settings}
        changed = {
            **tuned,
            "options": base.options,
            **({"rounds": 4, "eval_every": 1} if scope.quick else {}),
        }
        return resolve({**base.model_dump(), **changed})

    def chosen(self, library: Library, scope: Scope, entrant: Entrant) -> Trial | None:
        """Find what did best on validation data; None while a trial is missing."""
        if self.fixed is not None:
            return self.fixed
        found = []
        for trial in self.grid:
            runs = [library.find(self.trial(scope, entrant, trial, seed)) for seed in self.trial_seeds]
            scores = [trial_score(run) for run in runs if run is not None]
            if len(scores) < len(runs):
                return None
            found.append((sum(scores), trial))
        return max(found, key=lambda one: one[0])[1]


def trial_score(run: RunRecord) -> float:
    """The mean over the last third of the evaluations, which jump; none where the trial diverged."""
    scores = [] if run.diverged else [score for _, score in evaluated(run)]
    last = scores[-max(1, len(scores) // 3) :]
    return sum(last) / len(last) if last else 0.0


@dataclass(frozen=True)
class Tuned:
    """A page: cases, in two stages, since the runs that count depend on the trials."""

    name: str
    title: str
    cases: Sequence[Case]
    about: str  # how it was done

    def trials(self, scope: Scope) -> list[Settings]:
        """All trials."""
        return [
            case.trial(scope, entrant, trial, seed)
            for case in self.cases
            if case.fixed is None
            for entrant in case.entrants[: QUICK_ENTRANTS if scope.quick else None]
            for trial in case.grid
            for seed in case.trial_seeds
        ]

    def runs(self, library: Library, scope: Scope) -> list[Settings]:
        """The runs that count, of methods whose trials are done; seed by seed."""
        best = {
            (case.name, entrant.title): case.chosen(library, scope, entrant)
            for case in self.cases
            for entrant in case.entrants
        }
        return [
            case.run(scope, entrant, trial, seed)
            for seed in scope.seeds
            for case in self.cases
            for entrant in case.entrants
            if (trial := best[case.name, entrant.title]) is not None
        ]

    def page(self, library: Library, scope: Scope) -> Artefact:
        """Tables and charts of the runs that are there."""
        texts, tables, values = [self.about], list[Table](), dict[str, Any]()
        found = {case.name: self._found(library, scope, case) for case in self.cases}
        verdicts = compare([(case, found[case.name]) for case in self.cases])
        for case in self.cases:
            runs = found[case.name]
            if not runs:
                continue
            rows = [_row(case, title, members) for title, members in runs.items()]
            rows.sort(key=lambda row: -row["accuracy"])
            mine = {rival: one for (name, rival), one in verdicts.items() if name == case.name}
            texts.append(_text(case, rows, mine))
            tables += [_table(case, rows), _verdict_table(case, mine)]
            values[case.name] = {
                "rows": rows,
                "verdicts": {rival: one.values() for rival, one in mine.items()},
            }
        shown = {case.title: found[case.name] for case in self.cases if found[case.name]}
        caption = "Test accuracy against virtual time, the band from the lowest to the highest seed."
        pictures = [Picture(self.name, draw_panels(shown), caption)] if shown else []
        command = f"python -m reproduction {self.name}{scope.suffix}"
        return Artefact(self.name, self.title, command, "\n\n".join(texts), tables, pictures, values)

    def _found(self, library: Library, scope: Scope, case: Case) -> dict[str, list[RunRecord]]:
        every: dict[str, list[RunRecord]] = {}
        for entrant in case.entrants:
            trial = case.chosen(library, scope, entrant)
            runs = (
                []
                if trial is None
                else [library.find(case.run(scope, entrant, trial, seed)) for seed in scope.seeds]
            )
            there = [run for run in runs if run is not None]
            if there:
                every[entrant.title] = there
        return every

    @property
    def experiment(self) -> Experiment:
        """As one of the catalogue."""
        return Experiment(self.name, self.title, self.trials, self.page, self.runs)


@dataclass(frozen=True)
class Verdict:
    """How a rival does against a case's champion by accuracy, on equal seeds."""

    champion: str
    lead: Estimate  # the champion's
    chance: float  # that seeds alone make such a difference: the p-value
    corrected: float  # the same, of one among many comparisons

    @property
    def text(self) -> str:
        """In a word."""
        if not self.corrected < LIKELY:
            return "undecided"
        return f"{self.champion} {'ahead' if self.lead.mean > 0 else 'behind'}"

    def values(self) -> dict[str, Any]:
        """For programs."""
        half = self.lead.half if math.isfinite(self.lead.half) else None
        numbers = {
            "lead": self.lead.mean,
            "half_interval": half,
            "p": self.chance,
            "corrected": self.corrected,
        }
        known = {key: None if one is None or math.isnan(one) else one for key, one in numbers.items()}
        return {**known, "verdict": self.text}


def compare(
    cases: Sequence[tuple[Case, Mapping[str, Sequence[RunRecord]]]],
) -> dict[tuple[str, str], Verdict]:
    """Set every rival of every case against its champion, and correct the whole family by Holm's rule."""
    leads: dict[tuple[str, str], tuple[Estimate, float]] = {}
    for case, runs in cases:
        scores = {
            title: {run.settings["seed"]: case.reading(run) for run in members}
            for title, members in runs.items()
        }
        ours = scores.pop(case.champion, {})
        for title, theirs in scores.items():
            both = sorted(ours.keys() & theirs.keys())
            if not both:
                continue
            mine, other = [ours[seed] for seed in both], [theirs[seed] for seed in both]
            lead = Estimate.of([one - another for one, another in zip(mine, other, strict=True)])
            assert lead is not None
            chance = float(ttest_rel(mine, other).pvalue) if len(both) > 1 else math.nan
            leads[case.name, title] = lead, chance
    adjusted = holm({key: chance for key, (_, chance) in leads.items() if not math.isnan(chance)})
    champions = {case.name: _short(case.champion) for case, _ in cases}
    return {
        key: Verdict(champions[key[0]], lead, chance, adjusted.get(key, math.nan))
        for key, (lead, chance) in leads.items()
    }


def _short(title: str) -> str:
    return title.partition(",")[0]


def how(grid: Sequence[Trial]) -> str:
    """How rates were chosen, and how to read what came out."""
    rates = dict.fromkeys(f"{trial.rate:g}" for trial in grid)
    tried = (
        f"{', '.join(rates)} times the task's rate on devices"
        if len(rates) > 1
        else "the task's rate on devices"
    )
    steps = ["the mean as it is", "a step with momentum 0.9 at rate 0.3"]
    if any(trial.server == ADAM for trial in grid):
        steps.append("a step of Adam at rate 0.01")
    return (
        f"On each split, each method chooses among {len(grid)} settings by validation data that no device holds: "
        f"{tried}, and a server that takes {', '.join(steps[:-1])} or {steps[-1]}. The setting that is best over "
        "the last third of the trials runs with all seeds, on the test set. The budget is the leaderboard's: on each "
        "device no more `exact` operations than FedPMT's depth takes there; *over* is the share of local rounds above "
        "it.\n\n"
        f"{READING}"
    )


READING = (
    f"Accuracy is the mean over the last {100 * TAIL:.0f} % of the rounds, over seeds, with {100 * CONFIDENCE:.0f} % "
    "intervals. An accuracy is reached when the mean over the last tenth of the evaluations reaches it. Time is "
    "virtual. A run that diverges counts as a guess. *Ahead* and *behind*: a paired t-test over equal seeds gives "
    "p < 0.05 after Holm's correction over all comparisons of this page; else *undecided*."
)


def _row(case: Case, title: str, runs: Sequence[RunRecord]) -> dict[str, Any]:
    accuracy = Estimate.of([case.reading(run) for run in runs])
    assert accuracy is not None
    devices = [device for run in runs for step in run.rounds for device in step.devices]
    reached = {target: Estimate.of([seconds_to(run, target) for run in runs]) for target in case.targets}
    return {
        "title": title,
        "runs": len(runs),
        "accuracy": accuracy.mean,
        "accuracy_text": percent(accuracy),
        "lr": runs[0].settings["lr"],
        "server": runs[0].settings.get("server_optimizer", "none"),
        "over_budget": sum(device.over_budget for device in devices) / max(1, len(devices)),
        "seconds": sum(run.rounds[-1].virtual_seconds for run in runs) / len(runs),
        "reached": {
            str(target): None if one is None or one.reached < one.runs else one.mean
            for target, one in reached.items()
        },
        "reached_text": {str(target): minutes(one) for target, one in reached.items()},
    }


def _table(case: Case, rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [
        [
            f"**{row['title']}**" if row["title"] == case.champion else row["title"],
            row["accuracy_text"],
            *row["reached_text"].values(),
            show(row["seconds"], time_unit),
            f"{row['lr']:g}",
            row["server"],
            f"{100 * row['over_budget']:.0f} %" if row["over_budget"] else "-",
        ]
        for row in rows
    ]
    targets = (f"min to {100 * target:.0f} %" for target in case.targets)
    columns = ("method", "accuracy, %", *targets, "whole run", "rate", "server", "over")
    return Table(f"{case.title}: what came out", columns, cells)


def _verdict_table(case: Case, verdicts: Mapping[str, Verdict]) -> Table:
    cells = [
        [rival, f"{percent(one.lead)}", _chance(one.chance), _chance(one.corrected), one.text]
        for rival, one in sorted(verdicts.items(), key=lambda item: item[1].lead.mean)
    ]
    columns = ("rival", f"{_short(case.champion)}'s lead, points", "p", "p, corrected", "verdict")
    return Table(f"{case.title}: {case.champion} against each rival", columns, cells)


def _chance(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _text(case: Case, rows: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Verdict]) -> str:
    """Where the champion stands, from the numbers."""
    by_title, champion = {row["title"]: row for row in rows}, case.champion
    counts = seeds_text([row["runs"] for row in rows])
    lines = [f"## {case.title}", ""]
    if champion not in by_title:
        return "\n".join([*lines, f"{counts}; no run of {champion} yet."])
    ours = by_title[champion]
    within = [row for row in rows if not row["over_budget"] and row["title"] != champion]
    said = [f"{counts}, {case.rounds} rounds. {champion} ends at {100 * ours['accuracy']:.1f} %"]
    if within:
        best = max(within, key=lambda row: row["accuracy"])
        said.append(
            f"the best other method within the budget, {best['title']}, at {100 * best['accuracy']:.1f} %"
        )
    behind = [rival for rival, one in verdicts.items() if one.text.endswith("behind")]
    ahead = [rival for rival, one in verdicts.items() if one.text.endswith("ahead")]
    said.append(
        f"significantly better than {len(ahead)} of {len(verdicts)} rivals"
        + (f", worse than {', '.join(behind)}" if behind else ", worse than none")
    )
    lines += ["; ".join(said) + ".", ""]
    for target in case.targets:
        lines.append(_first(target, rows, ours))
    return "\n".join(lines)


def _first(target: float, rows: Sequence[Mapping[str, Any]], ours: Mapping[str, Any]) -> str:
    """Who is first at an accuracy, and how much sooner the champion is than FedAvg."""
    champion = ours["title"]
    there = {
        row["title"]: row["reached"][str(target)] for row in rows if row["reached"][str(target)] is not None
    }
    goal = f"- {100 * target:.0f} %: "
    if not there:
        return f"{goal}nobody gets there in every seed."
    first = min(there, key=lambda title: there[title])
    if ours["title"] not in there:
        return f"{goal}{first} is first; {champion} does not get there in every seed."
    mine = there[ours["title"]]
    others = sorted((seconds, title) for title, seconds in there.items() if title != champion)
    told = f"{goal}{champion} after {mine / 60:.1f} min"
    told += ", first" if first == champion else f", behind {first} ({there[first] / 60:.1f} min)"
    if first == champion and others:
        told += f"; then {others[0][1]} ({others[0][0] / 60:.1f} min)"
    if "FedAvg" in there:
        told += f"; {there['FedAvg'] / mine:.1f} times sooner than FedAvg"
    return f"{told}."


NAMES = {IID: "iid", TWO_CLASSES: "two-classes"}
MOMENTUM = Trial(1.0, SERVERS[1])
EMBEDDED_CASES = tuple(
    Case(NAMES[split], f"Embedded images, {PARTITIONS[split]}", "embedded", split, targets, 100, 100, 0.1)
    for split, targets in {IID: (0.8, 0.9), TWO_CLASSES: (0.6, 0.8)}.items()
)
CIFAR10_CASES = tuple(
    Case(
        NAMES[split],
        f"CIFAR-10, {PARTITIONS[split]}",
        "cifar10",
        split,
        targets,
        200,
        200,
        0.05,
        BEST,
        trial_seeds=TRIAL_SEEDS[:1],
        grid=AT_THE_RATE,
    )
    for split, targets in {IID: (0.50, 0.55, 0.60), TWO_CLASSES: (0.40, 0.45, 0.50)}.items()
)
TABLE_II = replace(
    CIFAR10_CASES[0],
    name="deadline",
    title=f"CIFAR-10, i.i.d., the paper's deadline of {DEADLINE:g} s",
    entrants=(
        Entrant(OURS, "fedpmt", TRADED),
        Entrant(PAPER, "fedpmt"),
        Entrant("FedAvg", "fedavg", {"deadline": None}),
        Entrant("FedAvg, with the deadline", "fedavg"),
    ),
    more={"assign": "deadline", "deadline": DEADLINE, "budget": None},
)
"""As in Table II, with `exact` prices; FedAvg waits for everybody, or loses those who are late."""

EMBEDDED = Tuned(
    "tuned-embedded", "Every method at its best rates: embedded images", EMBEDDED_CASES, how(GRID)
)
CIFAR10 = Tuned(
    "tuned-cifar10", "Every method at its best rates: CIFAR-10", (*CIFAR10_CASES, TABLE_II), how(AT_THE_RATE)
)

FEW = tuple(one for one in WEIGHTS if one.title in (OURS, PAPER, "FedAvg", "HeteroFL"))
ELSEWHERE = Tuned(
    "tuned-elsewhere",
    "Every method at its best rates: other splits, more epochs, and people",
    (
        replace(
            CIFAR10_CASES[1],
            name="dirichlet",
            title="CIFAR-10, Dirichlet 0.3",
            partition="dirichlet:0.3",
            targets=(0.45, 0.50, 0.55),
            entrants=FEW,
        ),
        replace(
            EMBEDDED_CASES[1],
            name="epochs",
            title="Embedded images, 2 classes per device, E = 5",
            entrants=FEW,
            trial_seeds=TRIAL_SEEDS[:1],
            grid=AT_THE_RATE,
            more={"epochs": 5},
        ),
        *(
            Case(
                people.name,
                people.title,
                people.task,
                "natural",
                people.targets,
                people.rounds,
                people.rounds,
                0.1,
                FEW,
                trial_seeds=TRIAL_SEEDS[:1],
                grid=AT_THE_RATE,
                people=people,
            )
            for people in (PEOPLE, ROLES)
        ),
    ),
    how(AT_THE_RATE),
)

PLAIN = {"server_optimizer": "none", "server_lr": None}
FORMS = (
    Entrant(OURS, "fedpmt", TRADED),
    Entrant("the paper's plan", "fedpmt"),
    Entrant("no server step", "fedpmt", {**TRADED, **PLAIN}),
    Entrant("the paper's plan, no server step", "fedpmt", PLAIN),
    Entrant("s = 0.3", "fedpmt", {**TRADED, "options": {"share": 0.3}}),
    Entrant("s = 0.7", "fedpmt", {**TRADED, "options": {"share": 0.7}}),
    Entrant("normalised by steps", "fedpmt", {**TRADED, "options": {"normalise": "steps"}}),
    Entrant("rotated", "fedpmt", {"plan": "rotated"}),
    Entrant("rotated, normalised by draws", "fedpmt", {"plan": "rotated", "options": {"normalise": "draws"}}),
    Entrant("by expected decrease", "reproduction.plans:ExpectedDecrease", TRADED),
    Entrant("calibrated by label counts", "reproduction.plans:Calibrated", TRADED),
    Entrant("server Adam", "fedpmt", {**TRADED, **ADAM}),
    Entrant("server Yogi", "fedpmt", {**TRADED, "server_optimizer": "yogi", "server_lr": 0.01}),
)
"""FedPMT with one thing changed at a time."""

ABLATION_HOW = (
    "FedPMT with the traded plan (s = 0.5) and server momentum 0.9 at rate 0.3, and the same with one thing "
    "changed. The fleet, the budget and the task's rate on devices are the leaderboard's. *By expected decrease*: "
    "the pair of depth and steps that maximises steps times the squared movement of the layers trained. "
    "*Calibrated*: each layer's trainers are weighed by label counts, so that they are like the cohort. "
    "*Rotated*: one round in four of a device, on average, is of all layers. Verdicts as on the pages of all "
    "methods: paired t-tests with Holm's correction."
)
ABLATION = Tuned(
    "ablation",
    "What each ingredient of FedPMT buys",
    tuple(replace(case, entrants=FORMS, fixed=MOMENTUM) for case in EMBEDDED_CASES)
    + tuple(
        replace(case, name=f"cifar10-{case.name}", entrants=FORMS, fixed=MOMENTUM) for case in CIFAR10_CASES
    ),
    ABLATION_HOW,
)
