"""How the replies of a round come in: each on its own, or only as a sum (`secure/sealed.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpmt.flower.wire import write_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from fedpmt.flower.answers import Missing
    from fedpmt.flower.checks import Inspector
    from fedpmt.flower.wire import Order
    from fedpmt.records import RoundRecord
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.training.messages import Reply


class SumError(ValueError):
    """A sum that cannot be opened or cannot be right; its text is the reason."""


class Collector(ABC):
    """What the strategy asks for between the opening of a round and its end.

    The defaults do nothing in addition to writing tasks and reading replies.
    """

    def prepare(
        self, grid: Grid, assignments: list[Assignment], seconds: Callable[[], float]
    ) -> list[Assignment]:
        """Exchange what is needed before tasks are sent; `seconds()` is how much of the round is left."""
        return assignments

    @property
    def missing(self) -> Mapping[int, Missing]:
        """The devices that dropped out in `prepare` and get no task."""
        return {}

    @abstractmethod
    def write(self, order: Order) -> RecordDict:
        """Encode a task."""

    @abstractmethod
    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """Check and decode a reply. Raises `RefusedError` where something is wrong with it."""

    def replies(self, grid: Grid, replies: list[Reply]) -> list[Reply]:
        """What is folded in place of the replies that were read. Raises `SumError` where that is nothing."""
        return replies

    def adjust(self, assignment: Assignment) -> Assignment:
        """Correct the bytes of a device whose reply has arrived."""
        return assignment

    def annotate(self, record: RoundRecord) -> RoundRecord:
        """Add what only the collector knows to the round's record."""
        return record


@dataclass(frozen=True)
class InClear(Collector):
    """The server sees every reply."""

    inspector: Inspector

    def write(self, order: Order) -> RecordDict:
        """Encode a task."""
        return write_order(order, self.inspector.structure)

    def read(self, records: RecordDict, order: Order, samples: int) -> Reply:
        """Check and decode a whole reply."""
        return self.inspector.read(records, order, samples)
