"""What becomes of a node's answer that does not count."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from flwr.common.constant import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flwr.app import Message

    from fedpmt.records import Outcome

EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""What the SuperLink answers in a node's place when the message's time is over."""

UNREADABLE = -1
"""The code of an error that stands for a reply that could not be put together (see `pulling.py`)."""

REASON_LENGTH = 300
"""Characters of a reason; it goes into the log and into the round's record."""

Loss = tuple["Outcome", str]
"""What became of it, and why."""


class RefusedError(ValueError):
    """An answer that is not taken; its text is the reason, and may quote the node."""

    def __init__(self, reason: str) -> None:
        super().__init__(plain(reason))


def plain(text: str) -> str:
    """Words that somebody else may have chosen, fit for a log: one short line, and nothing that a terminal obeys.

    >>> plain("a\\x1b[2J\\n b")
    'a\\\\x1b[2J b'
    """
    line = " ".join(text[:REASON_LENGTH].split())
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)[:REASON_LENGTH]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever goes wrong while a node's words are read is the node's: its answer is refused, and nothing ends."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def no_answer(message: Message | None, seconds: float, node: int) -> Loss | None:
    """Why there is nothing of this node to look at; None where there is."""
    if message is None or (message.has_error() and message.error.code in EXPIRED):
        return "late", f"no reply within {seconds:g} seconds"
    if message.has_error():
        # What went wrong stands at the end.
        reason = plain((message.error.reason or "")[-REASON_LENGTH:])
        if message.error.code == UNREADABLE:
            return "refused", reason
        return "failed", f"error {message.error.code}: {reason}"
    if message.metadata.src_node_id != node:
        return "refused", f"node {message.metadata.src_node_id} answered for it"
    return None
