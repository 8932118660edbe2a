"""What a method is: a frozen value whose functions map state to state. Loads no torch.

Its fields are hyperparameters; all that changes lives in values passed in and returned. It reads no
clock and sends nothing: what it may know stands in its arguments, so the same object runs in the
simulator and on real devices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from fedpmt.resources import RESOURCES
from fedpmt.seeds import Seeds
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self

    import numpy as np

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.pricing.meter import Plan
    from fedpmt.records import Evaluated
    from fedpmt.resources import Resource
    from fedpmt.training.local import LocalWork, PriceOf, Site
    from fedpmt.training.messages import Client, Reply, Task
    from fedpmt.types import Arrays, Examples, Tensors

S = TypeVar("S")
D = TypeVar("D")

Action = Literal["device", "shared", "work", "none"]
"""How a budget acts: on each device's part, on the one part of all, on how many steps a device takes, or not at all."""


def acts(action: Action, *but: Resource) -> dict[Resource, Action]:
    """How a budget acts: in this way for every resource, except for those that it cannot save."""
    return {resource: action for resource in RESOURCES if resource not in but}


@dataclass(frozen=True)
class Traits:
    """What is said about a method: what it needs, keeps and discloses, and how a budget acts on it.

    A method whose traits depend on its settings gives other traits for other settings.
    """

    needs_speeds: bool = False  # `assign` needs what only the device knows when devices choose (Option II)
    needs_public: bool = False  # unlabelled public data
    needs_validation: bool = False  # labelled data on the server
    needs_classes: bool = False  # one logit per class, and no other outputs
    needs_adapters: bool = False  # a model with LoRA adapters
    needs_labels: bool = False  # how many samples of each class a device holds; real devices tell nobody else
    needs_losses: bool = False  # metrics that devices report
    sends_more: bool = False  # replies hold more than the update: control variates, features, counts
    sums: Literal["layers", "entries", "none"] = "none"  # what of the replies a secure sum can stand for
    rotates: bool = False  # the layers that a device trains change from round to round
    combines: str = "mean"  # how the server makes one model of the replies, in words
    server_work: Literal["", "trains", "clusters"] = ""  # what the server does in addition, at a price
    keeps: str = ""  # what a device keeps between rounds, in words
    keeps_net: bool = False  # whether that is a net, or a part of one, that the server never sees
    fitted_net: bool = False  # whether that net fits the device's level, which must then stay the same
    finds_statistics: bool = False  # BatchNorm statistics of the predictor are found on devices' data
    discloses: str = ""  # what the server learns of a device's data in addition to its update, in words
    optimizers: tuple[str, ...] | None = None  # those on devices that it works with; None: any
    budget: Mapping[Resource, Action] = field(default_factory=dict)  # where it says nothing: not at all
    under_budget: Mapping[str, Any] = field(default_factory=dict)  # settings on which a budget can act
    needs_round: str = ""  # why replies cannot be folded as they arrive on a clock of events, in words
    discounts: bool = False  # its own fold makes late replies count less, as that of `PartAveraging` does
    events: Mapping[str, Any] = field(
        default_factory=dict
    )  # settings of the clock of events, if that is its usual one

    def action(self, resource: Resource) -> Action:
        """How a budget of this resource acts."""
        return self.budget.get(resource, "none")


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
    weakest: Plan | None = None  # what the weakest device can afford; None where the server cannot know
    fastest: np.ndarray | None = None  # the devices of the fastest level, likewise
    batch: int = 1  # n^x, what prices are per
    rng: Seeds = field(default_factory=lambda: Seeds(0))  # one generator per purpose


@dataclass(frozen=True)
class Round:
    """What a method may know of the round it is in."""

    index: int  # t, from 0
    price: PriceOf
    rng: Seeds  # one generator per purpose and device, of this round
    cohort: tuple[int, ...] = ()  # S, who is asked, in order; on a clock of events, in `fold`, who has ended
    momentum: float = 0.0  # m, where devices train by SGD with momentum
    interval: float = math.inf  # virtual seconds from one server step to the next, where these are fixed


@dataclass(frozen=True)
class Server:
    """What the server has at hand when it finishes a fold."""

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
class Step(Generic[S]):
    """What a fold gives."""

    state: S
    metrics: Mapping[str, float] = field(default_factory=dict)
    server_operations: float = 0.0


class Fold(ABC, Generic[S]):
    """Folds the replies of one round into the next state. The old state is left as it was."""

    @abstractmethod
    def add(self, reply: Reply) -> None:
        """Take in one reply; they come in device order, or on a clock of events as they arrive."""

    @abstractmethod
    def finish(self, server: Server) -> Step[S]:
        """The next state, once all replies are in."""


class Gather(Fold[S]):
    """For methods that need all replies at once: holds them and hands them over in device order."""

    def __init__(self, finish: Callable[[list[Reply], Server], Step[S]]) -> None:
        self._finish, self._replies = finish, list["Reply"]()

    def add(self, reply: Reply) -> None:
        self._replies.append(reply)

    def finish(self, server: Server) -> Step[S]:
        return self._finish(sorted(self._replies, key=lambda reply: reply.device), server)


@dataclass(frozen=True)
class Predictor:
    """What is evaluated: the global model, or each device's own with something shared."""

    kind: Evaluated
    model: str
    tensors: Tensors
    statistics: Literal["stored", "data"] = "stored"  # BatchNorm's: as in tensors, or found on devices' data


class Method(ABC, Generic[S, D]):
    """A federated method. S is the server's state, D what a device keeps between rounds."""

    @property
    def traits(self) -> Traits:
        """What is said about the method as it is set."""
        return Traits()

    @property
    @abstractmethod
    def local(self) -> LocalWork[D]:
        """What a device does with its task."""

    def models(
        self, model: LayeredModel, example: Arrays, rng: Callable[[str], np.random.Generator]
    ) -> Mapping[str, LayeredModel]:
        """Nets in play in addition to the global one, by the name that parts call them: none."""
        return {}

    @abstractmethod
    def init(self, setup: Setup) -> S:
        """The server's state before the first round."""

    def cohort(self, state: S, round: Round) -> Sequence[int] | None:
        """The devices to ask; None leaves it to the sampler."""
        return None

    @abstractmethod
    def assign(self, state: S, client: Client, round: Round) -> Task:
        """What this device is asked to do."""

    @abstractmethod
    def fold(self, state: S, round: Round) -> Fold[S]:
        """Begin to fold this round's replies."""

    @abstractmethod
    def predictor(self, state: S) -> Predictor:
        """What to evaluate."""

    def predictors_by_width(self, state: S) -> Mapping[str, Predictor]:
        """Narrow nets to evaluate at the end, by their share of the channels: none."""
        return {}

    def neutral(self) -> Self | None:
        """The settings that reduce it to FedAvg when every device can do everything; None where there are none."""
        return None


def aggregate(
    method: Method[S, Any], state: S, replies: Iterable[Reply], round: Round, server: Server
) -> Step[S]:
    """Fold all of these replies at once."""
    fold = method.fold(state, round)
    for reply in replies:
        fold.add(reply)
    return fold.finish(server)


def require(method: Method[Any, Any], **limits: tuple[bool, str]) -> None:
    """Refuse the first setting that is not allowed; for each, whether it is, and what is: "mu must be >= 0"."""
    for key, (allowed, rule) in limits.items():
        if not allowed:
            name = type(method).__name__.lower()
            raise SettingError(f"{name}.{key} must be {rule} (got {getattr(method, key)})")
