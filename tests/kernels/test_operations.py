"""Single operations in compiled code: what PyTorch's give, in double precision, and their gradients."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedpmt import kernels
from fedpmt.kernels import operations

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")

CLOSE = 3e-6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outcome(function: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The outputs and the gradients of all inputs."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    outputs = function(*leaves)
    return [outputs.detach(), *torch.autograd.grad(outputs, leaves, gradient)]


def check_against_double(function: Callable[..., Tensor], *inputs: Tensor, close: float = CLOSE) -> None:
    """Compare with PyTorch's own in double precision, and see that it is not PyTorch's that ran."""
    with kernels.faster():
        shape = function(*inputs).shape
        gradient = drawn(*shape, seed=99)
        found = outcome(function, gradient, *inputs)
    wanted = outcome(function, gradient.double(), *(one.double() for one in inputs))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert float((ours.double() - theirs).abs().max()) < close
    plain = outcome(function, gradient, *inputs)
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.floats(0.1, 8.0))
@settings(max_examples=30, deadline=None)
def test_gelu_is_x_times_the_normal_distribution(shape: list[int], spread: float) -> None:
    inputs = spread * drawn(*shape)
    with kernels.faster():
        found = outcome(F.gelu, torch.ones(shape), inputs)
    wanted = outcome(F.gelu, torch.ones(shape).double(), inputs.double())
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.double() - theirs).abs().max()) < CLOSE


def test_gelu_of_extreme_numbers() -> None:
    inputs = torch.tensor([0.0, -0.0, 1e-30, -20.0, 20.0, -1e30, 1e30, math.inf, math.nan])
    with kernels.faster():
        found, slopes = outcome(F.gelu, torch.ones(9), inputs)
    assert found[:8].tolist() == pytest.approx([0.0, 0.0, 5e-31, 0.0, 20.0, 0.0, 1e30, math.inf])
    assert slopes[:7].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.0, 1.0, 0.0, 1.0])
    assert math.isnan(found[8])


def test_what_dropout_keeps_is_scaled_and_comes_back_by_the_same_mask() -> None:
    inputs = drawn(50, 401).abs() + 1
    torch.manual_seed(3)
    with kernels.faster():
        outputs, gradient = outcome(lambda one: F.dropout(one, 0.25), torch.ones(50, 401), inputs)
    kept = outputs != 0
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.01)
    assert torch.allclose(outputs[kept], inputs[kept] / 0.75)
    assert torch.equal(gradient != 0, kept)
    assert torch.allclose(gradient[kept], torch.tensor(1 / 0.75))
    # Neighbours are dropped independently, in rows and in columns.
    for first, second in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        assert float((first & second).float().mean()) == pytest.approx(0.75**2, abs=0.02)


def test_dropout_follows_the_seed_of_torch() -> None:
    inputs = torch.ones(1000)

    def once(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        with kernels.faster():
            return [F.dropout(inputs, 0.5), F.dropout(inputs, 0.5)]

    first, again, other = once(1), once(1), once(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


SHAPES = [(2, 3, 65, 65, 16), (1, 2, 32, 32, 64), (3, 1, 5, 9, 7), (1, 1, 1, 3, 8), (2, 2, 128, 128, 33)]


@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape: tuple[int, ...]) -> None:
    samples, heads, queries, keys, features = shape
    query = drawn(samples, heads, queries, features)
    key, value = (drawn(samples, heads, keys, features, seed=seed) for seed in (1, 2))
    check_against_double(F.scaled_dot_product_attention, query, key, value)


def test_attention_reads_heads_where_they_lie() -> None:
    """As transformers make them: views of one tensor, with heads next to each other for each token."""

    def attend(joint: Tensor) -> Tensor:
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(4, 10, 24)

    check_against_double(attend, drawn(4, 10, 3, 3, 8))


MASKS = {
    "boolean": (torch.arange(10) < 7).expand(4, 1, 10, 10),
    "nothing to attend to": (torch.arange(10) < 5)[:, None].expand(10, 10),
    "added": drawn(4, 3, 10, 10, seed=7),
}


@pytest.mark.parametrize("name", [*MASKS, "causal"])
def test_attention_with_a_mask(name: str) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = MASKS.get(name)
        given = mask.to(query.dtype) if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(query, key, value, given, is_causal=mask is None, scale=0.3)

    check_against_double(attend, *(drawn(4, 3, 10, 8, seed=seed) for seed in (1, 2, 3)))


def test_attention_drops_probabilities_and_goes_back_by_the_same() -> None:
    """With values that are all one, an output is the sum of what was kept; its gradient is checked by differences."""
    query, key = drawn(2, 2, 40, 8), drawn(2, 2, 40, 8, seed=1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(5)
        with kernels.faster():
            return F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)

    sums = attend(query, key, torch.ones(2, 2, 40, 8))
    assert float(sums.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(sums.std()) > 0.05
    value, direction = drawn(2, 2, 40, 8, seed=2), drawn(2, 2, 40, 8, seed=3)
    gradient = outcome(lambda one: attend(query, one, value), direction, key)[1]
    step = 1e-2 * drawn(2, 2, 40, 8, seed=4)
    there, back = (float((attend(query, key + sign * step, value) * direction).sum()) for sign in (1, -1))
    assert (there - back) / 2 == pytest.approx(float((gradient * step).sum()), rel=2e-2)


@pytest.mark.parametrize("shape", [(20, 65, 64, 192), (5, 260, 256, 64), (1300, 70, 33)])
def test_linear_layers(shape: tuple[int, ...]) -> None:
    *rows, features, outputs = shape
    inputs, weight, bias = drawn(*rows, features), drawn(outputs, features, seed=1), drawn(outputs, seed=2)
    check_against_double(F.linear, inputs, weight, bias, close=1e-3)
    check_against_double(F.linear, inputs.transpose(0, -2), weight, close=1e-3)


def test_a_penalty_on_gradients_of_a_linear_layer() -> None:
    """With a graph of the backward pass, and a gradient that is one number expanded."""

    def penalty(weight: Tensor) -> Tensor:
        inputs = drawn(300, 64).requires_grad_()
        (slopes,) = torch.autograd.grad(F.linear(inputs, weight).sum(), inputs, create_graph=True)
        return slopes.square().sum().reshape(1)

    weight = drawn(256, 64, seed=1)
    with kernels.faster():
        assert operations.linear(drawn(300, 64), weight) is not None
        value, gradient = outcome(penalty, torch.ones(1), weight)
    sums = weight.sum(0)
    assert float(value) == pytest.approx(300 * float(sums.square().sum()), rel=1e-4)
    assert torch.allclose(gradient, (600 * sums).expand(256, 64), rtol=1e-3, atol=1e-2)


def test_what_it_cannot_do_is_left_to_torch() -> None:
    wide, narrow = drawn(400, 100), drawn(100, 100)
    assert operations.linear(wide, narrow) is not None
    assert operations.linear(wide[:2], narrow) is None  # too small to gain
    assert operations.linear(wide.double(), narrow.double()) is None
    assert operations.linear(wide, narrow[:, :50]) is None  # whose message is PyTorch's
    assert operations.linear(wide, narrow, narrow[0].double()) is None
    assert operations.linear(wide, narrow[0]) is None
    long = torch.zeros(1, 1, operations.LONGEST + 1, 8)
    short = torch.zeros(1, 2, 4, 8)
    learned = torch.zeros(4, 4, requires_grad=True)
    assert operations.gelu(torch.zeros(3, dtype=torch.float64)) is None
    assert operations.gelu(torch.zeros(3), approximate="tanh") is None
    assert operations.gelu(torch.zeros(0)) is None
    assert operations.gelu(torch.zeros(3, 4).t()) is None
    assert operations.dropout(torch.zeros(3), training=False) is None
    assert operations.dropout(torch.zeros(3), inplace=True) is None
    assert operations.dropout(torch.zeros(3), 1.0) is None
    assert operations.attention(long, long, long) is None
    assert operations.attention(short, short, short, learned) is None
    assert operations.attention(short[:, :1], short, short) is None
    half = short.bfloat16()
    assert operations.attention(half, half, half) is None
    with torch.autocast("cpu", torch.bfloat16), kernels.faster():
        found = F.scaled_dot_product_attention(short, short, short)
    assert found.dtype == torch.bfloat16
