from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from fedpmt.aggregation import CoverageMean, Stretch
from fedpmt.methods.averaging import Averaged, MeanFold, Normalise
from fedpmt.methods.base import Server
from fedpmt.models.layered import layered
from fedpmt.parts.depth import full
from fedpmt.parts.part import WHOLE, Indices, Mask, Part, Selection
from fedpmt.training.messages import UPDATE, Chance, Reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.aggregation import Rule

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


@pytest.mark.parametrize("rule", ["overlap", "fill", "zero"])
def test_one_reply_alone_is_folded_to_the_same_bits(rule: Rule) -> None:
    """Compiled code takes such a step in one pass; an update that is not contiguous takes the other way."""
    weights = {"a": torch.randn(30, 40), "b": torch.randn(40, 30)}
    once, apart = CoverageMean(weights, rule), CoverageMean(weights, rule)
    for name, weight, discount in (("a", 3, 0.7), ("b", 10, 1.0)):
        update = torch.randn(weights[name].shape)
        once.add(part({name: WHOLE}), {name: update}, weight, discount=discount)
        apart.add(part({name: WHOLE}), {name: update.t().contiguous().t()}, weight, discount=discount)
    ours, theirs = once.result(), apart.result()
    assert all(torch.equal(ours[name], theirs[name]) for name in weights)
    assert not torch.equal(ours["a"], weights["a"])


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


NETS = layered(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)))
FIRST, LAST = "0.weight", "1.weight"
DEEP, SHALLOW = part({FIRST: WHOLE, LAST: WHOLE}), part({LAST: WHOLE})


def answer(trained: Part, change: float, samples: int, steps: int, chances: tuple[Chance, ...] = ()) -> Reply:
    update = {name: torch.full((1, 1), change) for name in trained.trained}
    return Reply(0, 0, trained, samples, {UPDATE: update}, steps=steps, chances=chances)


def mean_of(replies: list[Reply], normalise: Normalise, momentum: float = 0.0) -> tuple[float, float]:
    """The change of the first and the last layer, from weights of zero."""
    state = Averaged(NETS.structure, {name: torch.zeros(1, 1) for name in (FIRST, LAST)})
    fold = MeanFold(state, "overlap", "samples", normalise=normalise, momentum=momentum)
    for reply in replies:
        fold.add(reply)
    tensors = fold.finish(Server(None)).state.tensors  # type: ignore[arg-type]
    return float(tensors[FIRST]), float(tensors[LAST])


def test_changes_per_step_by_hand() -> None:
    """Changes -2 in 2 steps of 10 samples, all layers; -3 in 6 steps of 30, the last alone.

    Last layer: p = 1/4, 3/4, τ_eff = 5, and 5 (1/4 (-2 / 2) + 3/4 (-3 / 6)) = -3.125; the plain mean is -2.75.
    The first is the first device's own. With momentum 0.5 the steps are 1 + 1.5 = 2.5 and
    1 + 1.5 + 1.75 + 1.875 + 1.9375 + 1.96875 = 10.03125: 8.1484375 (1/4 (-2 / 2.5) + 3/4 (-3 / 10.03125)) = -3.4573..
    """
    replies = [answer(DEEP, -2.0, 10, 2), answer(SHALLOW, -3.0, 30, 6)]
    assert mean_of(replies, "none") == pytest.approx((-2.0, -2.75))
    assert mean_of(replies, "steps") == pytest.approx((-2.0, -3.125))
    assert mean_of(replies[::-1], "steps") == pytest.approx((-2.0, -3.125))
    assert mean_of(replies, "draws") == mean_of(replies, "steps")  # nothing is drawn
    assert mean_of(replies, "steps", momentum=0.5)[1] == pytest.approx(-3.4573, abs=1e-4)


def test_inverse_probabilities_by_hand() -> None:
    """The second device trains the first layer in one round of four: then it counts four times, else as no change.

    Weights 10 and 30: (10 (-2) + 30 · 4 (-3)) / 40 = -9.5, and 10 (-2) / 40 = -0.5; 1/4 (-9.5) + 3/4 (-0.5) = -2.75 is
    the mean of devices that always train it.
    """
    chances = (Chance(0.75, SHALLOW, 2), Chance(0.25, DEEP, 2))
    first = answer(DEEP, -2.0, 10, 2)
    deep = mean_of([first, answer(DEEP, -3.0, 30, 2, chances)], "draws")
    shallow = mean_of([first, answer(SHALLOW, -3.0, 30, 2, chances)], "draws")
    assert deep == pytest.approx((-9.5, -2.75))
    assert shallow == pytest.approx((-0.5, -2.75))
    # Without the option a layer is averaged over those who drew it, and by how many steps they took.
    assert mean_of([first, answer(DEEP, -3.0, 30, 2, chances)], "steps") == pytest.approx((-2.75, -2.75))


def test_a_layer_that_could_have_been_drawn_but_was_not_keeps_its_bits() -> None:
    chances = (Chance(0.75, SHALLOW, 2), Chance(0.25, DEEP, 2))
    weights = {FIRST: torch.tensor([[-0.0]]), LAST: torch.zeros(1, 1)}
    fold = MeanFold(Averaged(NETS.structure, weights), "overlap", "samples", normalise="draws")
    fold.add(answer(SHALLOW, 1.0, 3, 2, chances))
    assert fold.finish(Server(None)).state.tensors[FIRST] is weights[FIRST]  # type: ignore[arg-type]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 9), st.floats(-4, 4), st.floats(0.1, 0.9), st.integers(1, 8), st.integers(1, 8)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_mean_over_all_draws_is_the_gradient(
    devices: list[tuple[int, float, float, int, int]],
) -> None:
    """Devices move by g_k a step. Over all draws, by their probabilities, the mean is τ Σ a_k g_k / Σ a_k exactly.

    τ = Σ a_k E[τ_k] / Σ a_k does not depend on the draw; if it did, it would go along with who drew what.
    """
    total = sum(samples for samples, *_ in devices)
    expected = [(1 - chance) * shallow + chance * deep for _, _, chance, shallow, deep in devices]  # E[τ_k]
    length = sum(one[0] * steps for one, steps in zip(devices, expected, strict=True)) / total
    right = length * sum(samples * slope for samples, slope, *_ in devices) / total
    found = np.zeros(2)
    for draw in itertools.product((False, True), repeat=len(devices)):
        replies, probability = [], 1.0
        for drawn, (samples, slope, chance, shallow, deep) in zip(draw, devices, strict=True):
            chances = (Chance(1 - chance, SHALLOW, shallow), Chance(chance, DEEP, deep))
            likely, trained, steps = chances[drawn]
            probability *= likely
            replies.append(answer(trained, slope * steps, samples, steps, chances))
        found += probability * np.array(mean_of(replies, "draws"))
    assert found == pytest.approx([right, right], abs=1e-3)


@given(rounds(), st.integers(1, 30), st.floats(0, 0.95))
def test_with_equal_steps_and_nothing_drawn_it_is_the_plain_mean_to_the_bit(
    case: tuple[dict[str, np.ndarray], list[tuple[list[int], dict[str, np.ndarray], int]]],
    steps: int,
    momentum: float,
) -> None:
    weights, devices = case
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    net = SimpleNamespace(parameters=tuple(LAYERS))
    found = []
    for normalise in get_args(Normalise):
        state = Averaged(net, tensors)  # type: ignore[arg-type]
        fold = MeanFold(state, "overlap", "samples", normalise=normalise, momentum=momentum)
        for mask, local, count in devices:
            trained = {name: WHOLE for name, on in zip(LAYERS, mask, strict=True) if on}
            update = {name: torch.from_numpy(local[name] - weights[name]) for name in trained}
            fold.add(Reply(0, 0, part(trained), count, {UPDATE: update}, steps=steps))
        found.append(fold.finish(Server(None)).state.tensors)  # type: ignore[arg-type]
    for name in LAYERS:
        assert found[0][name].numpy().tobytes() == found[1][name].numpy().tobytes()
        assert found[0][name].numpy().tobytes() == found[2][name].numpy().tobytes()


def test_parts_of_tensors_are_stretched_too() -> None:
    """Two rows of three; steps 1 and 3, equal weights, so that τ_eff = 2: 2 (1/1 + 3/3) / 2 where both trained."""
    mean = CoverageMean({"w": torch.zeros(3)})
    for kept, change, steps in (([0, 1], 1.0, 1.0), ([1, 2], 3.0, 3.0)):
        some = part({"w": Indices((np.array(kept),))})
        mean.add(some, {"w": torch.full((2,), change)}, 5, {"w": Stretch(1 / steps, steps)})
    assert mean.result()["w"].tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_running_statistics_are_not_stretched() -> None:
    """They are no sums of steps: a variance that is stretched could become negative."""
    model = layered(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)))
    state = Averaged(model.structure, model.initial())
    whole = full(model.structure)
    found = []
    for normalise in get_args(Normalise):
        fold = MeanFold(state, "overlap", "uniform", normalise=normalise)
        for steps in (1, 3):
            update = {name: torch.full_like(state.tensors[name], 0.5 * steps) for name in whole.trained}
            chances = (Chance(0.5, part({}), 1), Chance(0.5, whole, steps))
            fold.add(Reply(0, 0, whole, 4, {UPDATE: update}, steps=steps, chances=chances))
        found.append(fold.finish(Server(None)).state.tensors)  # type: ignore[arg-type]
    plain, *others = found
    for other in others:
        assert torch.equal(plain["1.running_var"], other["1.running_var"])
    assert not torch.equal(plain["0.weight"], others[1]["0.weight"])


def test_steps_that_nobody_stamped_are_an_error() -> None:
    with pytest.raises(ValueError, match="did not say how many steps"):
        mean_of([answer(DEEP, 1.0, 1, 0)], "steps")
