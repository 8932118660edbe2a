"""Methods on nets of other kinds than the paper's: residual nets with BatchNorm, and wide ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench, trained
from torch import Tensor, nn

import fedpmt
from fedpmt.methods.averaging import Averaged
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.feddrop import FedDrop
from fedpmt.methods.fjord import FjORD
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.methods.registry import create, general_methods
from fedpmt.methods.slimfl import SlimFL
from fedpmt.models.layered import layered
from fedpmt.parts.part import size
from fedpmt.parts.part import size as size_of
from fedpmt.parts.width import channel_norms, hidden_groups
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.types import SettingError
from models.nets_of_users import Attention, Grouped, ResNet
from support import FEW, STAGES, images, stored_accuracy

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord


CHAINS = ("fedgkt", "fedgen")
"""Methods that need a chain of layers."""


def residual(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return layered(ResNet(), example=torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize("name", [name for name in general_methods() if name not in CHAINS])
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


def test_feddrop_really_drops() -> None:
    """It has no hidden fully connected layer, which is all that was thinned: its filters are."""
    drops, average = Bench(FedDrop(), residual()), Bench(FedAvg(), residual())
    size = float(drops.model.structure.size(drops.model.structure.parameters))
    weak, strong = drops.reply(0, budget=size / 3), average.reply(0)
    shapes = drops.model.structure.shapes
    kept, whole = (
        sum(size_of(one, shapes[name]) for name, one in r.part.trained.items()) for r in (weak, strong)
    )
    assert kept < whole / 2
    ours, theirs = (
        bench.aggregate([reply]).state.tensors for bench, reply in ((drops, weak), (average, strong))
    )
    assert not torch.equal(ours["blocks.1.conv2.weight"], theirs["blocks.1.conv2.weight"])
    with pytest.raises(SettingError, match=r"feddrop.scope = 'fc' thins nothing"):
        Bench(FedDrop(scope="fc"), residual())


@pytest.mark.parametrize(
    ("name", "options", "widths"),
    [
        ("heterofl", {}, ["1", "0.5", "0.25", "0.125", "0.0625"]),
        ("fedrolex", {"rate": 0.5}, ["1", "0.5"]),
        ("fjord", {"sizes": 2}, ["0.5", "1"]),
        ("slimfl", {}, ["0.5", "1"]),
        ("fedavg", {}, None),
    ],
)
def test_every_width_has_a_score(
    name: str, options: dict[str, Any], widths: list[str] | None, tmp_path: Path
) -> None:
    run = fedpmt.run(
        name,
        model=ResNet(),
        train=images(150),
        test=images(60, 1),
        out=tmp_path / "run",
        options=options,
        rounds=3,
        lr=0.1,
        **FEW,
    )
    assert run.result is not None
    found = run.result.score_by_width
    assert (None if found is None else list(found)) == widths
    if found is not None:
        # The whole net is the global model, but for widths that nobody has trained.
        assert found["1"] == pytest.approx(run.result.score)


@pytest.mark.parametrize(("method", "factor"), [(HeteroFL(), 2.0), (FjORD(sizes=2), 1.0), (SlimFL(), 1.0)])
def test_the_net_of_a_width_is_the_one_that_devices_train(method: Any, factor: float) -> None:
    """HeteroFL scales what narrow layers give by 1 / r in training, so a narrow net is made of scaled weights."""
    bench = Bench(method, residual())
    half = bench.method.predictors_by_width(bench.state)["0.5"].tensors
    whole = bench.state.tensors
    torch.testing.assert_close(half["stem.weight"], whole["stem.weight"][:2] * factor)
    torch.testing.assert_close(half["fc.weight"], whole["fc.weight"][:, :4])
    assert bench.model.forward(half, torch.zeros(2, 1, 8, 8)).shape == (2, 3)


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


WIDE: dict[str, dict[str, Any]] = {
    "feddrop": {"keep": 0.5, "scope": "all"},
    "heterofl": {"rate": 0.5},
    "fedrolex": {"rate": 0.5},
    "fjord": {"sizes": 2},
    "ist": {},
    "slimfl": {},
    "fedmp": {"ratio": 0.5},
}


class Patches(nn.Module):
    """Attention over the columns of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.net = nn.Linear(6, 6), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.relu(self.columns(x[:, 0])))  # type: ignore[no-any-return]


def play(name: str, net: type[nn.Module], folder: Path, workers: int = 1) -> RunRecord:
    torch.manual_seed(0)
    return fedpmt.run(
        name,
        model=net(),
        train=images(150),
        test=images(60, 1),
        out=folder,
        options=WIDE[name],
        rounds=2,
        lr=0.1,
        workers=workers,
        **FEW,
    )


@pytest.mark.parametrize("net", [Grouped, Patches])
@pytest.mark.parametrize("name", WIDE)
def test_it_is_trained_and_stored_whole(name: str, net: type[nn.Module], tmp_path: Path) -> None:
    run = play(name, net, tmp_path / "run")
    assert run.result is not None
    assert np.isfinite(run.rounds[-1].metrics["train_loss"])
    whole = 4 * sum(map(Tensor.numel, net().state_dict().values()))
    assert name == "slimfl" or run.rounds[0].devices[0].bytes_down < whole
    assert stored_accuracy(tmp_path / "run", net(), images(60, 1)) == pytest.approx(run.result.accuracy)


def test_two_workers_train_the_same_narrow_nets(tmp_path: Path) -> None:
    one, two = (play("heterofl", Patches, tmp_path / str(workers), workers).result for workers in (1, 2))
    assert one is not None
    assert two is not None
    assert one.weights_sha256 == two.weights_sha256


def test_heads_are_cut_whole_and_not_scaled() -> None:
    """The scale of queries and keys would change where heads look; what comes of them is scaled instead."""
    model = layered(Patches(), example=torch.zeros(2, 1, 6, 6))
    method = create("heterofl", {"rate": 0.5}, {"depths": None, "splitting": "server"})
    state = Bench(method, model).state
    half = method.predictors_by_width(state)["0.5"].tensors
    qkv = state.tensors["net.qkv.weight"].view(3, 4, 4, 16)[:, :2].reshape(24, 16)
    torch.testing.assert_close(half["net.qkv.weight"], qkv)
    torch.testing.assert_close(half["net.out.weight"], state.tensors["net.out.weight"][:, :8] * 2)
    torch.testing.assert_close(half["net.out.bias"], state.tensors["net.out.bias"])
    assert size(Bench(method, model).task(0).offer[0].sent["net.qkv.bias"], (48,)) == 24


def test_a_model_that_cannot_be_cut_is_refused_before_anything_runs(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x[:, 0])[0][:, -1])  # type: ignore[no-any-return]

    with pytest.raises(SettingError, match=r"module 'rnn' \(LSTM\) mixes channels"):
        fedpmt.run(
            "feddrop",
            model=Rows(),
            train=images(150),
            test=images(60, 1),
            out=tmp_path / "run",
            rounds=1,
            **FEW,
        )
    assert not (tmp_path / "run").exists()


def test_axes_are_kept_with_the_state_once_they_are_asked_for(tmp_path: Path) -> None:
    state = Averaged(layered(Grouped(), example=torch.zeros(2, 1, 8, 8)).structure, {})
    write_value(tmp_path / "before", state)
    assert read_value(tmp_path / "before").structure.axes is None
    axes = state.structure.require_axes("this test")
    assert axes.fits
    write_value(tmp_path / "after", state)
    assert read_value(tmp_path / "after").structure.axes == axes
