"""Parts as they travel come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpmt.flower.parts import decode_parts, encode_parts
from fedpmt.flower.wire import Order, array_bytes, read_order, write_order
from fedpmt.models.structure import Layer, Structure
from fedpmt.parts.part import WHOLE, Indices, Mask, Part, Selection, Whole, within
from fedpmt.training.messages import Task

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
