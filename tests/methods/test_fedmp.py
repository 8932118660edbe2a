"""FedMP: the bandit, what is pruned, and how it is made whole again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benches import Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.fedmp import Bandit, FedMP, Pruning
from fedpmt.parts.part import Indices, add_at, take
from fedpmt.parts.width import thinned
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.types import SettingError


def pulled(reward: Any, pulls: int, *, discount: float, finest: float, seed: int = 0) -> Bandit:
    """A bandit after so many draws, each rewarded at once."""
    bandit, rng = Bandit((0.0, 0.8)), np.random.default_rng(seed)
    for _ in range(pulls):
        ratio = bandit.draw(discount, rng)
        bandit = bandit.rewarded(ratio, reward(ratio), finest, discount)
    return bandit


@pytest.mark.parametrize("best", [0.1, 0.37, 0.7])
@pytest.mark.parametrize("seed", range(2))
def test_concentrates_near_the_optimum_of_a_stationary_reward(best: float, seed: int) -> None:
    bandit = pulled(lambda ratio: 10 * (1 - abs(ratio - best)), 500, discount=1.0, finest=0.05, seed=seed)
    late = np.array(bandit.ratios[250:])
    # Drawn at random from [0, 0.8), about a quarter of all would be as near as that.
    assert np.mean(np.abs(late - best) < 0.1) > 0.6
    assert abs(np.median(late) - best) < 0.05


@pytest.mark.parametrize("best", [0.1, 0.37, 0.7])
def test_concentrates_as_it_is_shipped(best: float) -> None:
    """With the default discount, interval and clip: less than without a discount, far more than at random."""
    shipped, near, median = FedMP(), [], []
    for seed in range(3):
        bandit = pulled(
            lambda ratio: shipped.clip * (1 - abs(ratio - best) / shipped.most),
            400,
            discount=shipped.discount,
            finest=shipped.finest,
            seed=seed,
        )
        late = np.array(bandit.ratios[200:])
        near.append(np.mean(np.abs(late - best) < 0.1))
        median.append(np.median(late))
    assert np.mean(near) > 0.5  # at random a quarter
    assert abs(np.mean(median) - best) < 0.1


def test_what_no_sum_would_show_is_forgotten() -> None:
    long = pulled(lambda ratio: ratio, 300, discount=0.9, finest=0.05)
    assert len(long.ratios) == len(long.rewards) == 263  # 0.9^262 is the last above 1e-12
    assert len(pulled(lambda ratio: ratio, 300, discount=1.0, finest=0.05).ratios) == 300


def test_forgets_what_has_changed() -> None:
    """With a discount the optimum is found again after it has moved."""
    rng, bandit = np.random.default_rng(0), Bandit((0.0, 0.8))
    for turn in range(600):
        best = 0.1 if turn < 300 else 0.7
        ratio = bandit.draw(0.97, rng)
        bandit = bandit.rewarded(ratio, 40 * (1 - abs(ratio - best)), 0.05, 0.97)
    assert abs(np.median(bandit.ratios[200:300]) - 0.1) < 0.1
    assert abs(np.median(bandit.ratios[500:]) - 0.7) < 0.1


def test_upper_bounds_by_hand() -> None:
    """λ = 0.5: N = (0.25, 1.5), means (1, 0), bounds 1 + sqrt(2 ln 1.75 / 0.25) = 3.1 and sqrt(2 ln 1.75 / 1.5) = 0.9;
    with rewards turned round 0 + 2.1 and 1 + 0.9."""
    rng = np.random.default_rng(0)
    first = Bandit((0.0, 0.4, 0.8), (0.1, 0.5, 0.5), (1.0, 0.0, 0.0))
    assert all(first.draw(0.5, rng) < 0.4 for _ in range(20))
    also = replace(first, rewards=(0.0, 1.0, 1.0))
    assert all(also.draw(0.5, rng) < 0.4 for _ in range(20))  # 2.11 > 1.86
    second = replace(first, rewards=(0.0, 2.0, 2.0))
    assert all(0.4 <= second.draw(0.5, rng) < 0.8 for _ in range(20))
    unseen = Bandit((0.0, 0.4, 0.6, 0.8), (0.1, 0.7), (100.0, 100.0))
    assert 0.4 <= unseen.draw(0.5, rng) < 0.6


@given(st.integers(0, 1000), st.floats(0.02, 0.5), st.floats(0.5, 1.0))
@settings(max_examples=30)
def test_intervals_stay_a_partition_and_are_split_where_they_are_wide(
    seed: int, finest: float, discount: float
) -> None:
    bandit, rng = Bandit((0.0, 0.8)), np.random.default_rng(seed)
    for _ in range(30):
        ratio = bandit.draw(discount, rng)
        arm = int(np.searchsorted(bandit.borders, ratio, side="right"))
        wide = bandit.borders[arm] - bandit.borders[arm - 1] > finest
        after = bandit.rewarded(ratio, 1.0, finest, discount)
        assert len(after.borders) == len(bandit.borders) + wide
        assert (ratio in after.borders) == wide
        assert after.borders[0] == 0.0
        assert after.borders[-1] == 0.8
        assert all(np.diff(after.borders) > 0)
        bandit = after


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.79])
def test_what_stays_has_the_largest_l1_norm(ratio: float) -> None:
    bench = Bench(FedMP(ratio=ratio))
    part = bench.method.assign(bench.state, bench.client(0), bench.round(0)).offer[0]
    for name, size in (("0", 4), ("4", 8)):
        selection = part.sent[f"{name}.weight"]
        assert isinstance(selection, Indices)
        rows = selection.axes[0]
        assert rows is not None
        weight = bench.state.tensors[f"{name}.weight"]
        norms = weight.abs().reshape(size, -1).sum(1).numpy()
        dropped = np.setdiff1d(np.arange(size), rows)
        assert len(dropped) == int(ratio * size)  # the smallest α n_l
        assert norms[rows].min() >= norms[dropped].max(initial=0)
    # The next layer loses the inputs of what is gone: nine each behind the flatten.
    linear = part.sent["4.weight"]
    assert isinstance(linear, Indices)
    assert linear.axes[1] is not None
    filters = part.sent["0.bias"]
    assert isinstance(filters, Indices)
    assert filters.axes[0] is not None
    assert linear.axes[1].tolist() == [
        9 * channel + offset for channel in filters.axes[0] for offset in range(9)
    ]
    assert part.overhead_bytes == 4 * (
        len(filters.axes[0]) + len(linear.axes[0] if linear.axes[0] is not None else ())
    )


def test_recovered_models_are_averaged_by_r2sp() -> None:
    """1/|S| Σ (embed(trained) + w - embed(w restricted)), literally; sample counts do not matter."""
    bench = Bench(FedMP(bandit=False))
    replies = [
        bench.reply(device, budget=budget, count=6 + device)
        for device, budget in enumerate((60.0, 150.0, 400.0))
    ]
    assert len({reply.part.label for reply in replies}) == 3
    step = bench.aggregate(replies)
    for name, tensor in bench.state.tensors.items():
        recovered = []
        for reply in replies:
            selection = reply.part.trained[name]
            trained, kept = torch.zeros_like(tensor), torch.zeros_like(tensor)
            add_at(trained, selection, take(tensor, selection) + reply.update[name])
            add_at(kept, selection, take(tensor, selection))
            recovered.append(trained + (tensor - kept))
        torch.testing.assert_close(
            step.state.tensors[name], torch.stack(recovered).mean(0), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("ratio", [None, 0.0, 0.3, 0.6])
def test_no_training_leaves_the_model_as_it_was(ratio: float | None) -> None:
    bench = Bench(FedMP(ratio=ratio), learning_rate=0.0)
    step = bench.aggregate([bench.reply(device) for device in range(4)])
    assert all(torch.equal(step.state.tensors[name], old) for name, old in bench.state.tensors.items())


def test_no_pruning_is_uniform_fedavg_bit_for_bit() -> None:
    ours, theirs = Bench(FedMP(ratio=0.0)), Bench(FedAvg(weight="uniform"))
    for index in range(2):
        for bench in (ours, theirs):
            replies = [bench.reply(device, index, count=5 + device) for device in range(3)]
            bench.state = bench.aggregate(replies, index).state
    for name, tensor in theirs.state.tensors.items():
        assert torch.equal(ours.state.tensors[name], tensor)


def test_without_the_bandit_the_ratio_follows_from_the_budget() -> None:
    bench = Bench(FedMP(bandit=False))
    structure = bench.model.structure
    axes = structure.require_axes("a test")
    for limit in (30.0, 60.0, 200.0, 300.0):
        alpha = bench.method.alpha(bench.state, bench.client(0, limit), bench.round(0))
        rate = 1 - alpha
        assert bench.price(thinned(structure, axes, rate)).operations <= limit
        assert bench.price(thinned(structure, axes, rate + 0.01)).operations > limit
        part = bench.method.assign(bench.state, bench.client(0, limit), bench.round(0)).offer[0]
        assert bench.price(part).operations <= limit
    assert bench.method.alpha(bench.state, bench.client(0), bench.round(0)) == 0
    blind = replace(bench.client(0), plan=None)
    assert bench.method.alpha(bench.state, blind, bench.round(0)) == 0


def test_reward_by_hand() -> None:
    """A decrease of 0.2, five seconds of a mean of ten apart: 0.2 / 0.501."""
    method = FedMP()
    assert method.reward(0.2, 15.0, 10.0) == pytest.approx(0.2 / 0.501)
    assert method.reward(0.2, 5.0, 10.0) == pytest.approx(0.2 / 0.501)  # too early is as bad as too late
    assert method.reward(-0.2, 5.0, 10.0) == pytest.approx(-0.2 / 0.501)
    assert method.reward(0.2, 10.0, 10.0) == 5.0  # 200, clipped
    assert method.reward(float("nan"), 10.0, 10.0) == -5.0
    assert method.reward(0.001, 0.0, 0.0) == pytest.approx(1.0)


def test_bandits_learn_the_ratio_that_was_assigned() -> None:
    bench = Bench(FedMP())
    for index in range(3):
        alphas = [
            bench.method.alpha(bench.state, bench.client(device), bench.round(index)) for device in (1, 4)
        ]
        replies = [replace(bench.reply(device, index), seconds=float(device)) for device in (1, 4)]
        assert [reply.part.label for reply in replies] == [f"prune {alpha:.2f}" for alpha in alphas]
        before = bench.state
        bench.state = bench.aggregate(replies, index).state
        for device, alpha, reply in zip((1, 4), alphas, replies, strict=True):
            bandit = bench.state.bandits[device]
            assert bandit.loss == reply.metrics["train_loss"]
            assert len(bandit.ratios) == index  # the first round has nothing to compare with
            if index:
                decrease = before.bandits[device].loss - bandit.loss
                assert bandit.ratios[-1] == alpha
                assert bandit.rewards[-1] == bench.method.reward(decrease, float(device), 2.5)
    assert set(bench.state.bandits) == {1, 4}


def test_late_workers_teach_nothing() -> None:
    bench = Bench(FedMP())
    step = bench.aggregate([])
    assert step.state.bandits == {}
    assert all(torch.equal(step.state.tensors[name], old) for name, old in bench.state.tensors.items())


def test_its_state_survives_the_disk(tmp_path: Any) -> None:
    bench = Bench(FedMP())
    for index in range(3):
        bench.state = bench.aggregate([bench.reply(2, index)], index).state
    write_value(tmp_path / "state", bench.state)
    back = read_value(tmp_path / "state")
    assert isinstance(back, Pruning)
    assert back.bandits == bench.state.bandits


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("ratio", 1.0, ">= 0 and < 1"),
        ("ratio", -0.1, ">= 0 and < 1"),
        ("discount", 0.0, "> 0 and <= 1"),
        ("finest", 0.0, "> 0"),
        ("most", 1.0, "> 0 and < 1"),
        ("gap", 0.0, "> 0"),
        ("clip", float("inf"), "> 0 and finite"),
    ],
)
def test_refusals(key: str, value: float, rule: str) -> None:
    with pytest.raises(SettingError, match=rf"^fedmp\.{key} must be {rule} \(got {value}\)$"):
        FedMP(**{key: value})  # type: ignore[arg-type]
