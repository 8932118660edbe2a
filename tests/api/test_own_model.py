"""A user's own module, data, loss and metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpmt
from fedpmt import api
from fedpmt.models.layered import layered
from fedpmt.types import SettingError
from models.nets_of_users import ResNet, Transformer
from models.zoo import ZOO
from support import FEW, images

Pair = tuple[Any, Any]


def tokens(count: int, seed: int = 0) -> Pair:
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    return {
        "tokens": rng.integers(3, size=(count, 5)) + 3 * labels[:, None],
        "scale": np.ones(count, dtype=np.float32),
    }, labels


def test_resnet_with_batch_norm_learns_and_loads_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = ResNet()
    run = fedpmt.run(
        "fedpmt",
        model=module,
        train=images(120),
        test=images(60, 1),
        out=tmp_path / "run",
        rounds=30,
        lr=0.2,
        **FEW,
    )
    assert run.result is not None
    assert run.result.accuracy is not None
    assert run.result.accuracy > 0.7
    weights = load_file(tmp_path / "run" / "model.safetensors")
    fresh = ResNet()
    fresh.load_state_dict(weights)  # strictly
    inputs, labels = images(60, 1)
    fresh.eval()
    accuracy = (fresh(torch.from_numpy(inputs)).argmax(1).numpy() == labels).mean()
    assert accuracy == pytest.approx(run.result.accuracy)


def test_batch_norm_of_frozen_layers_stays_as_received() -> None:
    """Weights and statistics of layers that no device trained keep their bits; all others move."""
    torch.manual_seed(0)
    module = ResNet()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    slow = {**FEW, "levels": "1/5,1/4", "deadline": 30}  # the whole net takes 40 seconds at speed 1/4
    run = fedpmt.run("fedpmt", model=module, train=images(120), test=images(60, 1), rounds=2, lr=0.2, **slow)
    assert run.result is not None
    after = load_file(Path(run.result.run) / "model.safetensors")
    trained = {layer for record in run.rounds for layer, count in record.layers.items() if count}
    assert 0 < len(trained) < len(run.rounds[0].layers)
    for layer in layered(ResNet(), example=torch.zeros(2, 1, 6, 6)).structure.layers:
        for name in layer.tensors:
            assert torch.equal(after[name], before[name]) == (layer.name not in trained), name


def test_transformer_with_keyword_inputs_learns() -> None:
    torch.manual_seed(0)
    run = fedpmt.run(
        "fedpmt", model=Transformer(), train=tokens(120), test=tokens(60, 1), rounds=30, lr=0.2, **FEW
    )
    assert run.result is not None
    assert run.result.accuracy is not None
    assert run.result.accuracy > 0.7
    assert list(run.rounds[0].layers) == ["embed", "encoder.layers.0", "encoder.layers.1", "head"]


def test_dropout_gives_the_same_bits_for_any_number_of_workers() -> None:
    found = set()
    for workers in (1, 3):
        torch.manual_seed(0)
        module = Transformer(dropout=0.5)
        torch.manual_seed(workers)  # the user's own randomness must not matter, nor be disturbed
        state = torch.get_rng_state()
        run = fedpmt.run(
            "fedpmt", model=module, train=tokens(120), test=tokens(60, 1), rounds=2, workers=workers, **FEW
        )
        assert torch.equal(state, torch.get_rng_state())
        assert run.result is not None
        found.add(run.result.weights_sha256)
    assert len(found) == 1


def test_regression_with_own_loss_and_metric() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(200, 4)).astype(np.float32)
    targets = (inputs @ np.array([1.0, -2.0, 0.5, 3.0], dtype=np.float32))[:, None]

    def close(outputs: Tensor, wanted: Tensor) -> Tensor:
        return ((outputs - wanted).abs() < 0.5).float().squeeze(1)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    run = fedpmt.run(
        "fedpmt",
        model=module,
        train=(inputs[:120], targets[:120]),
        test=(inputs[120:], targets[120:]),
        loss=nn.functional.mse_loss,
        metric=close,
        rounds=40,
        epochs=3,
        momentum=0.5,
        weight_decay=1e-4,
        **FEW,
    )
    first, last = run.rounds[0], run.rounds[-1]
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < 0.2 * first.loss
    assert last.score is not None
    assert last.score > 0.6
    assert (last.score_name, last.accuracy, last.score_by_class) == ("close", None, None)
    with pytest.raises(SettingError, match="partition"):
        fedpmt.run(
            "fedpmt",
            model=module,
            train=(inputs, targets),
            test=(inputs, targets),
            partition="classes:2",
            **FEW,
        )


def test_training_starts_from_the_modules_own_weights_and_leaves_them_alone() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = fedpmt.run("fedavg", model=module, train=images(120), test=images(60, 1), rounds=1, lr=0.0, **FEW)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert run.result is not None
    weights = load_file(Path(run.result.run) / "model.safetensors")
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_methods_can_be_values_with_their_own_settings() -> None:
    runs = fedpmt.compare(
        [fedpmt.FedPMT(depths=2), fedpmt.FedDrop(keep=0.5, scope="all"), fedpmt.FedAvg()],
        task="cnn-mnist",
        seeds=[0, 1],
        rounds=1,
        devices=5,
        samples=20,
        cohort=5,
    )
    assert [run.settings["method"] for run in runs] == ["fedpmt", "feddrop", "fedavg"] * 2
    assert runs[0].settings["depths"] == 2
    assert {device.part for device in runs[1].rounds[0].devices} == {"keep 0.50"}
    assert {device.part for device in runs[0].rounds[0].devices} == {"depth 1", "depth 2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": nn.Linear(2, 2)}, "needs one of train, clients, or data .* there is none"),
        ({"train": images(9), "test": images(9)}, "train needs a model of your own"),
        (
            {"model": nn.Linear(2, 2), "train": images(9), "test": images(9), "data": "mnist"},
            "there are train and data",
        ),
        ({"model": nn.Linear(2, 2), "task": "cnn-mnist"}, "drop it, or drop the model"),
        ({"layers": ["a", "b"]}, "layers = .* needs a model of your own"),
        ({"rounds": 0}, "rounds"),
        ({"method": "fedpmd"}, "did you mean 'fedpmt'"),
        ({"cohorts": 3}, "did you mean 'cohort'"),
        ({"task": "resnet"}, "task"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        api.run(**arguments, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_callback_sees_every_round_and_may_stop_the_run(tmp_path: Path) -> None:
    seen: list[int] = []

    def stop(record: fedpmt.RoundRecord) -> None:
        seen.append(record.round)
        if record.round == 2:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {
        "rounds": 4,
        "devices": 5,
        "samples": 20,
        "cohort": 5,
        "out": tmp_path / "run",
    }
    with pytest.raises(KeyboardInterrupt):
        api.run("fedpmt", on_round=stop, **settings)
    run = api.run("fedpmt", resume=True, on_round=lambda record: seen.append(record.round), **settings)
    assert seen == [1, 2, 3, 4]
    assert [record.round for record in run.rounds] == [1, 2, 3, 4]


def test_tensorboard_is_one_such_callback(tmp_path: Path) -> None:
    with fedpmt.TensorBoard(tmp_path / "board") as board:
        api.run("fedpmt", rounds=2, devices=5, samples=20, cohort=5, on_round=board)
    assert any((tmp_path / "board").iterdir())


@pytest.mark.parametrize(
    ("settings", "reason"), [({"target": 0.15}, "target"), ({"time_budget": 30.0}, "time-budget")]
)
def test_run_stops_at_a_target_or_a_time_budget(settings: dict[str, Any], reason: str) -> None:
    run = api.run("fedavg", rounds=30, lr=0.1, devices=10, samples=80, cohort=5, full_seconds=5.0, **settings)
    assert run.result is not None
    assert run.result.stopped == reason
    assert run.result.rounds < 30
    assert run.rounds[-1].accuracy == run.result.accuracy


SETTINGS: dict[str, Any] = {"rounds": 1, "devices": 2, "cohort": 2, "samples": 12, "levels": "1/4,1"}
GATES = {
    "embed.weight": (None, "words"),
    "cell.weight_ih_l0": (fedpmt.Axis("state", tiles=4), "words"),
    "cell.weight_hh_l0": (fedpmt.Axis("state", tiles=4), "state"),
    "cell.bias_ih_l0": (fedpmt.Axis("state", tiles=4),),
    "cell.bias_hh_l0": (fedpmt.Axis("state", tiles=4),),
    "out.weight": ("output", "state"),
    "out.bias": ("output",),
}


def test_a_recurrent_net_is_cut_where_its_user_says() -> None:
    published = ZOO["LSTM"]
    inputs = published.inputs()
    data = inputs, published.targets(inputs)
    with pytest.raises(SettingError, match="'cell' \\(LSTM\\) mixes channels"):
        fedpmt.run("heterofl", model=published.make(), train=data, test=data, **SETTINGS)
    run = fedpmt.run("heterofl", model=published.make(), train=data, test=data, axes=GATES, **SETTINGS)
    narrow, whole = sorted(run.rounds[0].devices, key=lambda one: one.level)
    assert narrow.bytes_up < whole.bytes_up / 2
    with pytest.raises(SettingError, match="axes needs a model of your own"):
        fedpmt.run("heterofl", axes=GATES, rounds=1)
