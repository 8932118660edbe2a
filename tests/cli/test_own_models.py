"""A user's own model and data on the command line, as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from command_line import call, refused
from safetensors.torch import load_file

import fedpmt
from fedpmt import records
from fedpmt.own import _called

if TYPE_CHECKING:
    from collections.abc import Iterator

NETS = """
import numpy as np
from torch import nn


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)


def small():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def wrapped():
    return Wrapper()


def table():
    return {"small": small()}


def broken():
    raise RuntimeError("no weights here")


def samples():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=200)
    inputs = rng.normal(size=(200, 6)).astype("float32")
    inputs[np.arange(200), labels] += 2
    return (inputs[:150], labels[:150]), (inputs[150:], labels[150:])


def one_pair():
    return samples()[0]


def people():
    inputs, labels = samples()[0]
    return {"ann": (inputs[:30], labels[:30]), "bob": (inputs[30:40], labels[30:40])}


weights = [1, 2, 3]
"""
OWN = ("--model", "nets_of_mine:small", "--data", "nets_of_mine:samples")
FEW = ("--devices", "6", "--samples", "20", "--cohort", "3", "--batch", "5", "--rounds", "2")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module that is nowhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nets_of_mine.py").write_text(NETS)
    _called.cache_clear()
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("nets_of_mine", None)


def test_a_run_is_recorded_resumed_and_reported(elsewhere: Path) -> None:
    """Python, with the names or with what they stand for, gets the same weights; torch's generator is left alone."""
    state = torch.get_rng_state()
    first = call("run", *OWN, *FEW, "--seed", "3", "--out", "run", "--json")
    assert first.code == 0, first.err
    assert torch.equal(state, torch.get_rng_state())
    settings = records.read_run(elsewhere / "run").settings
    assert (settings["model"], settings["data"]) == ("nets_of_mine:small", "nets_of_mine:samples")
    again = call("run", "--resume", "--out", "run", "--json")
    assert again.json == first.json
    assert call("report", "run", "--out", "page.html").code == 0
    few = {flag.removeprefix("--"): int(value) for flag, value in zip(FEW[::2], FEW[1::2], strict=True)}
    named = fedpmt.run(model=OWN[1], data=OWN[3], seed=3, out="run", resume=True, **few)  # type: ignore[arg-type]
    assert named.result is not None
    assert named.result.weights_sha256 == first.json["weights_sha256"]
    nets = importlib.import_module("nets_of_mine")
    train, test = nets.samples()
    torch.manual_seed(3)
    given = fedpmt.run(model=nets.small(), train=train, test=test, seed=3, **few)  # type: ignore[arg-type]
    assert given.result is not None
    assert given.result.weights_sha256 == first.json["weights_sha256"]
    nets.small().load_state_dict(load_file("run/model.safetensors"))


def test_a_run_is_not_continued_with_another_model(elsewhere: Path) -> None:
    assert call("run", *OWN, *FEW, "--out", "run").code == 0
    for change in (("--layers", "0,3"), ("--model", "nets_of_mine:wrapped"), ("--data", "embedded")):
        assert f"its {change[0][2:]} is" in refused("run", "--resume", "--out", "run", *change)
    (elsewhere / "nets_of_mine.py").write_text(NETS.replace("Linear(6, 8)", "Linear(6, 9)"))
    sys.modules.pop("nets_of_mine")
    importlib.invalidate_caches()
    assert "its digest is" in refused("run", "--resume", "--out", "run")
    assert call("run", *FEW, "--data", "synthetic", "--out", "paper").code == 0
    assert "task = 'fcnn-mnist'" in refused("run", "--resume", "--out", "paper", "--model", OWN[1])


def test_what_python_began_with_values_python_must_continue(tmp_path: Path) -> None:
    inputs, labels = torch.zeros(40, 4).numpy(), torch.zeros(40, dtype=torch.int64).numpy()
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    few = {"devices": 2, "samples": 10, "cohort": 2, "rounds": 1}
    fedpmt.run(model=module, train=(inputs, labels), test=(inputs, labels), out=tmp_path / "run", **few)  # type: ignore[arg-type]
    assert "was given in Python" in refused("run", "--resume", "--out", tmp_path / "run")


def test_seeds_draw_their_own_weights_and_are_repetitions() -> None:
    called = call("compare", "fedpmt", "fedavg", *OWN, *FEW, "--seeds", "0-1", "--out", "all", "--json")
    assert called.code == 0, called.err
    assert len({run["weights_sha256"] for run in called.json["runs"]}) == 4
    assert len({records.read_run(folder).settings["digest"] for folder in Path("all").iterdir()}) == 1


def test_options_are_numbers_whoever_gives_them() -> None:
    """What the command line began, Python continues; also runs of versions that stored what was typed."""
    flags = ("run", "--method", "feddrop", "--set", "keep=0.5", *OWN, *FEW, "--out", "run")
    assert call(*flags).code == 0
    few = {flag.removeprefix("--"): int(value) for flag, value in zip(FEW[::2], FEW[1::2], strict=True)}
    again = fedpmt.run(
        fedpmt.FedDrop(keep=0.5),
        model=OWN[1],
        data=OWN[3],
        out="run",
        resume=True,
        **few,  # type: ignore[arg-type]
    )
    assert again.settings["options"] == {"keep": 0.5}
    config = again.folder / records.CONFIG
    config.write_text(config.read_text().replace('"keep": 0.5', '"keep": "0.5"'))
    assert call("run", "--resume", "--out", "run").code == 0


@pytest.mark.parametrize("command", ["cost", "plan"])
def test_pricing_needs_inputs_of_the_right_shape_and_nothing_else(command: str) -> None:
    by_data, by_shape = (
        call(command, "--model", OWN[1], *inputs, "--json")
        for inputs in (("--data", OWN[3]), ("--input-shape", "6"))
    )
    assert by_data.code == by_shape.code == 0
    assert by_data.json == by_shape.json
    shown = call(command, "--model", OWN[1], "--input-shape", "6").out
    assert str(getattr(fedpmt, command)(OWN[1], data=OWN[3])) == shown.rstrip("\n")


def test_pricing_takes_the_inputs_and_sizes_of_clients(elsewhere: Path) -> None:
    flags = ("--model", OWN[1], "--clients", "nets_of_mine:people")
    costs = call("cost", *flags, "--json"), call("cost", *OWN, "--samples", "20", "--json")
    assert [called.json for called in costs] == [costs[1].json] * 2
    plan = call("plan", *flags, "--json")
    assert plan.code == 0, plan.err
    assert (plan.json["samples"], sum(row["devices"] for row in plan.json["devices"])) == (20, 2)
    assert call("profile", *flags, "--repeat", "1", "--json").code == 0
    nets = importlib.import_module("nets_of_mine")
    in_python = fedpmt.plan(nets.small(), clients=nets.people())
    assert in_python.devices == fedpmt.plan(OWN[1], clients="nets_of_mine:people").devices
    assert "data or clients" in refused("plan", *flags, "--data", OWN[3])
    assert "clients needs a model of your own" in refused("plan", *flags[2:])


def test_deploy_says_that_it_has_the_papers_nets_only(elsewhere: Path) -> None:
    (elsewhere / "run.toml").write_text(f'model = "{OWN[1]}"\ndata = "{OWN[3]}"\n')
    assert "cannot be deployed by this command" in refused("deploy", "--config", "run.toml", "--write-only")


def test_profile_measures_a_users_model() -> None:
    for inputs in (("--data", OWN[3]), ("--input-shape", "6")):
        called = call("profile", "--model", OWN[1], *inputs, "--samples", "20", "--repeat", "1", "--json")
        assert called.code == 0, called.err
        assert [row["trains_from"] for row in called.json["depths"]] == ["3", "0"]


def test_one_layer_is_said_with_names_for_more() -> None:
    flags = ("--model", "nets_of_mine:wrapped", "--layers", "net", "--data", OWN[3])
    line = "only one layer was found in Wrapper"
    names = 'layers="net.0,net.3"'
    for command in (("cost",), ("plan",), ("run", *FEW, "--out", "one")):
        called = call(*command, *flags)
        assert called.code == 0, called.err
        (said,) = (told for told in called.err.splitlines() if told.startswith("warning"))
        assert line in said
        assert names in said
    assert line not in call("run", *FEW, *flags, "--method", "fedavg", "--out", "two").err
    assert line not in call("cost", *flags[:2], *flags[4:]).err


REFUSED = {
    "run --model nets_of_mine:smal --data embedded": ("'smal' is unknown", "did you mean 'small'", "wrapped"),
    "run --model nets_of_yours:small --data embedded": ("there is no module 'nets_of_yours'",),
    "run --model small --data embedded": ("model = 'small' must be package.module:function",),
    "run --model nets_of_mine:weights --data embedded": ("must name a function (got a list)",),
    "run --model nets_of_mine:table --data embedded": ("must return an nn.Module (got dict)",),
    "run --model nets_of_mine:broken --data embedded": ("fails: RuntimeError: no weights here",),
    "run --model nets_of_mine:small --data embedded": ("evaluating two samples fails", "inputs: 1 x 28 x 28"),
    "run --model nets_of_mine:small --data nets_of_mine:one_pair": ("must return ((inputs, targets),",),
    "run --model nets_of_mine:small --data nets_of_mine:sample": ("did you mean 'samples'",),
    "run --model nets_of_mine:small --data embeded": ("data = 'embeded' is unknown",),
    "run --model nets_of_mine:small": ("or data", "there is none"),
    "run --model nets_of_mine:small --task cnn-mnist --data embedded": ("task = 'cnn-mnist'", "drop"),
    "run --data nets_of_mine:samples": ("needs a model of your own",),
    "run --layers fc1,out": ("layers = 'fc1,out' needs a model of your own",),
    "run --model nets_of_mine:small --layers 0,4 --data nets_of_mine:samples --samples 3": (
        "'4' is unknown",
    ),
    "cost --model nets_of_mine:small": ("priced by running an example",),
    "cost --model nets_of_mine:small --input-shape 6,x": ("input-shape must be whole numbers",),
    "cost --model nets_of_mine:small --input-shape 7": ("evaluating two samples fails", "inputs: 7"),
    "plan --model nets_of_mine:small --input-shape 6 --depths 3": ("this model has 2 layers",),
    "cost --model nets_of_mine:small --input-shape 6 --mode paper": ("mode = 'exact'",),
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(command: str) -> None:
    line = refused(*command.split())
    for words in REFUSED[command]:
        assert words in line
