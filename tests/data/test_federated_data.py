"""Data as a simulation sees it: named sets, own arrays and synthetic fleets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from made_files import write_idx

from fedpmt.data import federate, federate_dataset
from fedpmt.data.datasets import from_arrays
from fedpmt.data.sets import synthetic
from fedpmt.seeds import generator
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.data import FederatedData


def embedded(**changes: Any) -> FederatedData:
    values = {
        "partition": "iid",
        "partition_seed": 0,
        "devices": 50,
        "samples": 80,
        "data_dir": None,
        **changes,
    }
    return federate("embedded", **values)


def fleet(name: str = "synthetic", **changes: Any) -> FederatedData:
    values = {
        "partition": "iid",
        "partition_seed": 0,
        "devices": 100,
        "samples": 40,
        "data_dir": None,
        **changes,
    }
    return federate(name, **values)


def test_embedded_spread_over_a_fleet() -> None:
    data = embedded(partition="classes:2")
    assert (data.name, data.classes, data.devices, len(data.test)) == ("embedded", 10, 50, 1000)
    assert data.input_shape == (1, 28, 28)
    ids = []
    for device in range(50):
        shard = data.shard(device)
        counts = data.label_counts(device)
        assert counts is not None
        assert np.array_equal(counts, np.bincount(shard.targets, minlength=10))
        assert sorted(counts)[-2:] == [40, 40]
        assert len(shard) == data.samples(device) == 80
        assert shard.inputs.shape == (80, 1, 28, 28)
        ids += shard.ids.tolist()
    assert sorted(ids) == list(range(4000))


def test_inputs_take_the_shape_asked_for() -> None:
    assert embedded(input_shape=(784,)).input_shape == (784,)
    with pytest.raises(SettingError, match="has inputs of 1 x 28 x 28, but 3 x 32 x 32 are needed"):
        embedded(input_shape=(3, 32, 32))


@pytest.mark.usefixtures("small_files")
def test_files_from_a_folder(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    data = federate(
        "mnist",
        partition="iid",
        partition_seed=0,
        devices=4,
        samples=5,
        data_dir=tmp_path,
        input_shape=(1, 28, 28),
    )
    assert len(data.shard(3)) == 5


def test_own_arrays() -> None:
    inputs = {"a": np.arange(20.0).reshape(10, 2), "b": np.arange(10)}
    test = {name: array[:3] for name, array in inputs.items()}
    data = federate_dataset(
        from_arrays((inputs, np.ones(10)), (test, np.ones(3))),
        partition="iid",
        partition_seed=1,
        devices=2,
        samples=5,
    )
    assert data.classes is None
    assert data.label_counts(0) is None
    assert data.input_shape == {"a": (2,), "b": ()}
    shard = data.shard(1)
    assert shard.inputs["b"].tolist() == shard.ids.tolist()
    with pytest.raises(SettingError, match="one class per sample"):
        federate_dataset(
            from_arrays((inputs, np.ones(10)), (test, np.ones(3))),
            partition="classes:2",
            partition_seed=1,
            devices=2,
            samples=5,
        )


def test_targets_may_be_dicts() -> None:
    inputs, targets = np.ones((6, 2)), {"start": np.arange(6), "end": np.arange(6)}
    data = federate_dataset(
        from_arrays((inputs, targets), (inputs, targets)),
        partition="iid",
        partition_seed=0,
        devices=2,
        samples=3,
    )
    assert data.label_counts(0) is None
    assert data.shard(0).targets["end"].tolist() == data.shard(0).ids.tolist()


def test_refused() -> None:
    with pytest.raises(SettingError, match="data = 'mnst' is unknown; did you mean 'mnist'"):
        fleet("mnst")
    with pytest.raises(SettingError, match="need 4080 samples, the training set has 4000"):
        embedded(devices=51)
    with pytest.raises(SettingError, match="partition = 'classes:2' does not apply to data = 'synthetic'"):
        fleet(partition="classes:2")
    with pytest.raises(SettingError, match="must be >= 1"):
        fleet(devices=0)
    data = embedded()
    for device in (-1, 50):
        with pytest.raises(IndexError):
            data.samples(device)
        with pytest.raises(IndexError):
            data.shard(device)
        with pytest.raises(IndexError):
            fleet(devices=50).shard(device)


@pytest.mark.parametrize(
    "name",
    [
        "synthetic:",
        "synthetic:1",
        "synthetic:1,2,3",
        "synthetic:-1,1",
        "synthetic:1,nan",
        "synthetic:inf,1",
        "synthetic:a,b",
    ],
)
def test_refused_synthetic(name: str) -> None:
    with pytest.raises(SettingError, match="data must be synthetic:ALPHA,BETA"):
        fleet(name)


def test_synthetic_follows_its_definition() -> None:
    """The lines of the module's docstring, written out for device 7 of a fleet with α = 0.5 and β = 2."""
    data = fleet("synthetic:0.5,2", partition_seed=3, input_shape=(3, 4))
    own = generator(3, "synthetic/device", None, 7)
    u, b_mean = np.sqrt(0.5) * own.standard_normal(), np.sqrt(2) * own.standard_normal()
    weights = u + own.standard_normal((10, 12))
    bias = u + own.standard_normal(10)
    centre = b_mean + own.standard_normal(12)
    noise = generator(3, "synthetic/train", None, 7).standard_normal((40, 12))
    inputs = centre + noise * np.sqrt(np.arange(1, 13) ** -1.2)
    shard = data.shard(7)
    assert shard.inputs.dtype == np.float32
    assert np.allclose(shard.inputs, inputs.reshape(40, 3, 4), atol=1e-5)
    assert shard.targets.tolist() == np.argmax(inputs @ weights.T + bias, axis=1).tolist()
    assert shard.ids.tolist() == list(range(280, 320))


def test_synthetic_is_fixed_by_its_seed() -> None:
    first, same, other = fleet(partition_seed=1), fleet(partition_seed=1), fleet(partition_seed=2)
    assert np.array_equal(first.shard(5).inputs, same.shard(5).inputs)
    assert np.array_equal(first.test.inputs, same.test.inputs)
    assert not np.array_equal(first.shard(5).inputs, other.shard(5).inputs)
    assert not np.array_equal(first.shard(5).inputs, first.shard(6).inputs)
    counts = first.label_counts(5)
    assert counts is not None
    assert counts.sum() == first.samples(5) == 40
    assert len(counts) == first.classes == 10


@pytest.mark.parametrize("devices", [1, 3, 100, 1_000_000])
def test_synthetic_test_set(devices: int) -> None:
    """A fleet of a million costs no more than one of a hundred: the test set draws on a hundred devices."""
    data = fleet(devices=devices)
    assert data.test.inputs.shape == (1000, 60)
    assert len(np.unique(data.test.ids)) == 1000
    assert data.input_shape == synthetic.INPUT_SHAPE
    shard = data.shard(devices - 1)
    # Fresh samples: none of the test set is one that a device trains on.
    assert not (data.test.inputs[:, None, 0] == data.shard(0).inputs[None, :, 0]).any()
    assert shard.ids[-1] == devices * 40 - 1


def test_test_samples_come_from_their_device() -> None:
    """Three devices share the thousand as 334, 333 and 333; each part lies around its device's centre."""
    data = fleet(devices=3, samples=2000)
    parts = np.split(data.test.inputs, [334, 667])
    for device, part in enumerate(parts):
        assert np.allclose(part.mean(axis=0), data.shard(device).inputs.mean(axis=0), atol=0.3)


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
def test_arrays_that_are_refused(train: tuple[Any, Any], test: tuple[Any, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says) as caught:
        from_arrays(train, test)
    assert "\n" not in str(caught.value)
