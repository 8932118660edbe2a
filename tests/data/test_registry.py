"""A data set is one file: its description is all that the rest of the library knows about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fedpmt.data import federate_dataset, from_arrays
from fedpmt.data.registry import DATASETS, default_for, find_dataset
from fedpmt.models.nets import NETS
from fedpmt.settings import resolve
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

LETTERS = """
from fedpmt.data.description import Dataset, Defaults


def load(dataset, folder, scale):
    import numpy as np

    from fedpmt.data.datasets import LoadedDataset
    from fedpmt.types import Examples

    images = np.random.default_rng(0).normal(size=(120, 1, 28, 28)).astype("float32")
    all_of_them = Examples(images, np.arange(120) % 7, np.arange(120))
    return LoadedDataset("letters", all_of_them, all_of_them.take(slice(20)), 7)


DATASET = Dataset(
    name="letters", shape=(1, 28, 28), classes=7, train=120, built_in="drawn by this test",
    defaults=Defaults(devices=3, samples=40, cohort=2, batch=8, lr=0.125, rounds=1), load=load,
)
"""

PROGRAM = """
import contextlib, io, json, sys
import fedpmt.data.sets as sets
sets.__path__.append(sys.argv[1])
from fedpmt.cli.main import program
heavy = [name for name in ("numpy", "torch", "mlxtend") if name in sys.modules]
assert not heavy, heavy
ended = []
for line in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program(line)
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""


def test_a_new_file_is_known_everywhere(tmp_path: Path) -> None:
    """Nothing but the file is added; defaults, list, --data, --public, help texts and refusals all know it."""
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "letters.py").write_text(textwrap.dedent(LETTERS))
    small = ["--devices", "4", "--cohort", "2", "--rounds", "1", "--json"]
    commands = [
        ["data", "list", "--json", "--data-dir", str(tmp_path)],
        ["run", "--data", "letters", "--json", "--out", str(tmp_path / "own")],
        ["run", "--method", "feddf", "--public", "letters:50", *small, "--out", str(tmp_path / "public")],
        ["run", "--data", "leters"],
        ["run", "--public", "leters:9"],
        ["data", "get", "letters"],
        ["run", "--help"],
    ]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "sets"), json.dumps(commands)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
    )
    codes, outs, errs = zip(*json.loads(ended.stdout), strict=True)
    assert codes == (0, 0, 0, 2, 2, 2, 0), errs
    listed: dict[str, Any] = {one["name"]: one for one in json.loads(outs[0])}
    assert listed["letters"] == {"name": "letters", "state": "built in", "where": "drawn by this test"}
    assert set(listed) == {*DATASETS, "letters"}
    assert json.loads(outs[1])["data"] == "letters"
    settings = json.loads((tmp_path / "own" / "config.json").read_bytes())["settings"]
    assert (settings["devices"], settings["samples"], settings["lr"]) == (3, 40, 0.125)
    assert json.loads(outs[2])["public_samples"] == 50
    assert "did you mean 'letters'?" in errs[3]
    assert "did you mean 'letters:N'?" in errs[4]
    assert "data = 'letters' needs no fetching: drawn by this test" in errs[5]
    assert "synthetic, letters" in " ".join(outs[6].replace("│", "").split())


def test_a_net_brings_its_data_set() -> None:
    """The paper's set, or a built-in part of it; all that differs stands in the two descriptions."""
    for net in NETS.values():
        settings = resolve({"task": net.name})
        dataset = DATASETS[settings.data]
        assert net.data in (dataset.name, dataset.part_of)
        assert DATASETS[net.data].shape == net.input_shape
        assert (settings.batch, settings.lr) == (dataset.defaults.batch, dataset.defaults.lr)
    assert default_for("fashion-mnist") == "fashion-mnist"
    with pytest.raises(SettingError, match="did you mean 'cnn-mnist'"):
        resolve({"task": "cnn-mnits"})


@pytest.mark.parametrize(
    ("labels", "says"), [(np.arange(24) % 12, "12 classes"), (np.ones(24), "no classes")]
)
def test_data_that_a_net_cannot_tell_apart_is_refused(labels: np.ndarray, says: str) -> None:
    """A new data set may have more classes than the paper's nets have outputs."""
    from fedpmt.simulation.problem import paper_problem

    arrays = (np.zeros((24, 1, 28, 28)), labels)
    data = federate_dataset(
        from_arrays(arrays, arrays), partition="iid", partition_seed=0, devices=2, samples=12
    )
    with pytest.raises(SettingError, match=f"'cnn-mnist' tells 10 classes apart, .* has {says}"):
        paper_problem(resolve({"task": "cnn-mnist"}), data)


@pytest.mark.parametrize("text", ["mnist:3", "embedded:", "syntetic", "", "arrays:3"])
def test_unknown_names_and_arguments_are_refused_at_once(text: str) -> None:
    with pytest.raises(SettingError, match=f"data = '{text}' is unknown"):
        find_dataset(text)
    with pytest.raises(SettingError, match=f"data = '{text}' is unknown"):
        resolve({"data": text})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"load": None}, "exactly one of load and draw"),
        ({"files": ()}, "exactly one of built_in and files"),
        ({"sources": ()}, "files need places and sources"),
    ],
)
def test_a_description_that_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"data set mnist: {says}"):
        replace(DATASETS["mnist"], **change)
