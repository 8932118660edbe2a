"""The paper's own numbers: its table of prices, and the examples that its text works out."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from fedpmt.models.build import build
from fedpmt.models.layered import layered
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import suffix, suffixes
from fedpmt.parts.part import mask, size
from fedpmt.pricing.cost_table import cost_table, dropped
from fedpmt.pricing.paper import AS_WRITTEN, PRINTED, dropped_operations, layer_operations, suffix_operations
from fedpmt.pricing.plan import splitting_constant
from fedpmt.pricing.price import Price
from fedpmt.seeds import generator
from fedpmt.training.optimizers import SGD

if TYPE_CHECKING:
    from fedpmt.pricing.paper import Operations


# depth, FedPMT's operations and printed percentage, FedDrop's rate and operations, parameters sent up
Row = tuple[int, int, str, float, int, int]
TABLE: dict[tuple[str, int], list[Row]] = {
    ("fcnn-mnist", 4): [
        (1, 6_473_760, "42.3", 0.54, 6_431_556, 21_110),
        (2, 7_496_160, "48.98", 0.61, 7_579_990, 81_310),
        (3, 9_779_760, "63.9", 0.73, 9_717_454, 201_610),
        (4, 15_305_968, "100", 1.0, 15_305_968, 515_610),
    ],
    ("fcnn-mnist", 2): [
        (1, 9_779_760, "63.9", 0.73, 9_717_454, 201_610),
        (2, 15_305_968, "100", 1.0, 15_305_968, 515_610),
    ],
    ("cnn-mnist", 4): [
        (1, 745_456, "40.8", 0.10, 1_047_049, 1_290),
        (2, 1_188_336, "65", 0.26, 1_185_944, 34_186),
        (3, 1_597_936, "87.4", 0.73, 1_593_950, 37_402),
        (4, 1_828_336, "100", 1.0, 1_828_336, 37_610),
    ],
    ("cnn-mnist", 2): [
        (1, 1_597_936, "87.4", 0.73, 1_593_950, 37_402),
        (2, 1_828_336, "100", 1.0, 1_828_336, 37_610),
    ],
    ("cnn-cifar10", 5): [
        (1, 12_864_200, "45.83", 0.40, 12_885_200, 3_010),
        (2, 16_077_200, "57.27", 0.54, 16_031_980, 153_310),
        (3, 24_587_200, "87.59", 0.88, 24_677_840, 553_810),
        (4, 26_187_200, "93.29", 0.93, 26_069_215, 566_642),
        (5, 28_068_800, "100", 1.0, 28_068_800, 567_858),
    ],
    ("cnn-cifar10", 2): [
        (1, 26_187_200, "93.29", 0.93, 26_069_215, 566_642),
        (2, 28_068_800, "100", 1.0, 28_068_800, 567_858),
    ],
}
FROZEN = {
    "fcnn-mnist": ["fc1", "fc2", "fc3"],
    "cnn-mnist": ["conv1", "conv2", "fc1"],
    "cnn-cifar10": ["conv1", "conv2", "fc1", "fc2"],
}


@pytest.mark.parametrize(("task", "count"), TABLE)
def test_every_printed_number(task: str, count: int) -> None:
    table = cost_table(task, "paper", count).model_dump(mode="json")
    assert set(table) == {"task", "mode", "batch", "layers", "depths", "base_bytes", "base_forward"}
    for row, (depth, operations, percent, keep, dropped_cost, sent) in zip(
        table["depths"], TABLE[task, count], strict=True
    ):
        assert row["depth"] == depth
        assert row["frozen"] == FROZEN[task][: count - depth]
        assert row["operations"] == operations
        # Some percentages are rounded, some cut (57.277 is printed as 57.27): both are within one last place.
        decimals = len(percent.partition(".")[2])
        assert abs(100 * row["ratio"] - float(percent)) < 10**-decimals
        assert (row["feddrop_keep"], row["feddrop_operations"]) == (keep, dropped_cost)
        assert row["upload_bytes"] == 4 * sent


def test_only_one_row_has_no_rate_that_fits() -> None:
    """The caption: FedDrop is given more "in cases when exact same complexity cannot be made"."""
    misfits = [
        (task, row.depth)
        for task in NETS
        for row in cost_table(task, "paper").depths
        if not row.feddrop_within_budget
    ]
    assert misfits == [("cnn-mnist", 1)]


def test_the_larger_number_of_widths_is_the_default() -> None:
    assert [len(cost_table(task, "paper").depths) for task in NETS] == [4, 4, 5]


@pytest.mark.parametrize(
    ("task", "keep", "sent"),
    [
        ("fcnn-mnist", 0.54, 228_754),
        ("fcnn-mnist", 0.61, 266_946),
        ("fcnn-mnist", 0.73, 336_978),
        ("cnn-cifar10", 0.40, 199_578),
        ("cnn-cifar10", 0.54, 275_850),
        ("cnn-cifar10", 0.88, 485_562),
        ("cnn-cifar10", 0.93, 519_327),
    ],
)
def test_what_feddrop_sends_each_way(task: str, keep: float, sent: int) -> None:
    structure = build(NETS[task], generator(0, "test")).structure
    part = dropped(structure, keep)
    assert part is not None
    assert sum(size(selection, structure.shapes[name]) for name, selection in part.sent.items()) == sent


def test_printed_times_of_the_clock() -> None:
    """Ratios .46 .58 .88 .94 1 at speeds 1/5 .. 1 are 23.0, 23.2, 26.4, 18.8 and 10.0 s."""
    net = NETS["cnn-cifar10"]
    price = Price(
        build(net, generator(0, "test")),
        mode="paper",
        batch=20,
        samples=500,
        cached=True,
        held=0,
        example=np.zeros((2, 3, 32, 32), "float32"),
        net=net,
    )
    costs = [price(part) for part in suffixes(price.structure, 5)]
    assert [cost.share for cost in costs] == [0.46, 0.58, 0.88, 0.94, 1.0]
    speeds = (1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)
    seconds = [
        10 * price.load(cost, samples=500, epochs=1) / speed
        for cost, speed in zip(costs, speeds, strict=True)
    ]
    assert seconds == pytest.approx([23.0, 23.2, 26.4, 18.8, 10.0])


class TestDepartures:
    """The printed columns next to the formulas of section IV-A, as they are written there."""

    def test_fc1_of_fcnn_counts_its_inputs_for_its_neurons(self) -> None:
        net = NETS["fcnn-mnist"]
        assert suffix_operations(net, 0, 12) == 15_305_968
        assert suffix_operations(net, 0, 12, AS_WRITTEN) == 15_301_360
        assert 15_305_968 - 15_301_360 == (784 - 400) * 12
        # Rows that freeze Fc1 have no such term.
        for frozen in (1, 2, 3):
            assert suffix_operations(net, frozen, 12) == suffix_operations(net, frozen, 12, AS_WRITTEN)

    def test_that_term_is_not_thinned_by_dropout(self) -> None:
        net = NETS["fcnn-mnist"]
        difference = dropped_operations(net, 0.54, 12) - dropped_operations(net, 0.54, 12, AS_WRITTEN)
        assert difference == (784 - 216) * 12

    def test_activations_are_left_out_of_cnn_columns(self) -> None:
        net = NETS["cnn-mnist"]
        for frozen in range(net.layers):
            written = suffix_operations(net, frozen, 12, AS_WRITTEN)
            assert written - suffix_operations(net, frozen, 12) == (128 + 10) * 12

    def test_conv2_of_cifar_counts_20_filters(self) -> None:
        conv2 = self._layers("cnn-cifar10", printed=True)[1]
        assert conv2.forward == 16 * 25 * 20 * 100 == 800_000
        assert self._layers("cnn-cifar10", printed=False)[1].forward == 16 * 25 * 32 * 100 == 1_280_000

    def test_fc1_of_cifar_takes_classes_for_its_successor(self) -> None:
        assert self._layers("cnn-cifar10", printed=True)[2].error == 500 * 20 + 500 * 10 * 20
        assert self._layers("cnn-cifar10", printed=False)[2].error == 500 * 20 + 500 * 300 * 20

    def test_fc2_of_cifar_takes_classes_for_the_batch(self) -> None:
        assert self._layers("cnn-cifar10", printed=True)[3].error == 300 * 10 + 300 * 10 * 20
        assert self._layers("cnn-cifar10", printed=False)[3].error == 300 * 20 + 300 * 10 * 20

    def test_convolutions_are_priced_for_one_sample(self) -> None:
        """Not a slip of the table but of the formula: it has no n^x, so a larger batch leaves it as it is."""
        net = NETS["cnn-mnist"]
        small, large = (
            layer_operations(net, batch, filters=net.filters, hidden=net.hidden, departures=PRINTED[net.name])
            for batch in (12, 120)
        )
        assert small[0].forward == large[0].forward == 1 * 25 * 8 * 24**2
        assert large[2].forward == 10 * small[2].forward

    def test_feddrop_widths_are_fractions(self) -> None:
        """At keep 0.1 the table has 12.8 neurons of 128, a run 13."""
        net = NETS["cnn-mnist"]
        exactly = layer_operations(
            net, 12, filters=net.filters, hidden=[Fraction(128, 10)], departures=PRINTED[net.name]
        )
        assert float(sum(layer.forward + layer.backward for layer in exactly)) == 1_047_049.6

    def _layers(self, task: str, *, printed: bool) -> tuple[Operations, ...]:
        net = NETS[task]
        departures = PRINTED[task] if printed else AS_WRITTEN
        return layer_operations(net, net.batch, filters=net.filters, hidden=net.hidden, departures=departures)


def chain(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def test_layer_wise_product() -> None:
    """a = [0, 1, 2], b = [2, 2, 2; 1, 1; 3, 3, 3, 3] -> [0, 0, 0; 1, 1; 6, 6, 6, 6], here as a step of size -a."""
    blocks = {"1": torch.full((3,), 2.0), "2": torch.ones(2), "3": torch.full((4,), 3.0)}
    product = {}
    for factor, (name, gradient) in zip((0, 1, 2), blocks.items(), strict=True):
        parameter = {name: torch.zeros_like(gradient)}
        SGD().start().step(parameter, {name: gradient}, rate=-factor)
        product[name] = parameter[name].tolist()
    assert product == {"1": [0, 0, 0], "2": [1, 1], "3": [6, 6, 6, 6]}


def test_masks_of_three_layers_and_three_depths() -> None:
    structure = layered(chain(3)).structure
    assert [mask(structure, part) for part in suffixes(structure, 3)] == [(0, 0, 1), (0, 1, 1), (1, 1, 1)]


def test_masks_of_four_layers_and_three_depths() -> None:
    """The footnote's f_k = [0, 1, 1, 1] and [1, 1, 1, 1] for |I| = 3 <= |L| = 4."""
    structure = layered(chain(4)).structure
    assert [mask(structure, part) for part in suffixes(structure, 3)] == [
        (0, 0, 1, 1),
        (0, 1, 1, 1),
        (1, 1, 1, 1),
    ]


def test_full_depth_is_the_model_itself() -> None:
    structure = layered(chain(4)).structure
    full = suffix(structure, 0, "full")
    assert tuple(full.trained) == structure.tensors == tuple(full.sent)


@pytest.mark.parametrize("count", [0, 5, -1])
def test_more_widths_than_layers_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 4 depths"):
        suffixes(layered(chain(4)).structure, count)


def test_psi_of_the_even_split() -> None:
    """ψ = Σ_i 1 / Σ_{j>=i} p_j with p_j = 1/5: 5 (1/5 + 1/4 + 1/3 + 1/2 + 1)."""
    assert splitting_constant([0.2] * 5) == pytest.approx(5 * (1 / 5 + 1 / 4 + 1 / 3 + 1 / 2 + 1))


def test_psi_shrinks_when_more_devices_train_more_layers() -> None:
    assert (
        splitting_constant([0.2, 0.2, 0.6])
        < splitting_constant([0.6, 0.2, 0.2])
        < splitting_constant([0.8, 0.2, 0])
    )
