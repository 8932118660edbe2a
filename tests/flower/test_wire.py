"""What travels: parts come back as they were, and bytes are those accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import CARRIED, deploy

from fedpmt.flower.parts import decode_parts, encode_parts
from fedpmt.flower.wire import array_bytes
from fedpmt.models.structure import Layer, Structure
from fedpmt.parts.part import WHOLE, Indices, Mask, Part, Selection, Whole, within

if TYPE_CHECKING:
    from pathlib import Path

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


FRAMING = 3_000
"""Bytes of a message beside its tensors and their headers: names, shapes, the part, ids of objects."""
PER_TENSOR = 700
"""A NumPy header (128), and what Flower writes for an array and its chunks."""


@pytest.mark.parametrize("method", CARRIED)
def test_bytes_in_the_grid_are_those_accounted_for(method: str, tmp_path: Path) -> None:
    given = {
        "method": method,
        "devices": 3,
        "samples": 20,
        "cohort": 3,
        "batch": 10,
        "rounds": 1,
        "executor": "plain",
    }
    deployed, grid = deploy(tmp_path, {**given, "levels": "1/4,1/2,1"})
    (step,) = deployed.rounds
    trained = [one for one in grid.traffic if one.kind == "train"]
    assert len(trained) == len(step.devices)
    by_device = {one.question.config_records["task"]["device"]: one for one in trained}
    for record in step.devices:
        one = by_device[record.device]
        for measured, accounted, records in (
            (one.down, record.bytes_down, one.question),
            (one.up, record.bytes_up, one.reply),
        ):
            tensors = sum(len(group) for group in records.array_records.values())
            assert array_bytes(records) == accounted + 128 * tensors
            stated = accounted + FRAMING + PER_TENSOR * tensors
            assert accounted < measured <= 1.05 * stated, (method, measured, stated)
