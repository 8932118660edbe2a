"""The paper's comparison of methods (Table 1 of its introduction), each cell found out from the method itself.

Every method plays a few small rounds on a fleet of five speeds. Who trained what, what it cost and what travelled is
read off its tasks and records; what it needs and keeps, off its own declarations.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.experiments.artefact import Artefact, Table
from fedpmt.experiments.paper import Experiment
from fedpmt.methods.base import Round
from fedpmt.seeds import Seeds
from fedpmt.submodel.part import Indices, Mask

if TYPE_CHECKING:
    from fedpmt.experiments.library import Library
    from fedpmt.experiments.paper import Scope
    from fedpmt.simulation.loop import Asked, Federation
    from fedpmt.submodel.part import Part, Selection

YES, NO = "✓", "-"
ROUNDS = 6
SMALL: dict[str, Any] = {"task": "cnn-mnist", "devices": 10, "cohort": 10, "samples": 20, "rounds": ROUNDS}


@dataclass(frozen=True)
class Row:
    """What the paper says of a method, or what was found."""

    differ: str  # do devices train different nets or parts?
    computation: str
    communication: str
    chosen: str  # how a device's part comes about
    auxiliary: str


PRINTED = {
    "fedavg": Row("No", NO, "No", NO, "No"),
    "scaffold": Row("No", NO, "No", NO, "No"),
    "feddf": Row("Yes", NO, NO, NO, "Unlabeled"),
    "comet": Row("Yes", NO, NO, NO, "Unlabeled"),
    "fedgkt": Row("Yes", NO, NO, NO, "No"),
    "fedgen": Row("Yes", NO, NO, NO, "No (Generator)"),
    "fedmp": Row("Yes", YES, YES, "Random", "No"),
    "prunefl": Row("Yes", YES, YES, "Static", "No"),
    "feddrop": Row("Yes", YES, YES, "Random", "No"),
    "heterofl": Row("Yes", YES, NO, "Fixed", "No"),
    "slimfl": Row("Yes", NO, YES, "Fixed", "No"),
    "fjord": Row("Yes", YES, YES, "Ordered", "No"),
    "fedrolex": Row("Yes", YES, YES, "Rotated", "No"),
    "fedpmt": Row("Yes", YES, YES, "layer-wise", "No"),
}
"""As printed; the paper leaves both marks of the knowledge-transfer methods open with one dash."""

EXTRA = ("fedprox", "ist")

NOTES = {
    "feddf": "Weak devices train, send and get a narrower prototype, so both kinds of heterogeneity are served. "
    "Beside unlabelled data it uses labels: the best student is chosen on labelled validation data.",
    "comet": "Nets are as wide as a device can afford, which serves computation. Traffic is small but the same "
    "for all.",
    "fedgkt": "One edge net for all devices (the server's layers need features of one shape): in its published "
    "form devices do not differ. It needs no auxiliary data, but the labels and features of all samples "
    "go to the server.",
    "fedgen": "In its published main form all devices train one model; only a variant that shares the classifier "
    "alone lets bodies differ. Label counts go to the server.",
    "fedmp": "Channels are pruned by the magnitude of their weights, not at random; random is only the ratio, "
    "which a bandit draws for each device and round.",
    "prunefl": "The mask is one for all devices and is changed now and then: neither static, nor per device. "
    "Devices do not differ.",
    "heterofl": "A narrower slice is also shorter to send and to get: communication is served as computation is.",
    "slimfl": "All devices train all widths and send everything; it is the channel that delivers less from some. "
    "That is robustness of what arrives, and spares no device a byte.",
    "fedpmt": "Uplink only: every device gets the whole model.",
}


@dataclass(frozen=True)
class Found:
    """What a method turned out to be."""

    row: Row
    up: str
    server: str
    keeps: str
    evaluates: str
    down: bool  # whether weak devices get less
    sent: bool  # whether they send less


def make(library: Library, scope: Scope) -> Artefact:
    """The table, ours beside the paper's."""
    found = {name: observe(name) for name in (*PRINTED, *EXTRA)}
    marked = [name for name, row in PRINTED.items() if differs(row, found[name].row)]
    rows = []
    for name, one in found.items():
        printed = PRINTED.get(name)
        star = " *" if name in marked else ""
        says = (
            NO if printed is None else f"{printed.differ}; {printed.computation} / {printed.communication}; "
        )
        says += "" if printed is None else f"{printed.chosen} / {printed.auxiliary}"
        rows.append(
            [
                f"`{name}`{star}",
                says,
                one.row.differ,
                one.row.computation,
                traffic(one),
                one.row.chosen,
                one.row.auxiliary,
                one.up,
                one.server,
                one.keeps,
                one.evaluates,
            ]
        )
    columns = (
        "method", "the paper: heterogeneity; comp. / comm.; sub-model / auxiliary data", "models differ",
        "computation", "communication", "a device's part", "auxiliary data", "goes up", "server", "device keeps",
        "evaluated",
    )  # fmt: skip
    notes = "\n".join(f"- `{name}`: {NOTES[name]}" for name in marked if name in NOTES)
    return Artefact(
        "comparison",
        "What tells the methods apart (the paper's comparison table)",
        "fedpmt reproduce comparison",
        f"Found out by playing {ROUNDS} small rounds of each method on devices of five speeds. A cell is marked "
        f"{YES} where weak devices compute, or send and get, less than strong ones. A star marks rows that are not "
        f"as the paper prints them:\n\n{notes}\n",
        [Table("Methods", columns, rows, "`fedprox` and `ist` are not in the paper's table.")],
        values={"corrected": marked, "rows": {name: vars(one.row) for name, one in found.items()}},
    )


def traffic(one: Found) -> str:
    """Which way a weak device is spared something."""
    ways = [way for way, spared in (("up", one.sent), ("down", one.down)) if spared]
    return f"{YES} ({' and '.join(ways)})" if ways else NO


def differs(printed: Row, found: Row) -> bool:
    """Whether a row is to be corrected; words for one thing count as the same."""
    same = {"No": NO, "Unlabeled": "unlabelled", "No (Generator)": NO}
    kinds = {"Random": "at random", "Static": "static", "Fixed": "fixed", "Ordered": "drawn per batch",
             "Rotated": "rolls", "layer-wise": "fixed", NO: "whole"}  # fmt: skip
    pairs = [
        (printed.differ, found.differ),
        (same.get(printed.computation, printed.computation), found.computation),
        (same.get(printed.communication, printed.communication), found.communication),
        (same.get(printed.auxiliary, printed.auxiliary), found.auxiliary),
    ]
    if printed.chosen != NO:
        pairs.append((kinds[printed.chosen], found.chosen))
    return any(ours != theirs for theirs, ours in pairs)


def observe(name: str) -> Found:
    """Play a method and see."""
    from fedpmt.simulation.assemble import assembled

    settings = api.settings_of({**SMALL, "method": name})
    api.check(settings)
    method = api.method_of(settings)
    asked: list[list[Asked]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        assembled(settings, api.paper_problem_of(settings), method, Path(folder)) as federation,
    ):
        progress = federation.start()
        for index in range(ROUNDS):
            round_ = Round(index, federation.planner.price, Seeds(settings.seed, index))
            asked.append(federation.settle(progress, round_)[0])
            progress, record = federation.play(progress)
        kind = method.predictor(progress.state).kind
        keeps = federation.keeps_state
        nets = method.kept_bytes({key: model.structure for key, model in federation.problem.models.items()})
        weak, strong = extremes(federation, asked[-1])
    needs = [
        word
        for word, on in (("unlabelled", method.needs_public), ("labelled", method.needs_validation))
        if on
    ]
    sent, down = (less(weak, strong, key) for key in ("bytes_up", "bytes_down"))
    return Found(
        Row(
            "Yes"
            if len({signature(one.part) for one in [*weak, *strong]}) > 1 and differ_by_level(weak, strong)
            else "No",
            YES if work(federation, weak) < work(federation, strong) else NO,
            YES if sent or down else NO,
            chosen(asked),
            ", ".join(needs) or NO,
        ),
        "weights" if all(one.part.trained for one in asked[-1]) else "answers",
        "trains"
        if "server_steps" in record.metrics
        else "clusters"
        if record.server_operations
        else "averages",
        "a net" if nets else "a variate" if keeps else NO,
        kind,
        down,
        sent,
    )


def extremes(federation: Federation, asked: list[Asked]) -> tuple[list[Asked], list[Asked]]:
    """The devices of the slowest and of the fastest level."""
    levels = sorted({one.device.level for one in asked})
    weak, strong = ([one for one in asked if one.device.level == level] for level in (levels[0], levels[-1]))
    return weak, strong


def work(federation: Federation, devices: list[Asked]) -> float:
    """Mean operations of a local round."""
    return sum(map(federation.operations, devices)) / len(devices)


def less(weak: list[Asked], strong: list[Asked], key: str) -> bool:
    """Whether the weak ones have less of it on average."""
    means = [sum(getattr(one, key) for one in devices) / len(devices) for devices in (weak, strong)]
    return bool(means[0] < means[1])


def differ_by_level(weak: list[Asked], strong: list[Asked]) -> bool:
    """Whether weak and strong devices train parts of different sizes, or different layers."""
    return {_sizes(one.part) for one in weak} != {_sizes(one.part) for one in strong}


def chosen(asked: list[list[Asked]]) -> str:
    """How a weak device's part comes about, from what it was given round after round."""
    given: dict[int, list[Part]] = defaultdict(list)
    for one in (one for devices in asked for one in devices if one.device.level == 1):
        given[one.device.id].append(one.part)
    parts = [part for sequence in given.values() for part in sequence]
    if any(part.inner for part in parts):
        return "drawn per batch"
    if any(isinstance(kept, Mask) for part in parts for kept in part.trained.values()):
        return "a mask for all, changed now and then"
    if all(len({signature(part) for part in sequence}) == 1 for sequence in given.values()):
        part = parts[0]
        return "whole" if part.label in ("full", "edge net") else "fixed"
    if len({_sizes(part) for part in parts}) > 1:
        return "by magnitude, at a learned rate"
    # The same round gives all devices of a level the same window where it rolls.
    alike = all(
        len({signature(part) for part in together}) == 1 for together in zip(*given.values(), strict=False)
    )
    return "rolls" if alike else "at random"


def signature(part: Part) -> tuple[object, ...]:
    """What is trained, entry for entry."""
    return tuple((name, _signed(selection)) for name, selection in sorted(part.resident().trained.items()))


def _signed(selection: Selection) -> object:
    if isinstance(selection, Indices):
        return tuple(None if axis is None else axis.tobytes() for axis in selection.axes)
    return selection.bits.tobytes() if isinstance(selection, Mask) else "whole"


def _sizes(part: Part) -> tuple[object, ...]:
    return tuple(
        (
            name,
            tuple(None if axis is None else len(axis) for axis in kept.axes)
            if isinstance(kept, Indices)
            else "whole",
        )
        for name, kept in sorted(part.resident().trained.items())
    )


COMPARISON = Experiment("comparison", "what tells the methods apart, Table 1", lambda _: [], make)
