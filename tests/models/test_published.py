"""Models as published: their layers, prices and cuts, and runs whose saved model is what was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

import fedpmt
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.tracing import NoFastPath
from fedpmt.models.trees import tensors_in
from fedpmt.parts.depth import suffix
from fedpmt.pricing.price import Price
from fedpmt.training.ready_made import make_objective
from fedpmt.types import Examples
from models.nets_of_users import check_narrow
from models.page import PAGE, fill
from models.zoo import ZOO
from published import timm_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fedpmt.records import RunRecord
    from fedpmt.types import Arrays
    from models.zoo import Published


def make(name: str) -> tuple[Published, nn.Module, Any]:
    torch.manual_seed(0)
    return ZOO[name], ZOO[name].make(), ZOO[name].inputs()


def state(module: nn.Module) -> dict[str, Any]:
    """All that a forward pass or a search for layers could change."""
    tensors = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
    modes = {path: child.training for path, child in module.named_modules()}
    return {"tensors": tensors, "modes": modes, "hooks": [len(m._forward_hooks) for m in module.modules()]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = one["tensors"].keys() == other["tensors"].keys() and all(
        torch.equal(tensor, other["tensors"][key]) for key, tensor in one["tensors"].items()
    )
    return tensors and one["modes"] == other["modes"] and one["hooks"] == other["hooks"]


LARGE = (
    "timm efficientnet_b0",
    "timm mobilenetv3_small",
    "timm resnet26d",
    "timm convnext_atto",
    "efficientnet",
    "mobilenetv3",
    "mixer",
    "resnext",
)
"""As published there are no smaller ones: `make test-slow` waits for them."""


def large_ones_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in names]


@pytest.mark.parametrize("name", large_ones_slow(ZOO))
def test_layers_prices_and_cuts(name: str) -> None:
    published, module, inputs = make(name)
    before = state(module)
    model = layered(module, example=inputs)
    assert tuple(layer.name for layer in model.structure.layers) == published.layers
    assert {*model.structure.tensors, *model.structure.fixed} <= before["tensors"].keys()
    few = Examples(inputs, torch.zeros(48), torch.arange(48).numpy()).take(slice(0, 4)).inputs
    check_operations(model, few, published)
    check_cuts(model, few)
    assert same(state(module), before)


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def attention_back(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Two products for each of the forward pass; what kernels compute again to save memory is not counted."""
    return 2 * attention(query, key, value)


def convolution_back(error: Any, inputs: Any, weight: Any, *options: Any, out_shape: Any) -> int:
    """Torch's own formula leaves the groups out, which counts a depthwise gradient as often as it has channels."""
    *_, transposed, _, _, wanted = options
    each = conv_flop_count(inputs, weight, error, transposed=transposed)
    return int(each) * (int(wanted[0]) + int(wanted[1]))


ATEN = torch.ops.aten
COUNTS = {
    # It knows attention, but not by the name of the CPU's kernel.
    ATEN._scaled_dot_product_flash_attention_for_cpu: attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention_back,
    ATEN.convolution_backward: convolution_back,
}


def check_operations(model: LayeredModel, inputs: Any, published: Published) -> None:
    """The price of a batch of 4, forward and back, against torch's counter, which counts product and sum apart."""
    price = Price(model, mode="exact", batch=4, samples=48, cached=False, example=inputs)
    layers, names = len(model.structure.layers), model.structure.parameters
    model.set_training([False] * layers)
    with FlopCounterMode(display=False, custom_mapping=COUNTS) as counter, NoFastPath(), torch.no_grad():
        model.forward({}, inputs)
    theirs = published.operations or counter.get_total_flops() / 2
    assert price.full.inference == pytest.approx(theirs, rel=1e-3)
    if published.operations:
        return  # torch counts nothing of it
    model.set_training([True] * layers, norms=False)
    local = {name: one.clone().requires_grad_(name in names) for name, one in model.initial().items()}
    with NoFastPath():
        numbers = [one for one in tensors_in(model.forward(local, inputs)) if one.requires_grad]
        with FlopCounterMode(display=False, custom_mapping=COUNTS) as counter:
            loss = torch.stack([one.float().sum() for one in numbers]).sum()
            torch.autograd.grad(loss, [local[name] for name in names], allow_unused=True)
    assert price.full.error + price.full.gradient == pytest.approx(counter.get_total_flops() / 2, rel=1e-3)


def check_cuts(model: LayeredModel, inputs: Any) -> None:
    """The gradients of what is trained are the same, whether the layers before are run or answered for."""
    tensors = model.initial()
    layers = len(model.structure.layers)
    for cut in range(layers):
        if cut == 0 and not model.layout.base:
            continue
        assert model.can_cut(cut)
        part = suffix(model.structure, cut, "")
        trained = [name for name in model.structure.parameters if name in part.trained]
        model.set_training([place >= cut for place in range(layers)], norms=False)
        found = []
        for halves in (True, False):
            local = {key: one.clone().requires_grad_(key in trained) for key, one in tensors.items()}
            if halves:
                kept = model.prefix(cut, tensors, inputs)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1)
                    outputs = model.suffix(cut, local, model.entry(kept, inputs))
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1)
                    outputs = model.forward(local, inputs)
            numbers = [one for one in tensors_in(outputs) if one.requires_grad]
            loss = sum((one * torch.linspace(-1, 1, one.numel()).view_as(one)).sum() for one in numbers)
            assert isinstance(loss, torch.Tensor)
            gradients = torch.autograd.grad(loss, [local[key] for key in trained], allow_unused=True)
            found.append(dict(zip(trained, gradients, strict=True)))
        for key in trained:
            one, other = (gradients[key] for gradients in found)
            if is_tied(model, key):
                assert one is not None  # through its last use alone, where the first is before the cut
            elif one is None or other is None:
                assert one is other
            else:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    model.release()


def is_tied(model: LayeredModel, name: str) -> bool:
    return len(model.layout.aliases[name]) > 1


@pytest.mark.slow
def test_the_page_shows_what_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text) == text, "run python tests/models/page.py"


RUN: dict[str, Any] = {
    "rounds": 3, "devices": 2, "cohort": 2, "samples": 24, "batch": 8, "levels": "1/3,1", "workers": 1
}  # fmt: skip


def run(name: str, method: str, folder: Path, **settings: Any) -> tuple[RunRecord, Published, Any, Tensor]:
    published, module, inputs = make(name)
    targets = published.targets(inputs)
    before = state(module)
    data = inputs, targets
    given = {**RUN, "lr": 0.1, **published.settings, **settings}
    record = fedpmt.run(method, model=module, train=data, test=data, out=folder, **given)
    assert same(state(module), before)
    return record, published, inputs, targets


@pytest.mark.parametrize("name", large_ones_slow(ZOO))
def test_what_is_recorded_is_what_the_saved_model_scores(name: str, tmp_path: Path) -> None:
    bits = []
    for method, workers in (("fedavg", 1), ("fedpmt", 1), ("fedpmt", 2)):
        folder = tmp_path / f"{method}{workers}"
        record, published, inputs, targets = run(name, method, folder, workers=workers)
        assert record.result is not None
        bits.append(record.result.weights_sha256)
        losses = [one.metrics["train_loss"] for one in record.rounds]
        assert min(losses[1:]) < losses[0], losses
        torch.manual_seed(5)  # other weights than those it was trained from
        fresh = published.make().eval()
        fresh.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        with torch.no_grad():
            outputs = fresh(**inputs) if isinstance(inputs, dict) else fresh(inputs)
        objective = make_objective(objective=published.settings.get("objective", "classification"))
        loss = float(objective.loss(outputs, targets))
        assert record.result.loss == pytest.approx(loss, rel=1e-4)
    assert bits[1] == bits[2]


HUGGING: Any = transformers  # some of its classes have no annotations
TEXT: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def images(side: int) -> torch.Tensor:
    return torch.randn(3, 3, side, side)


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 50, (3, 8)), "attention_mask": torch.ones(3, 8, dtype=torch.int64)}


def bert() -> Any:
    return HUGGING.BertForSequenceClassification(HUGGING.BertConfig(**TEXT, **SMALL))


def distilbert() -> Any:
    config = HUGGING.DistilBertConfig(**TEXT, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    return HUGGING.DistilBertForSequenceClassification(config)


def vit() -> Any:
    return HUGGING.ViTForImageClassification(HUGGING.ViTConfig(image_size=32, **SMALL))


def gpt2() -> Any:
    return HUGGING.GPT2LMHeadModel(HUGGING.GPT2Config(**TEXT, n_embd=32, n_layer=2, n_head=4))


def llama() -> Any:
    return HUGGING.LlamaForCausalLM(HUGGING.LlamaConfig(**TEXT, **SMALL, num_key_value_heads=2))


Cut = tuple["Callable[[], nn.Module]", "Callable[[], Arrays]", dict[str, int]]
MODELS: dict[str, Cut] = {
    "resnet18": (lambda: timm_model("resnet18"), lambda: images(32), {"conv": 12}),
    "resnext": (lambda: timm_model("resnext26ts"), lambda: images(32), {"conv": 15}),
    "mobilenetv3": (lambda: timm_model("mobilenetv3_small_050"), lambda: images(32), {"conv": 26}),
    "efficientnet": (lambda: timm_model("efficientnet_b0"), lambda: images(32), {"conv": 40}),
    "convnext": (
        lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1)),
        lambda: images(64),
        {"conv": 4},
    ),
    "vit_tiny": (
        lambda: timm_model("vit_tiny_patch16_224", img_size=32, depth=2),
        lambda: images(32),
        {"heads": 2, "linear": 2},
    ),
    "mixer": (
        lambda: timm_model("mixer_s32_224", img_size=64),
        lambda: images(64),
        {"linear": 16},
    ),
    "bert": (bert, tokens, {"heads": 2, "linear": 3}),
    "distilbert": (distilbert, tokens, {"heads": 2, "linear": 3}),
    "vit": (vit, lambda: {"pixel_values": images(32)}, {"heads": 2, "linear": 2}),
    "gpt2": (gpt2, tokens, {"heads": 2, "linear": 2}),
    "llama": (llama, tokens, {"heads": 2, "linear": 2}),
}


@pytest.mark.parametrize("name", large_ones_slow(MODELS))
def test_half_of_a_published_model_is_the_model_without_the_other_half(name: str) -> None:
    make, example, wanted = MODELS[name]
    torch.manual_seed(0)
    structure = check_narrow(make(), example())
    axes = structure.require_axes("this test")
    kinds = [group.kind for group in axes.groups.values() if group.hidden]
    assert {kind: kinds.count(kind) for kind in kinds} == wanted
    assert [group.kind for group in axes.groups.values()].count("output") == 1
