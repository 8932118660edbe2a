"""Who is compared with whom, and on what: every method in its strongest documented form, under one budget.

The one table of settings for `python -m reproduction leaderboard` and `python -m reproduction rivals`: equal settings
make equal records, so that no run is trained twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.methods.registry import method_class
from fedpmt.models.nets import net
from fedpmt.types import Scalar, SettingError
from reproduction.paper import IID, TWO_CLASSES, Scope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fedpmt.records import RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library

BUDGET = "operations"
TASK = {"embedded": "cnn-mnist", "mnist": "cnn-mnist", "fashion-mnist": "cnn-mnist", "cifar10": "cnn-cifar10"}
QUICK_ROUNDS = 20
ROUNDS = {"embedded": 100, "mnist": 200, "fashion-mnist": 200, "cifar10": 200}
EVALUATED_EVERY = {"embedded": 2, "mnist": 5, "fashion-mnist": 5, "cifar10": 5}
TARGETS = {
    "embedded": (0.5, 0.8),
    "mnist": (0.5, 0.9),
    "fashion-mnist": (0.5, 0.7),
    "cifar10": (0.4, 0.5),
}
"""Accuracies whose virtual time is shown."""

SAMPLES = {"embedded": 60, "mnist": 300, "fashion-mnist": 300, "cifar10": 420}
"""Of each device. What is held out is not equal parts of all classes; two classes per device need enough of each."""

INITIAL_SHARE = 20
"""PruneFL's initial pruning is one device's: it may take one of so many rounds."""

CAPITALS = {"scaffold": "SCAFFOLD", "comet": "COMET"}
"""Where the papers' names are not those of the classes."""

PERSONAL_EVERY, PERSONAL_TEST = 4, 1_000
"""Nets of a hundred devices are tested where others have one: so many times less often, each on so many samples."""


@dataclass(frozen=True)
class Case:
    """A situation that is another than the contest's own: the paper's fleet, and no deadline."""

    about: str = ""  # for titles
    fleet: str = ""  # what the page says of it
    depths: int | None = None  # |I|, as many levels of speed; None: the net's largest
    settings: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "even": Case("an even fleet", depths=2),
    "deadline": Case(
        "a deadline",
        " A round ends after 15 s, just above FedPMT's longest; what comes later is lost.",
        settings={"deadline": 15.0},
    ),
}
"""Of embedded images. The even fleet is the paper's with |I| = 2: no device is slower than half of the fastest."""

RunsByEntrant = dict[tuple[str, str], list["RunRecord"]]  # partition and entrant's name -> its seeds


@dataclass(frozen=True)
class Entrant:
    """A method with settings of its own."""

    method: str
    form: str  # what the settings come to, in words
    options: Mapping[str, Scalar] = field(default_factory=dict)  # beside its defaults under a budget
    variant: str = ""  # names an extra row; empty for the strongest documented form
    exchanges: bool = False  # knowledge in the place of, or beside, weights
    personal: bool = False  # what is evaluated are devices' own nets, or halves of one

    @property
    def name(self) -> str:
        """As it is asked for.

        >>> Entrant("feddrop", "", variant="unscaled").name
        'feddrop:unscaled'
        """
        return f"{self.method}:{self.variant}" if self.variant else self.method

    @property
    def title(self) -> str:
        """As it is shown."""
        shown = CAPITALS.get(self.method) or method_class(self.method).__name__
        return f"{shown}, {self.variant.replace('-', ' ')}" if self.variant else shown


ENTRANTS = (
    Entrant("fedpmt", "a suffix of layers by level, frozen layers run once"),
    Entrant("fedavg", "the whole model on every device"),
    Entrant("scaffold", "option II", {"option": "II"}),
    Entrant("feddf", "a prototype for each budget, best on validation data", exchanges=True),
    Entrant(
        "comet",
        "a net for each budget, 3 clusters, λ = 1, as many public samples a round as a device has of its own",
        exchanges=True,
        personal=True,
    ),
    Entrant("fedgkt", "distillation on both sides, T = 3", {"rate": 0.001}, exchanges=True, personal=True),
    Entrant(
        "fedgen",
        "A from 10 and B from 1, falling, as its code has for EMNIST",
        {"latent": 1.0},
        exchanges=True,
    ),
    Entrant("fedmp", "α from the budget", {"bandit": False}),
    Entrant("prunefl", "initial pruning in a twentieth of the rounds, further pruning, one mask"),
    Entrant("feddrop", "all layers, scaled activations, overlap mean", {"scope": "all", "scaling": True}),
    Entrant("heterofl", "scaler and masked cross-entropy"),
    Entrant("slimfl", "widths 0.5 and 1, distillation, a channel without noise", {"noise": 0.0}),
    Entrant("fjord", "five widths, from labels alone"),
    Entrant("fedrolex", "scaler and masked cross-entropy"),
    Entrant("fedprox", "μ = 1, fewer steps on weak devices"),
    Entrant("ist", "two sub-nets, scaled outputs"),
    Entrant(
        "feddf",
        "as FedDF, without distillation: each prototype's own mean",
        {"steps": 0},
        "no-distillation",
        exchanges=True,
    ),
    Entrant(
        "feddf",
        "as FedDF's main experiments: one net for all devices, on which a budget does not act",
        {"nets": "one"},
        "one-net",
        exchanges=True,
    ),
    Entrant(
        "comet",
        "as COMET, λ = 0: every device for itself, with all of its budget",
        {"pull": 0.0, "asked": 1},
        "alone",
        exchanges=True,
        personal=True,
    ),
    Entrant("feddrop", "as FedDrop, activations as they are", {"scope": "all"}, "unscaled"),
    Entrant(
        "fjord",
        "as FjORD, self-distillation; the widest net that a budget pays for is tested",
        {"distil": True},
        "distillation",
    ),
    Entrant("scaffold", "as SCAFFOLD, c_i from one more pass", {"option": "I"}, "option-I"),
    Entrant("fedmp", "α learned by the bandit: a budget does not act", {"bandit": True}, "bandit"),
    Entrant(
        "slimfl", "as SlimFL, over its fading channel, which loses what others always deliver", {}, "fading"
    ),
    Entrant(
        "slimfl",
        "as SlimFL, a device trains and sends only what its budget pays for; the narrow net is tested",
        {"fit": True, "noise": 0.0, "evaluated": 0.5},
        "fitted",
    ),
    Entrant(
        "fedgen",
        "as FedGen, only the head is shared",
        {"share": "head", "latent": 1.0},
        "head-only",
        exchanges=True,
        personal=True,
    ),
    Entrant("fedprox", "as FedProx, μ = 0.01", {"mu": 0.01}, "mu-0.01"),
)
"""The paper's comparison table in its order, FedProx and IST; then variants."""

LATER = (
    Entrant("salf", "a suffix drawn anew up to the budget, blended with the old weights"),
    Entrant("fedpart", "5 rounds of all layers, then 2 of each in turn; a budget does not act"),
    Entrant("cocofl", "a random largest block within the budget, blended, frozen layers in fp32"),
    Entrant("fiarse", "the largest weights of the net; zeros are not free, so that it exceeds the budget"),
    Entrant("depthfl", "4 classifiers that learn from each other; the model's own is tested"),
    Entrant("inclusivefl", "the first layers and a classifier behind them"),
    Entrant("fedasync", "mixing 0.6, a server step for each reply"),
    Entrant("fedbuff", "a server step for every 5 replies"),
    Entrant("timelyfl", "a server step in the time in which half of the fleet trains the whole model"),
)
"""Methods that are on the tuned pages alone. Those in `SAME` are on none."""

SAME = {"embracingfl": "fedpmt", "fedolf": "fedpmt", "fedel": "fedpmt", "fedepth": "fedavg"}
"""Methods that under the contest's budget have the weights of another, to the bit.

FedEL's window is FedPMT's suffix, since no other window is as cheap as that; FeDepth cuts the model by memory alone.
"""

OWN_RATE = {"fedgkt": "rate"}
"""Methods whose devices train at a rate of the method's own, and the option that it is."""

STRONGEST = tuple(entrant for entrant in ENTRANTS if not entrant.variant)
KNOWN = {entrant.name: entrant for entrant in (*ENTRANTS, *LATER)}


def entrants_of(names: Sequence[str]) -> tuple[Entrant, ...]:
    """Those with these names; where none is named, all that are on the leaderboard."""
    known = {entrant.name: entrant for entrant in ENTRANTS}
    for name in names:
        if name not in known:
            raise SettingError.unknown("entrant", name, known)
    return tuple(entrant for entrant in ENTRANTS if not names or entrant.name in names)


@dataclass(frozen=True)
class Contest:
    """What the entrants are compared on."""

    seeds: Sequence[int]
    data: str = "cifar10"
    partitions: Sequence[str] = (IID, TWO_CLASSES)
    rounds: int | None = None  # T; None: what the data set has above
    entrants: Sequence[Entrant] = ENTRANTS
    quick: bool = False  # a fifth of the rounds, and evaluated in each
    data_dir: Path | None = None
    case: str = ""  # one of CASES; empty: the contest's own

    def __post_init__(self) -> None:
        if self.data not in TASK:
            raise SettingError.unknown("data", self.data, TASK)
        if self.quick and self.data != "embedded":
            raise SettingError(f"data = '{self.data}' is refused with quick (allowed: embedded)")
        if self.case and self.case not in CASES:
            raise SettingError.unknown("case", self.case, CASES)
        if self.case and self.data != "embedded":
            raise SettingError(f"data = '{self.data}' is refused with case (allowed: embedded)")

    @property
    def situation(self) -> Case:
        """What the case comes to."""
        return CASES[self.case] if self.case else Case()

    @property
    def key(self) -> str:
        """Names its pages, and the spots of documents that are about it.

        >>> Contest([0], "embedded", case="even").key
        'embedded-even'
        """
        return f"{self.data}-{self.case}" if self.case else self.data

    @property
    def task(self) -> str:
        """The net."""
        return TASK[self.data]

    @property
    def played(self) -> int:
        """How many rounds."""
        return self.rounds or (QUICK_ROUNDS if self.quick else ROUNDS[self.data])

    @property
    def has_variants(self) -> bool:
        """Whether a method takes part in more than one form."""
        return any(entrant.variant for entrant in self.entrants)

    @property
    def targets(self) -> tuple[float, ...]:
        """Accuracies to reach."""
        return TARGETS[self.data]

    def options(self, entrant: Entrant) -> dict[str, Scalar]:
        """An entrant's settings, with those that the size of this contest decides."""
        by_size: dict[str, dict[str, Scalar]] = {
            # With many more, devices of few samples spend their budget on the public ones.
            "comet": {"asked": SAMPLES[self.data]},
            "prunefl": {"initial_rounds": max(1, self.played // INITIAL_SHARE)},
        }
        return {**by_size.get(entrant.method, {}), **entrant.options}

    def settings(self, entrant: Entrant, partition: str, seed: int) -> Settings:
        """One run: the paper's fleet, as many levels as depths, and the same held-out data whoever needs it.

        A seed is of everything: the split over devices is another one with each, and the same for all entrants.
        """
        every = 1 if self.quick else EVALUATED_EVERY[self.data]
        every *= PERSONAL_EVERY if entrant.personal else 1
        test = PERSONAL_TEST if entrant.personal else None
        more: dict[str, Any] = {
            "data": self.data,
            "mode": "exact",
            "budget": BUDGET,
            "samples": SAMPLES[self.data],
            "rounds": self.played,
            "eval_every": min(every, self.played),
            "personal_test": test,
            "options": self.options(entrant),
            "partition_seed": seed,
            **api.HELD_OUT,
        }
        more |= self.situation.settings
        scope = Scope(self.seeds, quick=self.data == "embedded", data_dir=self.data_dir)
        depths = self.situation.depths or net(self.task).depths[0]
        chosen = scope.settings(entrant.method, self.task, partition, seed, depths, **more)
        return api.settings_of(chosen.model_dump())

    def runs(self) -> list[Settings]:
        """All runs, seed by seed; of each the strongest forms of all methods first."""
        ordered = sorted(self.entrants, key=lambda entrant: bool(entrant.variant))
        return [
            self.settings(entrant, partition, seed)
            for seed in self.seeds
            for partition in self.partitions
            for entrant in ordered
        ]

    def found(self, library: Library) -> RunsByEntrant:
        """The runs that are there."""
        found: RunsByEntrant = {}
        for partition in self.partitions:
            for entrant in self.entrants:
                every = [library.find(self.settings(entrant, partition, seed)) for seed in self.seeds]
                found[partition, entrant.name] = [run for run in every if run is not None]
        return found
