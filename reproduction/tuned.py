"""Every method at rates of its own, chosen by one rule: what it reaches, in what time, and who is ahead of FedPMT.

For each task every method tries the same settings on validation data, which no device holds and no test sees: a small
grid of its devices' rate and of the server's step, where its server takes one. What does best there plays the runs that
count. Runs of all seeds are compared in pairs, and the family of comparisons on a page is corrected by Holm's rule.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.methods.registry import method_class
from fedpmt.report.tables import evaluated
from fedpmt.settings import resolve
from reproduction import entrants as leaderboard
from reproduction.artefact import Artefact, Picture, Table
from reproduction.boards import (
    BEST_SHOWN,
    EVENTS,
    Verdict,
    clock_of,
    compare,
    draw_clocks,
    events_text,
    rows_of,
    shown_on_chart,
    speed_table,
    speed_text,
    tables_of,
    text_of,
    verdict_table,
)
from reproduction.completion_time import DEADLINE
from reproduction.natural import IMAGES, PEOPLE, ROLES, Contest, Entrant, draw_panels
from reproduction.paper import IID, PARTITIONS, TWO_CLASSES, Experiment, Scope
from reproduction.readings import TAIL, WATTS, final, guess
from reproduction.scores import percent, seconds_to
from reproduction.verdicts import CONFIDENCE, Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library

RATES = (0.5, 1.0, 2.0)
"""Rates of devices that are tried, as multiples of the task's own."""

SERVERS: tuple[Mapping[str, Any], ...] = ({}, {"server_optimizer": "momentum", "server_lr": 0.3})
"""Steps of the server that are tried: the mean as it is, and momentum 0.9 at rate 0.3."""

TRIAL_SEEDS = (100, 101)
"""Of the trials: none of the seeds that count."""

OURS, PAPER = "FedPMT, traded", "FedPMT"
TRADED = {"plan": "traded"}
BUFFER = 5
BUFFERED = {"clock": "events", "buffer": BUFFER}


def known(name: str, settings: Mapping[str, Any] | None = None) -> Entrant:
    """A method in its strongest form, with these settings."""
    one = leaderboard.KNOWN[name]
    return Entrant(one.title, one.method, settings or {}, one.form)


WEIGHTS = (
    Entrant(OURS, "fedpmt", TRADED, "a deeper suffix in fewer steps"),
    known("fedpmt"),
    *map(known, ("fedavg", "heterofl", "fedrolex", "fedmp", "fedprox", "feddrop", "fjord", "scaffold")),
)
"""FedPMT in its two forms, and methods that exchange weights, those first that were best on the leaderboard."""

BEST = WEIGHTS[:6]
WITHOUT_ROUNDS = (
    known("fedasync", {"clock": "events", "buffer": 1}),
    known("fedbuff", BUFFERED),
    known("timelyfl", {"clock": "events", "step_every": "fastest:0.5"}),
    Entrant(f"{PAPER}, buffered", "fedpmt", BUFFERED, "as FedPMT; a server step for every 5 replies"),
    Entrant(
        f"{OURS}, buffered",
        "fedpmt",
        {**TRADED, **BUFFERED},
        "as FedPMT, traded; a server step for every 5 replies",
    ),
)
"""On the clock of events."""

ALL = (
    *WEIGHTS,
    *(
        known(one.method)
        for one in (*leaderboard.STRONGEST, *leaderboard.LATER)
        if one.method not in {entrant.method for entrant in (*WEIGHTS, *WITHOUT_ROUNDS)}
    ),
    *WITHOUT_ROUNDS,
)
"""Every method that needs no adapters and is not another one under this budget."""


@dataclass(frozen=True)
class Trial:
    """One point of the grid."""

    rate: float  # a multiple of the task's own
    server: Mapping[str, Any]

    def settings(self, base: Settings) -> dict[str, Any]:
        """As settings, for a run with this usual rate: the run's, or where a method has one of its own, that one."""
        option = leaderboard.OWN_RATE.get(base.method)
        if option is None:
            return {"lr": _scaled(self.rate, base.lr), **self.server}
        own = {option: _scaled(self.rate, float(base.options[option]))}
        return {"options": {**base.options, **own}, **self.server}


def _scaled(rate: float, usual: float) -> float:
    return float(f"{rate * usual:.3g}")


PLAIN_TRIAL = Trial(1.0, {})
"""The task's own rate and the mean as it is: the settings of the leaderboard."""

GRID = tuple(Trial(rate, server) for rate, server in product(RATES, SERVERS))
PLAIN = {"server_optimizer": "none", "server_lr": None}
ADAM = {"server_optimizer": "adam", "server_lr": 0.01}
AT_THE_RATE = tuple(Trial(1.0, server) for server in (*SERVERS, ADAM))
OTHER_RATES = (0.5, 2.0)
"""Where a trial takes minutes: three steps of the server at the task's own rate, then other rates with the best."""


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
    rates: Sequence[float] = ()  # tried afterwards, with the server's step that did best
    people: Contest | None = None  # whose task it is, where that is no leaderboard's
    fixed: Trial | None = None  # of all entrants, without trials: forms of one method
    most_seeds: int | None = None  # of those asked for: where a run takes minutes
    tuned_on: Case | None = None  # whose choices are taken, so that this case has no trials of its own
    champion: str = OURS  # whom the others are set against
    reading: Callable[[RunRecord], float] = final  # what a run comes to
    for_speed: bool = False  # whether methods also play the settings with which trials are soonest

    @property
    def has_budget(self) -> bool:
        """Whether devices are limited to what the leaderboard allows them."""
        return self.more.get("budget", leaderboard.BUDGET) is not None

    def base(self, scope: Scope, entrant: Entrant, seed: int) -> Settings:
        """A run as on the leaderboard: the same fleet, budget and held-out data; or as on the page of people."""
        if self.people is not None:
            form = Entrant(entrant.title, entrant.method, {"budget": leaderboard.BUDGET, **entrant.settings})
            return self.people.of(replace(scope, quick=False), form, seed)
        contest = leaderboard.Contest([seed], self.data, rounds=self.rounds, data_dir=scope.data_dir)
        strongest = leaderboard.KNOWN.get(entrant.method, leaderboard.KNOWN["fedpmt"])
        given = contest.settings(strongest, self.partition, seed).model_dump()
        options = {**given["options"], **entrant.settings.get("options", {})}
        more = {**self.more, **entrant.settings, "options": options, "method": entrant.method}
        base = api.settings_of({**given, **more})
        steps = {key: steps_of(base, getattr(base, key)) for key in ("rounds", "eval_every")}
        return base.model_copy(update=steps)

    def trial(self, scope: Scope, entrant: Entrant, trial: Trial, seed: int) -> Settings:
        """A run that is scored on validation data."""
        base = self.base(scope, entrant, seed)
        changed = {
            **trial.settings(base),
            "rounds": steps_of(base, 2 if scope.quick else self.trial_rounds),
            "validation": self.validation,
            "score_on": "validation",
        }
        return api.settings_of(resolve({**base.model_dump(), **changed}).model_dump())

    def run(self, scope: Scope, entrant: Entrant, trial: Trial, seed: int) -> Settings:
        """A run that counts."""
        base = self.base(scope, entrant, seed)
        own = {key: value for key, value in entrant.settings.items() if key != "options"}
        few = {"rounds": steps_of(base, 4), "eval_every": steps_of(base, 1)} if scope.quick else {}
        return resolve({**base.model_dump(), **trial.settings(base), **own, **few})

    def seeds(self, scope: Scope) -> Sequence[int]:
        """The seeds of the runs that count."""
        return scope.seeds[: self.most_seeds]

    def playing(self, scope: Scope) -> Sequence[Entrant]:
        """Who takes part: a quick page with trials has the first two and the last one."""
        few = scope.quick and self.fixed is None
        return [*self.entrants[:2], *self.entrants[2:][-1:]] if few else self.entrants

    def trials_of(self, entrant: Entrant) -> Sequence[Trial]:
        """What a method tries first: what of the grid it can be combined with."""
        if self.tuned_on is not None:
            return self.tuned_on.trials_of(self._counterpart(entrant))
        if self.fixed is not None:
            return (self.fixed,)
        if _trains_with_validation(entrant):
            return (PLAIN_TRIAL,)
        names = {one.name for one in dataclasses.fields(method_class(entrant.method))}  # type: ignore[arg-type]
        return [trial for trial in self.grid if "server" in names or not trial.server]

    def rates_of(self, entrant: Entrant) -> Sequence[float]:
        """The rates that a method tries after that."""
        if self.tuned_on is not None:
            return self.tuned_on.rates_of(self._counterpart(entrant))
        return () if self.fixed is not None or _trains_with_validation(entrant) else self.rates

    def choices(self, entrant: Entrant) -> int:
        """Among how many settings a method chooses."""
        return len(self.trials_of(entrant)) + len(self.rates_of(entrant))

    def trials(self, library: Library, scope: Scope, entrant: Entrant) -> list[Settings]:
        """All trials of a method that has a choice, as far as they are known; those of other rates follow the first."""
        if self.tuned_on is not None or self.choices(entrant) == 1:
            return []
        tried = [*self.trials_of(entrant), *self._further(library, scope, entrant)]
        return [self.trial(scope, entrant, trial, seed) for trial in tried for seed in self.trial_seeds]

    def chosen(self, library: Library, scope: Scope, entrant: Entrant) -> Trial | None:
        """Find what did best on validation data; None while a trial is missing."""
        if self.tuned_on is not None:
            return self.tuned_on.chosen(library, scope, self._counterpart(entrant))
        tried = self._tried(library, scope, entrant)
        return None if tried is None else self._best(library, scope, entrant, tried, self._score)

    def settings_of(self, library: Library, scope: Scope, entrant: Entrant) -> list[Trial | None]:
        """What a method plays: None for a choice that waits for a trial."""
        hasty = [self.soonest(library, scope, entrant, target) for target in self.targets if self.for_speed]
        return [self.chosen(library, scope, entrant), *hasty]

    def soonest(self, library: Library, scope: Scope, entrant: Entrant, target: float) -> Trial | None:
        """Find what was first at an accuracy on validation data; None while a trial is missing."""
        tried = self._tried(library, scope, entrant)
        if tried is None:
            return None
        return self._best(library, scope, entrant, tried, partial(self._haste, target=target))

    def _tried(self, library: Library, scope: Scope, entrant: Entrant) -> Sequence[Trial] | None:
        """All settings that a method tried; None while those that follow from the first are not known."""
        first = self.trials_of(entrant)
        if self.choices(entrant) == 1:
            return first
        further = self._further(library, scope, entrant)
        return [*first, *further] if len(further) == len(self.rates_of(entrant)) else None

    def _further(self, library: Library, scope: Scope, entrant: Entrant) -> list[Trial]:
        """Other rates with the best of the grid; none while a trial of the grid is missing."""
        rates, first = self.rates_of(entrant), self.trials_of(entrant)
        best = self._best(library, scope, entrant, first, self._score) if rates else None
        return [] if best is None else [Trial(rate, best.server) for rate in rates]

    def _best(
        self,
        library: Library,
        scope: Scope,
        entrant: Entrant,
        trials: Sequence[Trial],
        worth: Callable[[Sequence[RunRecord]], tuple[float, ...]],
    ) -> Trial | None:
        if len(trials) == 1:
            return trials[0]
        found = []
        for trial in trials:
            runs = [library.find(self.trial(scope, entrant, trial, seed)) for seed in self.trial_seeds]
            there = [run for run in runs if run is not None]
            if len(there) < len(runs):
                return None
            found.append((worth(there), trial))
        return max(found, key=lambda one: one[0])[1]

    def _score(self, runs: Sequence[RunRecord]) -> tuple[float, ...]:
        """What trials come to: their last third, since evaluations jump, or what the case reads from a run."""
        reading = trial_score if self.reading is final else self.reading
        return (sum(map(reading, runs)),)

    def _haste(self, runs: Sequence[RunRecord], target: float) -> tuple[float, ...]:
        """How soon trials are at an accuracy; where one never is, how good they are."""
        times = [seconds_to(run, target) for run in runs]
        total = sum(math.inf if one is None else one for one in times)
        return -total, *self._score(runs)

    def _counterpart(self, entrant: Entrant) -> Entrant:
        """The same method in the case whose choices are taken."""
        assert self.tuned_on is not None

        def form(one: Entrant) -> tuple[str, object, object]:
            return one.method, one.settings.get("plan"), one.settings.get("clock")

        return next(one for one in self.tuned_on.entrants if form(one) == form(entrant))


def _trains_with_validation(entrant: Entrant) -> bool:
    """Whether a method trains with the samples that trials are scored on, so that it can't choose by them."""
    return method_class(entrant.method)().traits.needs_validation


def steps_of(base: Settings, rounds: int) -> int:
    """The server steps in which as many replies arrive as in these rounds."""
    return rounds if base.buffer is None else rounds * base.cohort // base.buffer


def trial_score(run: RunRecord) -> float:
    """The mean over the last third of the evaluations, which jump; none where the trial diverged."""
    scores = [] if run.diverged else [score for _, score in evaluated(run)]
    last = scores[-max(1, len(scores) // 3) :]
    return sum(last) / len(last) if last else 0.0


@dataclass(frozen=True)
class Tuned:
    """A page: cases, in stages, since the runs that count depend on the trials."""

    name: str
    title: str
    cases: Sequence[Case]
    about: str  # how it was done
    at_usual_rate: bool = False  # whether all entrants also play at the task's own rate

    def trials(self, library: Library, scope: Scope) -> list[Settings]:
        """All trials, as far as they are known."""
        return [
            settings
            for case in self.cases
            for entrant in case.playing(scope)
            for settings in case.trials(library, scope, entrant)
        ]

    def runs(self, library: Library, scope: Scope) -> list[Settings]:
        """The runs that count, of methods whose trials are done; seed by seed."""
        usual = [PLAIN_TRIAL] if self.at_usual_rate else []
        played = [
            (case, entrant, trial)
            for case in self.cases
            for entrant in case.playing(scope)
            for trial in (*case.settings_of(library, scope, entrant), *usual)
            if trial is not None
        ]
        return [
            case.run(scope, entrant, trial, seed)
            for seed in scope.seeds
            for case, entrant, trial in played
            if seed in case.seeds(scope)
        ]

    def wanted(self, library: Library, scope: Scope) -> list[Settings]:
        """What is to be played next, and what was: trials come before the runs that depend on them."""
        trials = self.trials(library, scope)
        return trials if library.missing(trials) else [*trials, *self.runs(library, scope)]

    def page(self, library: Library, scope: Scope) -> Artefact:
        """Tables and charts of the runs that are there."""
        texts, tables, values = [self.about], list[Table](), dict[str, Any]()
        every = {case.name: self._found(library, scope, case) for case in self.cases}
        found = {name: runs for name, runs in every.items() if runs}
        cases = [case for case in self.cases if case.name in found]
        without_rounds = {case.name: _paper_against_events(case, found[case.name]) for case in cases}
        others = [pair for pairs in without_rounds.values() for pair in pairs]
        verdicts = compare([*((case, found[case.name]) for case in cases), *others])
        rows = {
            case.name: rows_of(case, found[case.name], self._at_usual_rate(library, scope, case))
            for case in cases
        }
        for case in cases:
            mine = _verdicts_of(case, verdicts)
            texts.append(text_of(case, rows[case.name], mine))
            tables += tables_of(case, rows[case.name], mine)
            values[case.name] = {
                "rows": rows[case.name],
                "verdicts": {rival: one.values() for rival, one in mine.items()},
            }
            for other, runs in without_rounds[case.name]:
                theirs = _verdicts_of(other, verdicts)
                texts.append(events_text(other, rows_of(other, runs, {}), theirs))
                tables.append(verdict_table(other, theirs))
                values[other.name] = {"verdicts": {rival: one.values() for rival, one in theirs.items()}}
            tables += _size_table(case, found[case.name])
            hasty = self._for_speed(library, scope, case)
            if hasty:
                soonest = {target: rows_of(case, runs, {}) for target, runs in hasty.items()}
                texts.append(speed_text(case, soonest))
                tables.append(speed_table(case, soonest))
                values[case.name]["for_speed"] = {str(target): found for target, found in soonest.items()}
        absent = self._absent(scope, found)
        if absent:
            texts.insert(1, f"Not played yet, and so not on this page: {', '.join(absent)}.")
        tables += _forms(cases)
        shown = shown_on_chart(list(rows.values()), OURS)
        drawn = _draw({case.title: found[case.name] for case in cases if case.targets}, shown)
        pictures = [Picture(self.name, *drawn)] if drawn else []
        command = f"python -m reproduction {self.name}{scope.suffix}"
        return Artefact(self.name, self.title, command, "\n\n".join(texts), tables, pictures, values)

    def _absent(self, scope: Scope, found: Mapping[str, Mapping[str, Sequence[RunRecord]]]) -> list[str]:
        """Who takes part in a case, by its title, without a run in it."""
        titles = (
            entrant.title
            for case in self.cases
            for entrant in case.playing(scope)
            if entrant.title not in found.get(case.name, {})
        )
        return list(dict.fromkeys(titles))

    def _found(self, library: Library, scope: Scope, case: Case) -> dict[str, list[RunRecord]]:
        every: dict[str, list[RunRecord]] = {}
        for entrant in case.playing(scope):
            trial = case.chosen(library, scope, entrant)
            there = [] if trial is None else _kept(library, scope, case, entrant, trial)
            if there:
                every[entrant.title] = there
        return every

    def _for_speed(
        self, library: Library, scope: Scope, case: Case
    ) -> dict[float, dict[str, list[RunRecord]]]:
        """By target, all methods' kept runs with the settings that are soonest there; none where one is missing."""
        every: dict[float, dict[str, list[RunRecord]]] = {}
        for target, entrant in product(case.targets if case.for_speed else (), case.playing(scope)):
            trial = case.soonest(library, scope, entrant, target)
            there = [] if trial is None else _kept(library, scope, case, entrant, trial)
            every.setdefault(target, {})[entrant.title] = there
        return every if all(runs for found in every.values() for runs in found.values()) else {}

    def _at_usual_rate(self, library: Library, scope: Scope, case: Case) -> dict[str, list[RunRecord]]:
        """The kept runs with the leaderboard's settings, where all seeds are there."""
        every = {
            entrant.title: _kept(library, scope, case, entrant, PLAIN_TRIAL)
            for entrant in case.playing(scope)
            if case.fixed is None
        }
        return {title: runs for title, runs in every.items() if len(runs) == len(case.seeds(scope))}

    @property
    def experiment(self) -> Experiment:
        """As one of the catalogue."""
        return Experiment(self.name, self.title, lambda _: [], self.page, self.wanted)


def _paper_against_events(
    case: Case, found: Mapping[str, Sequence[RunRecord]]
) -> list[tuple[Case, dict[str, Sequence[RunRecord]]]]:
    """FedPMT as in the paper against what has no rounds, where a case has both."""
    events = {title: runs for title, runs in found.items() if clock_of(runs) == EVENTS}
    if not events or case.champion != OURS or PAPER not in found:
        return []
    return [(replace(case, name=f"{case.name}-paper", champion=PAPER), {PAPER: found[PAPER], **events})]


def _verdicts_of(case: Case, verdicts: Mapping[tuple[str, str], Verdict]) -> dict[str, Verdict]:
    return {rival: one for (name, rival), one in verdicts.items() if name == case.name}


def _kept(library: Library, scope: Scope, case: Case, entrant: Entrant, trial: Trial) -> list[RunRecord]:
    """The runs that are there."""
    every = [library.find(case.run(scope, entrant, trial, seed)) for seed in case.seeds(scope)]
    return [run for run in every if run is not None]


def _forms(cases: Sequence[Case]) -> list[Table]:
    """What entrants' settings come to."""
    forms = {entrant.title: entrant.form for case in cases for entrant in case.entrants if entrant.form}
    rows = list(forms.items())
    return [Table("In which form methods take part", ("method", "form"), rows, words=True)] if rows else []


def _draw(
    panels: Mapping[str, Mapping[str, Sequence[RunRecord]]], shown: Sequence[str]
) -> tuple[Figure, str] | None:
    """The chart and its caption: all lines, or where there are two clocks those that matter."""
    if not panels:
        return None
    caption = "Test accuracy against virtual time, the band from the lowest to the highest seed."
    if not any(clock_of(runs) == EVENTS for found in panels.values() for runs in found.values()):
        return draw_panels(panels), caption
    return draw_clocks(panels, shown), (
        f"{caption} Solid: rounds; dashed: the clock of events. Of rounds, only FedPMT, FedAvg and the {BEST_SHOWN} "
        "other methods within the budget with the best mean over the panels are shown; the tables have all."
    )


def how(grid: Sequence[Trial], note: str = "") -> str:
    """How rates were chosen, with a note of a page's own, and how to read what came out."""
    rates = list(dict.fromkeys(f"{trial.rate:g}" for trial in grid))
    steps = ["the mean as it is", "a step with momentum 0.9 at rate 0.3"]
    if any(trial.server == ADAM for trial in grid):
        steps.append("a step of Adam at rate 0.01")
    server = f"a server that takes {', '.join(steps[:-1])} or {steps[-1]}"
    others = " and ".join(f"{rate:g}" for rate in OTHER_RATES)
    tried = (
        f"{', '.join(rates)} times the task's rate on devices, and {server}"
        if len(rates) > 1
        else f"{server}, at the task's rate on devices; then {others} times that rate with the best of these"
    )
    choices = len(grid) if len(rates) > 1 else len(grid) + len(OTHER_RATES)
    return (
        f"On each split, each method chooses among {choices} settings by validation data that no device holds: "
        f"{tried}. The setting that is best over "
        "the last third of the trials runs with all seeds, on the test set. A method whose server takes no such step "
        "chooses among rates alone, and one that trains with the validation data takes the task's rate; *choices* says "
        "how many there were. The budget is the leaderboard's: on each device no more `exact` operations than FedPMT's "
        "depth takes there; *over* is the share of local rounds above it. Energy is that of all devices in a run, at "
        f"{WATTS.computing:g} W while a device trains, {WATTS.sending:g} W while its link is busy and {WATTS.idle:g} W "
        f"while it waits for a round to end.{note}\n\n"
        f"{READING}"
    )


def everybody() -> str:
    """What is on a page of all methods, and what is not."""
    same = [
        f"{method_class(one).__name__} is {leaderboard.KNOWN[other].title}"
        for one, other in leaderboard.SAME.items()
    ]
    return (
        "On the clock of events as many devices are at work at any time as a round asks, and the server steps after "
        f"{BUFFER} replies (FedAsync after each, TimelyFL at intervals). A run ends after as many replies as one of "
        "rounds has. *In equal time* is the accuracy when FedPMT's run of the same seed ends. Rates are chosen in the "
        "same way. Nobody waits, so that energy is of training alone.\n\n"
        "Under this budget some methods have the weights of others, to the bit, and are not run again: "
        f"{', '.join(same)}. FedRA and FlexLoRA need a model with adapters and are not on this page."
    )


READING = (
    f"Accuracy is the mean over the last {100 * TAIL:.0f} % of the rounds, over seeds, with {100 * CONFIDENCE:.0f} % "
    "intervals. An accuracy is reached when the mean over the last tenth of the evaluations reaches it. Time is "
    "virtual. A run that diverges counts as a guess. *Ahead* and *behind*: a paired t-test over equal seeds gives "
    "p < 0.05 after Holm's correction over all comparisons of this page; else *undecided*."
)


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
        200,  # after 100 rounds trials favour what is ahead early, or are level
        0.05,
        BEST,
        trial_seeds=TRIAL_SEEDS[:1],
        grid=AT_THE_RATE,
        rates=OTHER_RATES,
        for_speed=True,
    )
    for split, targets in {IID: (0.50, 0.55, 0.60), TWO_CLASSES: (0.40, 0.45, 0.50)}.items()
)
TABLE_II = replace(
    CIFAR10_CASES[0],
    name="deadline",
    title=f"CIFAR-10, i.i.d., the paper's deadline of {DEADLINE:g} s",
    entrants=(
        Entrant(OURS, "fedpmt", {**TRADED, "deadline": None}),
        Entrant(f"{OURS}, until the deadline", "fedpmt", TRADED),
        Entrant(PAPER, "fedpmt"),
        Entrant("FedAvg", "fedavg", {"deadline": None}),
        Entrant("FedAvg, as published", "fedavg", {"deadline": None, **PLAIN, "lr": 0.05}),
        Entrant("FedAvg, with the deadline", "fedavg"),
    ),
    more={"assign": "deadline", "deadline": DEADLINE, "budget": None},
    tuned_on=CIFAR10_CASES[0],
    for_speed=False,
)
"""As in Table II, with `exact` prices and the settings chosen i.i.d.

FedPMT may fit its plan to a tighter deadline than the paper's, by default the tightest that leaves nobody out.

FedAvg waits for everybody, also with the paper's plain mean at its rate, or loses the late.
"""

EMBEDDED = Tuned(
    "tuned-embedded",
    "Every method at its best rates: embedded images",
    tuple(replace(case, entrants=ALL) for case in EMBEDDED_CASES),
    f"{how(GRID)}\n\n{everybody()}",
    at_usual_rate=True,
)
ONE_SEED = " Trials have one seed, and as many rounds as the runs that count."
CIFAR10 = Tuned(
    "tuned-cifar10",
    "Every method at its best rates: CIFAR-10",
    (*CIFAR10_CASES, TABLE_II),
    how(
        AT_THE_RATE,
        f"{ONE_SEED} With the paper's deadline, methods take the settings that they chose i.i.d.; the traded plan "
        "fits its rounds to the tightest deadline that leaves nobody out or, *until the deadline*, to the paper's.",
    ),
)
CIFAR10_ALL = Tuned(
    "tuned-cifar10-all",
    "Every method at rates chosen on embedded images, on both clocks: CIFAR-10",
    tuple(
        replace(case, entrants=ALL, tuned_on=tried, for_speed=False)
        for case, tried in zip(CIFAR10_CASES, EMBEDDED.cases, strict=True)
    ),
    f"{how(GRID, ' These trials are those on embedded images, on the same split: on CIFAR-10 they would take days.')}"
    " Six of the methods chose on CIFAR-10 itself, among other settings, for the page of [the best](tuned-cifar10.md), "
    f"which therefore has other numbers.\n\n{everybody()}",
)
"""All methods, with settings from another data set; `tuned-cifar10` has the best ones with their own."""

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
            tuned_on=CIFAR10_CASES[1],
            most_seeds=3,
            for_speed=False,
        ),
        replace(
            EMBEDDED_CASES[1],
            name="epochs",
            title="Embedded images, 2 classes per device, E = 5",
            entrants=FEW,
            trial_seeds=TRIAL_SEEDS[:1],
            grid=AT_THE_RATE,
            rates=OTHER_RATES,
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
                people.rounds if people is PEOPLE else people.rounds // 2,
                0.1,
                FEW if people is not IMAGES else FEW[:-1],
                trial_seeds=TRIAL_SEEDS[:1],
                grid=AT_THE_RATE,
                rates=OTHER_RATES if people is PEOPLE else (),
                people=people,
                most_seeds=None if people is PEOPLE else 3,
            )
            for people in (PEOPLE, ROLES, IMAGES)
        ),
    ),
    how(
        AT_THE_RATE,
        " Trials have one seed, and as many rounds as the runs that count. Shakespeare's roles and MobileNetV2, where "
        "a run takes minutes, are the exceptions: trials of half the rounds, and only the server's step is chosen. "
        "HeteroFL has no part of MobileNetV2 that is small enough for every device, and does not take part there. "
        "With Dirichlet 0.3, methods take the settings that they chose with two classes.",
    ),
)

FORMS = (
    Entrant(OURS, "fedpmt", TRADED),
    Entrant("the paper's plan", "fedpmt"),
    Entrant("no server step", "fedpmt", {**TRADED, **PLAIN}),
    Entrant("the paper's plan, no server step", "fedpmt", PLAIN),
    Entrant("server Adam", "fedpmt", {**TRADED, **ADAM}),
    Entrant("s = 0.3", "fedpmt", {**TRADED, "options": {"share": 0.3}}),
    Entrant("s = 0.7", "fedpmt", {**TRADED, "options": {"share": 0.7}}),
    Entrant("normalised by steps", "fedpmt", {**TRADED, "options": {"normalise": "steps"}}),
    Entrant("rotated", "fedpmt", {"plan": "rotated"}),
    Entrant("rotated, normalised by draws", "fedpmt", {"plan": "rotated", "options": {"normalise": "draws"}}),
    Entrant("by expected decrease", "reproduction.plans:ExpectedDecrease", TRADED),
    Entrant("calibrated by label counts", "reproduction.plans:Calibrated", TRADED),
    Entrant("server Yogi", "fedpmt", {**TRADED, "server_optimizer": "yogi", "server_lr": 0.01}),
)
"""FedPMT with one thing changed at a time."""

MAIN_FORMS = FORMS[:5]
"""The plan and the server's step, where a run takes minutes."""

ABLATION_HOW = (
    "FedPMT with the traded plan (s = 0.5) and server momentum 0.9 at rate 0.3, and the same with one thing "
    "changed. The fleet, the budget and the task's rate on devices are the leaderboard's. *By expected decrease*: "
    "the pair of depth and steps that maximises steps times the squared movement of the layers trained, as the server "
    "saw it in the last rounds; devices report nothing, so that variances are not part of it. "
    "*Calibrated*: each layer's trainers are weighed by label counts, so that they are like the cohort. "
    "*Rotated*: one round in four of a device, on average, is of all layers. Verdicts as on the pages of all "
    "methods: paired t-tests with Holm's correction."
)


def _ablation(case: Case, name: str, entrants: Sequence[Entrant] = FORMS, **more: Any) -> Case:
    return replace(case, name=name, entrants=entrants, fixed=MOMENTUM, for_speed=False, **more)


ABLATION = Tuned(
    "ablation",
    "What each ingredient of FedPMT buys",
    (
        *(_ablation(case, case.name) for case in EMBEDDED_CASES),
        *(_ablation(case, f"cifar10-{case.name}", MAIN_FORMS, most_seeds=3) for case in CIFAR10_CASES),
    ),
    ABLATION_HOW,
)

WIDTHS = {"1": "1", "0.25": "0.5", "0.0625": "0.25", "0.015625": "0.125"}
"""The sizes of sub-models in FIARSE's paper, as a share of the weights, and the widths that have these sizes."""


def mean_over_sizes(run: RunRecord) -> float:
    """The mean accuracy of the sub-models of four sizes, as FIARSE's paper has it; a guess where a run diverged."""
    if run.diverged:
        return guess(run)
    known = by_size(run)
    return sum(known.values()) / len(known) if known else final(run)


def by_size(run: RunRecord) -> dict[str, float]:
    """The accuracy of the last evaluation of the sub-model of each size, the largest first."""
    scores = (None if run.result is None else run.result.score_by_width) or {}
    found = {size: scores.get(size, scores.get(width)) for size, width in WIDTHS.items()}
    return {size: score for size, score in found.items() if score is not None}


def _size_table(case: Case, found: Mapping[str, Sequence[RunRecord]]) -> list[Table]:
    """The accuracy of every size, where it is that of several sizes that is compared."""
    if case.reading is not mean_over_sizes:
        return []
    cells = []
    for title, runs in found.items():
        scores = [by_size(run) for run in runs]
        means = [Estimate.of([one[size] for one in scores if size in one]) for size in WIDTHS]
        cells.append([title, *("-" if mean is None else percent(mean) for mean in means)])
    columns = ("method", *(f"{float(size):.2g} of the weights" for size in WIDTHS))
    return [Table(f"{case.title}: accuracy of each size, %", columns, cells)]


DEPTH = tuple(map(known, ("depthfl", "inclusivefl", "heterofl")))
SIZES = (
    Entrant("FIARSE", "fiarse"),
    *(Entrant(title, title.lower(), {"options": {"scaler": False}}) for title in ("HeteroFL", "FedRolex")),
)
SIZE_LEVELS = "0.7,0.8,0.9,1"  # who may upload how much; time is not compared
ORDERINGS_ABOUT = (
    "What two papers say of their methods, checked on embedded images (their nets are larger and their runs longer, so "
    "that only the order is): DepthFL is above HeteroFL (CIFAR-100 with "
    "ResNet18: 72.7 % with plain averaging, 76.1 % with FedDyn, against 57.6 %), and FIARSE's sub-models of 1/64, "
    "1/16, 1/4 and all of the weights are on average above those of HeteroFL and FedRolex (CIFAR-10, Dirichlet 0.3: "
    "73.8 % against 66.1 % and 66.0 %). In FIARSE's case a quarter of the devices each may upload 1/64, 1/16, 1/4 "
    "and all of the model: that is the budget there, and times are not compared. The accuracy is the mean over the "
    "four sizes after the last round, also in trials, of which each setting has one. HeteroFL and FedRolex take part "
    "without their scaler, with which they diverge: it multiplies every layer's outputs by up to 8, which a net needs "
    "normalization to bear. DepthFL, InclusiveFL (DepthFL's classifiers without distillation) and HeteroFL take the "
    "settings that they chose on the page of [all methods](tuned-embedded.md), and their runs are the same.\n\n"
)

ORDERINGS = Tuned(
    "orderings",
    "Published orderings of DepthFL and FIARSE",
    (
        *(
            replace(
                case,
                name=f"depthfl-{case.name}",
                title=f"DepthFL: {case.title}",
                entrants=DEPTH,
                champion="DepthFL",
                tuned_on=tuned,
            )
            for case, tuned in zip(EMBEDDED_CASES, EMBEDDED.cases, strict=True)
        ),
        replace(
            EMBEDDED_CASES[0],
            name="fiarse",
            title="FIARSE: embedded images, Dirichlet 0.3, mean over four sizes",
            partition="dirichlet:0.3",
            targets=(),
            entrants=SIZES,
            champion="FIARSE",
            trial_seeds=TRIAL_SEEDS[:1],
            reading=mean_over_sizes,
            more={"levels": SIZE_LEVELS, "budget": f"upload={','.join(reversed(WIDTHS))}"},
        ),
    ),
    ORDERINGS_ABOUT + how(GRID),
)
