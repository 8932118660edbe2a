"""Encode a Part compactly, and decode it on the other side. Loads no torch.

Both sides know the model, so selections are a list of codes in the order of its tensors: 0 for absent, 1 for whole, a
list with the number of a list of positions for each axis (-1 for the whole axis), or the number of a mask. Lists of
positions travel once, as bounds where they are a range, else as one bit per position.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.parts.part import WHOLE, Indices, Mask, Part, Selection, Whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedpmt.models.structure import Structure

ABSENT, ALL, KEPT = 0, 1, -1


def encode_parts(parts: Sequence[Part], structure: Structure) -> tuple[str, list[bytes]]:
    """Encode the parts on offer as text, and the lists of positions that it refers to."""
    lists: dict[bytes, int] = {}

    def number(data: bytes) -> int:
        return lists.setdefault(data, len(lists))

    def code(name: str, selections: Mapping[str, Selection]) -> Any:
        selection, shape = selections.get(name), structure.shapes[name]
        if selection is None:
            return ABSENT
        if isinstance(selection, Whole):
            return ALL
        if isinstance(selection, Mask):
            return {"mask": number(_pack(selection.bits.reshape(-1)))}
        pairs = zip(selection.axes, shape, strict=True)
        return [KEPT if kept is None else number(_positions(kept, full)) for kept, full in pairs]

    def codes(selections: Mapping[str, Selection]) -> Any:
        found = [code(name, selections) for name in structure.tensors]
        return found[0] if found and all(one == found[0] for one in found) and found[0] in (0, 1) else found

    def plain(part: Part) -> dict[str, Any]:
        return {
            "model": part.model,
            "label": part.label,
            "overhead": part.overhead_bytes,
            "sent": codes(part.sent),
            "trained": codes(part.trained),
            "reported": codes(part.reported),
            "inner": [plain(inner) for inner in part.inner],
        }

    text = json.dumps([plain(part) for part in parts], separators=(",", ":"))
    return text, list(lists)


def decode_parts(text: str, lists: Sequence[bytes], structure: Structure) -> tuple[Part, ...]:
    """Decode what `encode_parts` returned; equal selections of a tensor become one object, as they were."""
    axes: dict[tuple[int, int], np.ndarray] = {}
    seen: dict[str, Selection] = {}

    def axis(place: int, full: int) -> np.ndarray | None:
        if place == KEPT:
            return None
        if (place, full) not in axes:
            axes[place, full] = _read_positions(lists[place], full)
        return axes[place, full]

    def selection(found: Any, name: str) -> Selection:
        shape = structure.shapes[name]
        if found == ALL:
            return WHOLE
        key = f"{name} {found}"
        if key not in seen:
            if isinstance(found, dict):
                bits = np.unpackbits(np.frombuffer(lists[found["mask"]], np.uint8), count=int(np.prod(shape)))
                seen[key] = Mask(bits.astype(bool).reshape(shape))
            else:
                seen[key] = Indices(
                    tuple(axis(place, full) for place, full in zip(found, shape, strict=True))
                )
        return seen[key]

    def selections(found: Any) -> dict[str, Selection]:
        each = found if isinstance(found, list) else [found] * len(structure.tensors)
        pairs = zip(structure.tensors, each, strict=True)
        return {name: selection(code, name) for name, code in pairs if code != ABSENT}

    def part(found: Mapping[str, Any]) -> Part:
        return Part(
            found["model"],
            selections(found["sent"]),
            selections(found["trained"]),
            found["label"],
            found["overhead"],
            tuple(part(inner) for inner in found["inner"]),
            selections(found["reported"]),
        )

    return tuple(part(found) for found in json.loads(text))


RANGE, BITS = b"r", b"b"


def _positions(kept: np.ndarray, full: int) -> bytes:
    """Encode positions along an axis, which must rise.

    >>> len(_positions(np.arange(3, 700), 1000)), len(_positions(np.array([0, 2, 5]), 1000))
    (9, 126)
    """
    if len(kept) and np.array_equal(kept, np.arange(kept[0], kept[0] + len(kept))):
        return RANGE + np.array([kept[0], kept[0] + len(kept)], "<u4").tobytes()
    bits = np.zeros(full, dtype=bool)
    bits[kept] = True
    if not np.array_equal(np.flatnonzero(bits), kept):
        raise ValueError("positions along an axis must rise")
    return BITS + _pack(bits)


def _read_positions(data: bytes, full: int) -> np.ndarray:
    if data[:1] == RANGE:
        first, last = np.frombuffer(data[1:], "<u4")
        return np.arange(int(first), int(last))
    return np.flatnonzero(np.unpackbits(np.frombuffer(data[1:], np.uint8), count=full))


def _pack(bits: np.ndarray) -> bytes:
    return np.packbits(bits).tobytes()
