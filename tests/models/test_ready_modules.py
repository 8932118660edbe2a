"""The library's own MobileNetV2 and MiniLM against the published ones, and strict loading of weights."""

from __future__ import annotations

import importlib
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import published  # noqa: F401  torchvision can be imported after it
from fedpmt.models import minilm, mobilenetv2
from fedpmt.models.small_nets import CharacterLSTM, CharacterTransformer, ResNet, motion_cnn
from fedpmt.models.weights import load_strictly, read_tensors
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def with_any_statistics(module: nn.Module) -> nn.Module:
    """Norms that would show if one were missing or in another place."""
    for one in module.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.uniform_(one.weight, 0.5, 1.5)
            assert one.running_mean is not None
            assert one.running_var is not None
            one.running_mean.uniform_(-0.1, 0.1)
            one.running_var.uniform_(0.5, 1.5)
    return module.eval()


def test_mobilenetv2_is_torchvisions() -> None:
    torch.manual_seed(0)
    theirs = with_any_statistics(importlib.import_module("torchvision.models").mobilenet_v2())
    ours = mobilenetv2.MobileNetV2().eval()
    load_strictly(ours, theirs.state_dict(), "weights")
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


def test_minilm_is_transformers_bert() -> None:
    torch.manual_seed(0)
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=minilm.WORDS,
        hidden_size=minilm.WIDTH,
        num_hidden_layers=minilm.LAYERS,
        num_attention_heads=minilm.HEADS,
        intermediate_size=minilm.HIDDEN,
        layer_norm_eps=minilm.EPSILON,
    )
    theirs, ours = transformers.BertModel(config).eval(), minilm.MiniLM().eval()
    places = {"embeddings.position_ids": torch.arange(minilm.PLACES)[None]}  # in the file, but no weight
    load_strictly(ours, {**theirs.state_dict(), **places}, "weights")
    words = torch.randint(minilm.WORDS, (3, 12))
    there = torch.tensor([12, 7, 1])[:, None] > torch.arange(12)
    with torch.no_grad():
        wanted = theirs(input_ids=words, attention_mask=there.long()).last_hidden_state
        found = ours(words, there.long())
    torch.testing.assert_close(found[there], wanted[there], atol=1e-5, rtol=0)


def test_padding_changes_no_answer() -> None:
    torch.manual_seed(0)
    model = minilm.build(None, classes=3).eval()
    words, there = torch.randint(minilm.WORDS, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    padded = torch.cat([words, torch.full((2, 4), 7)], dim=1)
    mask = torch.cat([there, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(words, there), model(padded, mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("2.bias"), "weights lack: 2.bias"),
        (lambda state: state.update(more=torch.zeros(1)), "weights have extra: more"),
        (
            lambda state: state.update({"0.weight": torch.zeros(3, 4)}),
            r"weights: 0.weight must have shape \(4, 3\) \(got \(3, 4\)\)",
        ),
    ],
)
def test_strict_loading(change: Callable[[dict[str, Any]], object], says: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(SettingError, match=says):
        load_strictly(model, state, "weights")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("hacked", "w"))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_that_are_refused(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, state = tmp_path / f"file{suffix}", {"a": torch.arange(1000.0)}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    assert torch.equal(read_tensors(path)["a"], state["a"])
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", pickle.dumps({"a": Attack()})):
        path.write_bytes(content)
        with pytest.raises(SettingError, match="cannot be read") as caught:
            read_tensors(path)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "hacked").exists()
    with pytest.raises(SettingError, match="is not there"):
        read_tensors(tmp_path / "none.pth")


def test_only_tensors_by_name_are_taken(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(SettingError, match="must hold tensors by name and nothing else"):
        read_tensors(tmp_path / "list.pth")


def test_pretrained_features_get_a_new_head() -> None:
    torch.manual_seed(0)
    published_state = mobilenetv2.MobileNetV2().state_dict()
    model = mobilenetv2.build(published_state, classes=10, size=64)
    assert torch.equal(
        model.features[3].state_dict()["conv.2.weight"], published_state["features.3.conv.2.weight"]
    )
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(SettingError, match=r"MobileNetV2 lack: features.0.0.weight, .* and 310 more"):
        mobilenetv2.build({"classifier.1.weight": torch.zeros(1)}, classes=10)


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (ResNet(), torch.zeros(2, 3, 32, 32), (2, 10)),
        (ResNet(blocks=3), torch.zeros(2, 3, 32, 32), (2, 10)),
        (motion_cnn(), torch.zeros(2, 6, 128), (2, 6)),
        (CharacterLSTM(90), torch.zeros(2, 80, dtype=torch.int64), (2, 80, 90)),
        (CharacterTransformer(90), torch.zeros(2, 80, dtype=torch.int64), (2, 80, 90)),
    ],
    ids=["resnet-8", "resnet-20", "cnn", "lstm", "transformer"],
)
def test_shapes(model: nn.Module, inputs: torch.Tensor, outputs: tuple[int, ...]) -> None:
    assert model(inputs).shape == outputs


def test_a_character_depends_on_those_before_it_alone() -> None:
    torch.manual_seed(0)
    text = torch.randint(90, (1, 20))
    changed = text.clone()
    changed[0, 10] = (text[0, 10] + 1) % 90
    for model in (CharacterLSTM(90), CharacterTransformer(90)):
        with torch.no_grad():
            one, other = model(text), model(changed)
        torch.testing.assert_close(one[:, :10], other[:, :10])
        assert not torch.allclose(one[:, 10:], other[:, 10:])
