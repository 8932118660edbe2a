"""What passes between processes arrives as it was, in memory that is used again."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpmt.parts.part import Indices, Part
from fedpmt.simulation.parcels import FIRST_BYTES, Arena, Outbox, unpack

TENSORS = {
    "scalar": torch.tensor(3.5),
    "matrix": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": torch.arange(10)[1::2],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 2),
    "traced": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_keeps_its_values_its_type_and_its_layout(name: str, own: bool) -> None:
    arena, sent = Arena(), TENSORS[name]
    found = unpack(arena, Outbox(arena).pack({"a": [sent], "b": sent}), own=own)["a"][0]
    assert found.dtype == sent.dtype
    assert torch.equal(found, sent)
    assert own or found.stride() == sent.stride()


def test_values_of_any_size_and_kind_arrive() -> None:
    arena, known = Arena(), object()
    large = torch.rand(FIRST_BYTES)  # four times what there is
    indices = Indices((np.array([0, 2]), None))
    part = Part("global", {"w": indices}, {"w": indices}, "half")
    value = {"small": torch.ones(2), "large": large, "part": part, "known": known}
    outbox = Outbox(arena)
    found = unpack(arena, outbox.pack(value, (known,)), (known,), own=True)
    assert torch.equal(found["large"], large)
    assert found["known"] is known
    assert found["part"].sent["w"] is found["part"].trained["w"]  # as `within` asks for
    assert found["part"].sent["w"].axes[0].tolist() == [0, 2]


def test_a_copy_of_ones_own_outlives_the_parcel() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    parcel = outbox.pack(torch.ones(3))
    kept, seen = unpack(arena, parcel, own=True), unpack(arena, parcel, own=False)
    outbox.forget(parcel)
    outbox.pack(torch.zeros(3))
    assert kept.tolist() == [1, 1, 1]
    assert seen.tolist() == [0, 0, 0]


def addresses(arena: Arena, outbox: Outbox, tensors: list[Tensor]) -> list[int]:
    return [unpack(arena, outbox.pack(tensor), own=False).data_ptr() for tensor in tensors]


def test_what_several_parcels_hold_is_copied_once() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    whole, cuts = torch.ones(100), [torch.ones(50) for _ in range(4)]
    parcels = [outbox.pack((whole, cut)) for cut in cuts[:2]]
    first, second = (unpack(arena, parcel, own=False) for parcel in parcels)
    assert first[0].data_ptr() == second[0].data_ptr()
    assert first[1].data_ptr() != second[1].data_ptr()
    for parcel in parcels:
        outbox.forget(parcel)
    again = [unpack(arena, outbox.pack((whole, cut)), own=False) for cut in cuts[2:]]
    # What all need is still there; what one needed has made room.
    assert {found[0].data_ptr() for found in again} == {first[0].data_ptr()}
    assert {found[1].data_ptr() for found in again} == {first[1].data_ptr(), second[1].data_ptr()}
    assert all(found[1].tolist() == [1] * 50 for found in again)


def test_a_cleared_outbox_begins_again() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    tensors = [torch.full((10,), float(value)) for value in range(3)]
    before = addresses(arena, outbox, tensors)
    outbox.clear()
    assert addresses(arena, outbox, tensors) == before


def test_an_arena_never_gets_smaller_for_another_process() -> None:
    """A fork that has not written since another one made it larger must not cut off what that one counts on."""
    arena = Arena()
    other = copy.copy(arena)  # as a fork has it
    arena.take(4 * FIRST_BYTES)
    other.take(FIRST_BYTES + 1)
    assert os.fstat(arena._file).st_size >= 4 * FIRST_BYTES
    assert len(other.bytes(0, 2 * FIRST_BYTES)) == 2 * FIRST_BYTES
