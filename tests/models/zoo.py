"""Models as their authors publish them, small, each with inputs and targets to learn: what the matrix runs over."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from published import timm_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TOKENS, LENGTH, CLASSES, SAMPLES = 20, 8, 4, 48


@dataclass(frozen=True)
class Published:
    """One row of the matrix."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    layers: tuple[str, ...]
    targets: Callable[[Any], Tensor] = lambda inputs: labels_of(inputs)  # noqa: PLW0108 (it comes later)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run
    operations: int | None = None  # of four samples by hand, where torch's counter has no formula


def words(name: str | None = "input_ids") -> Any:
    """Tokens; the class of a text can be read off its first token."""
    drawn = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return drawn if name is None else {name: drawn}


def images(side: int = 32) -> Tensor:
    """Pictures; the class can be read off the mean of each quarter."""
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(SAMPLES, 3, side, side, generator=rng)
    for sample, label in enumerate(torch.arange(SAMPLES) % CLASSES):
        row, column = divmod(int(label), 2)
        half = side // 2
        drawn[sample, :, row * half : (row + 1) * half, column * half : (column + 1) * half] += 2
    return drawn


def labels_of(inputs: Any) -> Tensor:
    """The class of each sample."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return torch.arange(SAMPLES) % CLASSES
    tokens: Tensor = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    first: Tensor = tokens[:, 0] % CLASSES
    return first


def next_words(inputs: Any) -> Tensor:
    """The text itself: each word is to be told from those before."""
    tokens: Tensor = next(iter(inputs.values()))
    return tokens.clone()


def hugging_face(model: str, config: str, **options: Any) -> nn.Module:
    """A model of transformers, from a configuration."""
    library = importlib.import_module("transformers")
    made: nn.Module = getattr(library, model)(getattr(library, config)(**options))
    return made


SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": LENGTH,
    "num_labels": CLASSES,
}
NARROW = (8, 16, 24, 32)
VISION = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def lora_bert(**options: Any) -> nn.Module:
    """BERT with adapters by peft: the base is frozen, adapters and classifier are trained."""
    peft = importlib.import_module("peft")
    base = hugging_face("BertForSequenceClassification", "BertConfig", **{**SMALL, **options})
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    made: nn.Module = peft.get_peft_model(base, config)
    return made


def mixer() -> nn.Module:
    """timm's registered mixers are large: the same class with fewer and narrower blocks."""
    made: nn.Module = importlib.import_module("timm.models.mlp_mixer").MlpMixer(
        num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=24
    )
    return made


def frozen_resnet() -> nn.Module:
    """Transfer learning as most people do it: everything but the classifier is frozen, norms are in training mode."""
    model = timm_model("resnet18", num_classes=CLASSES, channels=NARROW)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("fc."))
    return model


class Recurrent(nn.Module):
    """A text classifier with a recurrent layer."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.cell = cell(8, 12, batch_first=True)
        self.out = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.cell(self.embed(tokens))
        return self.out(hidden.mean(1))  # type: ignore[no-any-return]


class DoubleConvolution(nn.Sequential):
    """Two convolutions of a U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Down and up again, with a skip over everything between; a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = DoubleConvolution(3, 8)
        self.bottom = DoubleConvolution(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join = DoubleConvolution(16, 8)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        high = self.down(pictures)
        low = self.up(self.bottom(functional.max_pool2d(high, 2)))
        return self.out(self.join(torch.cat([high, low], dim=1)))  # type: ignore[no-any-return]


class Expert(nn.Module):
    """One of several that a router chooses from."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(hidden)))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """A residual block in which each sample goes to the expert of its highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden).softmax(-1)
        weight, chosen = scores.max(-1)
        mixed = torch.zeros_like(hidden)
        for place, expert in enumerate(self.experts):
            own = chosen == place
            if own.any():
                mixed[own] = weight[own, None] * expert(hidden[own])
        return hidden + mixed


class Experts(nn.Module):
    """A mixture of experts; those that nobody chooses get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 8 * 8, 12)
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.embed(pictures.flatten(1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def quarters(inputs: Tensor) -> Tensor:
    """A class for each pixel: that of its picture."""
    return labels_of(inputs)[:, None, None].expand(-1, *inputs.shape[2:]).clone()


BERT_LAYERS = ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier")
BLOCKS_OF_RESNET = tuple(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1))
LANGUAGE = {"objective": "causal-lm", "lr": 0.2}
CLASSIFICATION = {"objective": "classification", "lr": 0.2}

ZOO: dict[str, Published] = {
    "BERT": Published(
        partial(hugging_face, "BertForSequenceClassification", "BertConfig", **SMALL), words, BERT_LAYERS
    ),
    "DistilBERT": Published(
        partial(
            hugging_face,
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=TOKENS,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
        ),
        words,
        (
            "distilbert.embeddings",
            "distilbert.transformer.layer.0",
            "distilbert.transformer.layer.1",
            "pre_classifier",
            "classifier",
        ),
    ),
    "ViT": Published(
        partial(
            hugging_face,
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=32,
            patch_size=8,
            num_labels=CLASSES,
        ),
        lambda: {"pixel_values": images()},
        ("vit.embeddings.patch_embeddings", "vit.layers.0", "vit.layers.1", "classifier"),
        lambda inputs: labels_of(inputs["pixel_values"]),
    ),
    "GPT-2": Published(
        partial(
            hugging_face,
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=TOKENS,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        ),
        words,
        ("transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"),
        next_words,
        LANGUAGE,
    ),
    "Llama": Published(
        partial(
            hugging_face,
            "LlamaForCausalLM",
            "LlamaConfig",
            vocab_size=TOKENS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
        ),
        words,
        ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"),
        next_words,
        LANGUAGE,
    ),
    "T5": Published(
        partial(
            hugging_face,
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=TOKENS,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        lambda: {"input_ids": words(None), "decoder_input_ids": words(None).roll(1, 1)},
        ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1", "lm_head"),
        next_words,
        CLASSIFICATION,
    ),
    "timm resnet18": Published(
        partial(timm_model, "resnet18", num_classes=CLASSES, channels=NARROW),
        images,
        ("conv1", *BLOCKS_OF_RESNET, "fc"),
    ),
    "timm resnet26d": Published(
        partial(timm_model, "resnet26d", num_classes=CLASSES, channels=NARROW),
        images,
        ("conv1.0", *BLOCKS_OF_RESNET, "fc"),
    ),
    "timm mobilenetv3_small": Published(
        partial(timm_model, "mobilenetv3_small_050", num_classes=CLASSES),
        images,
        (
            "conv_stem",
            "blocks.1.0",
            "blocks.1.1",
            *(f"blocks.2.{block}" for block in range(3)),
            "blocks.3.0",
            "blocks.3.1",
            *(f"blocks.4.{block}" for block in range(3)),
            "blocks.5.0.conv",
            "conv_head",
            "classifier",
        ),
        settings={"lr": 0.003},
    ),
    "timm efficientnet_b0": Published(
        partial(timm_model, "efficientnet_b0", num_classes=CLASSES),
        images,
        (
            "conv_stem",
            *(
                f"blocks.{s}.{b}"
                for s, n in ((1, 2), (2, 2), (3, 3), (4, 3), (5, 4), (6, 1))
                for b in range(n)
            ),
            "conv_head",
            "classifier",
        ),
        settings={"lr": 0.01, "batch": 24, "rounds": 4},
    ),
    "timm convnext_atto": Published(
        partial(timm_model, "convnext_atto", num_classes=CLASSES, dims=(8, 16, 24, 32), depths=(1, 1, 2, 1)),
        images,
        (
            "stem.0",
            "stages.0.blocks.0",
            "stages.1.downsample.1",
            "stages.1.blocks.0",
            "stages.2.downsample.1",
            "stages.2.blocks.0",
            "stages.2.blocks.1",
            "stages.3.downsample.1",
            "stages.3.blocks.0",
            "head.fc",
        ),
    ),
    "timm vit_tiny": Published(
        partial(timm_model, "vit_tiny_patch16_224", num_classes=CLASSES, **VISION),
        images,
        ("patch_embed", "blocks.0", "blocks.1", "head"),
    ),
    "timm deit_tiny_distilled": Published(
        partial(timm_model, "deit_tiny_distilled_patch16_224", num_classes=CLASSES, **VISION),
        images,
        ("patch_embed", "blocks.0", "blocks.1", "head"),
    ),
    "timm mixer": Published(
        mixer,
        images,
        ("stem", "blocks.0", "blocks.1", "head"),
    ),
    "LSTM": Published(
        partial(Recurrent, nn.LSTM),
        partial(words, None),
        ("embed", "cell", "out"),
        # 8 words, four gates of 12 numbers from 8 inputs and 12 states; then the classifier
        operations=4 * (8 * 4 * 12 * (8 + 12) + 12 * CLASSES),
    ),
    "GRU": Published(
        partial(Recurrent, nn.GRU),
        partial(words, None),
        ("embed", "cell", "out"),
    ),
    "U-Net": Published(
        UNet,
        partial(images, 16),
        ("down.0", "down.3", "bottom.0", "bottom.3", "up", "join.0", "join.3", "out"),
        quarters,
        {"lr": 0.2},
    ),
    "mixture of experts": Published(Experts, partial(images, 8), ("embed", "blocks.0", "blocks.1", "head")),
    "peft LoRA BERT": Published(
        lora_bert,
        words,
        (
            "base_model.model.bert.encoder.layer.0",
            "base_model.model.bert.encoder.layer.1",
            "base_model.model.classifier",
        ),
    ),
    "resnet18 with a frozen backbone": Published(frozen_resnet, images, ("fc",)),
}
