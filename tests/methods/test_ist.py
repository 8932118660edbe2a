from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benches import Bench, check_fast_path, takes_fast_path, trained
from torch import nn

from fedpmt import api
from fedpmt.methods.ist import IST
from fedpmt.models.nets import NETS
from fedpmt.parts.part import Indices, add_at
from fedpmt.types import SettingError
from support import SMALL

COHORT = range(4)


def neurons(bench: Bench, device: int, index: int = 0, budget: float = float("inf")) -> list[int]:
    client = bench.client(device, budget)
    selection = bench.method.assign(bench.state, client, bench.round(index)).offer[0].sent["4.bias"]
    assert isinstance(selection, Indices)
    assert selection.axes[0] is not None
    return selection.axes[0].tolist()  # type: ignore[no-any-return]


def test_neurons_are_dealt_without_overlap_and_anew_each_round() -> None:
    bench = Bench(IST(subnets=None))
    deals = [[neurons(bench, device, index) for device in COHORT] for index in range(6)]
    for deal in deals:
        assert sorted(neuron for piece in deal for neuron in piece) == list(range(8))
        assert [len(piece) for piece in deal] == [2, 2, 2, 2]
    assert len({str(deal) for deal in deals}) > 1


def test_weights_return_to_their_place_and_what_is_shared_is_averaged() -> None:
    bench = Bench(IST(subnets=None))
    replies = [bench.reply(device) for device in COHORT]
    after = bench.aggregate(replies).state.tensors
    models = [trained(bench.state.tensors, reply) for reply in replies]
    for name in ("0.weight", "0.bias", "4.weight", "4.bias", "6.weight"):
        cover, wanted = torch.zeros_like(after[name]), torch.zeros_like(after[name])
        for reply, model in zip(replies, models, strict=True):
            add_at(cover, reply.part.trained[name], 1.0)
            add_at(wanted, reply.part.trained[name], model[name])
        assert cover.max() == 1  # nobody else has it
        torch.testing.assert_close(after[name][cover == 1], wanted[cover == 1], rtol=1e-5, atol=1e-7)
        # A weight between neurons of two devices rests.
        assert torch.equal(after[name][cover == 0], bench.state.tensors[name][cover == 0])
        assert bool((cover == 0).any()) == (name == "4.weight")
    mean = torch.stack([model["6.bias"] for model in models]).mean(dim=0)
    torch.testing.assert_close(after["6.bias"], mean)


def test_indices_travel_with_the_part() -> None:
    bench = Bench(IST(subnets=None))
    # One filter of four and two neurons of eight, four bytes each.
    assert bench.reply(0).part.overhead_bytes == 4 * (1 + 2)


def test_a_budget_leaves_a_random_part_of_a_piece() -> None:
    """Over many deals a weak device trains the last neuron as often as the first."""
    bench = Bench(IST(subnets=2))
    counts = np.zeros(8)
    for index in range(200):
        whole, kept = neurons(bench, 0, index), neurons(bench, 0, index, budget=30.0)
        assert set(kept) < set(whole)
        assert kept == sorted(kept)
        counts[kept] += 1
    # Of 8 neurons 1 is kept: 25 times each on average; that one is below 10 happens once in a thousand.
    assert counts.min() >= 10


def test_a_budget_pays_for_as_much_of_a_piece_as_it_can() -> None:
    """A small piece of one layer leaves room for more of another."""
    torch.manual_seed(0)
    bench = Bench(
        IST(subnets=3),
        nn.Sequential(
            nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)
        ),
    )
    for device in COHORT:
        whole = bench.method.assign(bench.state, bench.client(device), bench.round(0)).offer[0]
        price = bench.price(whole).operations
        cut = bench.method.assign(bench.state, bench.client(device, price - 1), bench.round(0)).offer[0]
        less = bench.price(cut).operations
        assert 0.95 * price < less < price


def test_fewer_subnets_than_devices_are_shared() -> None:
    bench = Bench(IST(subnets=2))
    assert neurons(bench, 0) == neurons(bench, 2)
    assert sorted(neurons(bench, 0) + neurons(bench, 1)) == list(range(8))


def test_the_devices_of_a_round_share_one_deal_in_a_run() -> None:
    settings: dict[str, Any] = {**SMALL, "task": "cnn-mnist", "lr": 0.01}
    run = api.run(IST(subnets=None), **settings)
    labels = {device.part for record in run.rounds for device in record.devices}
    assert labels == {"1 of 5 subnets"}
    # 8 + 16 + 128 channels, dealt to five devices; lists of all five together name each channel once.
    assert [record.overhead_bytes for record in run.rounds] == [4 * (8 + 16 + 128)] * 2


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("scaling", [True, False])
def test_the_fast_path_does_what_the_oracle_does(net: str, scaling: bool) -> None:
    check_fast_path(IST(subnets=None, scaling=scaling), net)


def test_scaling_makes_up_for_the_neurons_elsewhere() -> None:
    bench = Bench(IST(subnets=None))
    task = bench.method.assign(bench.state, bench.client(0), bench.round(0))
    factors = bench.method.local.factors(task, task.offer[0], bench.model.structure)
    assert factors == {"0.weight": 4.0, "0.bias": 4.0, "4.weight": 4.0, "4.bias": 4.0}
    assert takes_fast_path(IST(), "cnn-mnist")


def test_no_subnet_at_all_is_refused() -> None:
    with pytest.raises(SettingError, match=r"ist\.subnets must be >= 1 \(got 0\)"):
        IST(subnets=0)


def test_every_pair_of_neurons_meets_in_the_end() -> None:
    bench = Bench(IST(subnets=None))
    met = np.eye(8, dtype=bool)
    for index in range(60):
        for device in COHORT:
            piece = neurons(bench, device, index)
            met[np.ix_(piece, piece)] = True
    assert met.all()
