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
from fedpmt.methods.registry import method_class
from fedpmt.parts.part import GLOBAL, Indices, Mask, Whole, take
from fedpmt.pricing.meter import UPDATE, reply_shapes
from fedpmt.types import MODEL, Scalar
from reproduction.artefact import Artefact, Table
from reproduction.paper import Experiment
from reproduction.verdicts import Claim, exact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fedpmt.methods.base import Method
    from fedpmt.parts.part import Part
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.types import Tensors
    from reproduction.library import Library
    from reproduction.paper import Scope

YES, NO = "✓", "-"
ROUNDS = 6
SMALL: dict[str, Any] = {"task": "cnn-mnist", "devices": 10, "cohort": 10, "samples": 60, "rounds": ROUNDS}


FIXED, RANDOM, ROLLS, NESTED, MASKED, WHOLE_NET, LAYERS, OWN, EDGE_NET, LEARNED = (
    "fixed", "at random", "rolls", "nested widths", "one mask for all", "whole", "last layers", "a net of its own",
    "an edge net", "by magnitude, at a learned rate",
)  # fmt: skip
WORDS = {
    "Random": RANDOM, "Static": "static", "Fixed": FIXED, "Ordered": NESTED, "Rotated": ROLLS, "layer-wise": LAYERS,
    "Unlabeled": "unlabelled", "No (Generator)": NO, "No": NO,
}  # fmt: skip
"""The paper's words and ours for the same thing."""

SCHEMES = {NO: "mean", "Knowledge Distillation": "distillation", "Sub-model Training": "overlap mean"}
"""The paper's schemes of aggregation, and ours for the same thing; distillation is one word among others."""

GROUPS = {
    UPDATE: "weights", "control": "control variates", "squares": "squared gradients", "label_counts": "label counts",
    "transfer": "features, logits, labels",
}  # fmt: skip
"""What travels up, in words."""

AT_ONCE: dict[str, dict[str, Scalar]] = {"prunefl": {"initial_rounds": 0, "interval": 2}}
"""Settings without which a method would spend these few rounds on one device alone."""

BY_BUDGET: dict[str, dict[str, Scalar]] = {"fedmp": {"bandit": False}}
"""Settings under which a device gets at once what it would else be given after much learning: marks are read there."""


@dataclass(frozen=True)
class Row:
    """What the paper says of a method, or what was found."""

    differ: str  # do weak and strong devices train different nets or parts?
    aggregation: str
    computation: str
    communication: str
    chosen: str  # how a device's part comes about
    auxiliary: str


PRINTED = {
    "fedavg": Row("No", NO, NO, "No", NO, "No"),
    "scaffold": Row("No", NO, NO, "No", NO, "No"),
    "feddf": Row("Yes", "Knowledge Distillation", NO, NO, NO, "Unlabeled"),
    "comet": Row("Yes", "Knowledge Distillation", NO, NO, NO, "Unlabeled"),
    "fedgkt": Row("Yes", "Knowledge Distillation", NO, NO, NO, "No"),
    "fedgen": Row("Yes", "Knowledge Distillation", NO, NO, NO, "No (Generator)"),
    "fedmp": Row("Yes", NO, YES, YES, "Random", "No"),
    "prunefl": Row("Yes", NO, YES, YES, "Static", "No"),
    "feddrop": Row("Yes", "Sub-model Training", YES, YES, "Random", "No"),
    "heterofl": Row("Yes", "Sub-model Training", YES, NO, "Fixed", "No"),
    "slimfl": Row("Yes", "Sub-model Training", NO, YES, "Fixed", "No"),
    "fjord": Row("Yes", "Sub-model Training", YES, YES, "Ordered", "No"),
    "fedrolex": Row("Yes", "Sub-model Training", YES, YES, "Rotated", "No"),
    "fedpmt": Row("Yes", "Sub-model Training", YES, YES, "layer-wise", "No"),
}
"""As printed; the paper leaves both marks of the knowledge-transfer methods open with one dash."""

EXTRA = ("fedprox", "ist")
LEGEND = (
    "Overlap mean: of each entry over the devices that trained it; fill mean: it counts as unchanged for the others. "
    "`fedprox` and `ist` are not in the paper's table. `ist` deals every device half a net, and in these rounds no "
    "budget is below what that costs; a smaller one does cut a device's piece "
    "(`fedpmt run --method ist --task cnn-mnist --budget time=5s --dry-run`)."
)

NOTES = {
    "feddf": "Weak devices train, send and get a narrower prototype, so both kinds of heterogeneity are served. "
    "In addition to unlabelled data it uses labels: the best student is chosen on labelled validation data.",
    "comet": "Nets are as wide as a device can afford, which serves computation. Traffic is small but the same "
    "for all.",
    "fedgkt": "One edge net for all devices (the server's layers need features of one shape): in its published "
    "form devices do not differ; it is the server's net that differs from theirs. It needs no auxiliary data, but the "
    "labels and features of all samples go to the server.",
    "fedgen": "In its published main form all devices train one model; only a variant that shares the classifier "
    "alone lets bodies differ. The server averages models as FedAvg does, and trains a generator that devices learn "
    "from. Label counts go to the server.",
    "fedmp": "Channels are pruned by the magnitude of their weights, not at random; random is only the ratio, "
    "which a bandit draws for each device and round. What a bandit has learned cannot be seen in a few rounds, so "
    "marks are of the ratio that a device's budget gives it. The server averages; what a device did not get counts "
    "as unchanged.",
    "prunefl": "The mask is one for all devices and is changed now and then: neither static, nor per device. "
    "Devices do not differ, and the server takes the mean of the active weights. The mask cuts traffic for everybody "
    "alike, and a mark would say that weak devices send or get less than strong ones.",
    "heterofl": "A narrower slice is also shorter to send and to get: communication is served as computation is.",
    "slimfl": "All devices train all widths, nested in each other, and send everything; it is the channel that "
    "delivers less from some. That is robustness of what arrives, and spares no device a byte.",
    "fedpmt": "Uplink only: every device gets the whole model.",
}


@dataclass(frozen=True)
class Observation:
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
        "method", "the paper: heterogeneity; aggregation; comp. / comm.; sub-model / auxiliary data",
        "models differ", "aggregation", "computation", "communication", "a device's part", "auxiliary data", "goes up",
        "server", "device keeps", "evaluated",
    )  # fmt: skip
    notes = "\n".join(f"- `{name}`: {NOTES.get(name, 'not as printed.')}" for name in marked)
    return Artefact(
        "comparison",
        "What tells the methods apart (the paper's comparison table)",
        "python -m reproduction comparison",
        f"Found out by playing {ROUNDS} small rounds of each method on devices of five speeds. A cell is marked "
        f"{YES} where weak devices compute, or send and get, less than strong ones. A star marks rows that are not "
        f"as the paper prints them:\n\n{notes}\n",
        [Table("Methods", columns, rows, LEGEND, words=True)],
        values={"corrected": marked, "rows": {name: asdict(one) for name, one in found.items()}},
        claims=claims(marked),
    )


def claims(marked: Sequence[str]) -> list[Claim]:
    """The table row by row, and what the introduction says of secure sums."""
    method = method_class("fedpmt")()
    return [
        Claim(
            "rows",
            "the comparison of methods, row by row",
            "I, comparison table",
            [
                exact(name, name not in marked, "differs, see above" if name in marked else "as printed")
                for name in PRINTED
            ],
            "found",
        ),
        Claim(
            "secure-aggregation",
            "FedPMT is compatible with secure aggregation",
            "I, contributions",
            [
                exact(
                    "FedPMT",
                    method.traits.sums == "layers",
                    f"the server needs {SUMS.get(method.traits.sums, method.traits.sums)}",
                )
            ],
            "what the server needs of replies",
            "On Flower, masked sums give the plain mean of each layer, also if a device fails half-way: "
            "[test_secagg.py](../../tests/flower/test_secagg.py) (`make test-flower`).",
        ),
    ]


SUMS = {"layers": "a sum per layer and no single reply", "none": "every reply by itself"}


def _printed(row: Row | None) -> str:
    if row is None:
        return NO
    served = f"{row.computation} / {row.communication}"
    return f"{row.differ}; {row.aggregation}; {served}; {row.chosen} / {row.auxiliary}"


def differs(printed: Row, found: Row) -> bool:
    """Whether a row is to be corrected; a dash of the paper's before the stroke says nothing of parts."""
    apart = ("differ", "aggregation")
    said = {key: WORDS.get(text, text) for key, text in asdict(printed).items() if key not in apart}
    ours = {key: text for key, text in asdict(found).items() if key not in apart}
    if printed.chosen == NO:
        said["chosen"] = ours["chosen"]
    scheme = SCHEMES[printed.aggregation]
    alike = found.aggregation == scheme or (scheme == "distillation" and scheme in found.aggregation)
    return printed.differ != found.differ or not alike or said != ours


@dataclass(frozen=True)
class Watched:
    """Some rounds of a method."""

    method: Method[Any, Any]
    asked: Sequence[Sequence[Assignment]]  # by round
    own: bool  # whether a weak device's net is no part of the global one
    sent: frozenset[str]  # groups of tensors that came up
    spared: Sequence[bool]  # whether weak devices are spared operations, bytes up, bytes down
    keeps: str
    evaluates: str

    @property
    def levels(self) -> list[list[Assignment]]:
        """Who was asked in the last round, the slowest level first."""
        return _levels(self.asked[-1])


def watch(name: str, options: Mapping[str, Scalar]) -> Watched:
    """Play a method."""
    from fedpmt.simulation.assemble import assemble

    settings = api.settings_of({**SMALL, "method": name, "options": dict(options)})
    api.check(settings)
    method = api.method_of(settings)
    asked: list[list[Assignment]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        assemble(settings, api.paper_problem_of(settings), method, Path(folder)) as federation,
    ):
        progress, sent = federation.start(), set[str]()
        nets = {key: model.structure for key, model in federation.problem.models.items()}
        for _ in range(ROUNDS):
            asked.append(federation.open(progress)[1])
            for one in asked[-1]:
                groups = reply_shapes(one.part, nets[one.part.model])
                sent |= {group for group, shapes in groups.items() if shapes}
            before = progress.state
            progress, _ = federation.play(progress)
        levels = _levels(asked[-1])
        if len(levels) < 2:
            raise RuntimeError(f"{name}: devices of one level alone tell nothing of the others")
        spared = [
            _mean(levels[0], key) < _mean(levels[-1], key)
            for key in (
                lambda one: one.usage.operations,
                lambda one: one.bytes_up,
                lambda one: one.bytes_down,
            )
        ]
        keeps = "a net" if method.traits.keeps_net else "tensors" if federation.keeps_state else NO
        kind = method.predictor(progress.state).kind
    own = any(_apart(one, before.tensors) for one in levels[0])
    return Watched(method, asked, own, frozenset(sent), spared, keeps, kind)


def _levels(asked: Sequence[Assignment]) -> list[list[Assignment]]:
    return [
        [one for one in asked if one.device.level == level]
        for level in sorted({one.device.level for one in asked})
    ]


def _apart(one: Assignment, weights: Tensors) -> bool:
    """Whether what a device was sent, or keeps, is not cut out of the server's model."""
    if one.part.kept and one.part.model == GLOBAL:
        return True
    sent = one.task.tensors[MODEL]
    return any(
        not sent[name].equal(take(weights[name], kept))
        for name, kept in one.part.sent.items()
        if isinstance(kept, Indices)
    )


def observe(name: str) -> Observation:
    """Play a method and see."""
    plain = watch(name, AT_ONCE.get(name, {}))
    seen = watch(name, BY_BUDGET[name]) if name in BY_BUDGET else plain
    traits = plain.method.traits
    weak, strong = seen.levels[0], seen.levels[-1]
    slowest = weak[0].device.level
    way = chosen(
        [one for devices in plain.asked for one in devices if one.device.level == slowest], own=plain.own
    )
    needs = {"unlabelled": traits.needs_public, "labelled": traits.needs_validation}
    row = Row(
        "Yes" if {_sizes(one.part) for one in weak} != {_sizes(one.part) for one in strong} else "No",
        traits.combines,
        YES if seen.spared[0] else NO,
        _traffic(up=seen.spared[1], down=seen.spared[2]),
        way,
        ", ".join(word for word, on in needs.items() if on) or NO,
    )
    up = ", ".join(
        dict.fromkeys(
            GROUPS.get(group, group) for group in (UPDATE, *sorted(seen.sent)) if group in seen.sent
        )
    )
    return Observation(row, up, traits.server_work or "averages", plain.keeps, plain.evaluates)


def _traffic(*, up: bool, down: bool) -> str:
    if up and down:
        return YES
    return f"{YES} up only" if up else f"{YES} down only" if down else NO


def _mean(devices: list[Assignment], of: Callable[[Assignment], float]) -> float:
    return sum(map(of, devices)) / len(devices)


def chosen(asked: list[Assignment], *, own: bool) -> str:
    """How the part of one level's devices comes about, from what they were given round after round."""
    given: dict[int, list[Part]] = defaultdict(list)
    for one in asked:
        given[one.device.id].append(one.part.resident())
    parts = [part for sequence in given.values() for part in sequence]
    if any(part.model != GLOBAL for part in parts):
        return EDGE_NET
    if own:
        return OWN
    if any(part.inner for part in parts):
        return NESTED
    if any(isinstance(kept, Mask) for part in parts for kept in part.sent.values()):
        return MASKED
    if all(isinstance(kept, Whole) for part in parts for kept in part.sent.values()):
        return WHOLE_NET if all(part.sent.keys() == part.trained.keys() for part in parts) else LAYERS
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
