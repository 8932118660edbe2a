"""The front door: one set of keywords, methods by name or as values, optimizers in words or as functions."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch

import fedpmt
import fedpmt.methods
from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.methods.registry import METHODS, fields, method_class
from fedpmt.settings import RunSettings, Settings
from fedpmt.types import SettingError

TINY: dict[str, Any] = {"rounds": 2, "devices": 6, "samples": 10, "cohort": 3, "batch": 5, "eval_every": 2}


def test_an_editor_completes_every_setting() -> None:
    keywords = set(typing.get_type_hints(RunSettings, localns={"Callable": typing.Callable, "Mapping": dict}))
    assert keywords == set(Settings.model_fields) - {"method", "digest", "model", "layers", "clients"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_name_and_its_value_are_the_same_run(name: str) -> None:
    """No field of a method is taken for a setting of the run that happens to have its name."""
    by_name, by_value = api.make_request(name, {}), api.make_request(method_class(name)(), {})
    assert by_name.method == by_value.method
    assert by_name.settings == by_value.settings
    assert not set(fields(name)) & set(Settings.model_fields)


@pytest.mark.parametrize("module", [fedpmt, fedpmt.methods])
def test_every_exported_name_is_there(module: Any) -> None:
    for name in module.__all__:
        assert name.isupper() or getattr(module, name).__module__.startswith("fedpmt.")
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_all_methods_are_exported() -> None:
    assert {attribute for _, attribute in METHODS.values()} <= set(fedpmt.__all__)


def test_a_server_optimizer_is_the_same_in_python_and_on_the_command_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = fedpmt.run(fedpmt.FedPMT(server=fedpmt.Momentum(0.8, lr=0.3)), out=tmp_path / "python", **TINY)
    flags = [text for key, value in TINY.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    words = ["--server-optimizer", "momentum", "--server-momentum", "0.8", "--server-lr", "0.3"]
    assert program(["run", *flags, *words, "--out", str(tmp_path / "typed"), "--json"]) == 0
    capsys.readouterr()
    typed = fedpmt.read_run(tmp_path / "typed")
    assert typed.result is not None
    assert given.result is not None
    assert typed.result.weights_sha256 == given.result.weights_sha256
    assert typed.settings == given.settings
    plain = fedpmt.run("fedpmt", **TINY).result
    assert plain is not None
    assert plain.weights_sha256 != given.result.weights_sha256


def test_optimizers_and_rates_of_ones_own() -> None:
    rates: list[int] = []

    def rate(round_index: int) -> float:
        rates.append(round_index)
        return 0.1 / (1 + round_index)

    own = fedpmt.run("fedpmt", optimizer=torch.optim.SGD, schedule=rate, **TINY)
    assert [record.learning_rate for record in own.rounds] == [0.1, 0.05]
    assert set(rates) == {0, 1}
    assert (own.settings["optimizer"], own.settings["schedule"]) == ("custom", "custom")
    same = fedpmt.run("fedpmt", lr=0.1, schedule="inverse:1e-9", executor="plain", **TINY)
    assert own.result is not None
    assert same.result is not None
    assert own.result.path == "autograd"
    # torch's SGD takes the steps of ours, to the bit, by the same passes.
    assert own.result.score == same.result.score


REFUSED: dict[str, tuple[str, str]] = {
    "no server step": ("--method prunefl --server-optimizer adam", "server-optimizer = 'adam'"),
    "no optimizer": ("--server-lr 0.1", "server-lr = 0.1 does nothing with server-optimizer = 'none'"),
    "not its setting": ("--server-optimizer sgd --server-momentum 0.5", "it belongs to momentum, adam, yogi"),
    "Option II": (
        "--method scaffold --set option=II --optimizer adam",
        "optimizer = 'adam' cannot be combined",
    ),
    "its own Adam": (
        "--method fedgkt --optimizer adamw",
        "optimizer = 'adamw' cannot be combined with fedgkt",
    ),
    "two momenta": ("--optimizer adam --momentum 0.9", "momentum = 0.9 is SGD's"),
    "Nesterov alone": ("--nesterov true", "nesterov = 'true' needs"),
    "a word for a function": ("--optimizer custom", "only Python can give"),
    "schedule": ("--schedule cosine:x", "schedule = 'cosine:x' must be"),
    "clip": ("--clip-norm 0", "clip-norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined_is_refused_in_one_line(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, reason = REFUSED[case]
    assert program(["run", *words.split(), "--rounds", "1"]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert told.count("\n") == 1


def test_a_value_and_a_setting_that_disagree_are_refused() -> None:
    with pytest.raises(SettingError, match="drop server_optimizer"):
        api.make_request(fedpmt.FedAvg(server=fedpmt.SGD(0.5)), {"server_optimizer": "adam"})
    with pytest.raises(SettingError, match="was made with '2'"):
        api.make_request(fedpmt.FedPMT(depths=2), {"depths": 3})
