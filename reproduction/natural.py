"""Ready tasks: devices that are people, with a test of each person's own, and pretrained models that are fine-tuned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import PercentFormatter

from fedpmt.report.drawing import curve
from fedpmt.report.tables import evaluated
from fedpmt.report.theme import PALETTE, RESERVED, SIGNS, new_figure, themed
from fedpmt.settings import Settings, resolve
from reproduction.artefact import Artefact, Picture, Table
from reproduction.paper import Experiment, Scope, seeds_text
from reproduction.readings import TAIL, final, reaching
from reproduction.verdicts import CONFIDENCE, Estimate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from reproduction.library import Library

QUICK_ROUNDS = 4
TITLES = {"fedpmt": "FedPMT", "fedavg": "FedAvg", "heterofl": "HeteroFL", "feddrop": "FedDrop"}
METHODS = tuple(TITLES)


@dataclass(frozen=True)
class Entrant:
    """A method with its settings."""

    title: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""  # what the settings come to, in words


@dataclass(frozen=True)
class Contest:
    """Methods on one task, with the accuracies to which time is measured."""

    name: str
    title: str
    about: str  # whose data it is, and what is learned of it
    task: str
    rounds: int
    targets: tuple[float, ...]
    entrants: tuple[Entrant, ...] = tuple(Entrant(title, name) for name, title in TITLES.items())
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, scope: Scope, entrant: Entrant, seed: int) -> Settings:
        """One run."""
        return resolve(
            {
                "task": self.task,
                "data_dir": scope.data_dir,
                "seed": seed,
                "rounds": QUICK_ROUNDS if scope.quick else self.rounds,
                "eval_every": max(1, self.rounds // 40),
                "method": entrant.method,
                **self.settings,
                **entrant.settings,
            }
        )

    def runs(self, scope: Scope) -> list[Settings]:
        """All runs, seed by seed, so that an interrupted page has whole seeds."""
        return [self.of(scope, entrant, seed) for seed in scope.seeds for entrant in self.entrants]

    def found(self, library: Library, scope: Scope) -> dict[str, list[RunRecord]]:
        """The finished runs of each entrant."""
        every = {
            entrant.title: [
                run
                for seed in scope.seeds
                if (run := library.find(self.of(scope, entrant, seed))) is not None
            ]
            for entrant in self.entrants
        }
        return {title: runs for title, runs in every.items() if runs}


def page(name: str, title: str, contests: Sequence[Contest], library: Library, scope: Scope) -> Artefact:
    """What each method reaches, for whom, and in what time, on each of several tasks."""
    texts, tables, pictures, values = [HOW], list[Table](), list[Picture](), dict[str, Any]()
    about = "test accuracy against virtual time, the band from the lowest to the highest seed"
    panels: dict[str, Mapping[str, Sequence[RunRecord]]] = {}
    for contest in contests:
        found = contest.found(library, scope)
        if not found:
            continue
        rows = [_row(contest, one, runs) for one, runs in found.items()]
        texts.append(_text(contest, scope, rows))
        tables += [
            *([_people_table(rows, contest)] if _has_people(rows) else []),
            _time_table(rows, contest),
        ]
        if _has_people(rows):
            levels = "right: what people of each level get, from the slowest level to the fastest"
            caption = f"{contest.title}: {about}; {levels}."
            pictures.append(Picture(f"{name}-{contest.name}", draw(contest, found), caption))
        else:
            panels[contest.title] = found
        values[contest.name] = {"rows": rows, "seeds": [len(runs) for runs in found.values()]}
    if panels:
        caption = f"{about[0].upper()}{about[1:]}."
        pictures.append(Picture(name, draw_panels(panels), caption))
    command = f"python -m reproduction {name}{scope.suffix}"
    return Artefact(name, title, command, "\n\n".join(texts), tables, pictures, values)


HOW = (
    "On each device a method gets the largest part that takes no more `exact` operations than FedPMT's depth there. "
    "FedAvg trains everything; a method without such a small part exceeds the limit. Accuracy is the mean "
    f"over the last {100 * TAIL:.0f} % of the rounds, over seeds, with {100 * CONFIDENCE:.0f} % intervals. Time is "
    "virtual. Where people have their own test samples, *mean*, *spread* and *worst tenth* are over people, each "
    "counting the same, at the end of a run; *slowest* and *fastest* are the means over people on the slowest and the "
    "fastest level. No rate is tuned to a method. A run that diverges counts as a guess, and is left out of people's "
    "scores."
)


def _has_people(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["worst_tenth"] is not None for row in rows)


def _text(contest: Contest, scope: Scope, rows: Sequence[Mapping[str, Any]]) -> str:
    """What is compared, where FedPMT stands, and the settings."""
    one = contest.of(scope, contest.entrants[0], 0)
    epochs = "1 local epoch" if one.epochs == 1 else f"{one.epochs} local epochs"
    return (
        f"## {contest.title}\n\n{contest.about} {_sentence(rows, contest)}\n\n"
        f"{seeds_text([row['runs'] for row in rows])}, {one.rounds} rounds, {one.devices} devices of "
        f"{len(one.levels.split(','))} speeds, {one.cohort} a round, {epochs} in batches of {one.batch} by "
        f"{one.optimizer} at rate {one.lr:g}."
    )


def _row(contest: Contest, title: str, runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The numbers of one entrant."""
    results = [run.result for run in runs if run.result is not None]
    people = [one.clients for one in results if one.clients is not None]
    levels = [one.score_by_level for one in results if one.score_by_level]
    accuracy = Estimate.of([final(run) for run in runs])
    assert accuracy is not None
    return {
        "title": title,
        "runs": len(runs),
        "diverged": sum(run.diverged for run in runs),
        "accuracy": accuracy.mean,
        "half_interval": accuracy.half if math.isfinite(accuracy.half) else None,
        **{
            key: sum(getattr(one, key) for one in people) / len(people) if people else None
            for key in ("mean", "spread", "worst_tenth")
        },
        "levels": {
            level: sum(one[level] for one in levels) / len(levels) for level in (levels[0] if levels else {})
        },
        "seconds": sum(one.virtual_seconds for one in results) / len(results),
        "bytes_up": sum(one.bytes_up for one in results) / len(results),
        "operations": sum(one.operations for one in results) / len(results),
        "memory": max(device.memory_bytes for run in runs for step in run.rounds for device in step.devices),
        "reached": {str(target): _time_to(runs, target) for target in contest.targets},
    }


def _time_to(runs: Sequence[RunRecord], target: float) -> float | None:
    """Mean virtual seconds to an accuracy; None where a run never gets there."""
    reached = [reaching(run, target) for run in runs]
    seconds = [one.seconds for one in reached if one is not None]
    return sum(seconds) / len(runs) if len(seconds) == len(runs) else None


def _percent(value: float | None, half: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if half is None else f"{100 * value:.1f} ± {100 * half:.1f} %"


def _named(row: Mapping[str, Any]) -> str:
    lost = f" ({row['diverged']} of {row['runs']} diverged)" if row["diverged"] else ""
    return f"{row['title']}{lost}"


def _people_table(rows: Sequence[Mapping[str, Any]], contest: Contest) -> Table:
    cells = []
    for row in rows:
        levels = list(row["levels"].values())
        cells.append(
            [
                _named(row),
                _percent(row["accuracy"], row["half_interval"]),
                *(_percent(row[key]) for key in ("mean", "spread", "worst_tenth")),
                _percent(levels[0] if levels else None),
                _percent(levels[-1] if levels else None),
            ]
        )
    columns = ("method", "accuracy", "mean", "spread", "worst tenth", "slowest", "fastest")
    return Table(f"{contest.title}: accuracy, in all and over people", columns, cells)


def _time_table(rows: Sequence[Mapping[str, Any]], contest: Contest) -> Table:
    people = _has_people(rows)
    cells = [
        [
            _named(row),
            *([] if people else [_percent(row["accuracy"], row["half_interval"])]),
            f"{row['seconds'] / 60:,.0f} min",
            *(
                "not reached" if seconds is None else f"{seconds / 60:,.1f} min"
                for seconds in row["reached"].values()
            ),
            f"{row['bytes_up'] / 1e6:,.0f} MB",
            f"{row['operations'] / 1e12:,.2f} T",
            f"{row['memory'] / 1e6:,.1f} MB",
        ]
        for row in rows
    ]
    first = ("method",) if people else ("method", "accuracy")
    columns = (*first, "whole run", *(f"to {100 * target:.0f} %" for target in contest.targets))
    return Table(f"{contest.title}: time and resources", (*columns, "uploads", "operations", "memory"), cells)


def _sentence(rows: Sequence[Mapping[str, Any]], contest: Contest) -> str:
    """Where FedPMT stands, from the numbers."""
    # A mean over seeds that includes a run which diverged says nothing, and neither does one without it.
    rows = [row for row in rows if not row["diverged"]]
    by_title = {row["title"]: row for row in rows}
    if "FedPMT" not in by_title or len(rows) < 2:
        return ""
    ours = by_title["FedPMT"]
    best = max(rows, key=lambda row: row["accuracy"])
    parts = [f"FedPMT ends at {_percent(ours['accuracy'])}"]
    if best is not ours:
        parts.append(f"{best['title']} is best with {_percent(best['accuracy'])}")
    else:
        second = max((row for row in rows if row is not ours), key=lambda row: row["accuracy"])
        parts.append(f"which is the best; {second['title']} follows with {_percent(second['accuracy'])}")
    if ours["worst_tenth"] is not None:
        order = sorted(rows, key=lambda row: -(row["worst_tenth"] or 0.0))
        parts.append(
            f"for the worst tenth of people {order[0]['title']} is best ({_percent(order[0]['worst_tenth'])}, "
            f"FedPMT {_percent(ours['worst_tenth'])})"
        )
    target = next((one for one in reversed(contest.targets) if ours["reached"][str(one)] is not None), None)
    if target is not None:
        there = {row["title"]: row["reached"][str(target)] for row in rows}
        reached = {title: seconds for title, seconds in there.items() if seconds is not None}
        first = min(reached, key=lambda title: reached[title])
        if first == "FedPMT" and "FedAvg" in reached:
            ratio = reached["FedAvg"] / reached["FedPMT"]
            parts.append(
                f"FedPMT is the first to reach {100 * target:.0f} %, {ratio:.1f} times sooner than FedAvg"
            )
        elif first != "FedPMT":
            parts.append(f"{first} is the first to reach {100 * target:.0f} %")
    return "**" + "; ".join(parts) + ".**"


@themed
def draw_panels(panels: Mapping[str, Mapping[str, Sequence[RunRecord]]]) -> Figure:
    """Accuracy against virtual time, a panel for each case."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(6.4 * columns, 4.4 * rows)
    every = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, found) in zip(every, panels.items(), strict=False):
        for number, (name, runs) in enumerate(found.items()):
            turn, place = divmod(number, len(PALETTE))
            draw_line(axes, name, runs, PALETTE[place], DASHES[turn % len(DASHES)])
        axes.set(xlabel="virtual minutes", ylabel="test accuracy", title=title)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="lower right", fontsize="small")
    for axes in list(figure.axes)[len(panels) :]:
        axes.remove()
    return figure


@themed
def draw(contest: Contest, found: Mapping[str, Sequence[RunRecord]]) -> Figure:
    """Accuracy against virtual time, and over levels."""
    has_levels = any(run.result and run.result.clients for runs in found.values() for run in runs)
    figure = new_figure(11 if has_levels else 6.4, 4.4)
    left, *others = figure.subplots(1, 2 if has_levels else 1, squeeze=False)[0]
    for number, (title, runs) in enumerate(found.items()):
        method = runs[0].settings["method"]
        colour = PALETTE[RESERVED.get(method, number) if _alone(method, found) else number % len(PALETTE)]
        draw_line(left, title, runs, colour)
        levels = [run.result.score_by_level for run in runs if run.result and run.result.score_by_level]
        if levels and others:
            names = list(levels[0])
            means = [sum(one[name] for one in levels) / len(levels) for name in names]
            shape = ("o", "s", "^")[SIGNS.get(method, (0, 0))[1]]
            others[0].plot(names, means, color=colour, marker=shape, label=title)
    left.set(xlabel="virtual minutes", ylabel="test accuracy")
    for axes in others:
        axes.set(xlabel="level of the device, 1 the slowest", ylabel="mean accuracy of its people")
    for axes in (left, *others):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.legend(loc="lower right")
    left.set_title(contest.title)
    return figure


def _alone(method: str, found: Mapping[str, Sequence[RunRecord]]) -> bool:
    """Whether a method is there in one form only, so that it can have its usual colour."""
    forms = [title for title, runs in found.items() if runs[0].settings["method"] == method]
    return len(forms) == 1


DASHES = ("-", "--", ":")
"""For lines of one colour, where there are more methods than colours."""


def draw_line(axes: Axes, title: str, runs: Sequence[RunRecord], colour: str, dash: str = "-") -> None:
    """Draw the mean over runs against virtual minutes, with a band from the lowest to the highest."""
    line = curve(runs, "seconds")
    if line is None or not any(evaluated(run) for run in runs):
        return
    minutes = line.place / 60
    axes.plot(minutes, line.mean, color=colour, label=title, linewidth=1.4, linestyle=dash)
    axes.fill_between(minutes, line.low, line.high, color=colour, alpha=0.15, linewidth=0)


PEOPLE = Contest(
    "hapt",
    "Activities of 30 people (HAPT)",
    "Each device is one person's phone, with 197 to 299 windows of that person's motion; six activities are told apart "
    "by a convolutional net (`--task cnn-hapt`).",
    "cnn-hapt",
    100,
    (0.80, 0.85, 0.90),
)
ROLES = Contest(
    "shakespeare",
    "What Shakespeare's roles say next",
    "Each device is a role of one of twelve plays, with 16 to 667 passages of 80 characters; the next character is "
    "predicted by a small transformer (`--task transformer-shakespeare`). Scores are per character.",
    "transformer-shakespeare",
    40,
    (0.30, 0.35, 0.40),
    settings={"eval_every": 4},
)


_TUNED = {"tune": "lora"}
FINE_TUNING = (
    Entrant("FedPMT", "fedpmt"),
    Entrant("FedAvg", "fedavg"),
    Entrant("HeteroFL", "heterofl"),
    Entrant("head only", "fedavg", {"tune": "head"}),
    Entrant("LoRA by depth (FedPMT)", "fedpmt", _TUNED),
    Entrant("FedRA", "fedra", _TUNED),
    Entrant("FlexLoRA", "flexlora", _TUNED),
    Entrant("FedPMT, from scratch", "fedpmt", {"weights": "random"}),
    Entrant("FedAvg, from scratch", "fedavg", {"weights": "random"}),
)
MEMORY = tuple(
    Entrant(f"{one.title}, memory", one.method, {**one.settings, "budget": "memory"})
    for one in FINE_TUNING
    if one.title in ("HeteroFL", "LoRA by depth (FedPMT)", "FedRA", "FlexLoRA")
)
"""Held to the memory of FedPMT's depth on each device, where the others are held to its operations."""

IMAGES = Contest(
    "images",
    "Fine-tuning MobileNetV2 on CIFAR-10",
    "A MobileNetV2 that has learned ImageNet is fine-tuned by 100 devices with 50 images of CIFAR-10 each "
    "(`--task mobilenetv2-cifar10`).",
    "mobilenetv2-cifar10",
    12,
    (0.50, 0.60, 0.65),
    FINE_TUNING + MEMORY,
    {"eval_every": 3},
)
TEXTS = Contest(
    "texts",
    "Fine-tuning MiniLM on Reuters",
    "A MiniLM that has learned sentences is fine-tuned by 100 devices with 40 news items each, to tell ten subjects "
    "apart (`--task minilm-reuters`).",
    "minilm-reuters",
    12,
    (0.70, 0.80, 0.85),
    FINE_TUNING + MEMORY,
    {"eval_every": 3},
)


def _experiment(name: str, title: str, contests: Sequence[Contest]) -> Experiment:
    return Experiment(
        name,
        title,
        lambda scope: [settings for contest in contests for settings in contest.runs(scope)],
        lambda library, scope: page(name, title, contests, library, scope),
    )


REAL_CLIENTS = _experiment("people", "Devices that are people", (PEOPLE, ROLES))
TUNING = _experiment("fine-tuning", "Fine-tuning pretrained models", (IMAGES, TEXTS))
