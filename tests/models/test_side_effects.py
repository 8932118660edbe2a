"""Forward passes that do more than compute outputs: they change their inputs, or state that is not saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fedpmt import api
from fedpmt.models.layered import layered
from models.test_axes import Auxiliary
from support import FEW, images, stored_accuracy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fedpmt.models.layered import LayeredModel

SETTINGS: dict[str, Any] = {**FEW, "method": "fedpmt", "rounds": 2, "lr": 0.2}


class Shifting(nn.Module):
    """Changes its inputs, and outputs of its layers, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.last = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        x = self.stem(x.flatten(1))
        x += 0.5
        return self.last(self.middle(x).relu_())  # type: ignore[no-any-return]


def shifting_after_a_base() -> nn.Module:
    net = Shifting()
    net.stem.requires_grad_(False)
    return net


def leaky() -> nn.Module:
    return nn.Sequential(
        nn.LeakyReLU(0.5, inplace=True), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )  # fmt: skip


class Seeing(nn.Module):
    """Keeps a mean in a buffer that is not saved, and uses it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Linear(36, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(x.flatten(1)))
        if self.training:
            self.seen += hidden.detach().mean(0)
        return self.last(hidden - self.seen)  # type: ignore[no-any-return]


class Counting(Seeing):
    """Changes its buffer in evaluation mode, too, and puts another tensor in its place."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x) * self.seen.mean()


@pytest.mark.parametrize("make", [Shifting, shifting_after_a_base, leaky, Seeing, Counting])
def test_recorded_is_saved_for_any_number_of_workers(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    train, test = images(160), images(60, seed=1)
    before = [array.copy() for array in (*train, *test)]
    found = []
    for workers in (1, 2):
        torch.manual_seed(0)
        folder = tmp_path / str(workers)
        result = api.run(model=make(), train=train, test=test, out=folder, workers=workers, **SETTINGS).result
        assert result is not None
        found.append(result.weights_sha256)
        assert all((one == own).all() for one, own in zip((*train, *test), before, strict=True))
        copied = test[0].copy(), test[1]
        assert stored_accuracy(folder, make(), copied) == pytest.approx(result.score)
    assert len(set(found)) == 1


def halves(model: LayeredModel, cut: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a model in halves and of the whole one, as it is trained from a layer on."""
    tensors = model.initial()
    kept = model.prefix(cut, tensors, inputs)
    model.set_training([place >= cut for place in range(len(model.structure.layers))], norms=False)
    return model.suffix(cut, tensors, model.entry(kept, inputs)), model.forward(tensors, inputs)


def test_what_runs_in_training_only_gets_all_that_crosses_a_cut() -> None:
    inputs = torch.randn(3, 1, 8, 8)
    model = layered(Auxiliary(), example=inputs)
    for cut in (1, 2, 3):
        half, whole = halves(model, cut, inputs)
        torch.testing.assert_close(half, whole)
        found = model._checked(cut)
        # In evaluation mode the layers after the blocks need nothing else; the stem's outputs are kept, too.
        assert found.needed == frozenset([1] if cut == 1 else range(len(found.calls)))


class Dropping(nn.Module):
    """Drops between its layers by its own code, which a device that freezes them does, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.first(x), 0.5, self.training)
        return self.third(torch.relu(self.second(hidden)))  # type: ignore[no-any-return]


def test_a_model_that_answers_otherwise_in_training_is_not_cut() -> None:
    model = layered(Dropping(), example=torch.randn(3, 4))
    assert [model.can_cut(cut) for cut in (1, 2)] == [True, False]


def test_what_runs_in_training_only_belongs_to_the_first_layer_or_where_its_user_says() -> None:
    example = torch.randn(2, 1, 8, 8)
    assert "side.weight" in layered(Auxiliary(), example=example).structure.layers[0].parameters
    named = layered(Auxiliary(), example=example, layers=["stem", "blocks", ["fc", "side"]])
    assert "side.weight" in named.structure.layers[-1].parameters
    half, whole = halves(named, 2, example)
    torch.testing.assert_close(half, whole)
