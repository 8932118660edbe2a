"""What travels on Flower, and replies that Flower itself cannot read: one node's pieces end nobody's run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Error, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.superlink.grid import HttpGrid
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpmt.flower.answers import check_answer
from fedpmt.flower.pulling import pull_one_by_one
from fedpmt.flower.wire import Order, array_bytes, decode_parts, encode_parts, read_order, write_order
from fedpmt.models.structure import Layer, Structure
from fedpmt.parts.part import WHOLE, Indices, Mask, Part, Selection, Whole, within
from fedpmt.training.messages import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


SHAPES = {"a.weight": (5, 7), "a.bias": (5,), "b.weight": (3, 5, 2, 2), "b.bias": (3,)}
STRUCTURE = Structure((Layer("a", ("a.weight", "a.bias")), Layer("b", ("b.weight", "b.bias"))), SHAPES)


@st.composite
def selections(draw: Any, shape: tuple[int, ...]) -> Selection:
    kind = draw(st.sampled_from(["whole", "indices", "mask"]))
    if kind == "whole":
        return WHOLE
    if kind == "mask":
        bits = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return Mask(np.array(bits, dtype=bool).reshape(shape))
    axes = [
        draw(
            st.one_of(
                st.none(), st.sets(st.integers(0, full - 1), min_size=1).map(lambda s: np.array(sorted(s)))
            )
        )
        for full in shape
    ]
    return Indices(tuple(axes))


@st.composite
def parts(draw: Any, deep: bool = True) -> Part:
    sent = {name: draw(selections(shape)) for name, shape in SHAPES.items()}
    names = draw(st.sets(st.sampled_from(sorted(SHAPES))))
    trained = {
        name: sent[name] if draw(st.booleans()) else draw(selections(SHAPES[name]))
        for name in SHAPES
        if name in names
    }
    inner = tuple(draw(st.lists(parts(deep=False), max_size=2))) if deep else ()
    return Part("global", sent, trained, draw(st.text(max_size=5)), draw(st.integers(0, 99)), inner)


def same(ours: Selection, theirs: Selection) -> bool:
    if isinstance(ours, Whole) or isinstance(theirs, Whole):
        return ours == theirs
    if isinstance(ours, Mask):
        return isinstance(theirs, Mask) and np.array_equal(ours.bits, theirs.bits)
    pairs = zip(ours.axes, theirs.axes, strict=True) if isinstance(theirs, Indices) else []
    return all(
        (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in pairs
    )


def check(ours: Part, theirs: Part) -> None:
    assert (ours.model, ours.label, ours.overhead_bytes) == (
        theirs.model,
        theirs.label,
        theirs.overhead_bytes,
    )
    for half in ("sent", "trained", "reported"):
        before, after = getattr(ours, half), getattr(theirs, half)
        assert set(before) == set(after)
        assert all(same(before[name], after[name]) for name in before)
    for name, selection in ours.trained.items():
        if selection is ours.sent[name] and not isinstance(selection, Mask):
            # What was one object is one again: "all that was sent" needs no index.
            assert within(theirs.trained[name], theirs.sent[name]) == WHOLE
    assert len(ours.inner) == len(theirs.inner)
    for a, b in zip(ours.inner, theirs.inner, strict=True):
        check(a, b)


@given(st.lists(parts(), min_size=1, max_size=3))
@settings(max_examples=60)
def test_parts_come_back_as_they_were(offer: list[Part]) -> None:
    read = decode_parts(*encode_parts(offer, STRUCTURE), STRUCTURE)
    assert len(read) == len(offer)
    for ours, theirs in zip(offer, read, strict=True):
        check(ours, theirs)


def test_positions_that_do_not_rise_are_refused() -> None:
    crossed: dict[str, Selection] = {"a.weight": Indices((np.array([3, 1]), None))}
    with pytest.raises(ValueError, match="must rise"):
        encode_parts([Part("global", crossed, {}, "x")], STRUCTURE)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_back_in_their_own_type(kind: torch.dtype) -> None:
    weights = {name: torch.randn(shape).to(kind) for name, shape in SHAPES.items()}
    task = Task((Part("global", dict.fromkeys(SHAPES, WHOLE), {}, "all"),), {"model": weights})
    records = write_order(Order("run", 0, 1, task, 1.0), STRUCTURE)
    numbers = sum(tensor.numel() for tensor in weights.values())
    assert array_bytes(records) == numbers * kind.itemsize + 128 * len(SHAPES)
    read = read_order(records, STRUCTURE, torch.device("cpu")).task.tensors["model"]
    assert all(read[name].dtype == kind and torch.equal(read[name], weights[name]) for name in SHAPES)


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
