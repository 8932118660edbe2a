from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedpmt.models.build import build
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.models.trees import is_channels_last
from fedpmt.parts.part import add_at, take
from fedpmt.parts.width import kept_count, narrow, random_channels
from fedpmt.seeds import generator
from fedpmt.types import SettingError
from models.nets_of_users import Loose, ResNet, Shared, Tied, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.layout import TiedOwner


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


def test_only_a_plain_sequential_is_a_chain_of_its_layers() -> None:
    class Clamped(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(max=0.1)  # type: ignore[no-any-return,no-untyped-call]

    inputs = torch.randn(2, 4)
    hooked = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    hooked.register_forward_hook(lambda _m, _i, output: output * 2)
    for module in (Clamped(nn.Linear(4, 3), nn.Linear(3, 2)), hooked):
        model = layered(module, example=inputs)
        assert not model.composable
        # It is cut by answering for its first layer.
        kept = model.prefix(1, model.initial(), inputs)
        assert torch.equal(model.suffix(1, model.initial(), model.entry(kept, inputs)), module(inputs))


def test_layers_that_are_named_are_a_chain_where_they_follow_one_another() -> None:
    net = nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 2))
    )
    inputs = torch.randn(2, 4)
    model = layered(net, layers=["0", "2"])
    model.set_training([False, False])
    tensors = model.initial()
    net.eval()
    assert torch.equal(model.suffix(1, tensors, model.prefix(1, tensors, inputs)), net(inputs))
    assert not layered(net, layers=["2", "0"]).composable


def test_a_module_used_twice_runs_twice() -> None:
    activation = nn.ReLU()
    net = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 3))
    model = layered(net)
    inputs, tensors = torch.randn(20, 4), model.initial()
    for cut in (1, 2):
        assert torch.equal(model.suffix(cut, tensors, model.prefix(cut, tensors, inputs)), net(inputs))
    weighted = nn.Linear(4, 4)
    twice = nn.Sequential(weighted, activation, weighted)
    owner = [layered(twice, tied=tied).layout.owners["0.weight"] for tied in ("first", "last")]
    assert owner == [0, 0]  # one layer: the second use has no tensor of its own


def test_what_its_owner_has_frozen_is_not_trained() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[2].bias.requires_grad_(False)
    assert layered(net).structure.parameters == ("0.weight", "0.bias", "2.weight")
    net[0].requires_grad_(False)
    assert [layer.name for layer in layered(net).structure.layers] == ["2"]


@pytest.mark.parametrize(
    ("module", "layers", "message"),
    [
        (Shared(), ["inner", "hed"], "did you mean 'head'"),
        (Shared(), ["head", "inner"], "'inner' runs before 'head'"),
        (Shared(), ["inner", []], "paths, or lists of paths"),
        (Shared(), ["inner", ["inner", "head"]], "'inner.weight' is in two layers"),
        (Shared().requires_grad_(False), None, "nothing to train"),
        (nn.Sequential(nn.Flatten()), None, "no layer with weights"),
    ],
)
def test_what_cannot_be_layered_is_refused_with_the_reason(
    module: nn.Module, layers: list[str] | None, message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        layered(module, layers=layers, example=torch.randn(2, 4))


def test_a_bare_parameter_belongs_to_the_layer_that_reads_it() -> None:
    model = layered(Loose(), example=torch.randn(2, 4))
    assert [layer.parameters for layer in model.structure.layers] == [("scale", "head.weight", "head.bias")]


@pytest.mark.parametrize("tied", ["first", "last"])
def test_a_tied_weight_has_one_owner_and_all_its_names(tied: TiedOwner) -> None:
    module, inputs = Tied(), torch.randn(2, 4)
    model = layered(module, example=inputs, tied=tied)
    owner = {name: layer.name for layer in model.structure.layers for name in layer.parameters}
    assert owner == {
        "first.weight": tied.replace("last", "second"),
        "first.bias": "first",
        "second.bias": "second",
    }
    tensors = {name: torch.randn_like(tensor) for name, tensor in model.initial().items()}
    fresh = Tied()
    fresh.load_state_dict(model.state_dict(tensors), strict=True)
    assert torch.equal(fresh(inputs), model.forward(tensors, inputs))
    assert fresh.first.weight is fresh.second.weight


def test_layers_may_be_lists_of_paths_and_parameters() -> None:
    model = layered(Loose(), layers=[["scale"], ["head"]], example=torch.randn(2, 4))
    assert [layer.parameters for layer in model.structure.layers] == [
        ("scale",),
        ("head.weight", "head.bias"),
    ]
    model = layered(ResNet(), layers=[["stem", "blocks.0"], "fc"], example=torch.randn(2, 1, 8, 8))
    # What nobody named runs after the first layer, and belongs to it.
    assert [len(layer.parameters) for layer in model.structure.layers] == [1 + 2 + 6 + 7, 2]


class Wrapper(nn.Module):
    """A net inside of another module, with a counter and a head nobody uses."""

    seen: torch.Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.unused = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += 1
        return {"logits": self.net(x) + self.seen}


def test_a_wrapper_is_looked_through_and_all_state_counts() -> None:
    module, inputs = Wrapper(ResNet()), torch.randn(2, 1, 8, 8)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = layered(module, example=inputs)
    assert [layer.name for layer in model.structure.layers] == [
        "net.stem",
        "net.blocks.0",
        "net.blocks.1",
        "net.fc",
    ]
    assert "unused.weight" in model.structure.layers[0].parameters  # trained by those who train everything
    assert "seen" in model.structure.layers[-1].buffers
    assert {name for name in before if name.endswith("num_batches_tracked")} == set(model.structure.fixed)
    assert set(model.structure.tensors) | set(model.structure.fixed) == set(before)
    model.set_training([True] * 4)
    model.forward({**model.initial(), **model.local_buffers()}, inputs)
    model.release()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())


def test_a_frozen_backbone_is_a_base_that_can_be_kept() -> None:
    for module in (ResNet(), nn.Sequential(ResNet(), nn.Linear(3, 2))):
        backbone = [name for name, _ in module.named_parameters() if not name.startswith(("fc", "1."))]
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in backbone)
        inputs = torch.randn(2, 1, 8, 8)
        model = layered(module, example=inputs)
        assert len(model.structure.layers) == 1
        assert set(backbone) < set(model.structure.fixed)
        model.set_training([True])
        assert not any(child.training for name, child in model.module.named_modules() if ".bn" in name)
        assert model.can_cut(0)
        kept = model.prefix(0, {}, inputs)
        outputs = model.suffix(0, model.initial(), model.entry(kept, inputs))
        torch.testing.assert_close(outputs, module.eval()(inputs))


class Skipping(nn.Module):
    """The first layer's outputs skip the second; the second runs again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.first(x))
        third = self.third(torch.relu(self.second(first)) * 2)
        return self.second(third + first)  # type: ignore[no-any-return]


def test_all_that_crosses_a_cut_is_kept() -> None:
    module, inputs = Skipping(), torch.randn(3, 4)
    model = layered(module, example=inputs)
    tensors = model.initial()
    kept = [model.prefix(cut, tensors, inputs) for cut in (1, 2)]
    assert [len(one) for one in kept] == [1, 2]
    for cut, one in enumerate(kept, start=1):
        assert torch.equal(model.suffix(cut, tensors, model.entry(one, inputs)), module(inputs))


class TimeFirst(nn.Module):
    """Samples are the second axis of what the recurrent layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(9, 4), nn.LSTM(4, 5), nn.Linear(5, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cell(self.embed(words).transpose(0, 1))
        return self.out(hidden[-1])  # type: ignore[no-any-return]


def test_samples_may_be_any_axis() -> None:
    module, words = TimeFirst(), torch.randint(9, (6, 3))
    model = layered(module, example=words)
    kept = model.prefix(2, model.initial(), words)
    assert {len(tensor) for tensor in kept.values()} == {6}
    rows = {name: tensor[[4, 1]] for name, tensor in kept.items()}
    outputs = model.suffix(2, model.initial(), model.entry(rows, words[[4, 1]]))
    torch.testing.assert_close(outputs, module(words[[4, 1]]))


def test_dropout_goes_with_the_layer_it_feeds() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9), nn.Linear(3, 2))
    model = layered(net)
    model.set_training([False, True])
    assert [child.training for child in model.module.children()] == [False, True, True]


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


class Reshaping(nn.Module):
    def __init__(self, *, by_view: bool = False, groups: int = 3) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 6, 3, groups=groups), nn.Linear(6 * 36, 2)
        self.by_view = by_view

    def forward(self, images: Tensor) -> Tensor:
        found = torch.relu(self.conv(images))
        return cast("Tensor", self.out(found.view(len(images), -1) if self.by_view else found.flatten(1)))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Reshaping, True),
        (partial(Reshaping, by_view=True), False),  # which fails on channels that are not apart
        (partial(Reshaping, groups=1), True),
    ],
)
def test_images_are_given_channels_last_where_the_net_takes_them(
    make: Callable[[], nn.Module], expected: bool
) -> None:
    torch.manual_seed(0)
    module, images = make(), torch.randn(3, 3, 8, 8)
    seen: list[bool] = []
    model = layered(module, example=images)
    conv = next(one for one in model.module.modules() if isinstance(one, nn.Conv2d))
    conv.register_forward_pre_hook(lambda _, given: seen.append(is_channels_last(given[0])))
    found = model.forward(model.initial(), images)
    assert seen == [expected]
    torch.testing.assert_close(found, module(images))
    if model.can_cut(1):
        kept = model.prefix(1, model.initial(), images)
        torch.testing.assert_close(model.suffix(1, model.initial(), model.entry(kept, images)), found)
