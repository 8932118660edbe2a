"""What the runs of a tuned page come to: numbers, verdicts, tables, words and the chart of both clocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
from scipy.stats import ttest_rel

from fedpmt.report.quantities import joules_unit, show, time_unit
from fedpmt.report.theme import PALETTE, new_figure, themed
from reproduction.artefact import Table
from reproduction.entrants import OWN_RATE
from reproduction.natural import draw_line
from reproduction.paper import seeds_text
from reproduction.readings import accuracy_at, joules, reaching
from reproduction.scores import NOT_ALIKE, NOT_REACHED, lost, minutes, percent, seconds_to
from reproduction.verdicts import Estimate, holm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from reproduction.tuned import Case

    Row = Mapping[str, Any]
    Runs = Mapping[str, Sequence[RunRecord]]  # by the entrant's title

LIKELY = 0.05
"""A difference is sure where its corrected p-value is below this."""

EVENTS = "events"
EQUAL_TIME = ", in equal time"
"""Marks comparisons of what a run has reached when the champion's run of the same seed ends."""

REFERENCE = "FedAvg"
FEW_RIVALS = 3
BEST_SHOWN = 3
"""Methods within the budget on a chart of both clocks, besides the champion's and FedAvg."""


@dataclass(frozen=True)
class Verdict:
    """How a rival does against a case's champion by accuracy, on equal seeds."""

    champion: str
    lead: Estimate  # the champion's
    chance: float  # that seeds alone make such a difference: the p-value
    corrected: float  # the same, of one among many comparisons

    @property
    def sure(self) -> bool:
        """Whether the difference is more than noise."""
        return self.corrected < LIKELY

    @property
    def text(self) -> str:
        """In a word."""
        if not self.sure:
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


def compare(cases: Sequence[tuple[Case, Runs]]) -> dict[tuple[str, str], Verdict]:
    """Set every rival of every case against its champion, and correct the whole family by Holm's rule.

    A rival on the clock of events is compared twice: after its whole run, and when the champion's run ends. Accuracies
    that are not of one global model are left out.
    """
    leads: dict[tuple[str, str], tuple[Estimate, float]] = {}
    for case, runs in cases:
        scores = _scores(case, runs)
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


def _scores(case: Case, runs: Runs) -> dict[str, dict[int, float]]:
    """What is compared, by title and seed."""
    ends, scores = _ends(runs.get(case.champion, ())), dict[str, dict[int, float]]()
    for title, members in runs.items():
        if not _is_global(members):
            continue
        scores[title] = {run.settings["seed"]: case.reading(run) for run in members}
        if clock_of(members) == EVENTS:
            scores[title + EQUAL_TIME] = _at_ends(members, ends)
    return scores


def _ends(runs: Iterable[RunRecord]) -> dict[int, float]:
    """When each seed's run ends, in virtual seconds."""
    return {run.settings["seed"]: run.rounds[-1].virtual_seconds for run in runs if not run.diverged}


def _at_ends(runs: Sequence[RunRecord], ends: Mapping[int, float]) -> dict[int, float]:
    """The accuracy of each seed's run at that seed's time."""
    seeds = {run.settings["seed"]: run for run in runs}
    return {seed: accuracy_at(run, ends[seed]) for seed, run in seeds.items() if seed in ends}


def clock_of(runs: Sequence[RunRecord]) -> str:
    """`rounds` or `events`."""
    return str(runs[0].settings.get("clock", "rounds"))


def _is_global(runs: Sequence[RunRecord]) -> bool:
    """Whether accuracies are of one global model."""
    return all(run.result is None or run.result.evaluates == "global" for run in runs)


def _short(title: str) -> str:
    return title.partition(",")[0]


def rows_of(case: Case, runs: Runs, usual: Runs) -> list[dict[str, Any]]:
    """The numbers of every entrant, the most accurate first; `usual` are the runs at the task's own rate."""
    timed = any(clock_of(members) == EVENTS for members in runs.values())
    ends = _ends(runs.get(case.champion, ())) if timed else {}
    rows = []
    for title, members in runs.items():
        at_ends = Estimate.of(list(_at_ends(members, ends).values()))
        at_usual = Estimate.of([case.reading(run) for run in usual.get(title, ())])
        rows.append(
            {
                **_row(case, title, members),
                "in_equal_time": None if at_ends is None else at_ends.mean,
                "in_equal_time_text": "-" if at_ends is None else percent(at_ends),
                "at_usual_rate": None if at_usual is None else at_usual.mean,
                "at_usual_rate_text": "-" if at_usual is None else percent(at_usual),
            }
        )
    for row in rows:
        row["sooner_than_reference"] = {str(target): _sooner(row, rows, target) for target in case.targets}
    return sorted(rows, key=lambda row: -row["accuracy"])


def _sooner(row: Row, rows: Sequence[Row], target: float) -> float | None:
    """How many times sooner than FedAvg an entrant is at an accuracy, where both get there in every seed."""
    there = _times(rows, target)
    both = REFERENCE in there and row["title"] in there
    return there[REFERENCE] / there[row["title"]] if both else None


def _row(case: Case, title: str, runs: Sequence[RunRecord]) -> dict[str, Any]:
    accuracy = Estimate.of([case.reading(run) for run in runs])
    assert accuracy is not None
    settings = runs[0].settings
    option = OWN_RATE.get(settings["method"])
    # What a run had spent until it diverged is no price of anything.
    whole = [run for run in runs if not run.diverged] or list(runs)
    devices = [device for run in runs for step in run.rounds for device in step.devices]
    reached = {target: Estimate.of([seconds_to(run, target) for run in runs]) for target in case.targets}
    energy = Estimate.of([_joules_to(run, case.targets[-1]) for run in runs]) if case.targets else None
    return {
        "title": title,
        "clock": clock_of(runs),
        "global": _is_global(runs),
        "runs": len(runs),
        "diverged": sum(run.diverged for run in runs),
        "accuracy": accuracy.mean,
        "accuracy_text": percent(accuracy),
        "lr": settings["options"][option] if option else settings["lr"],
        "server": settings.get("server_optimizer", "none"),
        "over_budget": sum(device.over_budget for device in devices) / max(1, len(devices)),
        "seconds": sum(run.rounds[-1].virtual_seconds for run in whole) / len(whole),
        "joules": sum(map(joules, whole)) / len(whole),
        "joules_to_last": None if energy is None or energy.reached < energy.runs else energy.mean,
        "reached": {
            str(target): None if one is None or one.reached < one.runs else one.mean
            for target, one in reached.items()
        },
        "reached_text": {str(target): minutes(one) for target, one in reached.items()},
    }


def _joules_to(run: RunRecord, target: float) -> float | None:
    found = reaching(run, target)
    return None if found is None else joules(run, found.round)


def tables_of(case: Case, rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> list[Table]:
    """What came out, within the budget and over it; who is ahead; and what was chosen."""
    within, over = _divide(rows)
    made = (
        [_table(case, rows, within, "within the budget"), _table(case, rows, over, "over the budget")]
        if over
        else [_table(case, rows, within, "what came out")]
    )
    return [*made, verdict_table(case, verdicts), _settings_table(case, rows)]


def _divide(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Those that keep to the budget, and those that do not."""
    return [row for row in rows if not row["over_budget"]], [row for row in rows if row["over_budget"]]


def _named(case: Case, row: Row) -> str:
    title = f"**{row['title']}**" if row["title"] == case.champion else str(row["title"])
    return title if row["global"] else title + NOT_ALIKE


def _table(case: Case, rows: Sequence[Row], shown: Sequence[Row], what: str) -> Table:
    timed = any(row["clock"] == EVENTS for row in rows)
    over = any(row["over_budget"] for row in shown)
    cells = [
        [
            _named(case, row),
            *([row["clock"]] if timed else []),
            row["accuracy_text"],
            *([row["in_equal_time_text"]] if timed else []),
            *row["reached_text"].values(),
            show(row["seconds"], time_unit),
            show(row["joules"], joules_unit),
            *([_to_last(row)] if case.targets else []),
            *([f"{100 * row['over_budget']:.0f} %"] if over else []),
        ]
        for row in shown
    ]
    columns = (
        "method", *(["clock"] if timed else []), "accuracy, %", *(["in equal time, %"] if timed else []),
        *(f"min to {100 * target:.0f} %" for target in case.targets), "whole run", "energy",
        *(f"energy to {100 * target:.0f} %" for target in case.targets[-1:]), *(["over"] if over else []),
    )  # fmt: skip
    alike = all(row["global"] for row in shown)
    note = "" if alike else f"{NOT_ALIKE.strip()} {OTHER_NETS}"
    return Table(f"{case.title}: {what}", columns, cells, note)


def _to_last(row: Row) -> str:
    joules_to = row["joules_to_last"]
    return NOT_REACHED if joules_to is None else show(joules_to, joules_unit)


OTHER_NETS = (
    "The mean accuracy of devices' own nets, or of a device's and the server's halves together. Devices hold few "
    "classes, so that it is not comparable with that of one global model."
)


def verdict_table(case: Case, verdicts: Mapping[str, Verdict]) -> Table:
    """A case's champion against each rival."""
    cells = [
        [rival, percent(one.lead), _chance(one.chance), _chance(one.corrected), one.text]
        for rival, one in sorted(verdicts.items(), key=lambda item: item[1].lead.mean)
    ]
    columns = ("rival", f"{_short(case.champion)}'s lead, points", "p", "p, corrected", "verdict")
    return Table(f"{case.title}: {case.champion} against each rival", columns, cells)


def _chance(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _settings_table(case: Case, rows: Sequence[Row]) -> Table:
    counts = {entrant.title: case.choices(entrant) for entrant in case.entrants}
    cells = [
        [
            _named(case, row),
            str(counts[row["title"]]),
            f"{row['lr']:g}",
            row["server"],
            row["at_usual_rate_text"],
            lost(row["diverged"], row["runs"]).removeprefix(", diverged in ") or "-",
        ]
        for row in rows
    ]
    columns = ("method", "choices", "rate", "server", "accuracy at the task's rate, %", "diverged")
    return Table(f"{case.title}: what was chosen", columns, cells)


def text_of(case: Case, rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> str:
    """Where the champion stands, from the numbers."""
    by_title, champion = {row["title"]: row for row in rows}, case.champion
    counts = seeds_text([row["runs"] for row in rows])
    lines = [f"## {case.title}", ""]
    if champion not in by_title:
        return "\n".join([*lines, f"{counts}; no run of {champion} yet."])
    ours = by_title[champion]
    others = [row for row in _divide(rows)[0] if row["title"] != champion and row["global"]]
    over = " (over the budget)" if case.has_budget and ours["over_budget"] else ""
    said = [f"{counts}, {case.rounds} rounds. {champion} ends at {100 * ours['accuracy']:.1f} %{over}"]
    if others:
        best = max(others, key=lambda row: row["accuracy"])
        within = " within the budget" if case.has_budget else ""
        said.append(f"the best other method{within}, {best['title']}, at {100 * best['accuracy']:.1f} %")
    whole = {rival: one for rival, one in verdicts.items() if not rival.endswith(EQUAL_TIME)}
    behind = [rival for rival, one in whole.items() if one.text.endswith("behind")]
    ahead = [rival for rival, one in whole.items() if one.text.endswith("ahead")]
    # A few are named, since who they are is the point.
    better = (
        ", ".join(ahead)
        if 0 < len(ahead) < len(whole) <= FEW_RIVALS
        else f"{len(ahead)} of {len(whole)} rivals"
    )
    said.append(f"significantly better than {better}, worse than {', '.join(behind) or 'none'}")
    lines += ["; ".join(said) + ".", ""]
    alike = [row for row in rows if row["global"]]
    lines += [_first(target, alike, ours) for target in case.targets]
    if any(row["clock"] == EVENTS for row in alike):
        lines += ["", events_text(case, alike, verdicts)]
    return "\n".join(lines)


def _first(target: float, rows: Sequence[Row], ours: Row) -> str:
    """Who is first at an accuracy, and how much sooner the champion is than FedAvg."""
    champion, there = ours["title"], _times(rows, target)
    goal = f"- {100 * target:.0f} %: "
    if not there:
        return f"{goal}nobody gets there in every seed."
    others = sorted((seconds, title) for title, seconds in there.items() if title != champion)
    if champion not in there:
        return f"{goal}{others[0][1]} is first; {champion} does not get there in every seed."
    mine, said = there[champion], f"{goal}{champion} after {_minutes(there[champion])}"
    level = [title for seconds, title in others if _minutes(seconds) == _minutes(mine)]
    if others and others[0][0] < mine and others[0][1] not in level:
        said += f", behind {others[0][1]} ({_minutes(others[0][0])})"
    elif level:
        said += f", level with {', '.join(level)}"
    else:
        said += ", first" + "".join(f"; then {title} ({_minutes(seconds)})" for seconds, title in others[:1])
    sooner = _sooner(ours, rows, target)
    if sooner is not None:
        said += f"; {sooner:.1f} times sooner than {REFERENCE}"
    return f"{said}."


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def _times(rows: Sequence[Row], target: float) -> dict[str, float]:
    """Seconds to an accuracy, of those that get there in every seed."""
    return {row["title"]: seconds for row in rows if (seconds := row["reached"][str(target)]) is not None}


def events_text(case: Case, rows: Sequence[Row], verdicts: Mapping[str, Verdict]) -> str:
    """Where a method without rounds beats the champion."""
    there = [row for row in rows if row["clock"] == EVENTS]
    ours = next(row for row in rows if row["title"] == case.champion)
    lines = [f"Methods on the clock of events against {case.champion}, which waits for its rounds:", ""]
    for words, mark, key in (
        ("after as many replies", "", "accuracy"),
        ("in equal time", EQUAL_TIME, "in_equal_time"),
    ):
        better = [row for row in there if row[key] is not None and row[key] > ours["accuracy"]]
        sure = [row for row in better if (one := verdicts.get(row["title"] + mark)) and one.sure]
        likely = [row for row in better if row not in sure]
        said = f"- Significantly more accurate {words}: {_with(sure, key)}"
        lines.append(said + (f"; higher, but undecided: {_with(likely, key)}." if likely else "."))
    for target in case.targets:
        times, limit = _times(there, target), ours["reached"][str(target)]
        sooner = {title: one for title, one in times.items() if limit is None or one < limit}
        named = [f"{title} ({_minutes(one)})" for title, one in sorted(sooner.items(), key=itemgetter(1))]
        lines.append(f"- Sooner at {100 * target:.0f} %: {', '.join(named) or 'none'}.")
    return "\n".join(lines)


def speed_text(case: Case, rows: Mapping[float, Sequence[Row]]) -> str:
    """Who is first at each target where settings are chosen for it."""
    lines = [
        "The same where each method takes, for each target, the setting whose trial is soonest there:",
        "",
    ]
    for target, every in rows.items():
        lines.append(_first(target, every, next(row for row in every if row["title"] == case.champion)))
    return "\n".join(lines)


def speed_table(case: Case, rows: Mapping[float, Sequence[Row]]) -> Table:
    """Times with the settings that are soonest."""
    found = {target: {row["title"]: row for row in every} for target, every in rows.items()}
    last = case.targets[-1]
    ordered = sorted(rows[last], key=lambda row: (row["reached"][str(last)] or math.inf, -row["accuracy"]))
    cells = [
        [
            _named(case, row),
            *(
                text
                for target in case.targets
                for one in (found[target][row["title"]],)
                for text in (one["reached_text"][str(target)], f"{one['lr']:g}, {one['server']}")
            ),
            f"{100 * row['over_budget']:.0f} %",
        ]
        for row in ordered
    ]
    times = (text for target in case.targets for text in (f"min to {100 * target:.0f} %", "with"))
    return Table(f"{case.title}: settings chosen for speed", ("method", *times, "over"), cells)


def _with(rows: Sequence[Row], key: str) -> str:
    return ", ".join(f"{row['title']} ({100 * row[key]:.1f} %)" for row in rows) or "none"


def shown_on_chart(cases: Sequence[Sequence[Row]], champion: str) -> list[str]:
    """Whom a chart of both clocks shows: the champion's two forms, FedAvg, the best within the budget, all events.

    Args:
        cases: The rows of each case.
        champion: Its title; the method alone, before the comma, is its other form.
    """
    every = [row for rows in cases for row in rows]
    titles = list(dict.fromkeys(row["title"] for row in every))
    rounds = {row["title"] for row in every if row["clock"] != EVENTS}
    over = {row["title"] for row in every if row["over_budget"] or not row["global"]}
    means = {title: sum(row["accuracy"] for row in every if row["title"] == title) for title in rounds - over}
    always = [title for title in (champion, _short(champion), REFERENCE) if title in rounds]
    best = [title for title in sorted(means, key=lambda title: -means[title]) if title not in always]
    return [*always, *best[:BEST_SHOWN], *(title for title in titles if title not in rounds)]


@themed
def draw_clocks(panels: Mapping[str, Runs], shown: Sequence[str]) -> Figure:
    """Accuracy against virtual time, a panel for each case: rounds solid, events dashed in the colour of their kin."""
    present = [title for title in shown if any(title in runs for runs in panels.values())]
    events = {
        title
        for title in present
        for runs in panels.values()
        if title in runs and clock_of(runs[title]) == EVENTS
    }
    colours = _colours([title for title in present if title not in events], sorted(events))
    figure = new_figure(6.4 * len(panels), 5.2)
    every = figure.subplots(1, len(panels), squeeze=False).flat
    for axes, (title, runs) in zip(every, panels.items(), strict=True):
        for name in present:
            if name in runs:
                draw_line(axes, name, runs[name], colours[name], "--" if name in events else "-")
        axes.set(xlabel="virtual minutes, logarithmic", ylabel="test accuracy", title=title, xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    handles = {
        label: line
        for axes in figure.axes
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _colours(rounds: Sequence[str], events: Sequence[str]) -> dict[str, str]:
    """A colour for each; a title that begins with another one's has that one's.

    >>> colours = _colours(["FedPMT", "FedAvg"], ["FedBuff", "FedPMT, buffered"])
    >>> colours["FedPMT, buffered"] == colours["FedPMT"], colours["FedBuff"] in (colours["FedPMT"], colours["FedAvg"])
    (True, False)
    """
    colours = {title: PALETTE[place % len(PALETTE)] for place, title in enumerate(rounds)}
    rest = [colour for colour in reversed(PALETTE) if colour not in colours.values()] or list(
        reversed(PALETTE)
    )
    for title in events:
        kin = max((one for one in rounds if title.startswith(one)), key=len, default=None)
        colours[title] = colours[kin] if kin else rest[0]
        rest = rest if kin else [*rest[1:], rest[0]]
    return colours
