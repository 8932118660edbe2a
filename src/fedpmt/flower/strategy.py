"""The one strategy for all methods: the simulator opens and closes rounds, and Flower carries tasks and replies.

Replies come in each on its own, or only as a sum (`secure/sealed.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from logging import INFO
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy

from fedpmt.flower.answers import find_answer
from fedpmt.flower.checks import Inspector
from fedpmt.flower.exchange import NO_ROOM, Exchange
from fedpmt.flower.wire import write_order
from fedpmt.simulation.cohort import Verdict, send_base
from fedpmt.simulation.prefixes import reuse_prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flwr.app import Metadata, RecordDict
    from flwr.serverapp import Grid

    from fedpmt.devices.fleet import Fleet
    from fedpmt.flower.answers import Missing
    from fedpmt.flower.deployment import Deployment
    from fedpmt.flower.exchange import Judgement
    from fedpmt.flower.roster import Roster
    from fedpmt.flower.wire import Order
    from fedpmt.methods.base import Round
    from fedpmt.records import RoundRecord
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.simulation.loop import Federation
    from fedpmt.simulation.runner import Journal
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


NO_DEADLINE = 3600.0
"""Seconds to wait for a round's replies where no deadline is set; Flower notices a lost node within one minute."""

TRAIN_SECONDS = 10.0
"""With less than this left of a round, or less than a quarter of a short one, no task is sent: Flower itself takes six
to nine seconds. It is also the shortest lifetime of a message: one that has expired when it is pushed would make the
push of all others fail too."""

NO_TIME = "no time left for training"


class MethodStrategy(Strategy):
    """Runs any method: the tasks of a round come from its `assign`, and the replies go into its `fold`."""

    def __init__(
        self,
        federation: Federation,
        journal: Journal,
        roster: Roster,
        fleet: Fleet,
        run: str,
        deployment: Deployment,
    ) -> None:
        self.federation, self.journal, self.roster, self.run = federation, journal, roster, run
        self.deployment = deployment
        self.deadline = federation.settings.deadline or NO_DEADLINE
        self._fleet = fleet  # as the settings have it
        self._collector: Collector = InClear(Inspector(federation, deployment.update_limit))
        if deployment.secagg:
            from fedpmt.flower.secure.sealed import Sealed

            self._collector = Sealed(federation, roster, deployment)
        self._exchange = Exchange(federation, roster, self._collector, run)
        self._round: Round | None = None
        self._assignments: list[Assignment] = []
        self._sent: dict[int, Metadata] = {}  # by device; Flower writes the message's id into it
        self._begun = 0.0
        self._grid: Grid | None = None

    def summary(self) -> None:
        """Log what runs."""
        settings = self.federation.settings
        log(INFO, "\t├──> %s, seed %s, run %s", settings.method, settings.seed, self.run)
        log(INFO, "\t└──> rounds done: %s of %s", self.journal.progress.rounds, settings.rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the round's tasks. A run that has stopped early has none in the rounds that are left."""
        self._round = None
        if self.journal.stopped is not None:
            return []
        wanted = self.deployment.min_devices if self.deployment.secagg else 1
        self.roster.wait(grid, wanted, self.deployment.wait_seconds)
        progress = self.journal.progress
        by_level = self.federation.settings.assign == "level"
        fleet = self.roster.fleet(self._fleet, keep_levels=by_level)
        federation = replace(self.federation, fleet=fleet)
        self._round, assignments = federation.open(progress, reachable=set(self.roster.online()))
        self._begun, self._grid = time.monotonic(), grid
        if federation.settings.prefix_tolerance is not None:
            assignments = reuse_prefixes(federation, progress, assignments)
        self._assignments = self._collector.prepare(grid, assignments, self._left)
        missing = self._collector.missing
        able = [one for one in self._assignments if one.able and one.device.id not in missing]
        if self._left() < min(TRAIN_SECONDS, self.deadline / 4):
            able = []
        messages = [self._exchange.write(one, max(TRAIN_SECONDS, self._left())) for one in able]
        self._sent = {one.device.id: message.metadata for one, message in zip(able, messages, strict=True)}
        return messages

    def _left(self) -> float:
        """Seconds of the round that are left."""
        return max(0.0, self.deadline - (time.monotonic() - self._begun))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, fold those that are accepted in device order, and write down the round."""
        if self._round is None or self._grid is None:
            return None, None
        seconds = time.monotonic() - self._begun
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        judged = [self._judge(one, self._answer(one, answers)) for one in self._assignments]
        for one, (outcome, _, _) in zip(self._assignments, judged, strict=True):
            if one.able and outcome in ("failed", "refused"):
                self.roster.doubt(one.device.id)
        try:
            accepted = self._collector.replies(
                self._grid, [reply for _, _, reply in judged if reply is not None]
            )
        except SumError as error:
            judged = [one if one[2] is None else ("failed", str(error), None) for one in judged]
            accepted = []
        assignments = [
            self._exchange.account(one, judgement, seconds)
            for one, judgement in zip(self._assignments, judged, strict=True)
        ]
        # Nodes have the base, and the seconds that they took to run it are among those measured.
        assignments = send_base(self.federation, self.journal.progress, assignments, travels=False)
        verdict = Verdict(tuple(outcome for outcome, _, _ in judged), time.monotonic() - self._begun)
        progress, record = self.federation.close(
            self.journal.progress, self._round, assignments, verdict, accepted
        )
        record = self.journal.add(progress, self._collector.annotate(record))
        self._round = None
        shown = {"replies": sum(reply is not None for _, _, reply in judged), "asked": len(assignments)}
        score = {} if record.score is None else {record.score_name: record.score, **record.scores}
        return None, MetricRecord({**shown, **score})

    def _answer(self, one: Assignment, answers: dict[str, Message]) -> Message | None:
        sent = self._sent.get(one.device.id)
        return None if sent is None else answers.get(sent.message_id)

    def _judge(self, one: Assignment, message: Message | None) -> Judgement:
        """Decide what becomes of one device's answer, and why."""
        if not one.able:
            return "failed", NO_ROOM, None
        device = one.device.id
        if device in self._collector.missing:
            return *self._collector.missing[device], None
        if device not in self._sent:
            return "late", NO_TIME, None
        answer = find_answer(message, self.deadline, self._sent[device].dst_node_id)
        return self._exchange.judge(one, answer)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody: the server evaluates on its own test set when a round is closed."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nobody was asked."""
        return None
