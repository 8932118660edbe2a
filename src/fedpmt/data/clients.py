"""A user's own samples: arrays, dicts, data frames, Hugging Face and torch data sets, of one owner or of many.

Kinds are known by what they can do, so that neither torch nor pandas is loaded for those who don't use them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fedpmt.data.datasets import (
    ARRAYS,
    LoadedDataset,
    Owners,
    check_alike,
    clean_arrays,
    find_classes,
    make_examples,
)
from fedpmt.data.lazy import Joined, Lazy, Stored
from fedpmt.types import Examples, SettingError

if TYPE_CHECKING:
    from fedpmt.types import Arrays

LABELS = ("label", "labels", "target", "targets", "y")
"""Columns that are taken for the targets where the user names none; the first that there is."""

NOTHING = Examples(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
"""The test set of a user who gives none."""

Source: TypeAlias = Any
"""(inputs, targets), a dict of arrays, a data frame, or a Hugging Face or torch data set."""

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Makes a batch, (inputs, targets) or a dict with the targets in it, of a list of items."""


@dataclass(frozen=True)
class Reader:
    """How a user's samples are to be read."""

    client: str | Sequence[Any] | None = None  # the column that names the owner, or the owner of each sample
    label: str | None = None  # the column of targets
    collate: Collate | None = None

    def examples(self, what: str, source: Source) -> Examples:
        """Samples of any kind; `what` is what the user calls them."""
        columns = columns_of(source)
        if columns is None:
            if _is_pair(source):
                return make_examples(what, *source)
            if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
                return self._stored(what, source)
            raise SettingError(
                f"{what} must be (inputs, targets), a dict of arrays, a data frame or a data set "
                f"with len and [index] (got {type(source).__name__})"
            )
        if self.collate is not None:
            return self._stored(what, source if hasattr(source, "column_names") else _Rows(source, columns))
        label = self._label_of(what, columns)
        inputs = [name for name in columns if name not in (label, self._column)]
        if not inputs:
            raise SettingError(f"{what} has no column but '{label}', so nothing to learn from")
        return make_examples(what, _inputs_of(source, what, inputs), _column(source, label))

    def owners(self, what: str, source: Source, count: int) -> np.ndarray:
        """The owner of each sample, as the user calls them."""
        if isinstance(self.client, str):
            if columns_of(source) is None:
                raise SettingError(
                    f"client = '{self.client}' names a column, which {what} of this kind lacks: "
                    "give a list with the owner of each sample"
                )
            found = np.asarray(_column(source, self.client))
        else:
            found = np.asarray(self.client)
        if found.shape != (count,):
            raise SettingError(
                f"client must name one owner for each of the {count} samples (got shape {found.shape})"
            )
        return found.astype(str)

    @property
    def _column(self) -> str | None:
        return self.client if isinstance(self.client, str) else None

    def _label_of(self, what: str, columns: Sequence[str]) -> str:
        if self.label is not None:
            if self.label not in columns:
                raise SettingError.unknown(f"{what}: label", self.label, columns)
            return self.label
        found = next((name for name in LABELS if name in columns), None)
        if found is None:
            raise SettingError(
                f"{what} has no column {' or '.join(LABELS)}: name the one of the targets with label= "
                f"(its columns: {', '.join(map(str, columns))})"
            )
        return found

    def _stored(self, what: str, source: Any) -> Stored:
        if not len(source):
            raise SettingError(f"{what} has no samples")
        labels = getattr(source, "targets", None)
        known = None
        if labels is not None and not callable(labels) and len(labels) == len(source):
            cleaned = clean_arrays(f"{what} targets", labels, True)
            known = cleaned if isinstance(cleaned, np.ndarray) else None
        return Stored(source, partial(self._batch, what), known)

    def _batch(self, what: str, items: list[Any]) -> Examples:
        """A batch of a data set's items."""
        if self.collate is None:
            from torch.utils.data import default_collate

            try:
                batch = default_collate(items)
            except (TypeError, RuntimeError) as error:
                raise SettingError(
                    f"{what}: items cannot be put together as a batch; give collate= "
                    f"({' '.join(str(error).split())[:100]})"
                ) from error
        else:
            batch = self.collate(items)
        if isinstance(batch, Mapping):
            label = self._label_of(f"{what}: a batch", list(batch))
            rest = {name: one for name, one in batch.items() if name not in (label, self._column)}
            batch = (next(iter(rest.values())) if len(rest) == 1 else rest), batch[label]
        if not _is_pair(batch):
            raise SettingError(
                f"{what}: a batch must be (inputs, targets) or a dict (got {type(batch).__name__})"
            )
        return make_examples(what, *batch)


@dataclass(frozen=True)
class _Rows:
    """A data frame or a dict of columns, row by row."""

    source: Any
    columns: Sequence[str]

    def __len__(self) -> int:
        return len(_column(self.source, self.columns[0]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: _column(self.source, name)[index] for name in self.columns}


def columns_of(source: Source) -> list[str] | None:
    """The names of a source's columns; None where it has none."""
    if isinstance(source, Mapping):
        return list(source)
    if hasattr(source, "iloc"):
        return [str(name) for name in source.columns]
    names = getattr(source, "column_names", None)
    return list(names) if isinstance(names, list | tuple) else None


def _column(source: Source, name: str) -> Any:
    return source[name].to_numpy() if hasattr(source, "iloc") else source[name]


def _inputs_of(source: Source, what: str, names: Sequence[str]) -> Arrays:
    """One array of a single column or of a data frame's numbers; else a dict of arrays."""
    if not hasattr(source, "iloc"):
        found = {name: _column(source, name) for name in names}
        return found[names[0]] if len(names) == 1 else found
    texts = next((name for name in names if source[name].dtype.kind not in "fiub"), None)
    if texts is not None:
        raise SettingError(f"{what}: column '{texts}' must be numbers; give collate= to make tensors of rows")
    return source[list(names)].to_numpy(dtype=np.float32)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def read_dataset(train: Source, test: Source | None, reader: Reader) -> LoadedDataset:
    """One set of samples for all devices, to be split; by owner where the reader knows the owners."""
    columns = columns_of(train)
    if isinstance(reader.client, str) and columns is not None and reader.client not in columns:
        raise SettingError.unknown("train: client", reader.client, columns)
    read, tested = reader.examples("train", train), None if test is None else reader.examples("test", test)
    owners = None
    if reader.client is not None:
        of_train = reader.owners("train", train, len(read))
        names, positions = np.unique(of_train, return_inverse=True)
        of_test = np.full(0 if tested is None else len(tested), -1)
        if tested is not None and reader._column is not None and reader._column in (columns_of(test) or ()):
            theirs = reader.owners("test", test, len(tested))
            found = np.searchsorted(names, theirs).clip(max=len(names) - 1)
            of_test = np.where(names[found] == theirs, found, -1)
        owners = Owners(tuple(names.tolist()), positions, of_test)
    return _loaded(read, tested, owners)


def read_clients(clients: Source, test: Source | None, reader: Reader) -> LoadedDataset:
    """Samples of many clients, each with its own.

    Args:
        clients: A mapping or a sequence of clients' samples; or one set with owners, where the reader knows them.
        test: A common test set, or a mapping of clients' own; None where devices hold out some of their samples.
        reader: How to read them.
    """
    if reader.client is not None:
        return read_dataset(clients, test, reader)
    if not isinstance(clients, Mapping | Sequence) or isinstance(clients, str):
        raise SettingError(
            f"clients must be a mapping or a sequence of clients' samples, or one set with client= "
            f"(got {type(clients).__name__})"
        )
    named = dict(clients) if isinstance(clients, Mapping) else dict(enumerate(clients))
    if not named:
        raise SettingError("clients are empty")
    names = tuple(map(str, named))
    if len(set(names)) != len(names):
        raise SettingError("clients must have different names")
    parts = [
        reader.examples(f"client '{name}'", one) for name, one in zip(names, named.values(), strict=True)
    ]
    for name, part in zip(names, parts, strict=True):
        check_alike(f"client '{names[0]}'", parts[0], f"client '{name}'", part)
    of_train = np.repeat(np.arange(len(names)), [len(part) for part in parts])
    tested: Examples | None = None
    of_test = np.full(0, -1)
    if isinstance(test, Mapping) and set(map(str, test)) & set(names) and not _is_table(test):
        unknown = next((str(name) for name in test if str(name) not in names), None)
        if unknown is not None:
            raise SettingError.unknown("test: client", unknown, names)
        own = {
            names.index(str(name)): reader.examples(f"test of '{name}'", one) for name, one in test.items()
        }
        for position, part in own.items():
            check_alike(f"client '{names[0]}'", parts[0], f"test of '{names[position]}'", part)
        tested = Joined(list(own.values()))
        of_test = np.repeat(list(own), [len(part) for part in own.values()])
    elif test is not None:
        tested = reader.examples("test", test)
        of_test = np.full(len(tested), -1)
    return _loaded(Joined(parts), tested, Owners(names, of_train, of_test))


def _is_table(source: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a dict of arrays rather than of clients."""
    return all(hasattr(one, "shape") for one in source.values())


def _loaded(train: Examples, test: Examples | None, owners: Owners | None) -> LoadedDataset:
    if test is not None:
        check_alike("train", train, "test", test)
    classes = find_classes(train, test)
    return LoadedDataset(ARRAYS, train, NOTHING if test is None else test, classes, owners)


def mean_size(dataset: LoadedDataset, held_out: float) -> int:
    """The mean |D_k| of a data set with owners, but for what devices keep for their own test."""
    owners = dataset.owners
    assert owners is not None
    return max(1, round((1 - held_out) * len(dataset.train) / len(owners.names)))


def fingerprint(dataset: LoadedDataset) -> str:
    """Digest all samples in memory; of data sets that are read, their number and the first and last item."""
    digest = hashlib.sha256()
    if dataset.owners is not None:
        digest.update("\0".join(dataset.owners.names).encode())
    for examples in (dataset.train, dataset.test):
        for part in _parts(examples):
            digest.update(str(len(part)).encode())
            ends = part if not isinstance(part, Lazy) else part.take(np.array([0, len(part) - 1]))
            for kind in (ends.inputs, ends.targets):
                for name, array in sorted(kind.items()) if isinstance(kind, Mapping) else [("", kind)]:
                    digest.update(f"{name} {array.shape} {array.dtype}".encode())
                    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _parts(examples: Examples) -> list[Examples]:
    whole = examples.parts if isinstance(examples, Joined) else [examples]
    return [part for part in whole if len(part)]


def as_values(dataset: LoadedDataset) -> LoadedDataset:
    """The same samples where whole numbers are values to be predicted, and no classes."""
    return replace(dataset, classes=None)
