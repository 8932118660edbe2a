"""What a method is: a frozen value whose functions map state to state. Loads no torch.

Its fields are hyperparameters; all that changes lives in values passed in and returned. It reads no
clock and sends nothing: what it may know stands in its arguments, so the same object runs in the
simulator and on real devices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from fedpmt.seeds import Seeds
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from typing import Self

    import numpy as np

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.pricing.budget import Budget
    from fedpmt.pricing.cost import Cost
    from fedpmt.records import Evaluated
    from fedpmt.resources import Resource
    from fedpmt.training.local import LocalWork, Site
    from fedpmt.training.messages import Client, Reply, Task
    from fedpmt.types import Arrays, Examples, Tensors

S = TypeVar("S")
D = TypeVar("D")
PriceOf = Callable[["Part"], "Cost"]
Sums = Literal["layers", "entries", "none"]
"""What of the replies a sum can stand for: whole layers, entries of them, or nothing since each reply is needed."""

ABOVE_0, FROM_0, FROM_1 = "a number above 0", "a number of 0 or more", "a number of 1 or more"
SHARE = "a share above 0, at most 1,"
"""What settings are limited to, in the words of a refusal."""

Action = Literal["device", "shared", "work", "none"]
"""How a budget acts: on each device's part, on the one part of all, on how many steps a device takes, or not at all."""


@dataclass(frozen=True)
class Prototype:
    """One architecture in play, with its initial weights w^1."""

    structure: Structure
    tensors: Tensors


@dataclass(frozen=True)
class Setup:
    """What a method may know before the first round."""

    prototypes: Mapping[str, Prototype]
    population: int  # |K|
    price: PriceOf
    public: Examples | None = None  # unlabelled data, for methods that need some
    validation: Examples | None = None
    weakest: Budget | None = None  # what the weakest device can afford; None where the server cannot know
    fastest: np.ndarray | None = None  # the devices of the fastest level, likewise
    batch: int = 1  # n^x, what prices are per
    rng: Seeds = field(default_factory=lambda: Seeds(0))  # one generator per purpose


@dataclass(frozen=True)
class Server:
    """What the server has at hand for work of its own while it aggregates."""

    site: Site  # forward passes of all nets in play, the batch size
    public: Examples | None = None
    validation: Examples | None = None
    budget: float = math.inf  # operations that it may spend on this round

    def affordable(self, operations: Callable[[int], float], wanted: int) -> int:
        """The most steps, up to those wanted, whose operations are within the budget; these grow with the steps.

        >>> Server(None, budget=25).affordable(lambda steps: 5 + 10 * steps, wanted=100)
        2
        """
        if operations(wanted) <= self.budget:
            return wanted
        return max(0, bisect_right(range(wanted + 1), self.budget, key=operations) - 1)


@dataclass(frozen=True)
class Round:
    """What a method may know of the round it is in."""

    index: int  # t, from 0
    price: PriceOf
    generator: Callable[[str, int | None], np.random.Generator]
    cohort: tuple[int, ...] = ()  # S, the devices that are asked, in order; known when tasks are assigned
    at_hand: Server | None = None  # when replies are aggregated

    def rng(self, purpose: str, device: int | None = None) -> np.random.Generator:
        """The generator of this purpose, round and device."""
        return self.generator(purpose, device)

    @property
    def server(self) -> Server:
        """What the server has at hand: while it aggregates, and only then."""
        if self.at_hand is None:
            raise RuntimeError("the server works while it aggregates, and this is not the time")
        return self.at_hand


@dataclass(frozen=True)
class Step(Generic[S]):
    """What aggregation gives."""

    state: S
    metrics: Mapping[str, float] = field(default_factory=dict)
    server_operations: float = 0.0


@dataclass(frozen=True)
class Predictor:
    """What is evaluated: the global model, or each device's own with something shared."""

    kind: Evaluated
    model: str
    tensors: Tensors
    statistics: Literal["stored", "data"] = (
        "stored"  # BatchNorm's: as in tensors, or of devices' data, found anew
    )


class Method(ABC, Generic[S, D]):
    """A federated method. S is the server's state, D what a device keeps between rounds."""

    needs_speeds: ClassVar[bool] = False
    """Whether `assign` needs what only the device knows when devices choose (Option II)."""

    under_budget: ClassVar[Mapping[str, bool | int | float | str]] = {}
    """Its settings where a run has a budget and the user did not choose others: those on which a budget can act."""

    needs_public: ClassVar[bool] = False
    """Whether it needs unlabelled public data."""

    needs_validation: ClassVar[bool] = False
    """Whether it makes use of labelled data on the server."""

    needs_classes: ClassVar[bool] = False
    """Whether it works on one logit per class, and not on other outputs."""

    needs_losses: ClassVar[bool] = False
    """Whether `aggregate` learns from metrics that devices report."""

    sends_more: ClassVar[bool] = False
    """Whether replies hold more than trained tensors, as control variates, features or counts."""

    sums: ClassVar[Sums] = "none"
    """What `aggregate` needs to know of devices' tensors: with `layers`, only their weighted mean for each layer."""

    server_work: ClassVar[Literal["", "trains", "clusters"]] = ""
    """What the server does beside averaging, at a price."""

    def require(self, **limits: tuple[bool, str]) -> None:
        """Refuse the first setting that is not allowed; for each, whether it is and what is needed, in words."""
        for key, (allowed, needed) in limits.items():
            if not allowed:
                name = type(self).__name__.lower()
                raise SettingError(f"{name}.{key} = '{getattr(self, key)}' is refused: {needed} is needed")

    @property
    def combines(self) -> str:
        """How the server makes one of the replies, in words."""
        return "mean"

    @property
    def keeps(self) -> str:
        """What a device keeps between rounds, in words; empty where it keeps nothing."""
        return ""

    @property
    def keeps_net(self) -> bool:
        """Whether that is a net, or a part of one, that the server never sees."""
        return False

    @property
    def fitted_net(self) -> bool:
        """Whether that net, the part's `kept`, fits the device's level, which must then stay the same."""
        return False

    @property
    def finds_statistics(self) -> bool:
        """Whether its predictor's BatchNorm statistics are found on devices' data, which must be at hand for that."""
        return False

    @property
    def discloses(self) -> str:
        """What of a device's data the server gets to know beside its weights, in words; empty: nothing."""
        return "which classes it holds" if self.needs_labels else ""

    @property
    def needs_labels(self) -> bool:
        """Whether `assign` needs to know how many samples of each class a device holds; real ones tell nobody else."""
        return False

    def prototypes(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """Nets in play beside the global one, by the name that parts call them: none."""
        return {}

    def kept_bytes(self, structures: Mapping[str, Structure]) -> int:
        """What one device keeps between rounds, at most; 0 where it keeps nothing."""
        return 0

    @abstractmethod
    def init(self, setup: Setup) -> S:
        """The server's state before the first round."""

    @abstractmethod
    def assign(self, state: S, client: Client, round: Round) -> Task:
        """What this device is asked to do."""

    @abstractmethod
    def local(self) -> LocalWork[D]:
        """What a device does with its task."""

    @abstractmethod
    def aggregate(self, state: S, replies: Iterable[Reply], round: Round) -> Step[S]:
        """Fold the replies, in device order, into a new state; the old one is left as it was."""

    @abstractmethod
    def predictor(self, state: S) -> Predictor:
        """What to evaluate."""

    def cohort(self, state: S, round: Round) -> Sequence[int] | None:
        """The devices to ask; None leaves it to the sampler."""
        return None

    def action(self, resource: Resource) -> Action:
        """How a budget of this resource acts on the method as it is set: not at all, so that the clock shows it."""
        return "none"

    def fits(self, client: Client, structure: Structure, price: PriceOf) -> Callable[[Part], bool]:
        """Whether a device can afford a part, with all that this method makes of it; without a budget it can."""
        budget = client.budget
        if budget is None:
            return lambda part: True
        work = self.local()
        return lambda part: budget.allows(work.usage(part, price, structure))

    def neutral(self) -> Self | None:
        """The settings that reduce it to FedAvg when every device can do everything; None where there are none."""
        return None
