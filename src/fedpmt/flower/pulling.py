"""Pull a deployment's replies one by one, so that a reply that Flower cannot decode costs only its own node.

The SuperLink stores a reply in pieces and does not look into them. Flower's grid decodes all replies at once, after it
has removed them from the SuperLink: a single bad piece would end the run, and lose the other replies too.
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


def pull_one_by_one(grid: Grid) -> Grid:
    """Change a deployment's grid in place; the grid of a simulation passes objects, and stays as it is."""
    if isinstance(grid, HttpGrid):
        # Its own loop for sending and receiving calls this.
        grid.pull_messages = partial(_pull_each, grid.pull_messages)  # type: ignore[method-assign]
    return grid


def _pull_each(pull: Pull, message_ids: Iterable[str]) -> list[Message]:
    return [reply for asked in list(message_ids) for reply in _pull(pull, asked)]


def _pull(pull: Pull, asked: str) -> list[Message]:
    """The replies to one message: none yet, or one."""
    try:
        replies = list(pull([asked]))
    except (httpx.HTTPError, OSError):  # the SuperLink's fault, not a node's
        raise
    except Exception as error:
        return [_make_error(asked, f"its reply cannot be read: {type(error).__name__}: {error}")]
    # The node wrote the envelope too: it may name another message than the one it was sent.
    if any(reply.metadata.reply_to_message_id != asked for reply in replies):
        return [_make_error(asked, "its reply names a message that it did not get")]
    return replies


def _make_error(asked: str, reason: str) -> Message:
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
