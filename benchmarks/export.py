"""Write one setting's shards, test set and initial weights where every peer can read them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.ours import INITIAL_SEED
from benchmarks.settings import TOKENS
from fedpmt.api import paper_problem_of, settings_of
from fedpmt.data import load
from fedpmt.data.datasets import from_arrays
from fedpmt.data.federated import federate_dataset

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from benchmarks.settings import Setting

Samples = tuple[np.ndarray, np.ndarray]

MODULE_TEST = 1000
"""Test samples of a user's module: testing is no part of a round, and would take longer than many rounds."""


def export(setting: Setting, folder: Path, data_dir: Path | None) -> Path:
    """Find the folder of a setting's arrays; written once, and again when the setting has changed."""
    described = json.dumps(asdict(setting), sort_keys=True)
    target = folder / setting.name
    stamp = target / "setting.json"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == described:
        return target
    arrays = (module_arrays if setting.module else chain_arrays)(setting, data_dir)
    temporary = folder / f".{setting.name}.{os.getpid()}"
    temporary.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(temporary / f"{name}.npy", np.ascontiguousarray(array))
    (temporary / "setting.json").write_text(described, encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return target


def chain_arrays(setting: Setting, data_dir: Path | None) -> dict[str, np.ndarray]:
    """The arrays of one of the paper's tasks, with the weights that ours begins with."""
    settings = settings_of(
        {
            **setting.ours("fedavg"),
            "cohort": setting.cohort,
            "batch": setting.batch,
            "seed": INITIAL_SEED,
            "data_dir": data_dir,
        }
    )
    problem = paper_problem_of(settings)
    dataset = load(setting.data, data_dir)
    split = np.stack([problem.data.shard(device).ids for device in range(setting.devices)])
    train, test = (
        (np.asarray(part.inputs), np.asarray(part.targets)) for part in (dataset.train, dataset.test)
    )
    if not np.array_equal(train[0][split[0]], problem.data.shard(0).inputs):
        raise RuntimeError(f"the shards of '{setting.name}' are not rows of its training set")
    return _named(train, test, split, (tensor.numpy() for tensor in problem.model.initial().values()))


def module_arrays(setting: Setting, data_dir: Path | None) -> dict[str, np.ndarray]:
    """The arrays of a user's module: no more samples than the devices hold."""
    import torch

    from benchmarks.peers.modules import MODULES

    train, test = samples_of(setting, data_dir)
    data = federate_dataset(
        from_arrays(train, test),
        partition="iid",
        partition_seed=0,
        devices=setting.devices,
        samples=setting.samples,
        data_dir=data_dir,
    )
    split = np.stack([data.shard(device).ids for device in range(setting.devices)])
    torch.manual_seed(INITIAL_SEED)
    state = MODULES[setting.module]().state_dict()
    return _named(train, test, split, (tensor.numpy() for tensor in state.values()))


def samples_of(setting: Setting, data_dir: Path | None) -> tuple[Samples, Samples]:
    """The training and test samples of a user's module."""
    count = setting.devices * setting.samples
    if setting.data == TOKENS:
        inputs, labels = random_texts(count + MODULE_TEST)
        return (inputs[:count], labels[:count]), (inputs[count:], labels[count:])
    dataset = load(setting.data, data_dir)
    train, test = dataset.train, dataset.test
    return (
        (np.asarray(train.inputs)[:count], np.asarray(train.targets)[:count]),
        (np.asarray(test.inputs)[:MODULE_TEST], np.asarray(test.targets)[:MODULE_TEST]),
    )


def random_texts(count: int) -> Samples:
    """Texts of random tokens, in which those of the label's own tenth of the vocabulary are twice as frequent."""
    from benchmarks.peers import modules

    rng = np.random.default_rng(INITIAL_SEED)
    labels = rng.integers(0, modules.CLASSES, count)
    tokens = rng.integers(0, modules.VOCABULARY, (count, modules.TOKENS))
    share = modules.VOCABULARY // modules.CLASSES
    own = labels[:, None] * share + tokens % share
    return np.where(rng.random(tokens.shape) < 0.1, own, tokens), labels


def _named(
    train: Samples, test: Samples, split: np.ndarray, initial: Iterable[np.ndarray]
) -> dict[str, np.ndarray]:
    arrays = {
        "inputs": train[0],
        "labels": train[1],
        "split": split,
        "test_inputs": test[0],
        "test_labels": test[1],
    }
    return arrays | {f"initial_{number}": array for number, array in enumerate(initial)}
