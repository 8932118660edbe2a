"""Measured operations against forms derived by hand, and the memory that goes with them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fedpmt.models.build import build
from fedpmt.models.nets import NETS
from fedpmt.parts import depth
from fedpmt.parts.part import WHOLE, Mask, Part
from fedpmt.parts.width import narrow
from fedpmt.pricing import measure as measuring
from fedpmt.pricing import price as pricing
from fedpmt.pricing.cost import RoundMemory
from fedpmt.pricing.cost_table import dropped
from fedpmt.pricing.price import Price
from fedpmt.seeds import generator
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from fedpmt.models.nets import Net
    from fedpmt.pricing.cost import StepCost
    from fedpmt.pricing.price import Mode

TASKS = list(NETS)


def price_of(
    task: str, mode: Mode = "exact", *, batch: int | None = None, cached: bool = False, momentum: bool = False
) -> Price:
    net = NETS[task]
    return Price(
        build(net, generator(0, "test")),
        mode=mode,
        batch=batch or net.batch,
        samples=300,
        cached=cached,
        held=int(momentum),
        example=np.zeros((3, *net.input_shape), "float32"),
        net=net,
    )


def forward_products(net: Net, filters: tuple[int, ...], hidden: tuple[int, ...]) -> list[tuple[int, int]]:
    """Multiply-adds of one sample and parameters of each layer, by hand."""
    rows = []
    channels, side = net.input_shape[0], net.input_shape[1]
    for count in filters:
        side -= 4
        rows.append((channels * 25 * count * side * side, channels * 25 * count + count))
        channels, side = count, side // 2
    units = [channels * side * side, *hidden, net.classes]
    return rows + [(before * after, before * after + after) for before, after in pairwise(units)]


def closed_form(
    rows: list[tuple[int, int]], trained: list[int], batch: int
) -> tuple[int, int, int, int, int]:
    """Prefix, forward, error, gradient and update when layers `trained` (from 0) are trained."""
    first = trained[0]
    # The error signal is taken through every layer behind the first trained one.
    return (
        batch * sum(row[0] for row in rows[:first]),
        batch * sum(row[0] for row in rows[first:]),
        batch * sum(row[0] for row in rows[first + 1 :]),
        batch * sum(rows[layer][0] for layer in trained),
        sum(rows[layer][1] for layer in trained),
    )


def numbers(cost: StepCost) -> tuple[float, float, float, float, float]:
    return cost.prefix, cost.forward, cost.error, cost.gradient, cost.update


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("batch", [1, 7, None])
def test_every_cut_of_the_papers_nets(task: str, batch: int | None) -> None:
    price, net = price_of(task, batch=batch), NETS[task]
    rows = forward_products(net, net.filters, net.hidden)
    for frozen in range(net.layers):
        cost = price(depth.suffix(price.structure, frozen, ""))
        assert numbers(cost) == closed_form(rows, list(range(frozen, net.layers)), price.batch)
        assert cost.share == cost.operations / price.full.operations
    assert price.full.share == 1


@pytest.mark.parametrize("task", TASKS)
def test_a_middle_block_pays_for_the_signal_behind_it(task: str) -> None:
    price, net = price_of(task), NETS[task]
    middle = [1, 2]
    names = [name for index in middle for name in price.structure.layers[index].tensors]
    part = Part("global", dict.fromkeys(price.structure.tensors, WHOLE), dict.fromkeys(names, WHOLE), "block")
    rows = forward_products(net, net.filters, net.hidden)
    assert numbers(price(part)) == closed_form(rows, middle, net.batch)


@pytest.mark.parametrize(
    ("task", "hidden"),
    [("fcnn-mnist", (216, 162, 108, 54)), ("cnn-mnist", (70,)), ("cnn-cifar10", (270, 162))],
)
def test_a_part_narrowed_by_feddrop(task: str, hidden: tuple[int, ...]) -> None:
    price, net = price_of(task), NETS[task]
    part = dropped(price.structure, 0.54)
    assert part is not None
    rows = forward_products(net, net.filters, hidden)
    assert numbers(price(part)) == closed_form(rows, list(range(net.layers)), net.batch)


def test_a_part_with_fewer_filters() -> None:
    price, net = price_of("cnn-mnist"), NETS["cnn-mnist"]
    axes = price.structure.require_axes("test")
    part = narrow(price.structure, axes, {"conv1": np.array([1, 5, 6]), "conv2": np.arange(4)}, "thin")
    assert numbers(price(part)) == closed_form(forward_products(net, (3, 4), net.hidden), [0, 1, 2, 3], 12)


@pytest.mark.parametrize("mode", ["exact", "paper"])
@pytest.mark.parametrize("task", TASKS)
def test_layers_add_up_to_every_suffix(task: str, mode: Mode) -> None:
    price = price_of(task, mode)
    layers = price.layers()
    forward = sum(layer.forward for layer in layers)
    for frozen in range(len(layers)):
        backward = sum(layer.error + layer.gradient + layer.update for layer in layers[frozen:])
        assert price(depth.suffix(price.structure, frozen, "")).operations == forward + backward
    assert layers[-1].name == "out"
    assert [layer.kind for layer in layers] == ["conv"] * len(NETS[task].filters) + ["linear"] * (
        len(NETS[task].hidden) + 1
    )
    assert [layer.units for layer in layers] == [*NETS[task].filters, *NETS[task].hidden, 10]


def test_a_mask_saves_updates_only() -> None:
    price = price_of("cnn-mnist")
    bits = np.zeros((128, 256), bool)
    bits[::2] = True
    selections = dict.fromkeys(price.structure.tensors, WHOLE) | {"fc1.weight": Mask(bits)}
    cost = price(Part("global", selections, selections, "mask"))
    assert cost.update == price.full.update - bits.size / 2
    assert cost.operations - cost.update == price.full.operations - price.full.update


def test_nothing_trained_is_a_forward_pass() -> None:
    price = price_of("cnn-mnist")
    cost = price(Part("global", dict.fromkeys(price.structure.tensors, WHOLE), {}, "none"))
    assert numbers(cost) == (price.full.forward, 0, 0, 0, 0)
    assert cost.memory.activations == 0


def test_parts_of_equal_sizes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    original = measuring.measure

    def counted(*given: Any, **named: Any) -> measuring.Measurement:
        runs.append(1)
        return original(*given, **named)

    monkeypatch.setattr(pricing, "measure", counted)
    price = price_of("cnn-mnist")
    axes = price.structure.require_axes("test")
    first = price(narrow(price.structure, axes, {"fc1": np.arange(13)}, "a"))
    before = len(runs)
    assert price(narrow(price.structure, axes, {"fc1": np.arange(50, 63)}, "b")) is first
    assert len(runs) == before
    price(narrow(price.structure, axes, {"fc1": np.arange(14)}, "c"))
    assert len(runs) == before + 1


class TestMemory:
    """FCNN-MNIST by hand: 784 inputs, layers of 400, 300, 200, 100 and 10, batches of 12, 4 bytes a number."""

    units = (784, 400, 300, 200, 100, 10)
    trained = (515_610, 201_610, 81_310, 21_110, 1_010)

    @pytest.mark.parametrize("cached", [False, True])
    def test_fcnn_by_hand(self, cached: bool) -> None:
        price = price_of("fcnn-mnist", cached=cached)
        for frozen in range(5):
            # Without a cache the batch itself stays, and so does what the frozen layers made of it.
            batch = self.units[frozen] if cached else 784 + (self.units[frozen] if frozen else 0)
            gradients = 4 * self.trained[frozen]
            # Outputs of the trained layers, the loss's ten numbers for each sample, and the loss.
            activations = 4 * 12 * (batch + sum(self.units[frozen + 1 :]) + 10) + 4
            # Last come the first trained layer's gradients: its error signal is still there, and the loss's two.
            step = gradients + 4 * 12 * (batch + self.units[frozen + 1]) + 8
            if frozen == 4 and not cached:
                step = 4 * 12 * (784 + 400 + 400)  # more than that: the first layer and its ReLU
            cache = 4 * 300 * self.units[frozen] if cached and frozen else 0
            # While 64 samples are in the first ReLU, those of an earlier chunk are in the cache.
            prefix_pass = cache + 4 * 64 * (400 + 400) if cached and frozen else 0
            received_and_copied = 4 * 515_610 + gradients
            expected = RoundMemory(received_and_copied, gradients, activations, 0, cache, prefix_pass, step)
            assert price(depth.suffix(price.structure, frozen, "")).memory == expected

    def test_momentum_is_one_number_for_each_trained_one(self) -> None:
        plain, moved = (price_of("fcnn-mnist", momentum=momentum).full for momentum in (False, True))
        assert moved.memory.optimizer == plain.memory.gradients == 4 * 515_610
        assert moved.memory_bytes == plain.memory_bytes + 4 * 515_610

    def test_few_samples_are_cached_as_they_come_out(self) -> None:
        """Up to 64 are run at once: their outputs are the cache, and nothing is copied."""
        net = NETS["fcnn-mnist"]
        price = Price(
            build(net, generator(0, "test")),
            mode="exact",
            batch=12,
            samples=50,
            cached=True,
            held=0,
            example=np.zeros((2, *net.input_shape), "float32"),
        )
        memory = price(depth.suffix(price.structure, 1, "")).memory
        assert memory.prefix_cache == 4 * 50 * 400
        assert memory.prefix_pass == 4 * 50 * (400 + 400)

    @pytest.mark.parametrize("task", TASKS)
    def test_grows_with_the_width(self, task: str) -> None:
        price = price_of(task, momentum=True)
        sizes = [price(part).memory_bytes for part in depth.suffixes(price.structure, NETS[task].layers)]
        assert sizes == sorted(set(sizes))

    def test_is_the_same_in_both_modes(self) -> None:
        exact, paper = price_of("cnn-cifar10"), price_of("cnn-cifar10", "paper")
        for part in depth.suffixes(exact.structure, 5):
            assert exact(part).memory == paper(part).memory


class TestLoad:
    def test_full_model_for_one_epoch_is_the_unit(self) -> None:
        for mode in ("exact", "paper"):
            price = price_of("cnn-cifar10", mode)
            assert price.load(price.full, samples=300, epochs=1) == pytest.approx(1)
            assert price.load(price.full, samples=150, epochs=4) == pytest.approx(2)

    def test_a_cached_prefix_is_paid_once(self) -> None:
        plain, cached = price_of("fcnn-mnist"), price_of("fcnn-mnist", cached=True)
        part = depth.suffix(plain.structure, 3, "")
        cost = plain(part)
        once = plain.load(cost, samples=300, epochs=1)
        assert cached.load(cost, samples=300, epochs=1) == once
        saved = 4 * cost.prefix / plain.full.operations
        assert cached.load(cost, samples=300, epochs=5) == pytest.approx(5 * once - saved)

    def test_the_papers_clock_rounds_up(self) -> None:
        price = price_of("cnn-cifar10", "paper")
        costs = [price(part) for part in depth.suffixes(price.structure, 5)]
        assert [cost.share for cost in costs] == [0.46, 0.58, 0.88, 0.94, 1.0]
        assert price.load(costs[0], samples=600, epochs=3) == pytest.approx(0.46 * 6)


class TestPaperMode:
    def test_a_run_has_whole_neurons(self) -> None:
        price = price_of("cnn-mnist", "paper")
        part = dropped(price.structure, 0.1)
        assert part is not None
        # 13 of 128 neurons: convolutions 3 · 320,000, then 256 · 13 and 13 · 10 with n^x = 12
        fc1 = 256 * 13 * 12 + 13 * 12 + 13 * 10 * 12 + 13 * 256 * 12 + 13 * 256
        out = 13 * 10 * 12 + 2 * 10 * 12 + 13 * 10 * 12 + 13 * 10
        assert price(part).operations == 3 * 320_000 + fc1 + out

    def test_thinned_filters_follow_the_same_formulas(self) -> None:
        price = price_of("cnn-mnist", "paper")
        axes = price.structure.require_axes("test")
        part = narrow(price.structure, axes, {"conv1": np.arange(4)}, "thin")
        assert price.full.operations - price(part).operations == 3 * (115_200 + 204_800) / 2

    def test_other_models_are_refused(self) -> None:
        model = build(NETS["cnn-mnist"], generator(0, "test"))
        for net in (None, NETS["fcnn-mnist"], NETS["cnn-cifar10"]):
            with pytest.raises(
                SettingError, match=r"^mode = 'paper' prices the paper's nets only; use mode = 'exact'$"
            ):
                Price(
                    model,
                    mode="paper",
                    batch=2,
                    samples=2,
                    cached=False,
                    held=0,
                    example=np.zeros((2, 1, 28, 28), "float32"),
                    net=net,
                )


def test_wrong_settings_are_one_line() -> None:
    model = build(NETS["cnn-mnist"], generator(0, "test"))
    with pytest.raises(SettingError, match="mode = 'exakt' is unknown; did you mean 'exact'"):
        Price(
            model,
            mode="exakt",  # type: ignore[arg-type]
            batch=2,
            samples=2,
            cached=False,
            held=0,
            example=np.zeros((2, 1, 28, 28), "float32"),
        )
    with pytest.raises(SettingError, match="1 sample is too few"):
        Price(
            model,
            mode="exact",
            batch=2,
            samples=2,
            cached=False,
            held=0,
            example=np.zeros((1, 1, 28, 28), "float32"),
        )


def test_torch_examples_and_double_precision_are_taken() -> None:
    model = build(NETS["fcnn-mnist"], generator(0, "test"))
    for example in (torch.zeros(5, 1, 28, 28), np.zeros((2, 1, 28, 28))):
        price = Price(model, mode="exact", batch=12, samples=2, cached=False, held=0, example=example)
        assert price.full.operations == 15_278_010
