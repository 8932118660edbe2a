from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedpmt.aggregation import CoverageMean
from fedpmt.parts.part import WHOLE, Indices, Mask, Part, Selection

if TYPE_CHECKING:
    from collections.abc import Mapping

FLOATS = st.floats(-4, 4, width=32)
LAYERS = {"l1": (3,), "l2": (2, 2), "l3": (4,)}


def part(trained: Mapping[str, Selection]) -> Part:
    return Part("global", trained, trained, "some")


@st.composite
def rounds(
    draw: st.DrawFn,
) -> tuple[dict[str, np.ndarray], list[tuple[list[int], dict[str, np.ndarray], int]]]:
    """Global weights, and for each device a mask over layers, its weights and its sample count."""
    weights = {name: draw(arrays(np.float32, shape, elements=FLOATS)) for name, shape in LAYERS.items()}
    devices = []
    for _ in range(draw(st.integers(1, 5))):
        mask = [draw(st.integers(0, 1)) for _ in LAYERS]
        local = {name: draw(arrays(np.float32, shape, elements=FLOATS)) for name, shape in LAYERS.items()}
        devices.append((mask, local, draw(st.integers(1, 900))))
    return weights, devices


def folded(
    weights: dict[str, np.ndarray], devices: list[tuple[list[int], dict[str, np.ndarray], int]]
) -> dict[str, np.ndarray]:
    """What becomes of the weights; devices send w_k - w."""
    mean = CoverageMean({name: torch.from_numpy(value) for name, value in weights.items()})
    for mask, local, count in devices:
        trained = {name: WHOLE for name, on in zip(LAYERS, mask, strict=True) if on}
        update = {name: torch.from_numpy(local[name] - weights[name]) for name in trained}
        mean.add(part(trained), update, count)
    return {name: value.numpy() for name, value in mean.result().items()}


@given(rounds())
def test_equation_7_by_device(
    case: tuple[dict[str, np.ndarray], list[tuple[list[int], dict[str, np.ndarray], int]]],
) -> None:
    """w + Σ_k A_k ∘ (w_k - w), A_k[l] = n_k f_k[l] / Σ_k n_k f_k[l], in double precision."""
    weights, devices = case
    result = folded(weights, devices)
    for position, name in enumerate(LAYERS):
        total = sum(count * mask[position] for mask, _, count in devices)
        expected = weights[name].astype(np.float64)
        for mask, local, count in devices:
            share = count * mask[position] / total if total else 0.0
            expected = expected + share * (local[name].astype(np.float64) - weights[name])
        np.testing.assert_allclose(result[name], expected, atol=2e-5)


@given(rounds())
def test_equation_7_by_layer(
    case: tuple[dict[str, np.ndarray], list[tuple[list[int], dict[str, np.ndarray], int]]],
) -> None:
    """Σ_i 1/|S_i+| Σ_{k in S_i+} g_k ∘ Υ^{|I|-i+1}: S_i+ all of depth i or more, |I| = |L|."""
    weights, devices = case
    depths = [1 + sum(mask) % len(LAYERS) for mask, _, _ in devices]  # i of each device
    suffixes = [
        ([int(position >= len(LAYERS) - depth) for position in range(len(LAYERS))], local, 7)
        for depth, (_, local, _) in zip(depths, devices, strict=True)
    ]
    result = folded(weights, suffixes)
    names = list(LAYERS)
    for i in range(1, len(LAYERS) + 1):
        name = names[len(LAYERS) - i]  # layer |I| - i + 1, counted from 1
        members = [local for depth, (_, local, _) in zip(depths, suffixes, strict=True) if depth >= i]
        change = (
            np.mean([local[name].astype(np.float64) - weights[name] for local in members], axis=0)
            if members
            else 0.0
        )
        np.testing.assert_allclose(result[name], weights[name] + change, atol=2e-5)


def test_layer_that_nobody_trained_keeps_its_bits() -> None:
    weights = {"l1": torch.tensor([0.1, -0.0, 3e-41]), "l2": torch.zeros(1)}
    mean = CoverageMean(weights)
    mean.add(part({"l2": WHOLE}), {"l2": torch.ones(1)}, 3)
    result = mean.result()
    assert result["l1"] is weights["l1"]
    assert result["l2"].item() == 1


def test_entry_that_nobody_trained_keeps_its_bits() -> None:
    weights = {"w": torch.tensor([[0.1, -0.0], [3e-41, 7.0]])}
    mean = CoverageMean(weights)
    mean.add(part({"w": Indices((np.array([0]), None))}), {"w": torch.tensor([[1.0, 2.0]])}, 5)
    result = mean.result()["w"]
    assert torch.equal(result[1].view(torch.int32), weights["w"][1].view(torch.int32))
    assert result[0].tolist() == pytest.approx([1.1, 2.0])


def test_training_that_changed_nothing_changes_nothing() -> None:
    weights = {"w": torch.rand(50)}
    mean = CoverageMean(weights)
    for count in (3, 5, 7):
        mean.add(part({"w": WHOLE}), {"w": torch.zeros(50)}, count)
    assert torch.equal(mean.result()["w"], weights["w"])


def test_whole_and_full_index_lists_give_the_same_bits() -> None:
    """A dense cover and a scalar one must not round differently."""
    weights = {"w": torch.rand(6, 4)}
    updates = [torch.rand(6, 4) for _ in range(3)]
    results = []
    for selection in (WHOLE, Indices((np.arange(6), None)), Mask(np.ones((6, 4), dtype=bool))):
        mean = CoverageMean(weights)
        for count, update in zip((3, 10, 7), updates, strict=True):
            sent = update.reshape(-1) if isinstance(selection, Mask) else update
            mean.add(part({"w": selection}), {"w": sent}, count)
        results.append(mean.result()["w"])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    )
)
def test_fill_is_overlap_damped_by_coverage(devices: list[tuple[list[int], int]]) -> None:
    """AGG-F_j - w_j = (Σ_{C_j} a / Σ_S a) (AGG-O_j - w_j), and zero fill counts the others as 0."""
    weights = torch.linspace(-1, 1, 6)
    means = {rule: CoverageMean({"w": weights}, rule) for rule in ("overlap", "fill", "zero")}
    cover, total, zero_sum = np.zeros(6), 0, np.zeros(6)
    for number, (kept, count) in enumerate(devices):
        positions = np.array(sorted(kept))
        values = number + 1 - weights[positions]
        for mean in means.values():
            mean.add(part({"w": Indices((positions,))}), {"w": values}, count)
        cover[kept] += count
        zero_sum[kept] += count * (number + 1)
        total += count
    overlap, fill, zero = (mean.result()["w"].numpy() for mean in means.values())
    np.testing.assert_allclose(fill - weights.numpy(), cover / total * (overlap - weights.numpy()), atol=1e-5)
    np.testing.assert_allclose(zero, zero_sum / total, atol=1e-5)


def test_fold_holds_one_sum_whatever_the_cohort() -> None:
    weights = {"w": torch.zeros(4)}
    mean = CoverageMean(weights)
    for number in range(100):
        mean.add(part({"w": WHOLE}), {"w": torch.full((4,), float(number))}, 1)
    assert mean.result()["w"].tolist() == [49.5] * 4
    assert weights["w"].tolist() == [0.0] * 4


def test_large_tensors_are_folded_in_blocks_to_the_same_bits() -> None:
    """An update that is not contiguous takes the way in one piece: the two must not differ."""
    weights = {"w": torch.rand(600, 1000)}
    updates = [torch.rand(600, 1000) for _ in range(3)]
    blocked, whole = CoverageMean(weights), CoverageMean(weights)
    for count, update in zip((3, 10, 7), updates, strict=True):
        blocked.add(part({"w": WHOLE}), {"w": update}, count)
        whole.add(part({"w": WHOLE}), {"w": update.t().contiguous().t()}, count)
    assert torch.equal(blocked.result()["w"], whole.result()["w"])


def test_changes_say_which_entries_were_trained() -> None:
    weights = {"w": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1)}
    mean = CoverageMean(weights)
    mean.add(
        part({"w": Indices((np.array([1, 3]),)), "b": WHOLE}), {"w": torch.ones(2), "b": torch.ones(2)}, 2
    )
    changes = mean.changes()
    assert set(changes) == {"w", "b"}
    change, covered = changes["w"]
    assert change.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert covered is not None
    assert covered.tolist() == [False, True, False, True]
    assert changes["b"][1] is None  # all of it


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selection", [WHOLE, Indices((np.arange(2),))])
def test_sixteen_bits_are_summed_in_thirty_two(kind: torch.dtype, selection: Selection) -> None:
    """A sum of 600 eighths in 16 bits would stop at 32, or 256; the mean is an eighth for any number of devices."""
    before = {"w": torch.ones(2, dtype=kind), "still": torch.ones(2, dtype=kind)}
    mean = CoverageMean(before)
    for _ in range(600):
        mean.add(part({"w": selection}), {"w": torch.full((2,), 0.125, dtype=kind)}, 3.0)
    after = mean.result()
    assert after["w"].dtype == kind
    assert after["w"].tolist() == [1.125, 1.125]
    assert after["still"] is before["still"]
