"""The family of FedPMT: which layers a device trains, and how they are averaged."""

from __future__ import annotations

import collections
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.methods.averaging import PartAveraging
from fedpmt.methods.family import SALF, CoCoFL, EmbracingFL, FedOLF, FedPart
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.fedel import FedEL, Weighed
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.parts.depth import maximal, runs, suffixes, windows
from fedpmt.parts.part import mask
from fedpmt.testing import ON_A_BENCH, check_method
from support import SMALL, Bench

if TYPE_CHECKING:
    from pathlib import Path

PRESETS = (EmbracingFL, FedOLF, SALF, FedPart, CoCoFL, FedEL)
BLOCKS = ("suffix", "random-suffix", "cycle", "window", "random-block", "middle", "prefix")
CNN: dict[str, Any] = {**SMALL, "task": "cnn-mnist", "rounds": 4, "eval_every": 4, "cohort": 10}


def sha(method: Any, **settings: Any) -> str:
    result = api.run(method, **settings).result
    assert result is not None
    return result.weights_sha256


def masks_of(
    bench: Bench, rounds: int, budget: float = float("inf"), device: int = 0
) -> list[tuple[int, ...]]:
    """What a device is asked to train, round by round."""
    structure = bench.model.structure
    return [mask(structure, bench.task(device, index, budget).offer[0]) for index in range(rounds)]


# Which block


def test_runs_are_all_blocks_and_the_longest_are_the_masks() -> None:
    structure = Bench(FedAvg()).model.structure  # three layers
    found = [[mask(structure, part) for part in beginning] for beginning in runs(structure, 3)]
    assert found == [[(1, 0, 0), (1, 1, 0), (1, 1, 1)], [(0, 1, 0), (0, 1, 1)], [(0, 0, 1)]]
    assert [beginning[-1] for beginning in reversed(runs(structure, 3))] == list(suffixes(structure, 3))
    # With two depths the last two layers are one, as in the mask of depth 1.
    assert [[mask(structure, part) for part in beginning] for beginning in runs(structure, 2)] == [
        [(1, 0, 0), (1, 1, 1)],
        [(0, 1, 1)],
    ]
    labels = [[part.label for part in beginning] for beginning in runs(structure, 3)]
    assert labels == [["layer 1", "layers 1-2", "depth 3"], ["layer 2", "depth 2"], ["depth 1"]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 40))
def test_windows_and_maximal_blocks_are_those_of_brute_force(prices: list[int], budget: int) -> None:
    """A block costs what its layers do, and the passage through all later ones; spans stand for parts here."""
    count = len(prices)
    spans: Any = [[(first, last) for last in range(first + 1, count + 1)] for first in range(count)]

    def fits(span: Any) -> bool:
        return bool(sum(prices[span[0] : span[1]]) + (count - span[0]) <= budget)

    fitting = [span for beginning in spans for span in beginning if fits(span)]
    inside = [
        one
        for one in fitting
        if any(other != one and other[0] <= one[0] and one[1] <= other[1] for other in fitting)
    ]
    largest: Any = maximal(spans, fits)
    assert sorted(largest) == (sorted(set(fitting) - set(inside)) or [(count - 1, count)])
    slid: Any = windows(spans, fits)
    for (begin, end), (following, _) in itertools.pairwise(slid):
        assert end <= following
        assert not fits((begin, end + 1))
    layers = {layer for begin, end in slid for layer in range(begin, end)}
    alone = {layer for layer in range(count) if fits((layer, layer + 1))}
    assert alone <= layers


def test_all_layers_then_one_after_another_in_a_cycle() -> None:
    bench = Bench(FedPart(full_rounds=2, layer_rounds=2))
    all_layers, one, two, three = (1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)
    cycle = [all_layers] * 2 + [one] * 2 + [two] * 2 + [three] * 2
    assert masks_of(bench, 16) == cycle * 2
    assert masks_of(bench, 8, budget=1.0, device=3) == cycle  # whatever a device can afford


def test_in_a_round_of_one_layer_only_its_tensors_change() -> None:
    bench = Bench(FedPart(full_rounds=0, layer_rounds=1))
    for index, layer in enumerate(bench.model.structure.layers):
        before = bench.state.tensors
        bench.state = bench.aggregate([bench.reply(device, index) for device in range(3)], index).state
        changed = {
            name for name, tensor in bench.state.tensors.items() if not torch.equal(tensor, before[name])
        }
        assert changed == set(layer.tensors)


def test_a_straggler_reaches_a_random_depth_and_others_train_everything() -> None:
    """The bench's layers have 40, 296 and 27 entries: the budget pays for the last two."""
    bench = Bench(SALF())
    assert set(masks_of(bench, 5)) == {(1, 1, 1)}
    drawn = collections.Counter(masks_of(bench, 100, budget=330.0))
    assert set(drawn) == {(0, 1, 1), (0, 0, 1)}
    assert 30 < drawn[0, 0, 1] < 70
    assert set(masks_of(bench, 5, budget=1.0)) == {(0, 0, 1)}


def test_a_window_slides_and_begins_again() -> None:
    bench = Bench(FedEL())
    assert masks_of(bench, 3, budget=330.0) == [(1, 0, 0), (0, 1, 1), (1, 0, 0)]
    assert masks_of(bench, 3, budget=340.0) == [(1, 1, 0), (0, 0, 1), (1, 1, 0)]
    assert masks_of(bench, 3, budget=70.0) == [(1, 0, 0), (0, 0, 1), (1, 0, 0)]  # the second never fits
    assert masks_of(bench, 2, budget=1.0) == [(0, 0, 1)] * 2
    assert masks_of(bench, 2) == [(1, 1, 1)] * 2


def test_a_random_block_is_one_of_the_largest() -> None:
    bench = Bench(CoCoFL())
    drawn = collections.Counter(masks_of(bench, 100, budget=340.0))
    assert set(drawn) == {(1, 1, 0), (0, 1, 1)}
    assert 30 < drawn[1, 1, 0] < 70
    assert masks_of(bench, 100, 340.0, device=1) != masks_of(bench, 100, 340.0)  # each draws for itself
    assert set(masks_of(bench, 3)) == {(1, 1, 1)}


@pytest.mark.parametrize("block", ["window", "random-block"])
def test_all_that_a_deadline_leaves_may_be_spent_and_no_more(block: Any) -> None:
    """By the exact price: a block near the input pays for the way back through all later layers."""
    run = api.run(FedPMT(block=block), **CNN)
    parts = {one.part for step in run.rounds for one in step.devices}
    assert "layer 1" in parts
    suffix = api.run(FedPMT(), **CNN)
    slowest = max(one.seconds for step in suffix.rounds for one in step.devices)
    assert max(one.seconds for step in run.rounds for one in step.devices) <= slowest * 1.0001
    within = api.run(FedPMT(block=block), budget="operations=0.5", **CNN)
    for step in within.rounds:
        assert {one.part for one in step.devices} == {"depth 2"}  # nothing else costs half of the model


# The important tensors of a window


def test_without_a_balance_and_before_the_first_step_it_is_the_window() -> None:
    plain, chooses = Bench(FedEL()), Bench(FedEL(balance=0.6))
    assert not isinstance(plain.state, Weighed)
    assert isinstance(chooses.state, Weighed)
    assert masks_of(chooses, 4, budget=330.0) == masks_of(plain, 4, budget=330.0)


def test_importances_are_squared_changes_by_hand() -> None:
    """Two devices move the 4 entries of the first bias by 1 and by 3, the mean by 2: I_0 = 4, I_1 = 36, I = 16.

    With β = 0.25, device 0 has 0.25 · 4 + 0.75 · 16 = 13; a device that never replied has 16, and so has a tensor of
    device 0 that it did not train.
    """
    bench = Bench(FedEL(balance=0.25))
    replies = []
    for device, moved in ((0, 1.0), (1, 3.0)):
        reply = bench.reply(device, budget=50.0)  # the first layer alone: 4 · 9 + 4 entries
        update = {name: torch.zeros_like(change) for name, change in reply.update.items()}
        update["0.bias"] += moved
        replies.append(replace(reply, tensors={"update": update}))
    bench.state = bench.aggregate(replies).state
    assert bench.state.own[0]["0.bias"] == 4
    assert bench.state.own[1]["0.bias"] == 36
    assert bench.state.shared["0.bias"] == pytest.approx(16)
    assert bench.method.importance(bench.state, 0)["0.bias"] == pytest.approx(13)
    assert bench.method.importance(bench.state, 1)["0.bias"] == pytest.approx(0.25 * 36 + 0.75 * 16)
    assert bench.method.importance(bench.state, 7)["0.bias"] == pytest.approx(16)
    assert bench.method.importance(bench.state, 0)["4.bias"] == 0


def test_the_most_important_tensors_that_fit_are_trained() -> None:
    """Of layers with 36 + 4, 288 + 8 and 24 + 3 entries, a budget of 70 affords layers 1 and 3 alone.

    The window of layer 1 becomes layers 1 and 2: their biases are most important here, then the first weight, 48
    entries together; the second weight never fits.
    """
    bench = Bench(FedEL(balance=0.0))
    important = {"4.weight": 9.0, "4.bias": 5.0, "0.bias": 4.0, "0.weight": 1.0}
    bench.state = replace(bench.state, shared=important)
    part = bench.task(0, 0, budget=70.0).offer[0]
    assert set(part.trained) == {"0.weight", "0.bias", "4.bias"}
    assert part.label == "layers 1-2, 3 of 4 tensors"
    assert part.overhead_bytes == 2  # which window, and a bit per tensor
    assert set(part.sent) == set(bench.tensors)
    few = bench.task(0, 0, budget=47.0).offer[0]
    assert set(few.trained) == {"0.bias", "4.bias"}
    # All tensors of a window that fits are the window itself.
    assert bench.task(0, 0).offer[0].label == "depth 3"
    assert bench.task(0, 0, budget=1.0).offer[0].label == "depth 1"


def test_only_chosen_tensors_change_and_are_paid_for() -> None:
    """Where only a bias is trained, its weight stays, in compiled code too."""
    run = api.run(FedEL(balance=0.6), **{**CNN, "rounds": 8})
    assert run.result is not None
    parts = {one.part for step in run.rounds for one in step.devices}
    assert any("tensors" in part for part in parts)
    assert run.result.path == "compiled"
    slowest = max(one.seconds for step in api.run(FedPMT(), **CNN).rounds for one in step.devices)
    assert max(one.seconds for step in run.rounds for one in step.devices) <= slowest * 1.0001


def test_a_balance_keeps_the_contract() -> None:
    check_method(FedEL(balance=0.6), checks=ON_A_BENCH)


# How it is averaged


def test_a_blend_by_hand() -> None:
    """Three devices train the last layer, one of them all: r = 1 there and 1/3 before."""
    trainers, blend = (Bench(FedPMT(average=average)) for average in ("trainers", "blend"))
    replies = [trainers.reply(device, 0, budget) for device, budget in enumerate((30.0, 30.0, float("inf")))]
    counts = {"0": 1, "4": 1, "6": 3}
    old = trainers.tensors
    mean, blended = (bench.aggregate(replies).state.tensors for bench in (trainers, blend))
    for name, tensor in old.items():
        share = counts[name.split(".")[0]] / 3
        torch.testing.assert_close(blended[name], share * mean[name] + (1 - share) * tensor)
        assert torch.equal(blended[name], mean[name]) == (share == 1)


def test_a_layer_that_is_drawn_now_and_then_can_count_for_more() -> None:
    """A straggler draws depth 1 or 2: normalised by draws, the change of the layer before the last counts twice."""
    bench, plain = (Bench(FedPMT(block="random-suffix", normalise=how)) for how in ("draws", "none"))
    structure = bench.model.structure
    index = masks_of(bench, 20, 330.0).index((0, 1, 1))
    task = bench.task(0, index, 330.0)
    assert [(one.probability, mask(structure, one.part)) for one in task.chances] == [
        (0.5, (0, 0, 1)),
        (0.5, (0, 1, 1)),
    ]
    reply = bench.reply(0, index, 330.0)
    ours, theirs = (one.aggregate([reply], index).state.tensors for one in (bench, plain))
    for name, old in bench.tensors.items():
        factor = 2 if name.startswith("4.") else 1
        torch.testing.assert_close(ours[name] - old, factor * (theirs[name] - old))


# Reductions


@pytest.mark.parametrize("kind", [FedPMT, CoCoFL], ids=lambda kind: kind.__name__)
def test_a_random_block_of_one_is_fedavg_to_the_bit(kind: Any) -> None:
    """Though devices are weak: with one depth there is one block, all layers."""
    settings: dict[str, Any] = {**CNN, "rounds": 3}
    one = sha(kind(block="random-block", depths=1), **settings)
    assert one == sha(FedAvg(), **settings)
    assert one != sha(kind(block="random-block", depths=4), **settings)


@pytest.mark.parametrize("budget", [None, "memory", "memory=0.5"])
@pytest.mark.parametrize("kind", [EmbracingFL, FedOLF], ids=lambda kind: kind.__name__)
def test_two_of_them_are_fedpmt_to_the_bit(kind: Any, budget: str | None) -> None:
    assert sha(kind(), budget=budget, **CNN) == sha(FedPMT(), budget=budget, **CNN)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_keeps_the_contract_with_a_blend(block: Any) -> None:
    check_method(FedPMT(block=block, average="blend"), checks=ON_A_BENCH)


@pytest.mark.parametrize("kind", PRESETS, ids=lambda kind: kind.__name__)
def test_a_preset_is_values_of_fedpmt_and_nothing_else(kind: Any) -> None:
    values = {key: getattr(kind(), key) for key in FedPMT.__dataclass_fields__}
    own = {name for name in vars(kind) if not name.startswith("_")} - set(values)
    assert not own or kind is FedEL  # which has an option more, of which the same is tested below
    bench, same = Bench(kind()), Bench(FedPMT(**values))
    assert masks_of(bench, 20, 340.0) == masks_of(same, 20, 340.0)
    assert issubclass(kind, PartAveraging)


# Settings


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--method fedpmt --set block=cycle --plan traded", "fedpmt.block must be suffix with plan = traded"),
        ("--method cocofl --plan rotated", "cocofl.block must be suffix with plan = rotated"),
        ("--method fedel --splitting device", "splitting = 'device': fedel needs speeds"),
        ("--method salf --set full_rounds=3", "salf.full_rounds must be 5 unless block = cycle (got 3)"),
        ("--method fedpart --set layer_rounds=0", "fedpart.layer_rounds must be >= 1 (got 0)"),
        ("--method fedpmt --set block=windows", "did you mean 'window'"),
        ("--method fedel --set balance=2", "fedel.balance must be >= 0 and <= 1 (got 2"),
        ("--method fedel --set balance=0.5 --set block=suffix", "fedel.block must be window with a balance"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["run", *words.split(), "--rounds", "1"]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert told.count("\n") == 1


def test_frozen_layers_in_int8_are_cheaper_on_the_clock_and_learn_other_weights() -> None:
    plain, eight = (api.run("cocofl", frozen_precision=precision, **CNN) for precision in ("fp32", "int8"))
    assert plain.result is not None
    assert eight.result is not None
    assert eight.result.virtual_seconds < plain.result.virtual_seconds
    assert eight.result.weights_sha256 != plain.result.weights_sha256


def test_a_layer_whose_turn_comes_later_is_not_called_untrained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At first the window of all these weak devices is at the input."""
    given: dict[str, Any] = {**CNN, "levels": "1", "budget": "operations=0.9", "devices": 10}
    run = api.run(FedEL(), out=tmp_path / "run", **given)
    assert all(0 in step.layers.values() for step in run.rounds)
    assert "no device of this fleet trains" not in caplog.text
    api.run(FedPMT(), **given)
    assert "no device of this fleet trains" in caplog.text
