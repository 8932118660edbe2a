"""A user's own arrays: what is taken over, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedpmt.data.datasets import from_arrays
from fedpmt.types import SettingError

INPUTS = np.arange(12.0).reshape(4, 3)
TARGETS = np.array([0, 2, 1, 2])


def test_numpy() -> None:
    data = from_arrays((INPUTS, TARGETS), (INPUTS[:2], [0, 3]), name="mine")
    assert (data.name, data.classes, len(data.train), len(data.test)) == ("mine", 4, 4, 2)
    assert data.train.inputs.dtype == np.float32
    assert data.train.targets.dtype == np.int64
    assert data.train.ids.tolist() == [0, 1, 2, 3]


def test_a_name_that_stands_for_other_data_is_refused() -> None:
    with pytest.raises(SettingError, match="name = 'mnist' is the name of a data set"):
        from_arrays((INPUTS, TARGETS), (INPUTS, TARGETS), name="mnist")


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    inputs = torch.arange(12.0, requires_grad=True).reshape(4, 3)
    data = from_arrays((inputs, torch.tensor([0, 1, 1, 0])), (inputs[:1], torch.tensor([1])))
    assert isinstance(data.train.inputs, np.ndarray)
    assert data.train.inputs.tolist() == INPUTS.tolist()
    assert data.classes == 2
    with pytest.raises(SettingError, match="train inputs cannot be read"):
        from_arrays((inputs.bfloat16(), TARGETS), (INPUTS, TARGETS))


def test_regression_and_dicts() -> None:
    inputs = {"tokens": np.ones((4, 7), np.int32), "mask": np.ones((4, 7), bool)}
    test = {name: array[:2] for name, array in inputs.items()}
    data = from_arrays((inputs, np.ones(4)), (test, np.ones(2)))
    assert data.classes is None
    assert data.train.inputs["tokens"].dtype == np.int64
    assert data.train.inputs["mask"].dtype == np.float32
    assert data.train.take(np.array([1])).inputs["tokens"].shape == (1, 7)


def test_bytes_become_floats_as_they_are() -> None:
    pixels = np.full((2, 1, 4, 4), 255, np.uint8)
    data = from_arrays((pixels, np.array([0, 1], np.uint8)), (pixels, [0, 1]))
    assert data.train.inputs.dtype == np.float32
    assert data.train.inputs.max() == 255
    assert data.classes == 2


@pytest.mark.parametrize(
    ("train", "test", "says"),
    [
        ((INPUTS, TARGETS[:3]), (INPUTS, TARGETS), r"train: inputs and targets differ in length \(3, 4\)"),
        (({"a": INPUTS, "b": INPUTS[:2]}, TARGETS), (INPUTS, TARGETS), "differ in length"),
        ((INPUTS, TARGETS), (INPUTS[:0], TARGETS[:0]), "test inputs are empty"),
        ((np.float32(1), TARGETS), (INPUTS, TARGETS), "train inputs are empty"),
        (({}, TARGETS), (INPUTS, TARGETS), "empty dict"),
        ((INPUTS * np.nan, TARGETS), (INPUTS, TARGETS), "not finite"),
        ((INPUTS + 1e300, TARGETS), (INPUTS, TARGETS), "not finite"),
        (
            (INPUTS, np.array([0, np.inf, 1, 2])),
            (INPUTS, TARGETS),
            "train targets hold values that are not finite",
        ),
        ((INPUTS, ["a", "b", "c", "d"]), (INPUTS, TARGETS), "train targets must be numbers"),
        (([[1], [1, 2], [], []], TARGETS), (INPUTS, TARGETS), "train inputs cannot be read"),
        ((INPUTS, TARGETS), (INPUTS[:, :2], TARGETS), "inputs do not agree: float32 x 3 and float32 x 2"),
        ((INPUTS, TARGETS), (INPUTS, TARGETS * 1.0), "targets do not agree: int64 and float32"),
        (({"a": INPUTS}, TARGETS), ({"b": INPUTS}, TARGETS), "a: float32 x 3 and b: float32 x 3"),
    ],
)
def test_refused(train: tuple[Any, Any], test: tuple[Any, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says) as caught:
        from_arrays(train, test)
    assert "\n" not in str(caught.value)
