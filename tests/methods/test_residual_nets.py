"""Methods on a net with residual blocks and BatchNorm, as users have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, trained

import fedpmt
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.methods.registry import METHODS, create
from fedpmt.models.layered import layered
from fedpmt.parts.width import channel_norms, hidden_groups
from models.nets_of_users import ResNet
from support import FEW, STAGES, images, stored_accuracy

if TYPE_CHECKING:
    from pathlib import Path

CHAINS = ("fedgkt", "fedgen")
"""Methods that need a chain of layers."""


def residual(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return layered(ResNet(), example=torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in CHAINS])
def test_every_method_trains_it(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = fedpmt.run(
        name,
        model=ResNet(),
        train=images(150),
        test=images(60, 1),
        out=tmp_path / "run",
        options=STAGES.get(name, {}),
        rounds=3,
        lr=0.1,
        **FEW,
    )
    assert run.result is not None
    assert run.result.accuracy is not None
    assert np.isfinite(run.rounds[-1].metrics["train_loss"])
    if run.result.evaluates == "global":
        assert stored_accuracy(tmp_path / "run", ResNet(), images(60, 1)) == pytest.approx(
            run.result.accuracy
        )


@pytest.mark.parametrize(
    "name", ["fedprox", "scaffold", "heterofl", "fedrolex", "ist", "fjord", "slimfl", "fedmp"]
)
def test_neutral_and_capable_is_fedavg_bit_for_bit(name: str) -> None:
    """Statistics of BatchNorm, too: what is evaluated is the same net."""
    neutral = create(name, {}, {"depths": None, "splitting": "server"}).neutral()
    assert neutral is not None
    ours, theirs = Bench(neutral, residual()), Bench(FedAvg(), residual())
    for index in range(2):
        for bench in (ours, theirs):
            arrived = [bench.reply(device, index, count=6 + device) for device in range(3)]
            bench.state = bench.aggregate(arrived, index).state
    shown = neutral.predictor(ours.state)
    assert shown.statistics == "stored"
    for key, tensor in theirs.state.tensors.items():
        assert torch.equal(shown.tensors[key], tensor), key
    assert not torch.equal(theirs.state.tensors["bn.running_mean"], torch.zeros(4))


def test_averaged_statistics_are_means_over_those_that_have_the_channel() -> None:
    bench = Bench(HeteroFL(norm="averaged", masked=False), residual())
    size = float(bench.model.structure.size(bench.model.structure.parameters))
    small, large = bench.reply(0, budget=size / 3), bench.reply(1)
    name = "blocks.1.bn1.running_var"
    one, two = (trained(bench.state.tensors, reply)[name] for reply in (small, large))
    assert len(one) < len(two) == 8
    after = bench.aggregate([small, large]).state.tensors[name]
    torch.testing.assert_close(after[: len(one)], (one + two[: len(one)]) / 2)
    torch.testing.assert_close(after[len(one) :], two[len(one) :])


def test_channels_that_are_added_are_scored_together() -> None:
    """The stem's channels and the first block's are one group: both layers' weights count."""
    model = residual()
    axes, weights = model.structure.require_axes("a test"), model.initial()
    shared = axes.tensors["stem.weight"][0].group
    assert shared == axes.tensors["blocks.0.conv2.weight"][0].group
    [group] = [one for one in hidden_groups(axes) if one.name == shared]
    wanted = sum(
        weights[name].abs().flatten(1).sum(1).double() for name in ("stem.weight", "blocks.0.conv2.weight")
    )
    np.testing.assert_allclose(channel_norms(model.structure, weights, group), wanted, rtol=1e-6)
