"""Replies of a deployment, pulled one by one: one that Flower cannot put together is its node's, and costs no other.

A reply comes in pieces that the SuperLink does not look into. Flower's grid puts all that are there together in one go,
and takes them off the SuperLink before it has: a single bad piece would end the run, and lose the replies beside it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import httpx
from flwr.app import Error, MessageType, Metadata
from flwr.app.message import make_message
from flwr.superlink.grid import HttpGrid

from fedpmt.flower.answers import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flwr.app import Message
    from flwr.serverapp import Grid

    Pull = Callable[[Iterable[str]], Iterable[Message]]


def one_by_one(grid: Grid) -> Grid:
    """The same grid; that of a simulation hands over objects, and is left as it is."""
    if isinstance(grid, HttpGrid):
        # Its own loop for sending and receiving calls this.
        grid.pull_messages = partial(_pulled, grid.pull_messages)  # type: ignore[method-assign]
    return grid


def _pulled(pull: Pull, message_ids: Iterable[str]) -> list[Message]:
    return [reply for asked in list(message_ids) for reply in _replies(pull, asked)]


def _replies(pull: Pull, asked: str) -> list[Message]:
    """What there is in reply to one message."""
    try:
        replies = list(pull([asked]))
    except (httpx.HTTPError, OSError):  # the SuperLink's, and no node's
        raise
    except Exception as error:
        return [_unreadable(asked, f"its reply cannot be read: {type(error).__name__}: {error}")]
    # The envelope is the node's own as well: it may name another message than the one that it answers.
    if any(reply.metadata.reply_to_message_id != asked for reply in replies):
        return [_unreadable(asked, "its reply names a message that it did not get")]
    return replies


def _unreadable(asked: str, reason: str) -> Message:
    """What stands in the place of such a reply."""
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=0,
        dst_node_id=0,
        reply_to_message_id=asked,
        group_id="",
        created_at=time.time(),
        ttl=0.0,
        message_type=MessageType.TRAIN,
    )
    return make_message(metadata=metadata, error=Error(UNREADABLE, reason))
