"""Write one setting's shards, test set and initial weights where every peer can read them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.ours import INITIAL_SEED
from fedpmt.api import paper_problem_of, settings_of
from fedpmt.data import load

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.settings import Setting


def export(setting: Setting, folder: Path, data_dir: Path | None) -> Path:
    """The folder of a setting's arrays; written once, and again when the setting has changed."""
    described = json.dumps(asdict(setting), sort_keys=True)
    target = folder / setting.name
    stamp = target / "setting.json"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == described:
        return target
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
    shape = setting.net.input_shape
    split = np.stack([problem.data.shard(device).ids for device in range(setting.devices)])
    inputs = dataset.train.inputs.reshape(-1, *shape)
    labels = np.asarray(dataset.train.targets)
    if not np.array_equal(inputs[split[0]], problem.data.shard(0).inputs):
        raise RuntimeError(f"the shards of '{setting.name}' are not rows of its training set")
    arrays = {
        "inputs": inputs,
        "labels": labels,
        "split": split,
        "test_inputs": dataset.test.inputs.reshape(-1, *shape),
        "test_labels": dataset.test.targets,
    }
    parameters = problem.model.initial()
    for number, tensor in enumerate(parameters.values()):
        arrays[f"initial_{number}"] = tensor.detach().numpy()
    temporary = folder / f".{setting.name}.{os.getpid()}"
    temporary.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(temporary / f"{name}.npy", np.ascontiguousarray(array))
    (temporary / "setting.json").write_text(described, encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return target
