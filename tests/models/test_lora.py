"""Adapters without peft: names, values, ranks, and that FedPMT trains them from the output on."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpmt
from fedpmt.models.adapters import find_adapters
from fedpmt.models.layered import layered
from fedpmt.types import SettingError
from models.zoo import CLASSES, NARROW, SMALL, hugging_face, images, labels_of, words
from published import timm_model


def bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return hugging_face("BertForSequenceClassification", "BertConfig", **{**SMALL, **options})


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return hugging_face(
        "ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, num_labels=CLASSES, **sizes
    )


def encoder() -> nn.Module:
    """torch's own encoder, which would take a fused path past the adapters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(4, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, CLASSES)
    )


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return timm_model("resnet18", num_classes=CLASSES, channels=NARROW, zero_init_last=False)


CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "bert": (bert, {"targets": ["query", "value"]}, words),
    "vit": (vit, {}, images),
    "encoder": (encoder, {}, lambda: torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))),
    "resnet": (resnet, {"targets": ["conv2", "downsample.0"]}, images),
}


def logits(module: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad():
        found = module.eval()(**inputs) if isinstance(inputs, dict) else module.eval()(inputs)
    return found if isinstance(found, Tensor) else found.logits


def moved(module: nn.Module) -> nn.Module:
    """The module with adapters that do something."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, one in module.named_parameters():
            if name.endswith("lora_B"):
                one.copy_(0.2 * torch.randn(one.shape, generator=rng))
    return module


@pytest.mark.parametrize("name", CASES)
def test_published_names_stay_and_adapters_do_nothing_until_they_are_trained(name: str) -> None:
    make, options, inputs = CASES[name]
    base, module = make(), fedpmt.lora(make(), rank=2, **options)
    before, state = base.state_dict(), module.state_dict()
    assert set(state) - set(before) == {key for key in state if key.endswith((".lora_A", ".lora_B"))} != set()
    assert all(torch.equal(state[key], one) for key, one in before.items())
    assert torch.equal(logits(base, inputs()), logits(module, inputs()))
    # The same adapters each time, in a module of its own.
    again = fedpmt.lora(make(), rank=2, **options)
    again.load_state_dict(state)
    assert all(torch.equal(one, state[key]) for key, one in again.state_dict().items())
    assert all(one.requires_grad for one in base.parameters())
    trained = {key for key, one in module.named_parameters() if one.requires_grad}
    head = next(reversed(before)).rpartition(".")[0]
    assert trained == {key for key in state if ".lora_" in key or key.startswith(f"{head}.")}


@pytest.mark.parametrize("name", CASES)
def test_merged_adapters_give_the_same_outputs(name: str) -> None:
    make, options, inputs = CASES[name]
    module = moved(fedpmt.lora(make(), rank=2, **options))
    merged = fedpmt.merge_lora(module)
    assert set(merged.state_dict()) == set(make().state_dict())
    assert [type(one) for one in merged.modules()] == [type(one) for one in make().modules()]
    found = logits(module, inputs())
    assert not torch.allclose(found, logits(make(), inputs()), atol=1e-3)
    torch.testing.assert_close(logits(merged, inputs()), found, rtol=1e-3, atol=1e-4)


def test_it_computes_what_peft_does() -> None:
    peft = importlib.import_module("peft")
    ours = moved(fedpmt.lora(bert(), rank=2, alpha=6, targets=["query", "dense"], head="classifier"))
    theirs = peft.get_peft_model(
        bert(), peft.LoraConfig(r=2, lora_alpha=6, target_modules=["query", "dense"])
    )
    state = dict(ours.named_parameters())
    with torch.no_grad():
        for name, one in theirs.named_parameters():
            if ".lora_" in name:
                one.copy_(state[name.removeprefix("base_model.model.").removesuffix(".default.weight")])
    torch.testing.assert_close(logits(ours, words()), logits(theirs, words()), rtol=1e-5, atol=1e-6)
    example = words()["input_ids"]
    found = [find_adapters(layered(one, example=example).structure) for one in (ours, theirs)]
    assert [(one.rank, one.layer) for one in found[0]] == [(one.rank, one.layer) for one in found[1]]


def test_ranks_grow_towards_the_output() -> None:
    """LEGEND: in even steps from block to block, the same within a block."""
    module = fedpmt.lora(vit(), ranks=(2, 8))
    ranks: dict[str, set[int]] = {}
    for name, one in module.named_parameters():
        if name.endswith("lora_A"):
            ranks.setdefault(name.split(".")[2], set()).add(len(one))
    assert ranks == {"0": {2}, "1": {5}, "2": {8}}
    each = fedpmt.lora(vit(), ranks=[1, 1, 4], targets=["q_proj"])
    assert [len(one) for name, one in each.named_parameters() if name.endswith("lora_A")] == [1, 1, 4]


def test_fedpmt_trains_adapters_of_the_last_blocks_a_device_affords(tmp_path: Any) -> None:
    module, inputs = fedpmt.lora(bert(), ranks=(1, 4), targets=["query", "value"]), words()
    data = (inputs, labels_of(inputs))
    run = fedpmt.run(
        "fedpmt", model=module, train=data, test=data, devices=6, cohort=6, samples=8, batch=4, rounds=1,
        lr=0.1, levels="1/3,1/2,1", depths=3, assign="level", workers=1, out=tmp_path / "run",
    )  # fmt: skip
    blocks = [f"bert.encoder.layer.{place}" for place in range(2)]
    assert list(run.rounds[0].layers) == [*blocks, "classifier"]
    assert list(run.rounds[0].layers.values()) == [2, 4, 6]
    # Query and value with A and B of 16 numbers for each component; the head has 16 x 4 weights and 4 biases.
    sizes = [4 * 68, 4 * (68 + 2 * 2 * 4 * 16), 4 * (68 + 2 * 2 * 4 * 16 + 2 * 2 * 1 * 16)]
    assert sorted(one.bytes_up for one in run.rounds[0].devices) == [size for size in sizes for _ in range(2)]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (bert, {"targets": ["querry"]}, "targets = 'querry' is unknown.*did you mean 'query'"),
        (bert, {"rank": 17, "targets": "query"}, r"rank must be from 1 to 16 in 'bert\..*query' \(got 17\)"),
        (bert, {"rank": 0}, r"rank must be from 1 to 16 in .* \(got 0\)"),
        (bert, {"ranks": (1, 2, 3, 4)}, r"one for each of 3 blocks \(got 4\)"),
        (bert, {"head": "classifer"}, "head = 'classifer' is unknown.*did you mean 'classifier'"),
        (bert, {"targets": "word_embeddings"}, "targets = 'word_embeddings' is unknown"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), {}, "has no linear layer or 1 x 1 convolution"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        fedpmt.lora(make(), **options)
    assert "\n" not in str(refused.value)


def test_a_head_that_is_tied_to_the_embedding_stays_frozen() -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "num_labels"}
    module = fedpmt.lora(hugging_face("BertLMHeadModel", "BertConfig", is_decoder=True, **sizes), rank=2)
    assert all(".lora_" in name for name, one in module.named_parameters() if one.requires_grad)
