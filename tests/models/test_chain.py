"""A class whose forward pass is a chain is found to be one; whatever does more is left as it is."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedpmt.models.chain import find_chain
from fedpmt.models.layered import layered
from models.nets_of_users import Convolutional, Nested, Perceptron, SharedModules, Viewed, twins

IMAGES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TWINS = twins()


@pytest.mark.parametrize("name", TWINS)
def test_a_chain_is_found_and_can_be_cut(name: str) -> None:
    net, sequential = TWINS[name]
    chain = find_chain(net, IMAGES)
    assert chain is not None
    outputs = IMAGES
    for link in chain:
        outputs = link.module(outputs)
        assert link.path is None or net.get_submodule(link.path) is link.module
    assert torch.equal(outputs, sequential(IMAGES))
    model = layered(net, example=IMAGES)
    for one in (model, model.clone()):
        tensors = one.initial()
        for cut in range(1, len(one.structure.layers)):
            assert torch.equal(one.suffix(cut, tensors, one.prefix(cut, tensors, IMAGES)), outputs)


def test_a_chain_inside_a_chain_is_looked_through() -> None:
    model = layered(Nested(), example=IMAGES)
    assert [layer.name for layer in model.structure.layers] == [
        "features.0",
        "head.fc1",
        "head.fc2",
        "head.out",
    ]
    assert [link.path for link in model.modules_of(1, 4)] == ["head.fc1", None, "head.fc2", None, "head.out"]
    # The view is before the head's first layer, and so goes with the layer before.
    assert [link.path for link in model.modules_of(0, 1)] == [
        "features.0",
        "features.1",
        "features.2.0",
        None,
    ]


def test_a_sequential_is_a_chain_of_whatever_it_holds() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    known = find_chain(nn.Sequential(block, Perceptron(144)), IMAGES)
    assert known is not None
    assert [link.path for link in known] == ["0.0", "0.1", None, "1.fc1", None, "1.fc2", None, "1.out"]
    opaque = find_chain(nn.Sequential(block, Doubled(), nn.Flatten()), IMAGES)
    assert opaque is not None
    assert [link.path for link in opaque] == ["0.0", "0.1", "1", "2"]


def test_looking_for_a_chain_changes_nothing() -> None:
    net, random_net = SharedModules(), Layerdrop()
    net.pool.eval()
    before, modes = copy.deepcopy(net.state_dict()), [one.training for one in net.modules()]
    torch_state, state, numpy_state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    find_chain(net, IMAGES)
    find_chain(random_net, IMAGES)
    assert [one.training for one in net.modules()] == modes
    assert all(torch.equal(net.state_dict()[name], one) for name, one in before.items())
    assert all(one.grad is None for one in net.parameters())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (random.getstate(), str(np.random.get_state())) == (state, numpy_state)


class Own(Viewed):
    """What a user may do in a forward pass; `between` is called on what enters the last layer."""

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return self.out(self.between(F.relu(self.fc1(x))))  # type: ignore[no-any-return]


class Trained(Own):
    def between(self, x: Tensor) -> Tensor:
        return x if self.training else F.relu(x)


class Dropping(Own):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


class Layerdrop(Own):
    def between(self, x: Tensor) -> Tensor:
        return F.relu(x) if random.random() + float(torch.rand(1)) + np.random.rand() < 1 else x


class Counting(Own):
    calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Skipping(Own):
    def between(self, x: Tensor) -> Tensor:
        return x + F.relu(x)


class Deciding(Own):
    def between(self, x: Tensor) -> Tensor:
        return F.relu(x) if x.sum() > 0 else x


class Detaching(Own):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return self.out(F.relu(self.fc1(x)))  # type: ignore[no-any-return]


class Shortened(Own):
    """Makes eight rows of each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.view(-1, 8))  # type: ignore[no-any-return]


class Unused(Own):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(8, 3)


class Buffered(Own):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


class Repeated(Own):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def between(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))  # type: ignore[no-any-return]


class Several(Own):
    def forward(self, x: Tensor) -> Tensor:
        return {"logits": super().forward(x)}  # type: ignore[return-value]


class Loud(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class WithOwnLinear(Own):
    def __init__(self) -> None:
        super().__init__()
        self.out = Loud(8, 3)


def changed(how: str) -> nn.Module:
    """A chain, until its user did something with it."""
    net = Own()
    match how:
        case "hook":
            net.fc1.register_forward_hook(lambda _module, _inputs, outputs: 2 * outputs)
        case "hook on itself":
            net.register_forward_pre_hook(lambda _module, inputs: (2 * inputs[0],))
        case "parametrization":
            parametrizations.weight_norm(net.fc1)
        case "frozen":
            net.conv.requires_grad_(False)
        case "tied":
            net.fc1, net.out = nn.Linear(36, 36), nn.Linear(36, 36)
            net.out.weight = net.fc1.weight
        case "forward":
            vars(net.fc1)["forward"] = lambda x: 2 * F.linear(x, net.fc1.weight, net.fc1.bias)
    return net


NO_CHAINS: dict[str, Any] = {
    one.__name__: one
    for one in (
        Trained, Dropping, Layerdrop, Counting, Skipping, Deciding, Detaching, Shortened, Unused, Buffered,
        Repeated, Several, WithOwnLinear,
    )
}  # fmt: skip
CHANGES = ("hook", "hook on itself", "parametrization", "frozen", "tied", "forward")


def test_the_class_that_the_others_are_made_from_is_a_chain() -> None:
    assert find_chain(Own(), IMAGES) is not None
    assert find_chain(changed("not at all"), IMAGES) is not None


@pytest.mark.parametrize("name", NO_CHAINS)
def test_what_does_more_is_no_chain(name: str) -> None:
    assert find_chain(NO_CHAINS[name](), IMAGES) is None


@pytest.mark.parametrize("how", CHANGES)
def test_what_was_changed_is_no_chain(how: str) -> None:
    assert find_chain(changed(how), IMAGES) is None


def test_a_class_without_an_example_is_no_chain() -> None:
    assert find_chain(Convolutional()) is None
    assert find_chain(Convolutional(), {"x": IMAGES}) is None
    assert find_chain(Convolutional(), IMAGES[:0]) is None
