"""The paper's comparison of methods (Table 1 of its introduction), each cell found out from the method itself.

Every method plays a few small rounds on a fleet of five speeds. Who trained what, what it cost and what travelled is
read off its tasks and records; what it needs and keeps, off its own declarations.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.experiments.artefact import Artefact, Table
from fedpmt.experiments.paper import Experiment
from fedpmt.methods.base import Round
from fedpmt.seeds import Seeds
from fedpmt.submodel.part import Indices, Mask, Whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.experiments.library import Library
    from fedpmt.experiments.paper import Scope
    from fedpmt.simulation.loop import Asked
    from fedpmt.submodel.part import Part

YES, NO = "✓", "-"
ROUNDS = 6
SMALL: dict[str, Any] = {"task": "cnn-mnist", "devices": 10, "cohort": 10, "samples": 60, "rounds": ROUNDS}


FIXED, RANDOM, ROLLS, NESTED, MASKED, WHOLE_NET, LEARNED = (
    "fixed", "at random", "rolls", "nested widths", "one mask for all", "whole", "by magnitude, at a learned rate",
)  # fmt: skip
WORDS = {
    "Random": RANDOM, "Static": "static", "Fixed": FIXED, "Ordered": NESTED, "Rotated": ROLLS, "layer-wise": FIXED,
    "Unlabeled": "unlabelled", "No (Generator)": NO, "No": NO,
}  # fmt: skip
"""The paper's words and ours for the same thing."""


@dataclass(frozen=True)
class Row:
    """What the paper says of a method, or what was found."""

    differ: str  # do weak and strong devices train different nets or parts?
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
    "which a bandit draws for each device and round. Its marks stand for what the bandit is there to learn: in "
    "these few rounds weak devices do not get less than strong ones yet.",
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

    def cells(self) -> list[str]:
        """As a table has them."""
        return [*astuple(self.row), self.up, self.server, self.keeps, self.evaluates]


def make(library: Library, scope: Scope) -> Artefact:
    """The table, ours beside the paper's."""
    found = {name: observe(name) for name in (*PRINTED, *EXTRA)}
    marked = [name for name, row in PRINTED.items() if differs(row, found[name].row)]
    rows = [
        [f"`{name}`{' *' if name in marked else ''}", _printed(PRINTED.get(name)), *one.cells()]
        for name, one in found.items()
    ]
    columns = (
        "method", "the paper: heterogeneity; comp. / comm.; sub-model / auxiliary data", "models differ",
        "computation", "communication", "a device's part", "auxiliary data", "goes up", "server", "device keeps",
        "evaluated",
    )  # fmt: skip
    notes = "\n".join(f"- `{name}`: {NOTES.get(name, 'not as printed.')}" for name in marked)
    return Artefact(
        "comparison",
        "What tells the methods apart (the paper's comparison table)",
        "fedpmt reproduce comparison",
        f"Found out by playing {ROUNDS} small rounds of each method on devices of five speeds. A cell is marked "
        f"{YES} where weak devices compute, or send and get, less than strong ones. A star marks rows that are not "
        f"as the paper prints them:\n\n{notes}\n",
        [Table("Methods", columns, rows, "`fedprox` and `ist` are not in the paper's table.")],
        values={"corrected": marked, "rows": {name: asdict(one) for name, one in found.items()}},
    )


def _printed(row: Row | None) -> str:
    if row is None:
        return NO
    return f"{row.differ}; {row.computation} / {row.communication}; {row.chosen} / {row.auxiliary}"


def differs(printed: Row, found: Row) -> bool:
    """Whether a row is to be corrected; a dash of the paper's before the stroke says nothing of parts."""
    said = {key: WORDS.get(text, text) for key, text in asdict(printed).items() if key != "differ"}
    ours = {key: text for key, text in asdict(found).items() if key != "differ"}
    if printed.chosen == NO:
        said["chosen"] = ours["chosen"]
    return printed.differ != found.differ or said != ours


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
        nets = {key: model.structure for key, model in federation.problem.models.items()}
        keeps = "a net" if method.kept_bytes(nets) else "tensors" if federation.keeps_state else NO
        levels = sorted({one.device.level for one in asked[-1]})
        weak, strong = (
            [one for one in asked[-1] if one.device.level == level] for level in (levels[0], levels[-1])
        )
        way = chosen([one for devices in asked for one in devices if one.device.level == levels[0]])
        spared = [
            _mean(weak, key) < _mean(strong, key)
            for key in (federation.operations, lambda one: one.bytes_up, lambda one: one.bytes_down)
        ]
    needs = {"unlabelled": method.needs_public, "labelled": method.needs_validation}
    row = Row(
        "Yes"
        if way == LEARNED or {_sizes(one.part) for one in weak} != {_sizes(one.part) for one in strong}
        else "No",
        # What a bandit will have learned is not to be seen in a few rounds; that it deals out less is.
        YES if way == LEARNED or spared[0] else NO,
        YES if way == LEARNED else _traffic(up=spared[1], down=spared[2]),
        way,
        ", ".join(word for word, on in needs.items() if on) or NO,
    )
    trains = "server_steps" in record.metrics
    return Found(
        row,
        "weights" if all(one.part.trained for one in asked[-1]) else "answers",
        "trains" if trains else "clusters" if record.server_operations else "averages",
        keeps,
        method.predictor(progress.state).kind,
    )


def _traffic(*, up: bool, down: bool) -> str:
    if up and down:
        return YES
    return f"{YES} up only" if up else f"{YES} down only" if down else NO


def _mean(devices: list[Asked], of: Callable[[Asked], float]) -> float:
    return sum(map(of, devices)) / len(devices)


def chosen(asked: list[Asked]) -> str:
    """How the part of one level's devices comes about, from what they were given round after round."""
    given: dict[int, list[Part]] = defaultdict(list)
    for one in asked:
        given[one.device.id].append(one.part.resident())
    parts = [part for sequence in given.values() for part in sequence]
    if any(part.inner for part in parts):
        return NESTED
    if any(isinstance(kept, Mask) for part in parts for kept in part.sent.values()):
        return MASKED
    if all(isinstance(kept, Whole) for part in parts for kept in part.sent.values()) and all(
        part.sent.keys() == part.trained.keys() for part in parts
    ):
        return WHOLE_NET
    if all(len({_signature(part) for part in sequence}) == 1 for sequence in given.values()):
        return FIXED
    if len({_sizes(part) for part in parts}) > 1:
        return LEARNED
    # Where a window rolls, one round gives all devices of a level the same.
    alike = all(len({_signature(part) for part in same}) == 1 for same in zip(*given.values(), strict=False))
    return ROLLS if alike else RANDOM


def _signature(part: Part) -> tuple[object, ...]:
    """What is sent and which of it is trained, entry for entry."""
    lists = [
        (name, tuple(None if axis is None else axis.tobytes() for axis in kept.axes))
        for name, kept in sorted(part.sent.items())
        if isinstance(kept, Indices)
    ]
    return (*lists, *sorted(part.trained))


def _sizes(part: Part) -> tuple[object, ...]:
    """How large the parts are that it is made of."""
    part = part.resident()
    lists = [
        (name, tuple(None if axis is None else len(axis) for axis in kept.axes))
        for name, kept in sorted(part.sent.items())
        if isinstance(kept, Indices)
    ]
    return (*lists, *sorted(part.trained))


COMPARISON = Experiment("comparison", "what tells the methods apart, Table 1", lambda _: [], make)
