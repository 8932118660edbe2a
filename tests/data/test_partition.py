"""Splits: disjoint, of the right size, fixed by their seed, and possible whenever the supply allows it."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpmt.data.datasets import Owners
from fedpmt.data.dealing import deal
from fedpmt.data.partition import Kept, by_owner, draw_sizes, owner_positions, partition
from fedpmt.seeds import generator
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.data.partition import Partition

CIFAR = np.repeat(np.arange(10), 5000)


def counts_of(split: Partition, targets: np.ndarray) -> np.ndarray:
    classes = int(targets.max()) + 1
    return np.stack([np.bincount(targets[split.indices(k)], minlength=classes) for k in range(split.devices)])


def check_disjoint(split: Partition, devices: int, samples: int, total: int) -> None:
    positions = np.concatenate([split.indices(device) for device in range(devices)])
    assert (split.devices, split.sizes) == (devices, samples)
    assert len(positions) == devices * samples
    assert len(np.unique(positions)) == devices * samples
    assert positions.min() >= 0
    assert positions.max() < total


@given(
    devices=st.integers(1, 12), samples=st.integers(1, 12), spare=st.integers(0, 20), seed=st.integers(0, 9)
)
@settings(max_examples=40)
def test_iid(devices: int, samples: int, spare: int, seed: int) -> None:
    total = devices * samples + spare
    check_disjoint(partition("iid", None, devices, samples, seed, total=total), devices, samples, total)


@given(
    devices=st.integers(1, 10),
    samples=st.integers(1, 12),
    classes=st.integers(1, 6),
    alpha=st.sampled_from(["1e-6", "0.01", "0.5", "100", "1e6"]),
    spare=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_dirichlet(devices: int, samples: int, classes: int, alpha: str, spare: int, seed: int) -> None:
    """Without spare samples every device after the first must cope with classes that are used up."""
    total = devices * samples + spare
    targets = generator(seed, "test").integers(classes, size=total)
    check_disjoint(partition(f"dirichlet:{alpha}", targets, devices, samples, seed), devices, samples, total)


def test_dirichlet_alpha_sets_the_skew() -> None:
    skewed, even = (
        counts_of(partition(f"dirichlet:{alpha}", CIFAR, 50, 500, 0), CIFAR) for alpha in ("0.05", "1000")
    )
    assert np.median(skewed.max(axis=1)) > 350
    assert even.max() < 90
    # Var of a proportion under Dir(α) over ten classes: 0.1 · 0.9 / (10 α + 1).
    moderate = counts_of(partition("dirichlet:1", CIFAR, 50, 500, 0), CIFAR) / 500
    assert moderate.var() == pytest.approx(0.09 / 11, rel=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_two_classes_on_cifar(seed: int) -> None:
    """The paper's case uses every image: 2 classes x 250 per device, hence 5,000 / 250 = 20 per class."""
    split = partition("classes:2", CIFAR, 100, 500, seed)
    check_disjoint(split, 100, 500, 50_000)
    counts = counts_of(split, CIFAR)
    assert set(np.unique(counts)) == {0, 250}
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert ((counts > 0).sum(axis=0) == 20).all()
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) > 30  # of 45: drawn at random, not in blocks


def test_two_classes_on_mnist_supply() -> None:
    supply = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    targets = np.repeat(np.arange(10), supply)
    counts = counts_of(partition("classes:2", targets, 100, 300, 0), targets)
    assert ((counts > 0).sum(axis=0) == 20).all()
    assert set(np.unique(counts)) == {0, 150}


def check_dealt(counts: np.ndarray, supply: list[int], devices: int, samples: int, classes_each: int) -> None:
    quota, extra = divmod(samples, classes_each)
    assert counts.shape == (devices, len(supply))
    assert (counts.sum(axis=0) <= supply).all()
    for row in counts:
        held = sorted(row[row > 0])
        assert held == [quota] * (classes_each - extra) + [quota + 1] * extra


@st.composite
def tight(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """A supply that one hidden way of dealing uses up to the last sample."""
    classes = draw(st.integers(1, 6))
    classes_each = draw(st.integers(1, classes))
    devices = draw(st.integers(1, 10))
    samples = draw(st.integers(classes_each, 4 * classes_each + 3))
    quota, extra = divmod(samples, classes_each)
    random = generator(draw(st.integers(0, 10_000)), "test")
    skew = random.random(classes) ** 3 + 1e-9
    supply = np.zeros(classes, int)
    for _ in range(devices):
        held = random.choice(classes, classes_each, replace=False, p=skew / skew.sum())
        supply[held] += quota
        supply[held[:extra]] += 1
    return supply.tolist(), devices, samples, classes_each


@given(case=tight(), seed=st.integers(0, 99))
@settings(max_examples=200)
def test_dealing_succeeds_without_a_spare_sample(case: tuple[list[int], int, int, int], seed: int) -> None:
    supply, devices, samples, classes_each = case
    counts = deal(supply, devices, samples, classes_each, generator(seed, "test"))
    assert counts is not None
    check_dealt(counts, supply, devices, samples, classes_each)


def possible(supply: list[int], devices: int, samples: int, classes_each: int) -> bool:
    """Try all totals: n holders, a of them with one sample more; q n + a <= supply, a <= n <= devices."""
    quota, extra = divmod(samples, classes_each)

    @cache
    def rest(label: int, holders: int, larger: int) -> bool:
        if label == len(supply):
            return holders == 0 and larger == 0
        return any(
            rest(label + 1, holders - count, larger - more)
            for count in range(min(devices, holders) + 1)
            for more in range(min(count, larger) + 1)
            if quota * count + more <= supply[label]
        )

    return rest(0, devices * classes_each, devices * extra)


@given(
    supply=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    devices=st.integers(1, 6),
    samples=st.integers(1, 8),
    classes_each=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=200)
def test_dealing_fails_only_where_it_must(
    supply: list[int], devices: int, samples: int, classes_each: int, seed: int
) -> None:
    if classes_each > min(len(supply), samples):
        return
    counts = deal(supply, devices, samples, classes_each, generator(seed, "test"))
    assert (counts is not None) == possible(supply, devices, samples, classes_each)
    if counts is not None:
        check_dealt(counts, supply, devices, samples, classes_each)


@given(
    classes_each=st.integers(1, 5),
    devices=st.integers(1, 8),
    samples=st.integers(5, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_classes(classes_each: int, devices: int, samples: int, seed: int) -> None:
    targets = np.arange(5 * devices * samples) % 5 + 3  # labels need not start at 0
    split = partition(f"classes:{classes_each}", targets, devices, samples, seed)
    check_disjoint(split, devices, samples, len(targets))
    check_dealt(counts_of(split, targets)[:, 3:], [devices * samples] * 5, devices, samples, classes_each)


@pytest.mark.parametrize("spec", ["iid", "iid:replace", "classes:2", "dirichlet:0.5"])
def test_fixed_by_the_seed(spec: str) -> None:
    first, same, other = (partition(spec, CIFAR, 20, 50, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(first.indices(device), same.indices(device)) for device in range(20))
    assert not all(np.array_equal(first.indices(device), other.indices(device)) for device in range(20))
    for device in (-1, 20):
        with pytest.raises(IndexError):
            first.indices(device)


def test_samples_of_a_device_are_mixed() -> None:
    labels = CIFAR[partition("classes:2", CIFAR, 100, 500, 0).indices(0)]
    assert 150 < (np.diff(labels) != 0).sum() < 350


def test_a_million_devices_are_free() -> None:
    split = partition("iid:replace", CIFAR, 1_000_000, 500, 0)
    indices = split.indices(999_999)
    assert indices.shape == (500,)
    assert 0 <= indices.min() <= indices.max() < 50_000
    assert not np.array_equal(indices, split.indices(0))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("idd", "partition = 'idd' is unknown; did you mean 'iid'?"),
        ("iid:replaced", "did you mean 'iid:replace'?"),
        ("iid:2", "is unknown"),
        ("class:2", "did you mean 'classes:N'?"),
        ("", "is unknown"),
        ("classes", "whole number"),
        ("classes:0", "whole number"),
        ("classes:-1", "whole number"),
        ("classes:1.5", "whole number"),
        ("classes:11", "the training set has 10 classes"),
        ("dirichlet", "ALPHA"),
        ("dirichlet:0", "ALPHA"),
        ("dirichlet:-1", "ALPHA"),
        ("dirichlet:nan", "ALPHA"),
        ("dirichlet:inf", "ALPHA"),
        ("dirichlet:x", "ALPHA"),
    ],
)
def test_refused_specs(spec: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        partition(spec, CIFAR, 10, 10, 0)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["iid", "classes:2", "dirichlet:1"])
def test_not_enough_data(spec: str) -> None:
    with pytest.raises(
        SettingError, match="devices = 100 of samples = 500 need 50000 samples, the training set has 4000"
    ):
        partition(spec, CIFAR[:4000], 100, 500, 0)


def test_too_few_classes_or_samples() -> None:
    targets = np.array([0] * 97 + [1, 2, 3])
    with pytest.raises(SettingError, match=r"cannot be met.*hold 1 to 97"):
        partition("classes:2", targets, 10, 10, 0)
    with pytest.raises(SettingError, match="samples = 1 per device are fewer"):
        partition("classes:2", targets, 1, 1, 0)
    with pytest.raises(SettingError, match="at least 1"):
        partition("iid", targets, 0, 1, 0)


@pytest.mark.parametrize("spec", ["classes:2", "dirichlet:1"])
@pytest.mark.parametrize("targets", [None, np.ones(100), np.ones((100, 2), int)])
def test_labels_are_needed(spec: str, targets: np.ndarray | None) -> None:
    with pytest.raises(SettingError, match="one class per sample"):
        partition(spec, targets, 2, 10, 0, total=100)
    assert partition("iid", targets, 2, 10, 0, total=100).sizes == 10


def test_total_must_be_known() -> None:
    with pytest.raises(TypeError):
        partition("iid", None, 2, 10, 0)


@given(devices=st.integers(1, 12), samples=st.integers(1, 30), seed=st.integers(0, 9))
@pytest.mark.parametrize(
    ("spec", "amounts"),
    [
        ("iid", "lognormal:1"),
        ("dirichlet:0.3", "lognormal:2"),
        ("dirichlet:0.3", "free"),
        ("dirichlet:100", "free"),
    ],
)
def test_unequal_amounts_share_out_what_equal_ones_do(
    spec: str, amounts: str, devices: int, samples: int, seed: int
) -> None:
    targets = np.arange(400) % 7
    split = partition(spec, targets, devices, samples, seed, amounts=amounts)
    rows = [split.indices(device) for device in range(devices)]
    sizes = np.broadcast_to(split.sizes, devices)
    assert [len(row) for row in rows] == sizes.tolist()
    assert [split.size(device) for device in range(devices)] == sizes.tolist()
    assert sizes.sum() == devices * samples
    assert sizes.min() >= 1
    assert len(np.unique(np.concatenate(rows))) == devices * samples


def test_amounts_spread_as_they_are_told() -> None:
    """The deviation of log |D_k| is sigma; classes that fall by Dir(α) fall further apart with a smaller α."""
    sizes = np.log(draw_sizes("lognormal:1", 10_000, 1000, 0))
    assert sizes.std() == pytest.approx(1, abs=0.05)
    spread = [
        np.std(partition(f"dirichlet:{alpha}", CIFAR, 100, 500, 0, amounts="free").sizes)
        for alpha in (0.1, 1, 10)
    ]
    assert spread[0] > 2 * spread[1] > 4 * spread[2]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_a_share_for_the_own_test_is_apart(share: float) -> None:
    whole = partition("dirichlet:0.3", CIFAR, 20, 50, 3, amounts="lognormal:1")
    kept = Kept(whole, share, 3)
    for device in range(20):
        train, test = kept.halves(device)
        assert sorted([*train, *test]) == sorted(whole.indices(device))
        assert len(train) == kept.size(device) >= 1
        assert len(test) == min(whole.size(device) - 1, math.ceil(share * whole.size(device)))


def test_owners_are_devices() -> None:
    owners = Owners(("a", "b", "c", "d"), np.array([2, 0, 2, 3, 1, 2]), np.array([], int))
    split = by_owner(owners, 4)
    assert [split.indices(device).tolist() for device in range(4)] == [[1], [4], [0, 2, 5], [3]]
    few = by_owner(owners, 2, seed=1)
    chosen = owner_positions(owners, 2, 1)
    assert [few.indices(device).tolist() for device in range(2)] == [
        np.flatnonzero(owners.train == owner).tolist() for owner in chosen
    ]
    with pytest.raises(SettingError, match="has 4 clients"):
        by_owner(owners, 5)
    with pytest.raises(SettingError, match="client 'd' has no samples"):
        by_owner(owners, 4, kept=np.array([0, 1, 4]))


@pytest.mark.parametrize(
    ("spec", "amounts", "says"),
    [
        ("iid", "free", "amounts = 'free' needs partition = 'dirichlet:ALPHA'"),
        ("classes:2", "lognormal:1", "cannot be combined"),
        ("iid", "lognormal:0", "0 < SIGMA"),
        ("iid", "lognormal:x", "0 < SIGMA"),
        ("iid", "equel", "did you mean 'equal'"),
        ("natural", "equal", "needs samples with owners"),
    ],
)
def test_amounts_that_cannot_be(spec: str, amounts: str, says: str) -> None:
    with pytest.raises(SettingError, match=re.escape(says)):
        partition(spec, CIFAR, 10, 10, 0, amounts=amounts)
