"""Pretrained models of which only a part is trained: adapters by peft, and backbones that their owner froze."""

from __future__ import annotations

import importlib
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpmt
from fedpmt import api
from fedpmt.models.layered import layered
from fedpmt.pricing.price import Price
from fedpmt.types import SettingError
from models.zoo import (
    CLASSES,
    LENGTH,
    TOKENS,
    VISION,
    ZOO,
    hugging_face,
    images,
    labels_of,
    lora_bert,
    next_words,
    words,
)
from published import timm_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK, BERT_BLOCK = "base_model.model.transformer.h", "base_model.model.bert.encoder.layer"


PRETRAINED = {"initializer_range": 0.3}
"""Random weights that are as large as those of a trained base, so that small adapters can make a difference."""


def adapted(base: nn.Module, *targets: str, **options: Any) -> Any:
    """A base with LoRA adapters."""
    peft = importlib.import_module("peft")
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=list(targets), **options))


def gpt2() -> nn.Module:
    return hugging_face(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=TOKENS,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        **PRETRAINED,
    )


def lora_gpt2() -> nn.Module:
    """Its projections are transformers' Conv1D, and its output layer is tied to the embedding."""
    made: nn.Module = adapted(gpt2(), "c_attn", fan_in_fan_out=True)
    return made


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, tuple[str, ...]]] = {
    "GPT-2": (lora_gpt2, next_words, "causal-lm", (f"{BLOCK}.0", f"{BLOCK}.1")),
    "BERT": (
        partial(lora_bert, **PRETRAINED),
        labels_of,
        "classification",
        (f"{BERT_BLOCK}.0", f"{BERT_BLOCK}.1", "base_model.model.classifier"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_trained_and_sent_by_depth_and_the_base_comes_once(name: str, tmp_path: Path) -> None:
    make, targets_of, objective, layers = CASES[name]
    torch.manual_seed(0)
    module, inputs = make(), words()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    data = (inputs, targets_of(inputs))
    run = fedpmt.run(
        "fedpmt",
        model=module,
        train=data,
        test=data,
        objective=objective,
        out=tmp_path / "run",
        devices=6,
        cohort=4,
        samples=8,
        batch=4,
        epochs=2,
        rounds=30,
        optimizer="adam",
        lr=0.02,
        levels=",".join(["1/3", "1/2", "1"][-len(layers) :]),
        depths=len(layers),
        assign="level",
        workers=1,
    )
    losses = [step.loss for step in run.rounds if step.loss is not None]
    assert losses[-1] < 0.9 * losses[0]

    # Only what requires a gradient has changed, and the file loads strictly into a fresh wrapper.
    after = load_file(tmp_path / "run" / "model.safetensors")
    trained = {key: one.numel() for key, one in module.named_parameters() if one.requires_grad}
    assert {key for key in before if not torch.equal(before[key], after[key])} == set(trained)
    make().load_state_dict(after)

    # By depth: the adapters of the last blocks, and the head.
    assert tuple(run.rounds[0].layers) == layers
    assert sum(trained.values()) < 0.1 * sum(one.numel() for one in before.values())
    frozen = sum(one.numel() for key, one in module.named_parameters() if key not in trained)
    seen: set[int] = set()
    for step in run.rounds:
        for one in step.devices:
            depth = int(one.part.removeprefix("depth "))
            own = [count for key, count in trained.items() if key.startswith(layers[-depth:])]
            assert one.bytes_up == 4 * sum(own)
            assert one.bytes_down == 4 * (sum(trained.values()) + (one.device not in seen) * frozen)
            seen.add(one.device)
    assert seen == set(range(6))


def second_adapter() -> nn.Module:
    """Two adapters, of which the second is in use."""
    peft: Any = importlib.import_module("peft")
    module: Any = lora_bert()
    module.add_adapter("second", peft.LoraConfig(r=2, target_modules=["key"], modules_to_save=["classifier"]))
    module.set_adapter("second")
    assert isinstance(module, nn.Module)
    return module


def adapters_of(module: nn.Module) -> dict[str, list[str]]:
    """The layers of a text model that are found, and the ends of the names of their tensors."""
    structure = layered(module, example=words()["input_ids"]).structure
    return {
        layer.name: [name.removeprefix(layer.name) for name in layer.tensors] for layer in structure.layers
    }


def test_the_adapter_in_use_is_trained_and_the_others_are_base() -> None:
    own = [f".attention.self.key.lora_{side}.second.weight" for side in "AB"]
    assert adapters_of(second_adapter()) == {
        f"{BERT_BLOCK}.0": own,
        f"{BERT_BLOCK}.1": own,
        "base_model.model.classifier": [f".modules_to_save.second.{kind}" for kind in ("weight", "bias")],
    }


def test_other_adapters_are_found_too() -> None:
    peft = importlib.import_module("peft")
    vectors = peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True)
    dora = adapted(gpt2(), "c_attn", fan_in_fan_out=True, use_dora=True)
    for module, count in ((peft.get_peft_model(gpt2(), vectors), 1), (dora, 3)):
        found = adapters_of(module)
        assert [len(names) for names in found.values()] == [count, count]
        assert list(found) == [f"{BLOCK}.0", f"{BLOCK}.1"]


def test_a_copied_head_is_trained_and_its_original_is_base() -> None:
    model = layered(lora_bert(), example=words()["input_ids"])
    head = "base_model.model.classifier"
    assert {f"{head}.original_module.weight", f"{head}.original_module.bias"} <= set(model.structure.fixed)
    assert model.structure.base_bytes == 4 * sum(one.numel() for one in model.base().values())


def test_disabled_adapters_leave_nothing_to_train() -> None:
    module = lora_bert()
    module.base_model.disable_adapter_layers()  # type: ignore[operator,union-attr]
    with pytest.raises(SettingError, match="no parameter requires a gradient"):
        layered(module, example=words()["input_ids"])


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_adapters_in_models_of_timm(name: str) -> None:
    makers = {
        "vit": lambda: adapted(
            timm_model("vit_tiny_patch16_224", num_classes=CLASSES, **VISION), "qkv", modules_to_save=["head"]
        ),
        "resnet": lambda: adapted(
            timm_model("resnet18", num_classes=CLASSES), "conv2", modules_to_save=["fc"]
        ),
    }
    model = layered(makers[name](), example=images()[:3])
    plain = {"vit": "timm vit_tiny", "resnet": "timm resnet18"}[name]
    # Of the layers that the base has, all but the first, in which nothing is trained.
    assert [layer.name for layer in model.structure.layers] == [
        f"base_model.model.{layer}" for layer in ZOO[plain].layers[1:]
    ]
    assert all("lora_" in key or "modules_to_save" in key for key in model.structure.parameters)
    assert all(model.can_cut(cut) for cut in range(len(model.structure.layers)))


def test_layers_can_be_named_inside_a_wrapper() -> None:
    head = "base_model.model.classifier"
    model = layered(
        lora_bert(), layers=[[f"{BERT_BLOCK}.0", f"{BERT_BLOCK}.1"], head], example=words()["input_ids"]
    )
    assert [(layer.name, len(layer.tensors)) for layer in model.structure.layers] == [
        (f"{BERT_BLOCK}.0", 8),
        (head, 2),
    ]
    with pytest.raises(SettingError, match=r"did you mean 'base_model\.model\.classifier'"):
        layered(lora_bert(), layers=["classifier"], example=words()["input_ids"])


def perceptron(*frozen: int) -> nn.Sequential:
    """Four linear layers, some of them frozen by their owner."""
    torch.manual_seed(0)
    sizes = pairwise((6, 16, 16, 16, CLASSES))
    linear = [nn.Linear(*pair) for pair in sizes]
    for place in frozen:
        linear[place].requires_grad_(False)
    return nn.Sequential(*[module for one in linear for module in (one, nn.ReLU())][:-1])


def points(count: int = 96) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % CLASSES
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    inputs[torch.arange(count), labels] += 3
    return inputs, labels


tiny: Any = partial(
    fedpmt.run,
    train=points(),
    test=points(),
    devices=6,
    cohort=4,
    samples=16,
    batch=4,
    rounds=6,
    lr=0.2,
    workers=1,
    executor="plain",
)


@pytest.mark.parametrize("frozen", [(1,), (1, 2), (0, 2), (3,)])
def test_what_is_frozen_in_the_middle_belongs_to_the_layer_before(
    frozen: tuple[int, ...], tmp_path: Path
) -> None:
    run = tiny("fedpmt", model=perceptron(*frozen), levels="1/2,1", rounds=20, out=tmp_path / "run")
    trained = [str(2 * place) for place in range(4) if place not in frozen]
    assert list(run.rounds[0].layers) == trained
    before = perceptron(*frozen).state_dict()
    after = load_file(tmp_path / "run" / "model.safetensors")
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(trained)
    assert run.result.loss < 0.7 * run.rounds[0].loss


def test_a_kept_base_runs_once_a_round() -> None:
    """On a frozen backbone one more epoch costs what the classifier does, which is next to nothing."""
    published = ZOO["resnet18 with a frozen backbone"]
    model = layered(published.make(), example=published.inputs()[:3])
    price = partial(Price, model, mode="exact", batch=4, samples=48, example=published.inputs()[:3], epochs=5)
    work = {
        (cached, epochs): price(cached=cached).round_operations(
            price(cached=cached).full, samples=48, epochs=epochs
        )
        for cached in (True, False)
        for epochs in (1, 5)
    }
    cost = price(cached=True).full
    head = cost.operations - cost.prefix
    assert work[True, 1] == work[False, 1] == 12 * cost.operations
    assert work[False, 5] == 5 * work[False, 1]
    assert work[True, 5] == work[True, 1] + 4 * 12 * head
    assert work[True, 5] < 1.001 * work[True, 1]


# The clock, the deadline and the budget

BASE = 4 * (6 * 16 + 16)  # bytes of the first layer of `perceptron`
SENT = 4 * (2 * (16 * 16 + 16) + 16 * CLASSES + CLASSES)


def fleet(folder: Path) -> Path:
    """Half of the devices take 100 seconds to download the base."""
    path = folder / "fleet.csv"
    path.write_text(f"name,speed,count,downlink_mbps\nnear,1,3,\nfar,1,3,{8 * BASE / 100 / 1e6}\n")
    return path


def test_no_deadline_applies_to_the_base(tmp_path: Path) -> None:
    """A far device needs 100 s for it, and SENT / BASE times as long for what is sent in every round."""
    each = 100 * SENT / BASE
    run = tiny(
        "fedavg", model=perceptron(0), fleet=fleet(tmp_path), deadline=each + 10, full_seconds=10, cohort=6
    )
    first, *others = run.rounds
    assert {one.outcome for step in run.rounds for one in step.devices} == {"arrived"}
    assert first.round_seconds == pytest.approx(100 + each + 10)
    assert [step.round_seconds for step in others] == pytest.approx([each + 10] * 5)
    far = first.devices[-1]
    assert (far.bytes_down, far.transfer_seconds) == (BASE + SENT, pytest.approx(100 + each))


def test_a_late_device_is_late_by_its_round_alone(tmp_path: Path) -> None:
    run = tiny("fedavg", model=perceptron(0), fleet=fleet(tmp_path), deadline=50, full_seconds=10, cohort=6)
    first, second = run.rounds[:2]
    assert [one.outcome for one in first.devices] == ["arrived"] * 3 + ["late"] * 3
    # The server waits for its deadline after the last device has the base.
    assert (first.round_seconds, second.round_seconds) == (pytest.approx(150), 50)
    assert first.devices[-1].bytes_down - second.devices[-1].bytes_down == BASE


def test_no_budget_is_spent_on_the_base(tmp_path: Path) -> None:
    for budget in ("time", "bytes"):
        run = tiny("fedpmt", model=perceptron(0), fleet=fleet(tmp_path), budget=budget, full_seconds=10)
        spent: dict[int, set[float]] = {}
        for one in (one for step in run.rounds for one in step.devices):
            spent.setdefault(one.device, set()).add(one.used)
            assert not one.over_budget
        assert all(len(used) == 1 for used in spent.values())


def test_a_resumed_run_knows_who_has_the_base(tmp_path: Path) -> None:
    def stop(record: fedpmt.RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    again = partial(tiny, "fedpmt", model=perceptron(0), cohort=2, levels="1/2,1")
    whole = again(out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        again(out=tmp_path / "killed", on_round=stop)
    killed = again(out=tmp_path / "killed", resume=True)
    assert killed.rounds == whole.rounds
    assert sum(step.bytes_down for step in whole.rounds) == 6 * 2 * SENT + BASE * len(
        {one.device for step in whole.rounds for one in step.devices}
    )


def test_a_prediction_counts_the_base_once_for_each_device(tmp_path: Path) -> None:
    given = {
        "fleet": fleet(tmp_path),
        "full_seconds": 10,
        "cohort": 6,
        "samples": 16,
        "batch": 4,
        "rounds": 6,
    }
    run = tiny("fedavg", model=perceptron(0), **given)
    request = api.make_request(
        "fedavg", {**given, "lr": 0.2}, api.Own(model=perceptron(0), train=points(), test=points())
    )
    predicted = api.predict(request, tmp_path)
    assert predicted["base_bytes"] == BASE
    assert predicted["bytes_down"] == run.result.bytes_down == 6 * (6 * SENT + BASE)
    assert predicted["virtual_seconds"] == pytest.approx(run.result.virtual_seconds)


def test_a_model_of_which_all_but_one_layer_is_frozen_is_said_to_be_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fedpmt.cost(perceptron(0, 1, 2), points()[0][:2])
    assert "all of Sequential but '6' is frozen" in caplog.text


def test_prices_and_plans_say_what_is_sent_once(tmp_path: Path) -> None:
    example = points()[0][:2]
    priced = fedpmt.cost(perceptron(0), example, batch=4, samples=16)
    assert (priced.base_bytes, priced.base_forward) == (BASE, 4 * 6 * 16)
    assert sum(row.share for row in priced.layers) == pytest.approx(
        1 - priced.base_forward / priced.depths[-1].operations
    )
    line = "base, sent once: 448 B"
    assert f"{line}; 96 operations before the first layer" in str(priced)
    plan = fedpmt.plan(perceptron(0), example, fleet=fleet(tmp_path), deadline=1000)
    said = " ".join(str(plan).split()).lower()
    assert f"{line}, 100.0 s on the slowest link; no deadline applies to it".lower() in said
    assert plan.devices[0].download_bytes == SENT + 1  # and the number of its level
    assert "base" not in str(fedpmt.cost(perceptron(), example))
