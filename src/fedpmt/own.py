"""A user's own model and samples: given as values, or named as `package.module:function`."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedpmt import references
from fedpmt.data.clients import Reader
from fedpmt.data.datasets import from_arrays
from fedpmt.data.federated import federate_dataset
from fedpmt.data.registry import find_dataset, is_own
from fedpmt.models.layered import layered
from fedpmt.models.lora import lora
from fedpmt.models.nets import HEAD, LORA, PRETRAINED, RANDOM, TASKS
from fedpmt.models.unwrap import check_module, unwrap
from fedpmt.models.weights import load_strictly, pretrained, read_tensors
from fedpmt.simulation.problem import Problem
from fedpmt.training.batches import placed
from fedpmt.types import Arrays, SettingError, one_line_errors

if TYPE_CHECKING:
    from fedpmt.models.axes.declared import Declared
    from fedpmt.models.layered import LayeredModel
    from fedpmt.settings import Settings

_log = logging.getLogger("fedpmt")


def load_module(text: str, seed: int) -> nn.Module:
    """Call the function that `model` names; weights that it draws from torch's generator depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = references.call("model", text)
    if not isinstance(module, nn.Module):
        raise SettingError(f"model = '{text}' must return an nn.Module (got {type(module).__name__})")
    return module


def check_model(model: object) -> None:
    """Refuse what is neither a module nor a name; a class is none yet."""
    if isinstance(model, nn.Module | str):
        return
    got = type(model).__name__
    if isinstance(model, type):
        got = f"the class {model.__name__}; give {model.__name__}()"
    raise SettingError(f"model must be an nn.Module or package.module:function (got {got})")


def load_task(settings: Settings) -> nn.Module:
    """Make the module of a ready task; weights that are drawn depend on the seed alone."""
    task = TASKS[settings.task]
    start: list[Any] = [None] if task.weights else []
    if settings.weights == PRETRAINED:
        start = [pretrained(task.weights, settings.data_dir)]
    where, _, name = task.module.partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        module: nn.Module = getattr(importlib.import_module(where), name)(*start, **task.arguments)
    if settings.tune == HEAD:
        module.requires_grad_(False).get_submodule("classifier").requires_grad_(True)
    elif settings.tune == LORA:
        module = lora(module)
    if settings.weights not in (PRETRAINED, RANDOM):
        path = Path(settings.weights)
        load_strictly(module, read_tensors(path), f"weights = '{path}'")
    return module


@lru_cache(maxsize=1)
def _called(key: str, text: str, data_dir: Path | None) -> Any:
    """What settings name, loaded once, since all runs of a comparison ask for it."""
    kind, _, argument = text.partition(":")
    if key == "data" and kind == "folder":
        from fedpmt.data.images import load_folder

        return load_folder(argument)
    if key == "data" and kind == "hf":
        from fedpmt.data.hugging_face import load_hugging_face

        return load_hugging_face(argument, data_dir)
    return references.call(key, text)


def load_samples(kind: str, text: str, test: Any = None, data_dir: Path | None = None) -> dict[str, Any]:
    """Load the samples that `data` or `clients` names, as arguments of `run`.

    Args:
        kind: `train` where the function returns (train, test), `clients` where it returns {client: samples}, or
            that and a test set.
        text: The function, as package.module:function; or data as hf:NAME or folder:PATH.
        test: A test set that was given otherwise.
        data_dir: Folder of the data files; None: the usual one.
    """
    key = "data" if kind == "train" else kind
    found = _called(key, text, data_dir)
    whole = _is_pair(found) and not any(hasattr(one, "dtype") for one in found)
    if whole and (kind == "train" or isinstance(found[0], Mapping)):
        samples, tested = found
        return {kind: samples, "test": tested if test is None else test}
    if kind == "train":
        raise SettingError(
            f"data = '{text}' must return ((inputs, targets), (inputs, targets)), "
            f"for training and for testing (got {_outline(found)})"
        )
    return {kind: found, "test": test}


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _outline(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def load_example(data: str, data_dir: Path | None = None) -> Arrays:
    """Take two inputs of a data set; those of the library are made up, so that pricing fetches nothing."""
    if not is_own(data):
        described = find_dataset(data)[0]
        if described.tokens is None:
            return make_example(described.shape)
        tokens = np.ones((2, *described.shape), np.int64)  # all of them padding would be no text
        return dict.fromkeys(described.fields, tokens) if described.fields else tokens
    samples = load_samples("train", data, data_dir=data_dir)["train"]
    return Reader().examples("train", samples).take(slice(0, 2)).inputs


def make_example(shape: Sequence[int]) -> np.ndarray:
    """Two inputs of this shape, of standard normal numbers."""
    return np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)


def parse_layers(layers: Sequence[str | Sequence[str]] | str | None) -> list[str | list[str]] | None:
    """Read layers as they stand in settings: commas between layers, + between the modules of one layer.

    >>> parse_layers("stem,block1+norm,head")
    ['stem', ['block1', 'norm'], 'head']
    """
    if layers is None or layers in ("", []):
        return None
    names = layers.split(",") if isinstance(layers, str) else layers
    if not isinstance(names, Sequence):
        raise SettingError(f"layers must be a list of paths, or of lists of paths (got {layers!r})")
    return [_parse_layer(name) for name in names]


def _parse_layer(name: str | Sequence[str]) -> str | list[str]:
    listed = name.split("+") if isinstance(name, str) else name
    if not (isinstance(listed, Sequence) and listed and all(isinstance(path, str) for path in listed)):
        raise SettingError(f"layers must be paths, or lists of paths (got {name!r})")
    paths = [path.strip() for path in listed]
    if not all(paths):
        raise SettingError(f"layers: a layer must have a path (got {name!r})")
    return paths[0] if len(paths) == 1 else paths


def write_layers(layers: Sequence[str | Sequence[str]] | str | None) -> str:
    """Write layers as they stand in settings.

    >>> write_layers(["stem", ["block1", "norm"]])
    'stem,block1+norm'
    """
    parsed = parse_layers(layers) or []
    return ",".join(name if isinstance(name, str) else "+".join(name) for name in parsed)


def find_layers(
    module: nn.Module, example: Arrays, settings: Settings, axes: Declared | None = None
) -> LayeredModel:
    """Find a module's layers, and refuse inputs that it cannot run; neither it nor torch's generator changes."""
    with (
        one_line_errors("model: evaluating two samples", f" ({_shapes(example)})"),
        torch.random.fork_rng(devices=[]),
    ):
        model = layered(
            module, layers=parse_layers(settings.layers), example=example, axes=axes, tied=settings.tied
        )
        trial = model.clone()
        trial.set_training([False] * len(model.structure.layers))
        with torch.no_grad():
            trial.forward(trial.initial(), example)
    return model


def _shapes(example: Arrays) -> str:
    named = example.items() if isinstance(example, Mapping) else [("inputs", example)]
    return ", ".join(f"{name}: {' x '.join(map(str, array.shape[1:])) or 'numbers'}" for name, array in named)


def example_problem(module: nn.Module, example: Arrays, settings: Settings, samples: int) -> Problem:
    """A model on copies of an example, for what does not depend on what is learned: prices and times."""
    length = len(next(iter(example.values())) if isinstance(example, Mapping) else example)
    pair = example, np.zeros(length, dtype=np.int64)
    dataset = from_arrays(pair, pair)
    few, many = (dataset.train.take(np.arange(count) % length) for count in (2, max(2, samples)))
    data = federate_dataset(
        replace(dataset, train=many, test=few),
        partition="iid",
        partition_seed=0,
        devices=1,
        samples=len(many),
    )
    return Problem(find_layers(module, placed(few).inputs, settings), data)


def warn_of_one_layer(model: LayeredModel) -> None:
    """Log a warning where a model has one layer only, so that no depth but the whole model is left."""
    if len(model.structure.layers) > 1:
        return
    if model.layout.base:
        _log.warning(
            "model: all of %s but '%s' is frozen, so FedPMT can freeze no more and trains as FedAvg does",
            type(model.module).__name__,
            model.structure.layers[0].name,
        )
        return
    names = model.candidates()
    advice = (
        f'name its layers in the order of the forward pass, e.g. layers="{",".join(names)}"'
        if len(names) > 1
        else "it has no two modules or parameters that could be layers"
    )
    _log.warning(
        "model: only one layer was found in %s, so FedPMT can freeze nothing and trains as FedAvg does; %s",
        type(model.module).__name__,
        advice,
    )


def fingerprint(model: nn.Module) -> str:
    """Digest a model's weights, so that a run is only ever resumed with its own."""
    model = unwrap(model)
    check_module(model)
    digest = hashlib.sha256()
    for name, array in model.state_dict().items():
        plain = np.ascontiguousarray(_as_numpy(array))
        digest.update(f"{name} {plain.shape} {plain.dtype}".encode())
        digest.update(plain.tobytes())
    return digest.hexdigest()


def _as_numpy(array: Any) -> Any:
    if not isinstance(array, torch.Tensor):
        return array
    if is_lazy(array):
        return np.zeros(0)  # its values are found by the data
    tensor = array.detach().cpu()
    # NumPy has no bfloat16.
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
