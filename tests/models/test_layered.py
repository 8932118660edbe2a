from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedpmt.models.build import build
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.part import add_at, take
from fedpmt.parts.width import kept_count, narrow, random_channels
from fedpmt.seeds import generator
from fedpmt.types import SettingError
from models.nets_of_users import Loose, ResNet, Shared, Tied, Transformer


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [
        ("fcnn-mnist", 515_610, ["fc1", "fc2", "fc3", "fc4", "out"]),
        ("cnn-mnist", 37_610, ["conv1", "conv2", "fc1", "out"]),
        ("cnn-cifar10", 567_858, ["conv1", "conv2", "fc1", "fc2", "out"]),
    ],
)
def test_paper_nets(name: str, parameters: int, layers: list[str]) -> None:
    model = build(NETS[name], generator(0, "init"))
    assert model.structure.size(model.structure.parameters) == parameters
    assert [layer.name for layer in model.structure.layers] == layers
    # No ReLU on the logits: some of them are negative.
    outputs = model.forward(model.initial(), torch.randn(50, *NETS[name].input_shape))
    assert outputs.shape == (50, 10)
    assert (outputs < 0).any()


@pytest.mark.parametrize("name", NETS)
def test_halves_make_the_whole_bit_for_bit(name: str) -> None:
    model = build(NETS[name], generator(0, "init"))
    tensors, inputs = model.initial(), torch.randn(3, *NETS[name].input_shape)
    whole = model.forward(tensors, inputs)
    for cut in range(1, len(model.structure.layers)):
        hidden = model.prefix(cut, tensors, inputs)
        assert not hidden.requires_grad
        assert torch.equal(model.suffix(cut, tensors, hidden), whole)


@pytest.mark.parametrize("name", NETS)
def test_narrow_forward_is_the_full_one_with_dropped_units_zeroed(name: str) -> None:
    """Also through the flatten: a kept filter keeps its block of the next layer's inputs."""
    model = build(NETS[name], generator(0, "init"))
    axes, structure = model.structure.require_axes("this test"), model.structure
    rng = generator(1, "channels")
    kept = {
        g.name: random_channels(g.size, kept_count(g.size, 0.4), rng)
        for g in axes.groups.values()
        if g.hidden
    }
    part = narrow(structure, axes, kept, "some")
    full = model.initial()
    cut = {name_: take(full[name_], selection) for name_, selection in part.sent.items()}
    zeroed = {name_: torch.zeros_like(tensor) for name_, tensor in full.items()}
    for name_, selection in part.sent.items():
        add_at(zeroed[name_], selection, cut[name_])
    inputs = torch.randn(4, *NETS[name].input_shape)
    torch.testing.assert_close(
        model.forward(cut, inputs), model.forward(zeroed, inputs), rtol=1e-5, atol=1e-6
    )
    assert part.overhead_bytes == 4 * sum(len(channels) for channels in kept.values())


def test_norms_and_stateless_modules_belong_to_the_layer_before() -> None:
    net = nn.Sequential(
        nn.Identity(),
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Sequential(nn.Flatten(), nn.Linear(72, 3)),
        nn.Softmax(1),
    )
    layers = layered(net).structure.layers
    assert [layer.name for layer in layers] == ["1", "4.1"]
    assert layers[0].parameters == ("1.weight", "1.bias", "2.weight", "2.bias")
    assert layers[0].buffers == ("2.running_mean", "2.running_var")  # the counter does not travel


def test_resnet_layers_are_found_and_a_block_is_one_layer() -> None:
    model = layered(ResNet(), example=torch.randn(2, 1, 8, 8))
    assert [layer.name for layer in model.structure.layers] == ["stem", "blocks.0", "blocks.1", "fc"]
    assert set(model.structure.layers[0].parameters) == {"stem.weight", "bn.weight", "bn.bias"}
    assert not model.composable  # it pools in its forward pass


def test_transformer_layers_are_found_from_keyword_inputs() -> None:
    example = {"tokens": torch.zeros(2, 5, dtype=torch.int64), "scale": torch.ones(2)}
    model = layered(Transformer(), example=example)
    assert [layer.name for layer in model.structure.layers] == [
        "embed",
        "encoder.layers.0",
        "encoder.layers.1",
        "head",
    ]
    assert "encoder.layers.0.linear1" in model.structure.require_axes("feddrop").groups


def test_only_a_plain_sequential_is_run_in_halves() -> None:
    """What stands between declared layers is not known, and two samples cannot tell."""

    class Clamped(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(max=1000.0)  # type: ignore[no-any-return,no-untyped-call]

    inputs = torch.randn(2, 4)
    for module, layers in (
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), ["0", "1"]),
        (Clamped(nn.Linear(4, 3)), None),
    ):
        model = layered(module, layers=layers, example=inputs)
        assert not model.composable
        with pytest.raises(SettingError, match="not a chain"):
            model.prefix(1, model.initial(), inputs)
    hooked = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    hooked.register_forward_hook(lambda _m, _i, output: output * 2)
    assert not layered(hooked, example=inputs).composable


def test_a_module_used_twice_runs_twice() -> None:
    activation = nn.ReLU()
    net = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 3))
    model = layered(net)
    inputs, tensors = torch.randn(20, 4), model.initial()
    for cut in (1, 2):
        assert torch.equal(model.suffix(cut, tensors, model.prefix(cut, tensors, inputs)), net(inputs))
    weighted = nn.Linear(4, 4)
    with pytest.raises(SettingError, match="one tensor in two layers"):
        layered(nn.Sequential(weighted, activation, weighted))


def test_what_its_owner_has_frozen_is_not_trained() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[2].bias.requires_grad_(False)
    assert layered(net).structure.parameters == ("0.weight", "0.bias", "2.weight")
    net[0].requires_grad_(False)
    assert [layer.name for layer in layered(net).structure.layers] == ["2"]


@pytest.mark.parametrize(
    ("module", "layers", "message"),
    [
        (Shared(), None, "'inner' runs more than once"),
        (Loose(), None, "'scale' is in none of the layers"),
        (Tied(), None, "one tensor in two layers"),
        (Tied(), ["first"], "'second.bias' is in none of the layers"),
        (Shared(), ["inner", "hed"], "did you mean 'head'"),
        (nn.Sequential(nn.Flatten()), None, "no layer with weights"),
    ],
)
def test_what_cannot_be_layered_is_refused_with_the_reason(
    module: nn.Module, layers: list[str] | None, message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        layered(module, layers=layers, example=torch.randn(2, 4))


def test_module_that_needs_an_example_says_so() -> None:
    with pytest.raises(SettingError, match="name its layers"):
        layered(ResNet())


def test_initial_weights_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = build(NETS["cnn-mnist"], generator(5, "init")).initial()
    torch.manual_seed(2)
    second = build(NETS["cnn-mnist"], generator(5, "init")).initial()
    assert all(torch.equal(first[name], second[name]) for name in first)
    bound = 1 / np.sqrt(25)
    assert -bound <= first["conv1.weight"].min() < -0.8 * bound
