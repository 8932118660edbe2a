"""What becomes of a node's answer that does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.common.constant import ErrorCode

if TYPE_CHECKING:
    from flwr.app import Message

    from fedpmt.records import Outcome

EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""What the SuperLink answers in a node's place when the message's time is over."""

Loss = tuple["Outcome", str]
"""What became of it, and why."""


class RefusedError(ValueError):
    """An answer that is not taken; its text is the reason."""


def no_answer(message: Message | None, seconds: float, node: int) -> Loss | None:
    """Why there is nothing of this node to look at; None where there is."""
    if message is None or (message.has_error() and message.error.code in EXPIRED):
        return "late", f"no reply within {seconds:g} seconds"
    if message.has_error():
        reason = " ".join((message.error.reason or "").split())[-300:]
        return "failed", f"error {message.error.code}: {reason}"
    if message.metadata.src_node_id != node:
        return "refused", f"node {message.metadata.src_node_id} answered for it"
    return None
