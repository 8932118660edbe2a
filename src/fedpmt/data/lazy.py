"""Samples that are not in one array: those of many clients, and those of a data set that is read batch by batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpmt.types import Arrays, Examples, SettingError

if TYPE_CHECKING:
    from typing import Self

CHUNK = 1000
"""Samples that are read at a time where targets are wanted of all of them."""

Place = Callable[[Examples], Examples]


class Lazy(Examples):
    """Samples that are gathered or read when they are taken."""

    def __init__(self, rows: np.ndarray, place: Place | None = None) -> None:
        # A frozen value like any other: what it is made of is written once, here.
        vars(self).update(ids=rows, _rows=rows, _place=place)

    if TYPE_CHECKING:
        _rows: np.ndarray
        _place: Place | None

    @abstractmethod
    def _read(self, rows: np.ndarray) -> Examples:
        """Samples by their positions in the whole."""

    @abstractmethod
    def _like(self, rows: np.ndarray, place: Place | None) -> Self:
        """Others of the same whole."""

    def take(self, index: np.ndarray | slice) -> Examples:
        """The samples at these positions, in memory."""
        found = self._read(self._rows[index])
        return found if self._place is None else self._place(found)

    def view(self, index: np.ndarray | slice) -> Examples:
        """The same samples, not read yet."""
        return self._like(self._rows[index], self._place)

    def placed(self, place: Place) -> Self:
        """The same samples, each batch of which is then moved to where it is used."""
        return self._like(self._rows, place)

    @property
    def inputs(self) -> Arrays:
        """Those of all samples, in memory."""
        return self.take(slice(None)).inputs

    @cached_property
    def targets(self) -> Arrays:
        """Those of all samples, without holding the inputs of all."""
        parts = [self.take(slice(start, start + CHUNK)).targets for start in range(0, len(self), CHUNK)]
        return parts[0] if len(parts) == 1 else join(parts)


class Joined(Lazy):
    """The samples of several sets one after another, none of which is copied as a whole."""

    def __init__(
        self, parts: Sequence[Examples], rows: np.ndarray | None = None, place: Place | None = None
    ) -> None:
        ends = np.cumsum([len(part) for part in parts])
        super().__init__(np.arange(ends[-1]) if rows is None else rows, place)
        vars(self).update(parts=tuple(parts), _ends=ends)

    if TYPE_CHECKING:
        parts: tuple[Examples, ...]
        _ends: np.ndarray

    def view(self, index: np.ndarray | slice) -> Examples:
        """The same samples; a set itself where they are all of it, and not read yet where one of the sets is not."""
        rows = self._rows[index]
        used = np.unique(np.searchsorted(self._ends, rows, side="right")).tolist()
        if len(used) == 1 and self._place is None:
            part: Examples = self.parts[used[0]]
            own = rows - (self._ends[used[0]] - len(part))
            whole = np.array_equal(own, np.arange(len(part)))
            return part if whole else part.view(own)
        if any(isinstance(self.parts[position], Lazy) for position in used):
            return self._like(rows, self._place)
        return self.take(index)

    def _like(self, rows: np.ndarray, place: Place | None) -> Joined:
        return Joined(self.parts, rows, place)

    def _read(self, rows: np.ndarray) -> Examples:
        which = np.searchsorted(self._ends, rows, side="right")
        found, order = [], []
        for position in np.unique(which).tolist():
            mine = np.flatnonzero(which == position)
            part = self.parts[position]
            own = rows[mine] - (self._ends[position] - len(part))
            found.append(part.take(_as_slice(own)))
            order.append(mine)
        if len(found) == 1:
            return Examples(found[0].inputs, found[0].targets, rows)
        back = np.argsort(np.concatenate(order))
        inputs, targets = (join([getattr(one, kind) for one in found]) for kind in ("inputs", "targets"))
        return Examples(inputs, targets, np.concatenate([rows[mine] for mine in order])).take(back)


class Stored(Lazy):
    """A data set with `len` and `[index]`, of which a batch is read and collated when it is needed."""

    def __init__(
        self,
        items: Any,
        collate: Callable[[list[Any]], Examples],
        labels: np.ndarray | None = None,
        rows: np.ndarray | None = None,
        place: Place | None = None,
    ) -> None:
        super().__init__(np.arange(len(items)) if rows is None else rows, place)
        vars(self).update(_items=items, _collate=collate, labels=labels)

    if TYPE_CHECKING:
        _items: Any
        _collate: Callable[[list[Any]], Examples]
        labels: np.ndarray | None

    def _like(self, rows: np.ndarray, place: Place | None) -> Stored:
        return Stored(self._items, self._collate, self.labels, rows, place)

    def _read(self, rows: np.ndarray) -> Examples:
        found = self._collate([self._items[int(row)] for row in rows])
        if len(found) != len(rows):
            raise SettingError(f"collate must keep all samples of a batch (got {len(found)} of {len(rows)})")
        return Examples(found.inputs, found.targets, rows)


def _as_slice(rows: np.ndarray) -> np.ndarray | slice:
    """Neighbours as a slice, which is taken without a copy."""
    if len(rows) and np.array_equal(rows, rows[0] + np.arange(len(rows))):
        return slice(int(rows[0]), int(rows[0]) + len(rows))
    return rows


def join(parts: Sequence[Arrays]) -> Arrays:
    """One array, or dict of arrays, after another."""
    if isinstance(parts[0], Mapping):
        return {name: join([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))


def known_targets(examples: Examples) -> np.ndarray | None:
    """The targets of all samples, where they are one array and none of it must be read first."""
    if isinstance(examples, Stored):
        return None if examples.labels is None else examples.labels[examples.ids]
    if isinstance(examples, Joined):
        parts = [known_targets(part) for part in examples.parts]
        found = [part for part in parts if part is not None]
        return np.concatenate(found)[examples.ids] if len(found) == len(parts) else None
    return examples.targets if isinstance(examples.targets, np.ndarray) else None


def is_read(examples: Examples) -> bool:
    """Whether samples are read from a data set batch by batch."""
    if isinstance(examples, Joined):
        return any(is_read(part) for part in examples.parts)
    return isinstance(examples, Stored)
