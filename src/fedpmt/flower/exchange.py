"""What passes between the server and a node for one task: its message, and what becomes of the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from logging import WARNING
from typing import TYPE_CHECKING

from flwr.app import Message, MessageType
from flwr.common.logger import log

from fedpmt.flower.answers import RefusedError, reading
from fedpmt.flower.wire import Order
from fedpmt.records import step_word
from fedpmt.simulation.cohort import conclude

if TYPE_CHECKING:
    from fedpmt.flower.answers import Missing
    from fedpmt.flower.roster import Roster
    from fedpmt.flower.strategy import Collector
    from fedpmt.records import Outcome
    from fedpmt.simulation.cohort import Assignment
    from fedpmt.simulation.loop import Federation
    from fedpmt.training.messages import Reply

NO_ROOM = "its part does not fit into its memory"

Judgement = tuple["Outcome", str, "Reply | None"]
"""What became of a device's answer, why, and the reply if it counts."""


@dataclass(frozen=True)
class Exchange:
    """Writes tasks and judges answers, for a run whose rounds end and for one that does not wait for them."""

    federation: Federation
    roster: Roster
    collector: Collector
    run: str  # its name on every node

    def order(self, one: Assignment) -> Order:
        """What a device is asked."""
        planner = self.federation.planner
        keeps = planner.price.keeps_base
        return Order(self.run, one.version, one.device.id, one.task, planner.deadline, keeps, one.turn)

    def write(self, one: Assignment, seconds: float) -> Message:
        """Write a task to the node of its device; it lives this long."""
        content, node = self.collector.write(self.order(one)), self.roster.of(one.device.id).id
        return Message(content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=seconds)

    def judge(self, one: Assignment, answer: Message | Missing) -> Judgement:
        """Decide what becomes of a device's answer, and why."""
        if isinstance(answer, tuple):
            return *answer, None
        try:
            with reading("it"):
                reply = self.collector.read(answer.content, self.order(one), one.samples)
                return "arrived", "", replace(reply, steps=one.steps, chances=one.task.chances)
        except RefusedError as error:
            return "refused", str(error), None

    def account(self, one: Assignment, judgement: Judgement, seconds: float) -> Assignment:
        """The assignment with the part that was really trained and the time it took; or why there is no reply."""
        outcome, reason, reply = judgement
        device = one.device.id
        if reply is not None:
            return self.collector.adjust(conclude(self.federation, one, reply.part, reply.seconds))
        node = self.roster.of(device).id if self.roster.knows(device) else "unknown"
        when = f"{step_word(self.federation.settings.clock)} {one.version + 1}"
        log(WARNING, "%s: device %s (node %s) %s: %s", when, device, node, outcome, reason)
        return replace(one, seconds=seconds if one.able else 0.0, reason=reason)
