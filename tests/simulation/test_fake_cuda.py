"""On an accelerator every tensor is where it belongs, and the numbers are those of the CPU. See `fake_cuda`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fake_cuda import CUDA, OnCuda, joined, pretended
from fedpmt import api
from fedpmt.methods.registry import METHODS, general_methods
from fedpmt.models.layered import layered
from fedpmt.simulation.assemble import check_precision
from fedpmt.simulation.executors import Parallel
from fedpmt.testing.bench import adapted_net
from fedpmt.types import SettingError
from support import FEW, STAGES, images, presets_slow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fedpmt.records import ResultRecord

SETTINGS: dict[str, Any] = {
    **FEW,
    "batch": 10,
    "epochs": 2,
    "rounds": 2,
    "lr": 0.05,
    "workers": 1,
    "server_cap": 1.0,
}
TRAIN, TEST = images(160), images(20, seed=1)


@pytest.fixture(autouse=True)
def plain_operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code, and torch's own fused layers, are not used for tensors like these, and round differently."""
    monkeypatch.setattr("fedpmt.kernels.library.library", lambda: None)
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def chain() -> nn.Module:
    """A net that every method can train."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    )  # fmt: skip


class Branching(nn.Module):
    """What a forward pass may have in it: a skip, a norm, dropout, a bare parameter, a buffer, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(36, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.first, self.second = (nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in "ab")
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stem = self.stem(inputs.flatten(1)) * self.scale
        tokens = torch.cat([self.token.expand(len(stem), -1, -1), stem[:, None]], dim=1)
        last = self.second(self.first(tokens))[:, 0]
        return self.head(self.norm(last) + stem)  # type: ignore[no-any-return]


def run(folder: Path, make: Callable[[], nn.Module], **settings: Any) -> ResultRecord:
    torch.manual_seed(0)
    made = api.run(model=make(), train=TRAIN, test=TEST, out=folder, **{**SETTINGS, **settings})
    assert made.result is not None
    return made.result


def check_same(folder: Path, make: Callable[[], nn.Module], **settings: Any) -> None:
    """A run on the accelerator has the bits of one on the CPU."""
    expected = run(folder / "cpu", make, **settings)
    with pretended() as generator:
        found = run(folder / "cuda", make, **{**settings, "device": "cuda"})
        # `torch.manual_seed` above, and nothing else.
        assert torch.equal(generator.state, torch.Generator().manual_seed(0).get_state())
    assert found.path == "autograd"
    assert (found.weights_sha256, found.score) == (expected.weights_sha256, expected.score)
    stored = [(folder / kind / "model.safetensors").read_bytes() for kind in ("cpu", "cuda")]
    assert stored[0] == stored[1]


def test_the_pretended_device_refuses_what_a_real_one_refuses() -> None:
    with pretended() as generator:
        here, there = torch.ones(2, 3), torch.ones(2, 3).to(CUDA)
        assert isinstance(there, OnCuda)
        assert there.device == (there + 1).device == torch.zeros_like(there).device == CUDA
        assert not isinstance(there.cpu(), OnCuda)
        mixed: list[Callable[[], Any]] = [
            lambda: here + there,
            lambda: functional.linear(here, there),
            lambda: there.index_select(0, torch.tensor([0])),
            lambda: torch.cat([torch.zeros(0), there]),
            lambda: torch.equal(here, there),
        ]
        for operation in mixed:
            with pytest.raises(RuntimeError, match="device"):
                operation()
        with pytest.raises(TypeError, match="float64"):
            there.double()
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        own, ours = generator.state, torch.get_rng_state()
        functional.dropout(there)
        assert torch.equal(torch.get_rng_state(), ours)
        assert not torch.equal(generator.state, own)


@pytest.mark.parametrize("method", presets_slow(general_methods()))
def test_all_tensors_of_a_method_are_on_its_device(method: str, tmp_path: Path) -> None:
    check_same(tmp_path, chain, method=method, options=STAGES.get(method, {}))


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(general_methods())))
def test_so_are_those_of_a_method_for_adapters(method: str, tmp_path: Path) -> None:
    check_same(tmp_path, partial(adapted_net, side=6), method=method)


@pytest.mark.parametrize("prefix", ["cache", "recompute"])
def test_a_module_that_is_cut_at_run_time_and_draws(prefix: str, tmp_path: Path) -> None:
    check_same(tmp_path, Branching, method="fedpmt", prefix=prefix)


MORE: list[dict[str, Any]] = [
    {"method": "fedpmt", "dp_clip": 1.0, "dp_noise": 0.1, "clip_norm": 1.0},
    {"method": "fedpmt", "optimizer": "adam", "server_optimizer": "yogi", "weight_decay": 0.01},
    {"method": "heterofl", "momentum": 0.9, "server_optimizer": "momentum"},
    {"method": "fedavg", "optimizer": lambda params: torch.optim.Adam(params, foreach=False)},
    {"method": "fedavg", "mean": "trimmed:0.2"},
    {"method": "fedavg", "mean": "clipped:0.1"},
    {"method": "scaffold", "options": {"option": "I"}},
    {"method": "fedgen", "options": {"share": "head"}},
    {"method": "feddrop", "options": {"scaling": True}},
]


@pytest.mark.parametrize("settings", MORE, ids="-".join)
def test_other_settings_keep_tensors_there_too(settings: dict[str, Any], tmp_path: Path) -> None:
    check_same(tmp_path, chain, **settings)


def test_threads_take_turns_with_the_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are never forked where there is an accelerator."""
    equip = Parallel._equip

    def join(executor: Parallel) -> None:
        joined()
        equip(executor)

    monkeypatch.setattr(Parallel, "_equip", join)
    check_same(tmp_path, Branching, method="fedpmt", workers=2)


def test_a_run_is_resumed_on_the_device(tmp_path: Path) -> None:
    """State of the server and of devices comes back from files."""

    def interrupt(record: Any) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    expected = run(tmp_path / "whole", chain, method="scaffold")
    with pretended():
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", chain, method="scaffold", device="cuda", on_round=interrupt)
        found = run(tmp_path / "parts", chain, method="scaffold", device="cuda", resume=True)
    assert found.weights_sha256 == expected.weights_sha256


def test_mps_refuses_a_model_in_double_precision() -> None:
    model = layered(chain().double())
    problem: Any = type("Problem", (), {"model": model})
    check_precision(problem, torch.device("cpu"))
    with pytest.raises(SettingError, match=r"device = 'mps' has no float64 \(got '0.weight'\)"):
        check_precision(problem, torch.device("mps"))
