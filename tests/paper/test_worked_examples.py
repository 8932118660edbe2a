"""The small examples that the paper works through in its text and footnotes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedpmt.models.layered import layered
from fedpmt.parts.depth import suffix, suffixes
from fedpmt.parts.part import mask
from fedpmt.pricing.splitting import splitting_constant
from fedpmt.training.optimizers import SGD


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
