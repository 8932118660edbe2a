"""How the replies of a round come in: each for itself, or only as a sum (`sealed.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.flower.wire import write_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from fedpmt.flower.answers import Loss
    from fedpmt.flower.checks import Inspector
    from fedpmt.flower.wire import Order
    from fedpmt.records import RoundRecord
    from fedpmt.simulation.assignment import Assignment
    from fedpmt.training.messages import Reply


class Collector(ABC):
    """What the strategy asks between the tasks of a round and its end."""

    @abstractmethod
    def prepare(self, grid: Grid, asked: list[Assignment], seconds: Callable[[], float]) -> list[Assignment]:
        """Before tasks are sent. `seconds` says how much of the round is left."""

    @property
    @abstractmethod
    def lost(self) -> Mapping[int, Loss]:
        """The devices that have fallen out before they got a task."""

    @abstractmethod
    def write(self, order: Order) -> RecordDict:
        """A task as it travels."""

    @abstractmethod
    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """A reply as far as it can be read; what is wrong is refused."""

    @abstractmethod
    def replies(self, grid: Grid, good: list[Reply]) -> list[Reply]:
        """What is aggregated in the place of the replies that were read; `SumError` where it is nothing."""

    @abstractmethod
    def priced(self, one: Assignment) -> Assignment:
        """A device that arrived, with the bytes that it really sent."""

    @abstractmethod
    def noted(self, record: RoundRecord) -> RoundRecord:
        """The round's record, with what only the collector knows."""


class SumError(ValueError):
    """A sum that cannot be opened, or that cannot be right; its text is the reason."""


@dataclass(frozen=True)
class InClear(Collector):
    """The server sees each reply."""

    inspector: Inspector

    def prepare(self, grid: Grid, asked: list[Assignment], seconds: Callable[[], float]) -> list[Assignment]:
        """Nothing is needed."""
        return asked

    @property
    def lost(self) -> Mapping[int, Loss]:
        """Nobody: who is there gets a task."""
        return {}

    def write(self, order: Order) -> RecordDict:
        """The order."""
        return write_order(order, self.inspector.structure)

    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """All of it, once it has been looked at."""
        return self.inspector.read(records, order, samples)

    def replies(self, grid: Grid, good: list[Reply]) -> list[Reply]:
        """They are."""
        return good

    def priced(self, one: Assignment) -> Assignment:
        """As it was priced."""
        return one

    def noted(self, record: RoundRecord) -> RoundRecord:
        """As it is."""
        return record
