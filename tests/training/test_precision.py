"""Fewer bits: trained layers by autocast, frozen ones as 16 or 8 bits, and models that are given in 16."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpmt
from fedpmt.models.build import build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.models.precision import Prefix
from fedpmt.models.trees import tensors_in
from fedpmt.parts.depth import full, suffix, suffixes
from fedpmt.parts.part import GLOBAL
from fedpmt.pricing.meter import Times, download_bytes, upload_bytes
from fedpmt.pricing.price import Price
from fedpmt.seeds import Seeds, generator
from fedpmt.settings import resolve
from fedpmt.simulation.checkpoint import read_value, write_value
from fedpmt.training.local import Job, LocalSettings, LocalWork, Site
from fedpmt.training.loop import begin, train
from fedpmt.training.messages import UPDATE, Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.types import MODEL, Examples, SettingError
from models.nets_of_users import ResNet
from support import FEW, images

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.models.structure import FrozenPrecision
    from fedpmt.parts.part import Part


class Words(nn.Module):
    """A transformer as Hugging Face would write it: wide enough for a scale for each token, with dropout everywhere."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 2, 64, dropout=dropout, batch_first=True) for _ in range(2)
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(64, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.drop(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))  # type: ignore[no-any-return]


def words(count: int = 80) -> Tensor:
    return torch.randint(11, (count, 7), generator=torch.Generator().manual_seed(0))


def pictures(count: int = 80) -> Tensor:
    return torch.from_numpy(images(count)[0])


def cnn() -> tuple[LayeredModel, Tensor]:
    net = NETS["cnn-mnist"]
    inputs = torch.randn(80, *net.input_shape, generator=torch.Generator().manual_seed(0))
    return build(net, generator(0, "test")), inputs


def resnet() -> tuple[LayeredModel, Tensor]:
    torch.manual_seed(0)
    return layered(ResNet(), example=pictures()), pictures()


def transformer() -> tuple[LayeredModel, Tensor]:
    torch.manual_seed(0)
    return layered(Words(), example=words()), words()


MODELS = {"cnn": cnn, "resnet": resnet, "transformer": transformer}


def job(model: LayeredModel, part: Part, inputs: Any, **settings: Any) -> Job[None]:
    local = LocalSettings(**{"epochs": 2, "batch": 16, "learning_rate": 0.05, **settings})
    data = Examples(inputs, torch.arange(len(inputs)) % 3, np.arange(len(inputs)))
    site = Site({GLOBAL: model}, CLASSIFICATION, local)
    return Job(site, Task((part,), {MODEL: model.initial()}), part, None, data, Seeds(0, 0))


def kept_bytes(entry: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors_in(entry))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("precision", "share", "apart"), [("bf16", 0.5, 0.02), ("int8", 0.25, 0.04)])
def test_frozen_layers_in_fewer_bits(
    name: str, precision: FrozenPrecision, share: float, apart: float
) -> None:
    """What they say is nearly the same, and keeping it takes half or a quarter, and a sixteenth of it for scales."""
    model, inputs = MODELS[name]()
    tensors = model.initial()
    model.set_training([False] * len(model.structure.layers))
    whole = model.forward(tensors, inputs)
    for cut in range(1, len(model.structure.layers)):
        exact, fewer = Prefix(model, cut, tensors), Prefix.of(model, cut, tensors, precision)
        kept = fewer.run(inputs)
        size = kept_bytes(kept) / kept_bytes(exact.run(inputs))
        assert share <= size <= share * (1 + 1 / 16)
        outputs = model.suffix(cut, tensors, fewer.restore(model.entry(kept, inputs)))
        difference = float((outputs - whole).norm() / whole.norm())
        assert 0 < difference < apart
        assert torch.equal(model.forward(tensors, inputs), whole)  # the weights themselves are as they were


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_keeping_and_recomputing_train_alike(name: str, precision: str) -> None:
    """On the same numbers; and what is trained stays in 32 bits."""
    model, inputs = MODELS[name]()
    part = suffix(model.structure, 1, "some")
    found = []
    for prefix in ("cache", "recompute"):
        reply, _ = train(LocalWork(), job(model, part, inputs, prefix=prefix, frozen_precision=precision))
        found.append(reply.tensors[UPDATE])
    plain, _ = train(LocalWork(), job(model, part, inputs))
    for key, update in found[0].items():
        assert update.dtype == torch.float32
        torch.testing.assert_close(update, found[1][key], rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(update, plain.tensors[UPDATE][key]) for key, update in found[0].items())


def test_autocast_is_for_trained_layers() -> None:
    """Weights, gradients and what frozen layers say stay in 32 bits; the trained layers compute in 16."""
    model, inputs = cnn()
    seen: dict[str, list[torch.dtype]] = {"frozen": [], "trained": []}
    frozen, trained = (model.modules_of(layer, layer + 1)[0].module for layer in (0, 3))
    for key, module in (("frozen", frozen), ("trained", trained)):
        module.register_forward_hook(lambda _, __, output, key=key: seen[key].append(output.dtype))
    part = suffix(model.structure, 2, "some")
    for prefix in ("cache", "recompute"):
        reply, _ = train(LocalWork(), job(model, part, inputs, prefix=prefix, precision="bf16"))
        assert {update.dtype for update in reply.tensors[UPDATE].values()} == {torch.float32}
    assert set(seen["frozen"]) == {torch.float32}
    assert set(seen["trained"]) == {torch.bfloat16}


def run(method: str = "fedpmt", **settings: Any) -> fedpmt.RunRecord:
    return fedpmt.run(method, **{"rounds": 3, "devices": 20, "samples": 50, "cohort": 10, **settings})


def test_a_run_by_autocast_learns_and_says_that_compiled_code_does_not_know_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exact = run(task="cnn-mnist", executor="plain", lr=0.1)
    with caplog.at_level(logging.WARNING):
        fewer = run(task="cnn-mnist", precision="bf16", lr=0.1)
    assert exact.result is not None
    assert fewer.result is not None
    assert fewer.result.path == "autograd"
    assert [record.getMessage() for record in caplog.records] == [
        "fedpmt: fedpmt: compiled code does not support precision = 'bf16'; training runs on autograd"
    ]
    assert fewer.result.score is not None
    assert exact.result.score is not None
    assert fewer.result.score > 0.3
    assert fewer.result.score == pytest.approx(exact.result.score, abs=0.05)
    assert fewer.result.weights_sha256 != exact.result.weights_sha256


def test_frozen_layers_in_eight_bits_have_the_same_bits_with_two_workers() -> None:
    hashes = set()
    for workers in (1, 2):
        result = run(task="cnn-mnist", epochs=2, frozen_precision="int8", workers=workers).result
        assert result is not None
        hashes.add(result.weights_sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize(("method", "idle"), [("fedavg", True), ("fedpmt", False)])
def test_a_precision_that_never_acts_is_said(
    method: str, idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(method, frozen_precision="int8", rounds=1, executor="plain")
    said = [record.getMessage() for record in caplog.records]
    wanted = "frozen-precision = 'int8' does nothing: no device has frozen layers that can be run before the others"
    assert said == ([f"{method}: {wanted}"] if idle else [])


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"precision": "fp16"}, "precision = 'fp16' is refused: input should be 'fp32' or 'bf16'"),
        ({"frozen_precision": "int8", "mode": "paper"}, "frozen-precision = 'int8' needs mode = 'exact'"),
        ({"precision_seconds": "int8=0.3"}, "precision-seconds = 'int8=0.3' does nothing"),
        ({"precision": "bf16", "precision_seconds": "fp16=1"}, "precision-seconds = 'fp16' is unknown"),
        ({"precision": "bf16", "precision_seconds": "bf16"}, "must be a number or a fraction, more than 0"),
    ],
)
def test_what_is_refused(given: dict[str, Any], refused: str) -> None:
    with pytest.raises(SettingError) as error:
        resolve(given)
    assert refused in str(error.value)


def price(model: LayeredModel, inputs: Any, **settings: Any) -> Price:
    options = {"mode": "exact", "batch": 16, "samples": 80, "cached": True, "epochs": 4, **settings}
    return Price(model, example=inputs[:2], **options)


@pytest.mark.parametrize("name", MODELS)
def test_prices_say_what_fewer_bits_save(name: str) -> None:
    """Operations stay, outputs that are kept take less, and seconds are weighed by what was stated."""
    model, inputs = MODELS[name]()
    part = suffix(model.structure, 2, "some")
    exact = price(model, inputs)(part)
    device: Any = type("Device", (), {"speed": 1.0})
    plain = Times(price(model, inputs), 10.0, 4).training(device, exact, 80)
    for precision, share in (("bf16", 0.5), ("int8", 0.25)):
        weighed = price(
            model, inputs, frozen_precision=precision, precision_seconds={"bf16": 0.7, "int8": 0.5}
        )
        cost = weighed(part)
        assert cost.operations == exact.operations
        assert share <= cost.memory.prefix_cache / exact.memory.prefix_cache <= share * (1 + 1 / 16)
        saved = plain - Times(weighed, 10.0, 4).training(device, cost, 80)
        factor = {"bf16": 0.7, "int8": 0.5}[precision]
        # The prefix runs once in a round of 4 epochs; 5 batches of it, of 5 batches that take 10 seconds in full.
        assert saved == pytest.approx(10 * (1 - factor) * exact.prefix / weighed.full.operations)
    trained = price(model, inputs, precision="bf16", precision_seconds={"bf16": 0.7})
    cost, products = trained(part), exact.forward + exact.error + exact.gradient
    saved = plain - Times(trained, 10.0, 4).training(device, cost, 80)
    assert saved == pytest.approx(4 * 10 * 0.3 * products / trained.full.operations)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param("fedavg", torch.bfloat16, marks=pytest.mark.slow),
        ("fedpmt", torch.bfloat16),
        pytest.param("fedpmt", torch.float16, marks=pytest.mark.slow),
        ("fedavg", torch.float64),
    ],
)
def test_a_model_of_other_numbers_trains_as_it_is(method: str, kind: torch.dtype, tmp_path: Path) -> None:
    """It learns, it stays in its type, as many bytes travel, and what is saved is what was recorded."""
    torch.manual_seed(0)
    module, test = ResNet().to(kind), images(60, seed=1)
    before = copy.deepcopy(module.state_dict())
    own: dict[str, Any] = {
        "train": images(120),
        "test": test,
        **FEW,
        "rounds": 12,
        "lr": 0.2,
        "eval_every": 12,
    }
    results = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        results.append(fedpmt.run(method, model=module, workers=workers, out=out, **own).result)
    result, again = results
    assert result is not None
    assert again is not None
    assert result.weights_sha256 == again.weights_sha256
    assert result.score is not None
    assert result.score > 0.5
    wide = fedpmt.run(method, model=copy.deepcopy(module).float(), **own).result
    assert wide is not None
    assert result.bytes_down * 4 == wide.bytes_down * kind.itemsize
    saved = load_file(tmp_path / "1" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} == {kind}
    fresh = ResNet().to(kind)
    fresh.load_state_dict(saved)
    outputs = fresh.eval()(torch.from_numpy(test[0]).to(kind))
    assert float((outputs.argmax(1).numpy() == test[1]).mean()) == result.score
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_bytes_and_memory_follow_the_type_of_each_tensor() -> None:
    """A net of which one half is in 16 bits: 6 numbers there, 9 here."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    net[0].half()
    structure = layered(net, layers=["0", "1"]).structure
    part = full(structure)
    assert download_bytes(part, structure) == upload_bytes(part, structure) == 6 * 2 + 9 * 4
    halved, whole = (
        Price(layered(model), mode="exact", batch=4, samples=8, cached=False, example=torch.zeros(2, 2))
        for model in (nn.Sequential(nn.Linear(2, 3)).bfloat16(), nn.Sequential(nn.Linear(2, 3)))
    )
    assert halved.full.memory.weights * 2 == whole.full.memory.weights
    assert halved.full.operations == whole.full.operations


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_checkpoints_keep_types(kind: torch.dtype, tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 2).to(kind)}
    write_value(tmp_path / "state", state)
    read = read_value(tmp_path / "state")
    assert read["w"].dtype == kind
    assert torch.equal(read["w"], state["w"])


def dropping_chain() -> tuple[LayeredModel, Tensor]:
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5)]
    net = nn.Sequential(
        nn.Dropout(0.5), *layers, *copy.deepcopy(layers), *copy.deepcopy(layers), nn.Linear(8, 3)
    )
    return layered(net), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def dropping_transformer() -> tuple[LayeredModel, Tensor]:
    torch.manual_seed(0)
    return layered(Words(0.5), example=words()), words(16)


@pytest.mark.parametrize("make", [dropping_chain, dropping_transformer])
@pytest.mark.parametrize("prefix", ["cache", "recompute"])
def test_dropout_is_active_where_a_layer_trains_at_every_depth(
    make: Any, prefix: Literal["cache", "recompute"]
) -> None:
    """The outputs of two passes differ; what frozen layers say does not, and no dropout of theirs runs."""
    model, inputs = make()
    layers = len(model.structure.layers)
    drawn: list[int] = []
    paths = {path: place for place, stage in enumerate(model.layout.stages) for path in stage.paths}
    dropouts: dict[int, int] = dict.fromkeys(range(layers), 0)
    for path, module in model.module.named_modules():
        if isinstance(module, nn.Dropout):
            owner = next(place for own, place in paths.items() if path == own or path.startswith(f"{own}."))
            dropouts[owner] += 1
            module.register_forward_hook(
                lambda module, _, __, owner=owner: drawn.append(owner) if module.training else None
            )
    for number, part in enumerate(suffixes(model.structure, layers), start=1):
        run = begin(job(model, part, inputs, prefix=prefix))
        batch = run.data.inputs
        drawn.clear()
        one, other = (run.forward(run.tensors, batch) for _ in range(2))
        assert not torch.equal(one, other)
        trained = range(layers - number, layers)
        assert {place: drawn.count(place) for place in range(layers)} == {
            place: 2 * count if place in trained else 0 for place, count in dropouts.items()
        }
