"""Data that no device owns: where it comes from, how much of it there is, and that no device holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_files import write_idx
from torch import nn

from fedpmt import api
from fedpmt.data.datasets import from_arrays, load
from fedpmt.data.federated import federate, federate_dataset
from fedpmt.data.partition import partition as split
from fedpmt.data.public import NO_LABEL, hold_out
from fedpmt.data.registry import with_samples
from fedpmt.data.sets import embedded
from fedpmt.data.spec import parse_public, public_spellings
from fedpmt.methods.base import Traits
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.registry import name_of
from fedpmt.seeds import generator
from fedpmt.settings import resolve
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {"partition_seed": 0, "devices": 8, "samples": 20, "data_dir": None}


@dataclass(frozen=True)
class Needy(FedAvg):
    """A method that needs both kinds of data and does nothing with them."""

    @property
    def traits(self) -> Traits:
        return Traits(needs_public=True, needs_validation=True)


NEEDY = name_of(Needy())


@given(st.floats(0.01, 0.6), st.floats(0, 0.3), st.integers(20, 500), st.integers(0, 5))
def test_what_is_held_out_is_apart_from_the_rest(
    share: float, labelled: float, total: int, seed: int
) -> None:
    rows = hold_out(f"holdout:{share}", labelled, total, seed)
    if rows is None:
        assert round(share * total) + round(labelled * total) == 0
        return
    assert (len(rows.public), len(rows.validation)) == (round(share * total), round(labelled * total))
    together = np.concatenate([rows.kept, rows.public, rows.validation])
    assert sorted(together.tolist()) == list(range(total))


@pytest.mark.parametrize("partition", ["iid", "classes:2", "dirichlet:0.5", "iid:replace"])
def test_no_device_holds_public_or_validation_samples(partition: str) -> None:
    data = federate("embedded", partition=partition, public="holdout:0.5", validation=0.1, **SIZES)
    assert data.public is not None
    assert data.validation is not None
    assert (len(data.public), len(data.validation)) == (2000, 400)
    held = {int(one) for device in range(8) for one in data.shard(device).ids}
    assert not held & ({*data.public.ids.tolist()} | {*data.validation.ids.tolist()})
    assert set(data.public.targets.tolist()) == {NO_LABEL}
    train = data.training_set()
    assert train is not None
    np.testing.assert_array_equal(train.targets[data.validation.ids], data.validation.targets)
    # A shard by rows is the shard, and its labels are its own.
    np.testing.assert_array_equal(train.take(data.rows(3)).inputs, data.shard(3).inputs)  # type: ignore[arg-type]
    counts = data.label_counts(3)
    assert counts is not None
    np.testing.assert_array_equal(counts, np.bincount(data.shard(3).targets, minlength=10))


def test_without_any_the_split_is_what_it_was() -> None:
    """Devices share the whole training set, by the same draw as where nobody has heard of public data."""
    plain = federate("embedded", partition="iid", **SIZES)
    assert plain.public is plain.validation is None
    train = plain.training_set()
    assert train is not None
    drawn = split("iid", train.targets, SIZES["devices"], SIZES["samples"], SIZES["partition_seed"])
    some = federate("embedded", partition="iid", public="holdout:0.1", **SIZES)
    for device in range(SIZES["devices"]):
        np.testing.assert_array_equal(plain.shard(device).ids, train.ids[drawn.indices(device)])
        assert plain.shard(device).ids.tolist() != some.shard(device).ids.tolist()


@pytest.mark.usefixtures("small_files")
def test_another_data_set_is_scaled_as_the_task_is(tmp_path: Path) -> None:
    """The net sees a byte of either set as the same number, else public data would look like another sensor's."""
    for name in ("mnist", "fashion-mnist"):
        write_idx(tmp_path / name)
    sizes = {**SIZES, "devices": 2, "samples": 2, "data_dir": tmp_path}
    data = federate("fashion-mnist", partition="iid", public="mnist:3", **sizes)
    assert data.public is not None
    assert len(data.public) == 3
    values = (np.arange(256) / 255 - 0.2860) / 0.3530
    assert np.abs(data.public.inputs.reshape(-1, 1) - values).min(axis=1).max() < 1e-6


@pytest.mark.usefixtures("small_files")
def test_public_data_of_named_sets_has_the_bits_it_always_had(tmp_path: Path) -> None:
    """Records of runs rest on them."""
    write_idx(tmp_path / "fashion-mnist")
    sizes = {**SIZES, "devices": 2, "samples": 2, "data_dir": tmp_path, "partition": "iid"}
    made = federate("embedded", public="generated:9", **sizes).public
    taken = federate("embedded", public="holdout:0.1", **sizes).public
    named = federate("fashion-mnist", public="embedded:9", **sizes).public
    assert made is not None
    assert taken is not None
    assert named is not None
    noise = generator(0, "public/noise").standard_normal((9, 1, 28, 28), dtype=np.float32)
    np.testing.assert_array_equal(made.inputs, noise)
    rows = np.sort(generator(0, "public/holdout").permutation(4000)[:400])
    np.testing.assert_array_equal(taken.inputs, load("embedded", None).train.inputs[rows])
    rows = np.sort(generator(0, "public/draw").permutation(4000)[:9])
    pixels = embedded.read()[0][rows, None].astype(np.int64)
    table = ((np.arange(256) / 255 - 0.2860) / 0.3530).astype(np.float32)
    np.testing.assert_array_equal(named.inputs, table[pixels])


def test_noise_has_the_inputs_shape_and_the_scale_they_are_standardised_to() -> None:
    data = federate("embedded", partition="iid", public="generated:200", **SIZES)
    assert data.public is not None
    assert data.public.inputs.shape == (200, 1, 28, 28)
    assert abs(data.public.inputs.mean()) < 0.02
    assert abs(data.public.inputs.std() - 1) < 0.02


def test_synthetic_data_is_drawn_afresh() -> None:
    data = federate("synthetic", partition="iid", public="holdout:0.1", validation=0.05, **SIZES)
    assert data.public is not None
    assert data.validation is not None
    assert (len(data.public), len(data.validation)) == (16, 8)
    drawn = np.concatenate([data.shard(device).inputs for device in range(8)] + [data.test.inputs])
    for one in (*data.public.inputs, *data.validation.inputs):
        assert not (drawn == one).all(axis=1).any()


def test_a_users_arrays_are_held_out_too() -> None:
    arrays = (np.arange(40.0)[:, None], np.arange(40) % 2)
    data = federate_dataset(
        from_arrays(arrays, arrays),
        partition="iid",
        partition_seed=0,
        devices=4,
        samples=9,
        public="holdout:0.1",
    )
    assert data.public is not None
    held = np.concatenate([data.shard(device).inputs for device in range(4)])
    assert sorted(np.concatenate([held, data.public.inputs])[:, 0].tolist()) == list(range(40))


def test_methods_that_need_some_get_a_tenth_and_devices_a_little_less() -> None:
    filled = api.with_public({"data": "embedded"}, [NEEDY])
    settings = resolve(filled)
    assert (settings.public, settings.validation, settings.samples) == ("holdout:0.1", 0.01, 71)
    assert (
        resolve({"data": "mnist", "public": "holdout:0.1"}).samples == 300
    )  # half of it is nobody's as it is
    assert api.with_public({"public": "generated:9"}, [NEEDY])["public"] == "generated:9"
    assert "public" not in api.with_public({}, ["fedavg"])


def test_compared_methods_hold_the_same_data_and_the_record_has_the_sizes() -> None:
    runs = api.compare([Needy(), "fedpmt"], rounds=1, devices=5, cohort=5, samples=10)
    for run in runs:
        assert run.result is not None
        assert (run.result.public_samples, run.result.validation_samples) == (400, 40)
    data = [api.paper_problem_of(api.settings_of({**run.settings, "method": "fedavg"})).data for run in runs]
    alone = api.paper_problem_of(resolve({"method": "fedpmt", "devices": 5, "cohort": 5, "samples": 10})).data
    for device in range(5):
        ids = [one.shard(device).ids.tolist() for one in (*data, alone)]
        assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"public": "holdout"}, "public must be holdout:SHARE with 0 < SHARE < 1 (got 'holdout')"),
        ({"public": "holdout:1.5"}, "public must be holdout:SHARE with 0 < SHARE < 1 (got 'holdout:1.5')"),
        ({"public": "hold:0.1"}, "public = 'hold:0.1' is unknown"),
        ({"public": "none:3"}, "public = 'none' takes no number (got 'none:3')"),
        ({"public": "generated"}, "public must be generated:N"),
        ({"public": "mnist:2.5"}, "public must be mnist:N"),
        ({"public": "holdout:0.7", "validation": 0.4}, "leave no samples for the devices"),
        ({"validation": 1.0}, "validation = '1.0' is refused"),
        ({"validation": "much"}, "validation = 'much' is refused"),
        (
            {"public": "mnist"},
            "devices hold images of embedded themselves (allowed: none, holdout:SHARE, generated:N, fashion-mnist:N)",
        ),
        (
            {"public": "cifar10"},
            "its inputs have another size than those of data = 'embedded' "
            "(allowed: none, holdout:SHARE, generated:N, fashion-mnist:N)",
        ),
        (
            {"public": "mnist:9", "data": "cifar10", "task": "cnn-cifar10"},
            "its inputs have another size than those of data = 'cifar10'",
        ),
        ({"public": "cifar10", "data": "cifar10", "task": "cnn-cifar10"}, "devices hold images of cifar10"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        api.check(resolve(given))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_whatever_is_accepted_is_also_offered() -> None:
    with pytest.raises(SettingError, match="did you mean 'fashion-mnist:N'"):
        resolve({"public": "fashion:9"})
    for offered in public_spellings():
        parse_public(offered.replace("SHARE", "0.1").replace(":N", ":9"))
    for name in with_samples():
        assert f"{name}:N" in public_spellings()


def test_a_method_without_the_data_it_needs_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"public = .none.: \S*Needy needs public data \(e.g. holdout:0.1\)"
    ):
        api.run(Needy(), rounds=1, public="none")


def test_another_data_set_beside_a_users_own_arrays_is_refused(tmp_path: Path) -> None:
    """They may be the very images that devices hold, and nobody knows how these were scaled."""
    held = load("embedded", None).train.take(np.arange(40))
    arrays = (held.inputs, held.targets)
    refusal = (
        "public = 'embedded:9' is refused: it can be neither told apart from data = 'arrays' nor scaled alike "
        r"\(allowed: none, holdout:SHARE, generated:N\)"
    )
    with pytest.raises(SettingError, match=refusal):
        federate_dataset(
            from_arrays(arrays, arrays), partition="iid", public="embedded:9", **{**SIZES, "samples": 5}
        )
    out = tmp_path / "run"
    with pytest.raises(SettingError, match=refusal):
        api.run(
            "feddf", model=nn.Linear(9, 2), train=arrays, test=arrays, public="embedded:9", rounds=1, out=out
        )
    assert not out.exists()


def test_noise_beside_a_users_own_arrays_is_scaled_as_they_are() -> None:
    """Channel by channel: bytes here, fractions there, and one that is always the same."""
    drawn = np.random.default_rng(0).normal((129, 0.5, 7), (74, 0.1, 0), (500, 4, 3)).astype(np.float32)
    images = drawn.transpose(0, 2, 1)[..., None]
    arrays = (images, np.arange(500) % 2)
    data = federate_dataset(from_arrays(arrays, arrays), partition="iid", public="generated:2000", **SIZES)
    assert data.public is not None
    made = data.public.inputs
    assert made.shape == (2000, 3, 4, 1)
    assert made.dtype == np.float32
    for moment in (np.mean, np.std):
        ours, theirs = (moment(inputs, axis=(0, 2, 3)) for inputs in (images, made))
        np.testing.assert_allclose(theirs, ours, rtol=0.05, atol=1e-5)
