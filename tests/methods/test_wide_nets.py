"""Methods that cut by width, on nets with groups, heads and norms of all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from benches import Bench
from torch import Tensor, nn

import fedpmt
from fedpmt.methods.averaging import Averaged
from fedpmt.methods.registry import create
from fedpmt.models.layered import layered
from fedpmt.parts.part import size
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.types import SettingError
from models.nets_of_users import Attention, Grouped
from support import FEW, images, stored_accuracy

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.records import RunRecord

METHODS: dict[str, dict[str, Any]] = {
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
        options=METHODS[name],
        rounds=2,
        lr=0.1,
        workers=workers,
        **FEW,
    )


@pytest.mark.parametrize("net", [Grouped, Patches])
@pytest.mark.parametrize("name", METHODS)
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
