"""Methods that live outside of the package: by entry point, as package.module:Class, and as values."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest

from fedpmt import api
from fedpmt.methods import registry
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.registry import METHODS, create, fields, method_class, method_names, name_of, short_name
from fedpmt.records import read_config
from fedpmt.types import SettingError
from support import SMALL

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = '''
    from __future__ import annotations

    from dataclasses import dataclass, field
    from typing import TYPE_CHECKING, Literal

    from fedpmt.methods import PartAveraging, full

    if TYPE_CHECKING:
        from fedpmt.methods.averaging import Weight
        from fedpmt.training.local import LocalWork


    @dataclass(frozen=True)
    class Mine(PartAveraging):
        """Sends everything."""

        depths: int | None = None
        weight: Weight = "uniform"
        kind: Literal["a", "b"] = "a"
        share: float | None = 0.5
        count: int = 3
        work: LocalWork | None = None
        names: tuple[str, ...] = ()
        table: dict = field(default_factory=dict)

        def part(self, state, client, round):
            return full(state.structure)


    @dataclass(frozen=True)
    class Unfinished(PartAveraging):
        pass


    @dataclass(frozen=True)
    class Needy(Mine):
        rate: float = field(kw_only=True)


    class Loose(Mine.__mro__[2]):
        local = init = assign = fold = predictor = None


    helper = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder."""
    name = f"outside_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SOURCE))
    (tmp_path / f"{name}_broken.py").write_text("import no_such_thing_at_all\n")
    (tmp_path / f"{name}_wrong.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def offered(module: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same offered by an installed package, next to one that cannot be loaded."""
    points = {
        "mine": EntryPoint("mine", f"{module}:Mine", registry.GROUP),
        "broken": EntryPoint("broken", f"{module}_broken:Mine", registry.GROUP),
        "fedavg": EntryPoint("fedavg", f"{module}:Mine", registry.GROUP),
    }
    monkeypatch.setattr(registry, "_offered", lambda: points)
    return module


def test_a_class_is_found_by_its_module(module: str) -> None:
    kind = method_class(f"{module}:Mine")
    assert (kind.__module__, kind.__name__) == (module, "Mine")
    assert name_of(kind()) == f"{module}:Mine"
    assert method_class(name_of(kind())) is kind
    assert short_name(name_of(kind())) == "mine"


def test_options_are_fields_that_text_can_express(module: str) -> None:
    """None that the run provides, and none of a type without words; types only checkers know are the default's."""
    name = f"{module}:Mine"
    assert {key: default for key, (_, default) in fields(name).items()} == {
        "weight": "uniform",
        "normalise": "none",
        "kind": "a",
        "share": 0.5,
        "count": 3,
    }
    made: Any = create(name, {"weight": "samples", "share": "none", "count": "5", "kind": "b"}, {"depths": 4})
    assert (made.weight, made.share, made.count, made.kind, made.depths) == ("samples", None, 5, "b", 4)
    for key, value, why in (
        ("kind", "c", r"mine.kind = 'c' is unknown .*\(allowed: a, b\)"),
        ("count", "many", "mine.count = 'many' must be a number"),
        ("sharing", "1", "did you mean 'share'"),
        ("depths", "3", "option of .* = 'depths' is unknown"),
        ("server", "adam", "option of .* = 'server' is unknown"),
    ):
        with pytest.raises(SettingError, match=why):
            create(name, {key: value}, {})


def test_what_is_no_method_is_refused_in_one_line(module: str) -> None:
    for name, why in {
        "fedpmd": "method = 'fedpmd' is unknown; did you mean 'fedpmt'?",
        f"{module}s:Mine": f"there is no module '{module}s'",
        f"{module}:Mino": "class = 'Mino' is unknown; did you mean 'Mine'?",
        f"{module}:helper": "helper is no subclass of fedpmt.Method",
        f"{module}:Unfinished": "Unfinished is abstract, it has no part",
        f"{module}:Needy": "the field 'rate' of Needy needs a default",
        f"{module}:Loose": "Loose must be a frozen dataclass",
        f"{module}_broken:Mine": f"the module '{module}_broken' cannot be imported (ModuleNotFoundError: No module",
        f"{module}_wrong:Mine": f"the module '{module}_wrong' cannot be imported (ZeroDivisionError: division by zero)",
        ":Mine": "must be a name of `fedpmt methods` or package.module:Class",
    }.items():
        with pytest.raises(SettingError) as refused:
            method_class(name)
        assert why in str(refused.value)
        assert "\n" not in str(refused.value)
        assert "PartAveraging" not in str(refused.value)


def test_packages_offer_methods_by_name(offered: str) -> None:
    assert method_names() == [*METHODS, "mine", "broken"]
    kind = method_class("mine")
    assert kind.__module__ == offered
    assert name_of(kind()) == "mine"
    assert method_class("fedavg") is FedAvg  # the library's own names stay its own
    with pytest.raises(SettingError, match=r"method = .broken.: the module .\w+_broken. cannot be imported"):
        method_class("broken")
    with pytest.raises(SettingError, match="did you mean 'mine'"):
        method_class("mines")


def test_the_command_line_lists_and_runs_them(
    offered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedpmt.cli.main import program

    assert program(["methods", "--json"]) == 0
    said = capsys.readouterr()
    own = {"weight": "uniform", "normalise": "none", "kind": "a", "share": 0.5, "count": 3}
    assert json.loads(said.out)["mine"] == own
    assert "'broken'" in said.err
    flags = [f"--{key}={value}" for key, value in SMALL.items()]
    for name, option, folder in (("mine", "mine.count=4", "one"), (f"{offered}:Mine", "mine.count=4", "two")):
        ran = program(["run", *flags, "--method", name, "--set", option, "--out", str(tmp_path / folder)])
        assert ran == 0, capsys.readouterr().err
        config = read_config(tmp_path / folder)
        assert config is not None
        assert (config["method"], str(config["options"]["count"])) == (name, "4")
    assert program(["run", "--resume", "--out", str(tmp_path / "two")]) == 0


def test_a_value_is_found_again_by_what_its_run_records(module: str, tmp_path: Path) -> None:
    kind: Any = method_class(f"{module}:Mine")
    run = api.run(kind(count=7), out=tmp_path / "run", **SMALL)
    settings = api.settings_of(run.settings)
    assert api.method_of(settings) == kind(count=7, depths=4)  # the run's own number of depths
    named = api.run(f"{module}:Mine", options={"count": 7}, **SMALL)
    assert run.result is not None
    assert named.result is not None
    assert named.result.weights_sha256 == run.result.weights_sha256


def test_a_class_inside_a_function_runs_as_a_value() -> None:
    @dataclass(frozen=True)
    class Inner(FedAvg):
        count: int = 1

    assert api.run(Inner(count=2), **SMALL).result is not None
