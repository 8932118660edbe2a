"""Ask nodes, read their answers safely, and say why an answer does not count."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from flwr.app import Message
from flwr.common.constant import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from fedpmt.records import Outcome

Answer = TypeVar("Answer")

EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""The codes with which the SuperLink answers in a node's place once a message has expired."""

UNREADABLE = -1
"""The code of an error that stands for a reply that Flower could not decode (see `pulling.py`)."""

REASON_LENGTH = 300
"""The longest reason, in characters; it goes into the log and into the round's record."""

Missing = tuple["Outcome", str]
"""The outcome of a device without a reply that counts, and the reason."""


class RefusedError(ValueError):
    """An answer that is not accepted; its text is the reason, which may quote the node."""

    def __init__(self, reason: str) -> None:
        super().__init__(clean(reason))


def clean(text: str) -> str:
    """Make untrusted text safe to log: one short line without control characters.

    >>> clean("a\\x1b[2J\\n b")
    'a\\\\x1b[2J b'
    """
    line = " ".join(text[:REASON_LENGTH].split())
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)[:REASON_LENGTH]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn any error raised while an answer is read into a refusal: a bad answer must not end the run."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def check_answer(message: Message | None, seconds: float, node: int) -> Missing | None:
    """Say why a node's message holds no answer; None where it holds one."""
    if message is None or (message.has_error() and message.error.code in EXPIRED):
        return "late", f"no reply within {seconds:g} seconds"
    if message.has_error():
        # The cause stands at the end of a traceback.
        reason = clean((message.error.reason or "")[-REASON_LENGTH:])
        if message.error.code == UNREADABLE:
            return "refused", reason
        return "failed", f"error {message.error.code}: {reason}"
    if message.metadata.src_node_id != node:
        return "refused", f"node {message.metadata.src_node_id} answered for it"
    return None


def ask(
    grid: Grid,
    kind: str,
    questions: Mapping[int, RecordDict],
    seconds: float,
    read: Callable[[int, RecordDict], Answer],
) -> tuple[dict[int, Answer], dict[int, Missing]]:
    """Ask several nodes and wait for their answers.

    Args:
        grid: Where the nodes are.
        kind: Flower's type of the messages.
        questions: What each node is asked, by node id.
        seconds: How long to wait.
        read: Decodes an answer; whatever it raises refuses that answer.

    Returns:
        The answers by node id, and the nodes without one, with the reason.
    """
    messages = [
        Message(content, dst_node_id=node, message_type=kind, ttl=seconds)
        for node, content in questions.items()
    ]
    replies = list(grid.send_and_receive(messages, timeout=seconds)) if messages else []
    by_question = {reply.metadata.reply_to_message_id: reply for reply in replies}
    found: dict[int, Answer] = {}
    missing: dict[int, Missing] = {}
    for message in messages:
        node, reply = message.metadata.dst_node_id, by_question.get(message.metadata.message_id)
        absent = check_answer(reply, seconds, node)
        if absent is not None:
            missing[node] = absent
            continue
        assert reply is not None
        try:
            with reading("its answer"):
                found[node] = read(node, reply.content)
        except RefusedError as error:
            missing[node] = ("refused", str(error))
    return found, missing
