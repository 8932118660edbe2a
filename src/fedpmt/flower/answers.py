"""Ask nodes, wait for their answers or not, read them safely, and say why an answer does not count."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from flwr.app import Message
from flwr.common.constant import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from fedpmt.records import Outcome

Answer = TypeVar("Answer")
Subject = TypeVar("Subject")

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
    asked = {message.metadata.dst_node_id: message.metadata.message_id for message in messages}
    answers = ((node, find_answer(by_question.get(key), seconds, node)) for node, key in asked.items())
    return read_answers(answers, read)


def find_answer(message: Message | None, seconds: float, node: int) -> Message | Missing:
    """The message of a node if it holds an answer, else why it does not."""
    absent = check_answer(message, seconds, node)
    if absent is not None:
        return absent
    assert message is not None
    return message


def read_answers(
    answers: Iterable[tuple[int, Message | Missing]], read: Callable[[int, RecordDict], Answer]
) -> tuple[dict[int, Answer], dict[int, Missing]]:
    """Decode answers by node id; whatever `read` raises refuses that answer."""
    found: dict[int, Answer] = {}
    missing: dict[int, Missing] = {}
    for node, answer in answers:
        if isinstance(answer, tuple):
            missing[node] = answer
            continue
        try:
            with reading("its answer"):
                found[node] = read(node, answer.content)
        except RefusedError as error:
            missing[node] = ("refused", str(error))
    return found, missing


@dataclass(frozen=True)
class _Letter(Generic[Subject]):
    """A message that was sent."""

    subject: Subject
    node: int
    seconds: float  # how long it is waited for
    due: float


class Post(Generic[Subject]):
    """Messages whose answers are collected while other things go on. Each has a subject, by which it is known."""

    def __init__(self) -> None:
        self._sent: dict[str, _Letter[Subject]] = {}  # by the message's id
        self._returned: list[tuple[Subject, Missing]] = []  # what could not be sent

    @property
    def subjects(self) -> set[Subject]:
        """What is not answered yet."""
        return {letter.subject for letter in self._sent.values()} | {subject for subject, _ in self._returned}

    def send(self, grid: Grid, subject: Subject, message: Message, seconds: float) -> None:
        """Send a message whose answer is waited for this long."""
        node = message.metadata.dst_node_id
        pushed = [key for key in grid.push_messages([message]) if key]
        if pushed:
            self._sent[pushed[0]] = _Letter(subject, node, seconds, time.monotonic() + seconds)
        else:
            self._returned.append((subject, ("failed", "the SuperLink has not taken its message")))

    def collect(self, grid: Grid) -> list[tuple[Subject, Message | Missing]]:
        """Take what has been answered by now, and what has not been in its time, in the order in which it was sent."""
        ended: list[tuple[Subject, Message | Missing]] = [*self._returned]
        self._returned.clear()
        if not self._sent:
            return ended
        now = time.monotonic()
        found = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(list(self._sent))}
        for key, letter in list(self._sent.items()):
            if key in found or now >= letter.due:
                del self._sent[key]
                ended.append((letter.subject, find_answer(found.get(key), letter.seconds, letter.node)))
        return ended
