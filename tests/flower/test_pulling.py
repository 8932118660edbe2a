"""Replies that Flower itself cannot read: one node's pieces end nobody's run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from flwr.app import Error, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.superlink.grid import HttpGrid

from fedpmt.flower.answers import check_answer
from fedpmt.flower.pulling import pull_one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


NAMES: Any = ["1", "2", "3"]
"""Messages, each named after its node."""


def reply_to(asked: str, node: int) -> Message:
    names: dict[str, Any] = {"run_id": 1, "message_id": f"re {asked}", "group_id": "", "created_at": 0.0}
    metadata = Metadata(
        **names,
        src_node_id=node,
        dst_node_id=1,
        reply_to_message_id=asked,
        ttl=1.0,
        message_type=MessageType.TRAIN,
    )
    return make_message(metadata=metadata, content=RecordDict())


class Deployed(HttpGrid):
    """Flower's own loop over replies, with a SuperLink that is made up."""

    def __init__(self, bad: Callable[[str], Message]) -> None:
        self.bad = bad

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        return list(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """As Flower does: all at once, and what raises takes everything with it."""
        return [self.bad(asked) if asked == "2" else reply_to(asked, int(asked)) for asked in message_ids]


def garbled(asked: str) -> Message:
    raise KeyError("no such object")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr.superlink.grid.http_grid.time.sleep", lambda seconds: None)


def outcomes(bad: Callable[[str], Message]) -> dict[str, Any]:
    grid = pull_one_by_one(Deployed(bad))
    found = grid.send_and_receive(NAMES, timeout=60.0)
    replies = {reply.metadata.reply_to_message_id: reply for reply in found}
    return {node: check_answer(replies.get(node), 60.0, int(node)) for node in ("1", "2", "3")}


def test_a_reply_that_cannot_be_put_together_is_refused_and_the_others_count() -> None:
    with pytest.raises(KeyError):  # Flower alone
        Deployed(garbled).send_and_receive(NAMES, timeout=60.0)
    found = outcomes(garbled)
    assert found == {
        "1": None,
        "2": ("refused", "its reply cannot be read: KeyError: 'no such object'"),
        "3": None,
    }


def test_nobody_answers_in_the_name_of_another() -> None:
    """What Flower puts together is the node's own word, down to whom it comes from and what it answers."""
    found = outcomes(lambda asked: reply_to("3", 3))
    assert found == {"1": None, "2": ("refused", "its reply names a message that it did not get"), "3": None}


def test_an_error_of_the_link_is_no_nodes() -> None:
    def gone(asked: str) -> Message:
        raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ConnectError):
        outcomes(gone)


def test_an_error_that_a_node_reports_is_its_own() -> None:
    def failed(asked: str) -> Message:
        return make_message(metadata=reply_to(asked, 2).metadata, error=Error(2, "out of memory"))

    assert outcomes(failed)["2"] == ("failed", "error 2: out of memory")
