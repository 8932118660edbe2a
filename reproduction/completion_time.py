"""Table II of the paper (label table2): virtual time to an accuracy, FedPMT and FedAvg, with a deadline and without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from scipy.stats import t as student

from fedpmt import api
from fedpmt.report.drawing import curve
from fedpmt.report.tables import evaluated, first_reaching
from fedpmt.report.theme import PALETTE, RESERVED, new_figure, themed
from reproduction.artefact import Artefact, Claim, Picture, Table
from reproduction.artefact import Case as Check
from reproduction.paper import IID, PARTITIONS, TWO_CLASSES, Experiment, seeds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library
    from reproduction.paper import Scope

DEADLINE = 26.5
"""Seconds: the paper's constraint, just above what FedPMT's slowest device needs (26.4)."""

QUICK_DEADLINE = 17.5
TOLERANCE = 0.15
"""Of the paper's rounds; its two FedPMT columns, the same experiment twice, are up to 12 % apart."""

WANTED_RATIO = 1.7
CONFIDENCE = 0.95

# seconds to each accuracy: FedPMT and FedAvg with the deadline, FedPMT and FedAvg without
PRINTED: dict[str, dict[float, tuple[float, float, float, float]]] = {
    IID: {
        0.50: (1064.8, 1121.8, 1029.6, 1950.0),
        0.55: (1584.0, 1732.0, 1601.6, 2800.0),
        0.60: (2270.4, 2464.5, 2217.6, 4266.6),
    },
    TWO_CLASSES: {
        0.40: (4136.0, 4507.0, 4174.0, 4644.0),
        0.45: (6157.0, 6604.4, 6218.7, 6577.7),
        0.50: (8251.0, 8771.5, 9234.1, 10361.0),
    },
}
CASES = (("fedpmt", True), ("fedavg", True), ("fedpmt", False), ("fedavg", False))
ROUND_SECONDS = {
    ("fedpmt", True): 26.4,
    ("fedavg", True): 26.5,
    ("fedpmt", False): 26.4,
    ("fedavg", False): 50.0,
}
"""What a round takes in the paper, so that its times can be read as rounds."""

TABLE = "IV-C, table II"
VARIED = "how a jumping curve is read; levels, prices and links ([studies](studies.md))"
WINDOWS = (1, 11, 21)
"""Evaluations in a centred mean. With two classes per device curves jump, and the paper does not say how it reads them:
at the first touch, or off the mean of its 10 trials, which is smooth."""

QUICK_TARGETS = (0.3, 0.4, 0.5)
NAMES = {"fedpmt": "FedPMT", "fedavg": "FedAvg"}
Case = tuple[str, bool]  # method, and whether there is a deadline


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval; `reached` of `runs` got there at all."""

    mean: float
    half: float  # half the interval's length; infinite for one seed
    reached: int
    runs: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate | None:
        """Of those that reached the target; None where nobody did.

        >>> Estimate.of([39.0, 41.0, None]).reached
        2
        """
        there = [value for value in values if value is not None]
        if not there:
            return None
        half = math.inf
        if len(there) > 1:
            quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(there) - 1))
            half = quantile * float(np.std(there, ddof=1)) / math.sqrt(len(there))
        return cls(float(np.mean(there)), half, len(there), len(values))

    def text(self, digits: int = 0) -> str:
        """As a cell."""
        shown = f"{self.mean:,.{digits}f}"
        if math.isfinite(self.half):
            shown += f" ± {self.half:,.{digits}f}"
        return shown if self.reached == self.runs else f"{shown} ({self.reached} of {self.runs})"


def settings_of(scope: Scope, case: Case, partition: str, seed: int) -> Settings:
    """One run; FedPMT's deadline changes nobody's part, so the run without it is trained and then re-stamped."""
    method, timed = case
    task = "fcnn-mnist" if scope.quick else "cnn-cifar10"
    more: dict[str, Any] = {"deadline": deadline(scope)} if timed and method == "fedavg" else {}
    return scope.settings(method, task, partition, seed, **more)


def deadline(scope: Scope) -> float:
    """The constraint, in seconds per round."""
    return QUICK_DEADLINE if scope.quick else DEADLINE


def runs(scope: Scope) -> list[Settings]:
    """All runs that must be trained."""
    return [
        settings_of(scope, case, partition, seed)
        for seed in scope.seeds
        for partition in PRINTED
        for case in CASES
    ]


def make(library: Library, scope: Scope) -> Artefact:
    """The table beside the paper's, the ratios, and accuracy against virtual time."""
    found = {
        (partition, case): _found(library, scope, case, partition) for partition in PRINTED for case in CASES
    }
    tables, values = [], []
    for partition, entries in PRINTED.items():
        targets = QUICK_TARGETS if scope.quick else tuple(entries)
        rows = []
        for target in targets:
            for place, case in enumerate(CASES):
                printed = None if scope.quick else entries[target][place]
                row, value = _row(found[partition, case], case, target, printed)
                rows.append(row)
                values.append({"partition": partition, **value})
        tables.append(Table(f"Time to accuracy, {PARTITIONS[partition]}", COLUMNS, rows))
    ratios = _ratios(values)
    read, readings = _readings(found, scope)
    counts = sorted({len(members) for members in found.values()})
    seeds = seeds_text(counts)
    return Artefact(
        "completion-time",
        "Time to an accuracy (the paper's Table II)",
        f"python -m reproduction completion-time{scope.suffix}",
        _text(values, ratios, scope),
        [*tables, _ratio_table(ratios), read],
        [
            Picture(
                "completion-time",
                draw(found),
                f"Test accuracy against virtual time, {seeds}: means, faint as they are and full over "
                f"{WINDOWS[1]} evaluations; bands reach from the worst to the best seed.",
            )
        ],
        {"rows": values, "ratios": ratios, "readings": readings, "seeds": counts},
        () if scope.quick else claims(values, ratios, readings),
    )


COLUMNS = (
    "target, method",
    "paper, s",
    "ours, s",
    "paper, rounds",
    "ours, rounds",
    "ours / paper",
    "within 15 %",
)


def _found(library: Library, scope: Scope, case: Case, partition: str) -> list[RunRecord]:
    found = []
    for seed in scope.seeds:
        settings = settings_of(scope, case, partition, seed)
        run = library.find(settings)
        if run is not None and case == ("fedpmt", True):
            run = api.restamp(run, settings.model_copy(update={"deadline": deadline(scope)}))
        if run is not None:
            found.append(run)
    return found


def _row(
    members: list[RunRecord], case: Case, target: float, printed: float | None
) -> tuple[list[str], dict[str, Any]]:
    reached = [first_reaching(run, target) for run in members]
    seconds = Estimate.of([one.seconds if one else None for one in reached])
    rounds = Estimate.of([float(one.round) if one else None for one in reached])
    wanted = None if printed is None else printed / ROUND_SECONDS[case]
    share = rounds.mean / wanted if rounds and wanted else None
    within = share is not None and abs(share - 1) <= TOLERANCE
    method, timed = case
    cells = [
        entry(target, method, timed),
        "-" if printed is None else f"{printed:,.1f}",
        seconds.text() if seconds else "not reached",
        "-" if wanted is None else f"{wanted:.0f}",
        rounds.text() if rounds else "not reached",
        "-" if share is None else f"{share:.2f}",
        "-" if wanted is None else ("yes" if within else "no"),
    ]
    return cells, {
        "target": target,
        "method": method,
        "deadline": timed,
        "paper_seconds": printed,
        "paper_rounds": wanted,
        "seconds": seconds.mean if seconds else None,
        "seconds_half_interval": seconds.half if seconds and math.isfinite(seconds.half) else None,
        "rounds": rounds.mean if rounds else None,
        "reached": rounds.reached if rounds else 0,
        "runs": len(members),
        "within": within if wanted is not None else None,
    }


def _ratios(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """FedAvg's time over FedPMT's, ours and the paper's."""
    at = {(row["partition"], row["target"], row["method"], row["deadline"]): row for row in values}
    ratios = []
    for (partition, target, method, timed), row in at.items():
        if method != "fedpmt":
            continue
        other = at[partition, target, "fedavg", timed]
        both = row["seconds"] and other["seconds"]
        printed = row["paper_seconds"] and other["paper_seconds"]
        ratios.append(
            {
                "partition": partition,
                "target": target,
                "deadline": timed,
                "paper": other["paper_seconds"] / row["paper_seconds"] if printed else None,
                "ours": other["seconds"] / row["seconds"] if both else None,
            }
        )
    return ratios


def _ratio_table(ratios: list[dict[str, Any]]) -> Table:
    rows = [
        [
            f"{PARTITIONS[row['partition']]}, {100 * row['target']:.0f} %{', deadline' if row['deadline'] else ''}",
            "-" if row["paper"] is None else f"{row['paper']:.2f}",
            "-" if row["ours"] is None else f"{row['ours']:.2f}",
        ]
        for row in ratios
    ]
    return Table("Time of FedAvg over time of FedPMT", ("target", "paper", "ours"), rows)


def _text(values: list[dict[str, Any]], ratios: list[dict[str, Any]], scope: Scope) -> str:
    parts = [
        f"Virtual time until the test accuracy is first reached, with a deadline of {deadline(scope)} s a round and "
        f"without; means over seeds with {100 * CONFIDENCE:.0f} % intervals. FedPMT's runs with the deadline are those "
        "without it under another clock: nobody misses it."
    ]
    if not scope.quick:
        judged = [row for row in values if row["partition"] == IID and not row["deadline"]]
        within = sum(bool(row["within"]) for row in judged)
        ratio = next(
            (
                row["ours"]
                for row in ratios
                if (row["partition"], row["target"], row["deadline"]) == (IID, 0.6, False)
            ),
            None,
        )
        shown = "not reached" if ratio is None else f"{ratio:.2f}"
        parts.append(
            f"i.i.d., without deadline: {within} of {len(judged)} entries within {100 * TOLERANCE:.0f} % of the "
            f"paper's rounds; at 60 % FedAvg takes {shown} times as long as FedPMT (paper 1.92, wanted {WANTED_RATIO})."
        )
    return "\n\n".join(parts)


def smoothed(run: RunRecord, window: int) -> list[tuple[int, float]]:
    """Rounds and the accuracy's mean over so many evaluations around each."""
    found = [(step.round, accuracy) for step, accuracy in evaluated(run)]
    half, means = window // 2, []
    for place in range(half, len(found) - half):
        around = found[place - half : place + half + 1]
        means.append((found[place][0], sum(accuracy for _, accuracy in around) / len(around)))
    return means


def _readings(
    found: dict[tuple[str, Case], list[RunRecord]], scope: Scope
) -> tuple[Table, list[dict[str, Any]]]:
    """Rounds to each target, by how a curve is read."""
    rows, values = [], []
    for (partition, case), members in found.items():
        for target in QUICK_TARGETS if scope.quick else PRINTED[partition]:
            printed = (
                None if scope.quick else PRINTED[partition][target][CASES.index(case)] / ROUND_SECONDS[case]
            )
            by_window = {}
            for window in WINDOWS:
                curves = [smoothed(run, window) for run in members]
                first = [next((t for t, height in curve if height >= target), None) for curve in curves]
                by_window[window] = Estimate.of([None if t is None else float(t) for t in first])
            where = f"{PARTITIONS[partition]}, {entry(target, *case)}"
            shown = [one.text() if one else "not reached" for one in by_window.values()]
            rows.append([where, "-" if printed is None else f"{printed:.0f}", *shown])
            means = {str(window): one.mean if one else None for window, one in by_window.items()}
            values.append(
                {"partition": partition, "target": target, "method": case[0], "deadline": case[1],
                 "paper_rounds": printed, "rounds": means, "runs": len(members)}
            )  # fmt: skip
    columns = (
        "target, method",
        "paper, rounds",
        "first touched",
        *(f"mean of {window}" for window in WINDOWS[1:]),
    )
    note = "Rounds until the accuracy, or its mean over this number of evaluations, is first reached."
    return Table("How a curve is read", columns, rows, note), values


def claims(
    values: list[dict[str, Any]], ratios: list[dict[str, Any]], readings: list[dict[str, Any]]
) -> list[Claim]:
    """What the text says of the table, and the table itself."""
    known = [row for row in ratios if row["ours"] is not None]
    free, tight = ([row for row in known if row["deadline"] is timed] for timed in (False, True))
    last = [row for row in free if (row["partition"], row["target"]) == (IID, 0.6)]
    return [
        *(
            Claim(
                f"times to accuracy, {PARTITIONS[partition]}: rounds within {100 * TOLERANCE:.0f} % of the paper's",
                TABLE,
                [
                    _near(row, row["rounds"])
                    for row in values
                    if row["partition"] == partition and row["runs"]
                ],
                VARIED,
            )
            for partition in PRINTED
        ),
        Claim(
            f"the same, {PARTITIONS[TWO_CLASSES]}, read off curves that are smoothed over {WINDOWS[-1]} evaluations",
            TABLE,
            [
                _near(row, row["rounds"][str(WINDOWS[-1])])
                for row in readings
                if row["partition"] == TWO_CLASSES and row["runs"]
            ],
            VARIED,
        ),
        Claim(
            f"without a deadline FedPMT needs almost half of FedAvg's time to 60 %, i.i.d. (at least {WANTED_RATIO} x)",
            TABLE,
            [Check("", row["ours"] >= WANTED_RATIO, f"{row['ours']:.2f} x (paper 1.92)") for row in last],
        ),
        Claim("without a deadline FedPMT is faster at every target", TABLE, [_faster(row) for row in free]),
        Claim(
            "so it is with the deadline, where FedAvg loses the slow devices",
            TABLE,
            [_faster(row) for row in tight],
        ),
        Claim(
            "with the deadline FedPMT gains more with two classes per device than i.i.d.",
            TABLE,
            _gains(tight),
            "-; the paper's own ratios are 1.08 i.i.d. and 1.07 with two classes",
        ),
    ]


def entry(target: float, method: str, timed: bool) -> str:
    """The name of an entry of the table.

    >>> entry(0.5, "fedpmt", True)
    '50 %, FedPMT, deadline'
    """
    return f"{100 * target:.0f} %, {NAMES[method]}{', deadline' if timed else ''}"


def _near(row: dict[str, Any], found: float | None) -> Check:
    """Whether so many rounds are what the paper has for this entry."""
    where, wanted = entry(row["target"], row["method"], row["deadline"]), row["paper_rounds"]
    if found is None:
        return Check(where, False, f"not reached (paper {wanted:.0f})")
    return Check(where, abs(found / wanted - 1) <= TOLERANCE, f"{found:.0f} (paper {wanted:.0f})")


def _faster(row: dict[str, Any]) -> Check:
    where = f"{PARTITIONS[row['partition']]} {100 * row['target']:.0f} %"
    return Check(where, row["ours"] > 1, f"{row['ours']:.2f} x (paper {row['paper']:.2f})")


def _gains(tight: list[dict[str, Any]]) -> list[Check]:
    means = {
        partition: [row["ours"] for row in tight if row["partition"] == partition] for partition in PRINTED
    }
    if not all(means.values()):
        return []
    alike, apart = (sum(found) / len(found) for found in (means[IID], means[TWO_CLASSES]))
    return [Check("mean over targets", apart > alike, f"{apart:.2f} x two classes, {alike:.2f} x i.i.d.")]


@themed
def draw(found: dict[tuple[str, Case], list[RunRecord]]) -> Figure:
    """One panel per partition, without deadline."""
    figure = new_figure(7.6, 3.1)
    panels = figure.subplots(1, len(PRINTED), sharey=True)
    for axes, partition in zip(panels, PRINTED, strict=True):
        for method, style in (("fedpmt", "-"), ("fedavg", "-")):
            for timed in (False, True):
                shape = curve(found[partition, (method, timed)], "seconds")
                if shape is None or (timed and method == "fedpmt"):
                    continue
                colour = PALETTE[RESERVED[method]]
                label = NAMES[method] + (", deadline" if timed else "")
                axes.fill_between(shape.place, shape.low, shape.high, color=colour, alpha=0.15, linewidth=0)
                look: Any = (0, (4, 1.6)) if timed else style
                axes.plot(shape.place, shape.mean, color=colour, linewidth=0.6, alpha=0.35)
                place, mean = _calm(shape.place), _calm(shape.mean)
                axes.plot(place, mean, color=colour, linestyle=look, linewidth=1.5, label=label)
        axes.set_title(PARTITIONS[partition])
        axes.set_xlabel("virtual time (s)")
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlim(left=0)
        if axes.lines:
            axes.legend(loc="lower right")
    panels[0].set_ylabel("test accuracy")
    return figure


def _calm(values: np.ndarray) -> np.ndarray:
    """A centred mean, so that lines that jump can be told apart."""
    window = min(WINDOWS[1], len(values))
    return np.convolve(values, np.ones(window) / window, "valid")


COMPLETION_TIME = Experiment(
    "completion-time", "virtual time to an accuracy, with a deadline and without, Table II", runs, make
)
