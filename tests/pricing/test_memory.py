"""The price of memory against what torch's allocator saw in a local round trained by autograd."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedpmt.models.build import build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.models.precision import Prefix
from fedpmt.models.trees import tensors_in
from fedpmt.parts.depth import suffixes
from fedpmt.parts.part import GLOBAL, frozen_prefix, take
from fedpmt.parts.width import thinned
from fedpmt.pricing.price import Price
from fedpmt.seeds import Seeds, generator
from fedpmt.simulation.profile import peak_bytes
from fedpmt.training.local import Job, LocalSettings, LocalWork, Site
from fedpmt.training.loop import keep, train
from fedpmt.training.messages import Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import SGD
from fedpmt.types import MODEL, Examples
from models import zoo
from published import timm_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedpmt.models.structure import FrozenPrecision, TrainedPrecision
    from fedpmt.parts.part import Part
    from fedpmt.types import Arrays, Tensors

CLOSE = 0.1 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0.4
"""What convolutions allocate inside is priced for processors with vectors of 16 numbers."""

SAMPLES = 80


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(inputs)))
        return torch.relu(self.bn2(self.conv2(hidden)) + self.skip(inputs))


def resnet() -> LayeredModel:
    """Blocks in a row, so that a prefix of them can be kept."""
    stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return layered(nn.Sequential(*stem, Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2), *head))


class Joined(nn.Module):
    """The same with the pooling in its forward pass, so that nothing can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3), Block(8, 8, 1), Block(8, 24, 2)
        self.head = nn.Linear(24, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(inputs))).mean((2, 3)))  # type: ignore[no-any-return]


class Mean(nn.Module):
    """The mean over all words."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(1)


def perceptron() -> LayeredModel:
    hidden = [
        module
        for before, after in ((256, 200), (200, 100), (100, 50))
        for module in (nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU())
    ]
    return layered(nn.Sequential(nn.Flatten(), *hidden, nn.Linear(50, 10)))


def transformer() -> LayeredModel:
    blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)]
    return layered(nn.Sequential(nn.Embedding(500, 32), *blocks, Mean(), nn.Linear(32, 10)))


def lora_bert() -> LayeredModel:
    """A base with adapters in both blocks; most of what a device holds is frozen."""
    sizes = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 20}
    return layered(zoo.lora_bert(**sizes, num_labels=10), example=words()[:3])


def frozen_resnet() -> LayeredModel:
    """Transfer learning: the last block and the classifier are trained, on a backbone with BatchNorm."""
    module = timm_model("resnet18", num_classes=10)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(("layer4.1", "fc")))
    return layered(module, example=images(16)[:3])


def words() -> Tensor:
    return torch.randint(500, (SAMPLES, 20))


def images(side: int) -> Tensor:
    return torch.randn(SAMPLES, 3, side, side)


CASES: dict[str, tuple[Callable[[], LayeredModel], Callable[[], Tensor]]] = {
    "cnn-cifar10": (lambda: build(NETS["cnn-cifar10"], generator(0, "test")), lambda: images(32)),
    "resnet": (resnet, lambda: images(16)),
    "joined resnet": (lambda: layered(Joined(), example=images(16)), lambda: images(16)),
    "perceptron": (perceptron, lambda: torch.randn(SAMPLES, 1, 16, 16)),
    "transformer": (transformer, words),
    "peft LoRA BERT": (lora_bert, words),
    "frozen resnet18": (frozen_resnet, lambda: images(16)),
}


def price_of(
    model: LayeredModel,
    inputs: Arrays,
    batch: int,
    *,
    cached: bool,
    momentum: bool,
    precision: TrainedPrecision = "fp32",
) -> Price:
    return Price(
        model,
        mode="exact",
        batch=batch,
        samples=SAMPLES,
        cached=cached,
        held=int(momentum),
        example=inputs[:2],
        precision=precision,
        frozen_precision=precision,
    )


def measured(
    model: LayeredModel, weights: Tensors, part: Part, inputs: Arrays, local: LocalSettings
) -> float:
    """The base and the received weights, and the most that a local round allocates on top of them."""
    site = Site({GLOBAL: model}, CLASSIFICATION, local)
    data = Examples(inputs, torch.arange(SAMPLES) % 10, np.arange(SAMPLES))
    task = Task((part,), {MODEL: weights})

    def once() -> None:
        job: Job[None] = Job(site, task, part, None, data, Seeds(0, 0))
        train(LocalWork(), job)

    held = [*model.base().values(), *weights.values()]
    return peak_bytes(once) + 4 * sum(tensor.numel() for tensor in held)


@pytest.mark.parametrize(
    ("batch", "cached", "momentum"),
    [
        pytest.param(10, False, False, marks=pytest.mark.slow),
        pytest.param(20, False, True, marks=pytest.mark.slow),
        (20, True, False),
        pytest.param(10, True, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_every_depth_holds_what_it_is_priced_at(name: str, batch: int, cached: bool, momentum: bool) -> None:
    make, draw = CASES[name]
    model, inputs = make(), draw()
    price = price_of(model, inputs, batch, cached=cached, momentum=momentum)
    local = LocalSettings(1, batch, 0.01, SGD(0.9 * momentum), prefix="cache" if cached else "recompute")
    weights = model.initial()
    parts = suffixes(model.structure, len(model.structure.layers))
    peaks = [measured(model, weights, part, inputs, local) for part in parts]
    assert [price(part).memory_bytes for part in parts] == pytest.approx(peaks, rel=CLOSE)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="without kernels of 16 bits PyTorch converts to 32, and memory is that of both",
)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["cnn-cifar10", "joined resnet"])
def test_so_it_does_in_sixteen_bits(name: str, cached: bool) -> None:
    make, draw = CASES[name]
    model, inputs = make(), draw()
    price = price_of(model, inputs, 20, cached=cached, momentum=False, precision="bf16")
    prefix: Literal["cache", "recompute"] = "cache" if cached else "recompute"
    local = LocalSettings(1, 20, 0.01, prefix=prefix, precision="bf16", frozen_precision="bf16")
    parts = suffixes(model.structure, len(model.structure.layers))
    peaks = [measured(model, model.initial(), part, inputs, local) for part in parts]
    assert [price(part).memory_bytes for part in parts] == pytest.approx(peaks, rel=CLOSE)


@pytest.mark.parametrize("cached", [False, True])
def test_so_it_does_with_the_outputs_of_a_base_that_are_kept(cached: bool) -> None:
    make, draw = CASES["frozen resnet18"]
    model, inputs = make(), draw()
    options: Any = {"batch": 10, "samples": SAMPLES, "cached": cached, "example": inputs[:2]}
    price = Price(model, mode="exact", keep_base="cache", **options)
    prefix: Literal["cache", "recompute"] = "cache" if cached else "recompute"
    local = LocalSettings(1, 10, 0.01, prefix=prefix, keeps_base=True)
    parts = suffixes(model.structure, len(model.structure.layers))
    peaks = [measured(model, model.initial(), part, inputs, local) for part in parts]
    assert [price(part).memory_bytes for part in parts] == pytest.approx(peaks, rel=CLOSE)


def test_a_narrow_part_holds_less() -> None:
    """A sub-model by width: half of the filters and of the neurons."""
    make, draw = CASES["cnn-cifar10"]
    model, inputs = make(), draw()
    axes = model.structure.require_axes("test")
    part = thinned(model.structure, axes, 0.5, ("conv", "linear"))
    weights = {name: take(tensor, part.sent[name]) for name, tensor in model.initial().items()}
    price = price_of(model, inputs, 20, cached=False, momentum=False)
    peak = measured(model, weights, part, inputs, LocalSettings(1, 20, 0.01, prefix="recompute"))
    assert price(part).memory_bytes == pytest.approx(peak, rel=CLOSE)
    assert peak < 0.6 * price.full.memory_bytes


def test_other_operations_for_other_inputs_have_a_price_too() -> None:
    """Where operations cannot be compared one by one, the peaks are."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(1000, 10), nn.Linear(10, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs if len(inputs) < 3 else inputs.view(-1, 1000))
            return self.second(hidden)  # type: ignore[no-any-return]

    model, inputs = layered(Moody(), layers=["first", "second"]), torch.randn(SAMPLES, 1000)
    price = price_of(model, inputs, 20, cached=False, momentum=False)
    whole = suffixes(model.structure, 2)[-1]
    peak = measured(model, model.initial(), whole, inputs, LocalSettings(1, 20, 0.01))
    assert price(whole).memory_bytes == pytest.approx(peak, rel=CLOSE)


class Storage(dict[str, Tensor]):
    """Weights that a device reads from its storage when it needs them."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).clone()


def stream(
    part: Part, stored: Tensors, model: LayeredModel, inputs: Arrays, precision: FrozenPrecision = "fp32"
) -> Arrays:
    """What frozen layers make of all samples, with their weights read from storage block by block."""
    cut = frozen_prefix(model.structure, part)
    kept = keep(Prefix.of(model, cut, stored, precision, streamed=True), inputs, SAMPLES)
    model.unbind()
    return kept


@pytest.mark.parametrize("name", ["perceptron", "resnet", "joined resnet", "transformer"])
def test_so_it_does_where_frozen_layers_are_streamed(name: str) -> None:
    """One block's weights at a time, then those of the layers that are trained, on what was kept."""
    make, draw = CASES[name]
    model, inputs = make(), draw()
    options: Any = {"batch": 10, "samples": SAMPLES, "cached": True, "example": inputs[:2]}
    price, cached = (Price(model, mode="exact", keep_base=how, **options) for how in ("streamed", "cache"))
    for part in suffixes(model.structure, len(model.structure.layers))[:-1]:
        model.set_training([False] * len(model.structure.layers))
        memory = price.streamed_memory(part, SAMPLES)
        peak = peak_bytes(partial(stream, part, Storage(model.initial()), model, inputs))
        assert memory.streamed == pytest.approx(peak, rel=CLOSE)
        assert memory.weights + memory.prefix_cache + memory.step < cached(part).memory_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_streamed_layers_have_the_bits_of_those_that_run_at_once(
    name: str, precision: FrozenPrecision
) -> None:
    make, draw = CASES[name]
    model, inputs = make(), draw()
    model.set_training([False] * len(model.structure.layers))
    for part in suffixes(model.structure, len(model.structure.layers)):
        cut = frozen_prefix(model.structure, part)
        if model.can_cut(cut):
            whole = keep(Prefix.of(model, cut, model.initial(), precision), inputs, SAMPLES)
            found = stream(part, Storage(model.initial()), model, inputs, precision)
            pairs = zip(tensors_in(whole), tensors_in(found), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
