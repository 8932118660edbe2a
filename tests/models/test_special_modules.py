"""Modules that are not plain ones: each is trained as what it stands for, or refused in one line."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import fedpmt
from fedpmt import api
from fedpmt.models.layered import layered
from fedpmt.types import SettingError
from support import FEW, images, stored_accuracy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fedpmt.records import ResultRecord

TRAIN, TEST = images(160), images(40, seed=1)
SETTINGS: dict[str, Any] = {**FEW, "rounds": 1, "lr": 0.05, "method": "fedpmt", "train": TRAIN, "test": TEST}


def body(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), *norms, nn.ReLU())


class Net(nn.Module):
    """A class that is no chain: only a trace finds its layers."""

    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda module: module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.head = wrap(body()), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        return self.head(hidden + self.middle(hidden).tanh())  # type: ignore[no-any-return]


class Strict(Net):
    """Refuses attributes that it does not know, and keeps one outside of its dictionary."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("body", "middle", "head", "scale", "training"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(inputs)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*body(), nn.Linear(8, 3))


def with_norms(make: Callable[[], nn.Module], norm: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    """Weights that are computed of others whenever the module runs."""

    def made() -> nn.Module:
        module = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the older of the two ways
            for child in list(module.modules()):
                if isinstance(child, nn.Linear):
                    norm(child)
        return module

    return made


def with_hooks() -> nn.Module:
    module = Net()
    module.body.register_forward_hook(lambda child, inputs, outputs: outputs * 2)
    module.middle.register_forward_pre_hook(lambda child, inputs: (inputs[0] + 1,))
    return module


def data_parallel(module: nn.Module, distributed: bool = False) -> nn.Module:
    if not distributed:
        return nn.DataParallel(module)
    # Its own constructor needs a group of processes.
    kind = nn.parallel.DistributedDataParallel
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    wrapped.module = module
    return wrapped


def compiled(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch's compiler loads
        return torch.compile(module, backend="eager")


def prune_half(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]


SAME: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "compiled": (lambda: compiled(chain()), chain),
    "data parallel": (lambda: data_parallel(Net()), Net),
    "distributed": (lambda: data_parallel(data_parallel(Net(), distributed=True)), Net),
}
"""Wrapped modules, and what they stand for."""

OWN: dict[str, Callable[[], nn.Module]] = {
    "compiled inside": lambda: Net(compiled),
    "data parallel inside": lambda: Net(data_parallel),
    "weight norm": with_norms(chain, parametrizations.weight_norm),
    "weight norm, old": with_norms(Net, weight_norm),
    "weight norm, old, of a chain": with_norms(chain, weight_norm),
    "spectral norm": with_norms(Net, parametrizations.spectral_norm),
    "spectral norm, old": with_norms(chain, spectral_norm),
    "orthogonal": with_norms(Net, parametrizations.orthogonal),
    "pruned": with_norms(chain, prune_half),
    "hooks": with_hooks,
    "slots": Strict,
}
"""Modules that are trained as they are: the saved file loads into another one of their kind."""


def run(folder: Path, module: nn.Module, **settings: Any) -> ResultRecord:
    found = api.run(model=module, out=folder, **{**SETTINGS, **settings}).result
    assert found is not None
    return found


def check_trains(folder: Path, module: nn.Module, fresh: nn.Module) -> str:
    """The same bits for any number of workers, all of them in the file, and nothing changed in the user's module."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = [run(folder / str(workers), module, workers=workers) for workers in (1, 2)]
    assert found[0].weights_sha256 == found[1].weights_sha256
    assert stored_accuracy(folder / "1", fresh, TEST) == pytest.approx(found[0].score)
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert module.training
    return found[0].weights_sha256


@pytest.mark.parametrize("name", SAME)
def test_a_wrapped_module_stands_for_the_one_inside(name: str, tmp_path: Path) -> None:
    make, plain = SAME[name]
    found = check_trains(tmp_path, make(), plain())
    assert found == run(tmp_path / "plain", plain(), workers=1).weights_sha256


@pytest.mark.parametrize("name", OWN)
def test_a_module_is_trained_as_it_is(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make = OWN[name]
    module = make()
    # The user has run it before: what a forward pass leaves behind has a graph.
    if not name.endswith("inside"):
        module(torch.from_numpy(TRAIN[0][:2]))
    check_trains(tmp_path, module, make())


def test_pruned_weights_are_cut_by_width_with_their_mask(tmp_path: Path) -> None:
    module = OWN["pruned"]()
    masked = module[1].weight_mask == 0  # type: ignore[index]
    run(tmp_path / "run", module, method="heterofl")
    fresh: Any = OWN["pruned"]()
    assert stored_accuracy(tmp_path / "run", fresh, TEST) > 0
    assert masked.any()
    assert not fresh[1].weight[masked].any()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_get_their_shapes_from_the_data(tmp_path: Path) -> None:
    module, fresh = lazy(), lazy()
    fresh(torch.from_numpy(TEST[0]))
    found = []
    for workers in (1, 2):
        torch.manual_seed(workers)  # the weights do not depend on it
        found.append(run(tmp_path / str(workers), module, workers=workers, rounds=2))
    assert found[0].weights_sha256 == found[1].weights_sha256
    assert stored_accuracy(tmp_path / "1", fresh, TEST) == pytest.approx(found[0].score)
    assert all(is_lazy(tensor) for tensor in module.parameters())
    # A finished run is found again, which takes the same fingerprint.
    assert run(tmp_path / "1", module, workers=1, rounds=2, resume=True) == found[0]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_need_samples_that_reach_them() -> None:
    with pytest.raises(SettingError, match=r"'0.weight' has no shape yet; run one batch"):
        layered(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))
    module = Net()
    module.unused = nn.LazyLinear(3)
    with pytest.raises(SettingError, match=r"'unused.weight' has no shape yet, and samples do not reach it"):
        layered(module, example=torch.from_numpy(TRAIN[0][:2]))


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Flagged(Net):
    def forward(self, inputs: torch.Tensor, flag: bool) -> torch.Tensor:  # type: ignore[override]
        return super().forward(inputs) * flag


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao moves to a package of its own
        quantise: Any = torch.ao.quantization.quantize_dynamic
        return quantise(chain(), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, EXAMPLE)  # type: ignore[no-untyped-call]


EXAMPLE = torch.from_numpy(TRAIN[0][:2])
JIT = "by torch.jit, so its weights cannot be exchanged; give the nn.Module that it was made from"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (
        lambda: scripted(chain()),
        f"model: the module was scripted or traced {JIT}",
    ),
    "traced": (lambda: traced(Net()), f"the module was scripted or traced {JIT}"),
    "scripted inside": (
        lambda: Net(scripted),
        f"model: 'body' was scripted or traced {JIT}",
    ),
    "quantised": (quantised, "model: '1' is quantised (torch.ao.nn.quantized.dynamic"),
    "meta": (lambda: chain().to("meta"), "model: '1.weight' has no values (it is on the meta device)"),
    "locked": (Locked, "model: Locked cannot be copied: cannot pickle '_thread.lock' object"),
    "more arguments": (
        Flagged,
        "model: forward of Flagged cannot be called with one array of inputs: missing a required argument: 'flag'; "
        "wrap it in a module that takes the inputs alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    module = make()
    for attempt in (
        lambda: run(tmp_path / "run", module),
        lambda: fedpmt.layers(module, EXAMPLE),
    ):
        with pytest.raises(SettingError) as caught:
            attempt()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_inputs_by_name_must_be_arguments() -> None:
    with pytest.raises(
        SettingError, match=r"with inputs 'image', 'mask': missing a required argument: 'inputs'"
    ):
        layered(Net(), example={"image": EXAMPLE, "mask": EXAMPLE})


@pytest.mark.parametrize("name", ["weight norm", "weight norm, old, of a chain"])
def test_weights_that_are_normed_are_not_cut_by_width(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="can't be cut by width: module '1"):
        run(tmp_path / "run", OWN[name](), method="heterofl")
