"""`fedpmt.layers`, `fedpmt.cost` and `fedpmt.plan` of a user's module: exact, readable, and without a trace."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpmt
from fedpmt import prices
from fedpmt.pricing.cost_table import cost_table
from fedpmt.simulation import executors
from fedpmt.types import SettingError
from models.nets_of_users import ResNet

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


EXAMPLE = np.zeros((2, 1, 6, 6), dtype=np.float32)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def test_the_layers_of_a_chain_by_hand() -> None:
    """Batches of 10. Activations: ReLU keeps its output, which is the next layer's input, and Tanh its own.

    Steps: 10 · (forward 92 + weight gradients 92 + error signals 60) + 110 updates = 2550.
    """
    table = fedpmt.layers(chain(), torch.zeros(3, 4), batch=10)
    assert [row.parameters for row in table.layers] == [40, 54, 14]
    assert [row.forward / table.batch for row in table.layers] == [32, 48, 12]
    steps = [10 * (32 + 32 + 48) + 40, 10 * (48 + 48 + 12) + 54, 10 * (12 + 12) + 14]
    assert [row.share for row in table.layers] == pytest.approx([one / sum(steps) for one in steps])
    # The first layer's input is the sample itself; the last one also keeps the loss's two outputs.
    assert [row.activation_bytes for row in table.layers][:2] == [0, 4 * 8]
    assert table.layers[2].activation_bytes >= 4 * 6
    assert table.parameters == sum(parameter.numel() for parameter in chain().parameters())


def test_activations_add_up_to_what_full_training_holds() -> None:
    module = ResNet()
    table = fedpmt.layers(module, EXAMPLE)
    costs = fedpmt.cost(module, EXAMPLE, batch=32), fedpmt.cost(module, EXAMPLE, batch=33)
    assert [row.name for row in costs[0].layers] == [row.name for row in table.layers]
    # One more sample in a batch: its activations, itself, and at most what the backward pass holds for a while.
    more = costs[1].depths[-1].memory_bytes - costs[0].depths[-1].memory_bytes
    kept = sum(row.activation_bytes for row in table.layers) + EXAMPLE[0].nbytes
    assert kept <= more <= 2 * kept


@pytest.mark.parametrize("training", [True, False])
def test_pricing_leaves_the_module_and_the_generator_alone(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*_: object, **__: object) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(executors.Plain, "compute", trained)
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    module.train(training)
    module[2].eval()  # as its owner left it
    module[1].bias.requires_grad_(False)
    before, modes = copy.deepcopy(module.state_dict()), [child.training for child in module.modules()]
    state, numbers = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    for price in (fedpmt.layers, fedpmt.cost, fedpmt.plan):
        price(module, EXAMPLE)
    assert torch.equal(state, torch.get_rng_state())
    assert numbers == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert [child.training for child in module.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [one.requires_grad for one in module.parameters()] == [True, False, True, True, True, True]
    assert all(one.grad is None for one in module.parameters())


class Deep(nn.Module):
    """Paths as long as those of published models."""

    def __init__(self) -> None:
        super().__init__()
        self.classification_backbone = nn.ModuleDict(
            {"text_encoder_with_a_long_name": nn.ModuleList(nn.Linear(6, 6) for _ in range(11))}
        )
        self.classification_head_for_sequences = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.classification_backbone["text_encoder_with_a_long_name"]:  # type: ignore[attr-defined]
            inputs = layer(inputs).relu()
        return self.classification_head_for_sequences(inputs)  # type: ignore[no-any-return]


def test_tables_fit_eighty_columns_and_tell_layers_apart(tmp_path: Path) -> None:
    names = [f"classification_backbone.text_encoder_with_a_long_name.{index}" for index in range(11)]
    deep: dict[str, Any] = {"layers": [*names, "classification_head_for_sequences"]}
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("name,speed,count\na machine with a long name in the basement,1/7,1200000\nphone,1,10\n")
    tables = [
        fedpmt.layers(Deep(), torch.zeros(2, 6), **deep),
        fedpmt.cost(Deep(), torch.zeros(2, 6), **deep),
        fedpmt.plan(Deep(), torch.zeros(2, 6), fleet=fleet, **deep),
    ]
    for table in tables:
        lines, rows = str(table).splitlines(), 2 if table is tables[-1] else 12
        ruled = [position for position, line in enumerate(lines) if line.startswith("---")]
        assert len(ruled) == (
            1 if table is tables[0] else 2
        )  # a plan's columns do not all fit next to the names
        assert all(len(line) <= 80 for place in ruled for line in lines[place - 1 : place + 1 + rows])
    shown = [line.split()[0] for line in str(tables[0]).splitlines()[3:15]]
    assert len(set(shown)) == 12
    assert all(line.startswith("classif") for line in shown)


def test_a_plan_is_the_command_lines() -> None:
    """Operations are 92 forward, and of each depth's backward pass: 12, 12 + 12 + 48, all."""
    table = fedpmt.plan(chain(), torch.zeros(2, 4), levels="1/2,1", deadline=15, samples=100, batch=10)
    assert [(row.depth, row.fits) for row in table.devices] == [(2, True), (3, True)]
    share = (10 * (92 + 12 + 12 + 48) + 68) / (10 * (92 + 92 + 60) + 108)
    assert table.devices[0].seconds == pytest.approx(10 * share / 0.5)
    assert table.devices[0].frozen == ("0",)
    assert table.devices[0].trains_from == "2"
    assert fedpmt.plan(task="cnn-mnist").task == "cnn-mnist"


def test_settings_change_prices() -> None:
    example = torch.zeros(2, 4)
    plain, adam = (fedpmt.cost(chain(), example, optimizer=name) for name in ("sgd", "adam"))
    own = fedpmt.cost(chain(), example, optimizer=torch.optim.Adam)
    differences = [
        one.memory_bytes - other.memory_bytes for one, other in zip(adam.depths, plain.depths, strict=True)
    ]
    assert differences == [2 * 4 * size for size in (14, 68, 108)]
    assert own.depths[-1].memory_bytes >= plain.depths[-1].memory_bytes
    assert len(fedpmt.cost(chain(), example, depths=2).depths) == 2


def test_an_example_is_needed_and_must_fit() -> None:
    with pytest.raises(SettingError, match="priced by running an example"):
        fedpmt.cost(chain())
    with pytest.raises(SettingError, match=r"evaluating two samples fails: .* \(inputs: 5\)"):
        fedpmt.layers(chain(), np.zeros((2, 5), dtype=np.float32))
    with pytest.raises(SettingError, match="optimiser"):
        prices.plan(chain(), torch.zeros(2, 4), optimiser="adam")  # type: ignore[call-arg]


def test_json_form_is_one_object() -> None:
    table = cost_table("cnn-mnist", "exact")
    read = json.loads(table.model_dump_json())
    assert list(read) == ["task", "batch", "layers", "base_bytes", "base_forward", "mode", "depths"]
    assert [layer["name"] for layer in read["layers"]] == ["conv1", "conv2", "fc1", "out"]
    assert read["depths"][0]["frozen"] == ["conv1", "conv2", "fc1"]
    assert read["depths"][-1]["frozen"] == []
    assert read["depths"][-1]["ratio"] == 1.0
    assert all(isinstance(row["operations"], int) for row in read["depths"])


def test_in_exact_mode_filters_cost_too_much_for_feddrop() -> None:
    """Convolutions are nearly all the work of a CNN, and FedDrop thins fully connected layers only."""
    table = cost_table("cnn-cifar10", "exact")
    assert [row.feddrop_within_budget for row in table.depths] == [False, False, False, False, True]
    assert [row.feddrop_keep for row in table.depths] == [0.1, 0.1, 0.1, 0.1, 1.0]


def test_settings_change_what_they_should() -> None:
    plain = cost_table("fcnn-mnist", "exact", 2, 10, samples=100)
    assert [row.operations for row in plain.depths] == [
        10 * (514_600 + 81_000 + 201_000) + 201_610,
        10 * (514_600 + 201_000 + 514_600) + 515_610,
    ]
    cached = cost_table("fcnn-mnist", "exact", 2, 10, samples=100, cached=True, held=1)
    # The batch's 784 inputs are no longer there, the hidden layer's 400 numbers are for all samples; momentum is
    # one number per trained one.
    difference = cached.depths[0].memory_bytes - plain.depths[0].memory_bytes
    assert difference == 4 * (400 * 100 - 784 * 10 + 201_610)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="task = 'cnn' is unknown"):
        cost_table("cnn", "exact")
    with pytest.raises(SettingError, match="mode = 'papers' is unknown; did you mean 'paper'"):
        cost_table("cnn-mnist", "papers")
    with pytest.raises(SettingError, match="depths = 5 is refused: this model has 4 layers"):
        cost_table("cnn-mnist", "exact", 5)
