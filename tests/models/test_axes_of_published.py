"""Published models are cut by width as they are: filters, hidden units and heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from models.narrow_nets import check_narrow
from published import timm_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fedpmt.types import Arrays

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


Published = tuple["Callable[[], nn.Module]", "Callable[[], Arrays]", dict[str, int]]
MODELS: dict[str, Published] = {
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


@pytest.mark.parametrize("name", MODELS)
def test_half_of_a_published_model_is_the_model_without_the_other_half(name: str) -> None:
    make, example, wanted = MODELS[name]
    torch.manual_seed(0)
    structure = check_narrow(make(), example())
    axes = structure.require_axes("this test")
    kinds = [group.kind for group in axes.groups.values() if group.hidden]
    assert {kind: kinds.count(kind) for kind in kinds} == wanted
    assert [group.kind for group in axes.groups.values()].count("output") == 1
