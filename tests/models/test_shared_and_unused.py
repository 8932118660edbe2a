"""Weights that two layers share are trained as by plain SGD, and those that nothing uses are left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from fedpmt import api
from models.nets_of_users import Tied

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS, RATE = 3, 0.5
EVERYBODY: dict[str, Any] = {"devices": 2, "cohort": 2, "samples": 20, "rounds": ROUNDS}


def pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(40, 4)).astype(np.float32), rng.integers(4, size=40)


@pytest.mark.parametrize("tied", ["first", "last"])
def test_fedavg_of_a_tied_model_is_plain_sgd(tied: Literal["first", "last"], tmp_path: Path) -> None:
    """Both devices take one step on all of their samples, so a round is a step on all samples."""
    torch.manual_seed(0)
    module = Tied()
    inputs, labels = pair()
    api.run(
        "fedavg", model=module, train=(inputs, labels), test=(inputs, labels), tied=tied,
        batch=20, lr=RATE, out=tmp_path / "run", **EVERYBODY,
    )  # fmt: skip
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(torch.from_numpy(inputs)), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(found["first.weight"], found["second.weight"])
    for name, expected in module.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


class Unused(nn.Module):
    """Has a head and a bare parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.other, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.other(hidden)
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("server", ["none", "adam"])
def test_unused_parameters_keep_their_bits(
    optimizer: Literal["sgd", "adam"], server: Literal["none", "adam"], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Unused()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    momentum: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    api.run(
        "fedavg", model=module, train=pair(), test=pair(), optimizer=optimizer, weight_decay=0.1,
        server_optimizer=server, batch=5, lr=0.05, out=tmp_path / "run", **momentum, **EVERYBODY,
    )  # fmt: skip
    after = load_file(tmp_path / "run" / "model.safetensors")
    kept = {name for name in before if torch.equal(after[name], before[name])}
    assert kept == {"other.weight", "other.bias", "scale"}
