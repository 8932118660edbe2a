"""What the documents say is true: names exist, examples run."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedpmt
from fedpmt import api
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.registry import METHODS, method_class
from support import SMALL, Bench

ROOT = Path(__file__).parents[2]
SHARED_SETTINGS = ("depths", "splitting", "server")
"""Settings of a run that methods take over."""
PAPER_SYMBOLS = [
    "K",
    "k",
    "D_k",
    "q_k",
    "ℓ",
    "F_k",
    "w",
    "w^1",
    "τ",
    "S",
    "S_i",
    "c_k",
    "E",
    "κ_k",
    "T_cmp",
    "Ψ",
    "I",
    "Ξ_i",
    "L",
    "Υ_k^l",
    "f_k",
    "∘",
    "⊙",
    "η_t",
    "ξ_k",
    "A_k",
    "ψ",
    "p_j",
    "λ",
    "μ",
    "G",
    "δ_k",
    "ε",
    "Λ",
    "n^x",
    "n_l",
    "s_l",
    "m_l",
]


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "notation.md").read_text().splitlines()
    table = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def identifiers(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


@pytest.mark.parametrize("row", [row for row in rows() if row[2] != "analysis"], ids=lambda row: row[0])
def test_each_name_of_the_notation_exists_in_its_file(row: list[str]) -> None:
    _, _, names, file = row
    found = identifiers(ROOT / file)
    wanted = re.findall(r"`(\w+)`", names)
    assert wanted
    assert set(wanted) <= found


def test_each_symbol_of_the_paper_has_a_row() -> None:
    listed = {symbol for row in rows() for symbol in re.split(r"[ ,]+", row[0].replace("\\|", ""))}
    listed |= {re.sub(r"\(.*", "", symbol) for symbol in listed}
    assert set(PAPER_SYMBOLS) <= listed


def blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "docs/adding-a-method.md"])
def test_examples_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # A module of its own, since checkpoints look state classes up by module.
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    code = blocks(document)
    assert code
    for block in code:
        exec(compile(block, document, "exec"), module.__dict__)
    assert capsys.readouterr().out


class TestTheExampleMethod:
    """The method of docs/adding-a-method.md is one as those of the library are."""

    @pytest.fixture
    def blocks_method(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = ModuleType("documented")
        monkeypatch.setitem(sys.modules, "documented", module)
        exec(compile(blocks("docs/adding-a-method.md")[0], "documented", "exec"), module.__dict__)
        return module.Blocks

    def test_a_line_in_the_table_makes_it_known_and_the_contract_holds(
        self, blocks_method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contract: Any = importlib.import_module("contract.test_methods")
        monkeypatch.setitem(METHODS, "blocks", (blocks_method.__module__, "Blocks"))
        settings: dict[str, Any] = {**SMALL, "options": {"choice": "random"}}
        run = api.run("blocks", **settings)
        assert run.result is not None
        contract.test_is_a_frozen_value_that_can_be_pickled("blocks")
        contract.test_does_not_change_the_state_it_is_given("blocks", tmp_path)
        contract.test_does_not_change_what_a_device_has_kept("blocks", tmp_path)
        contract.test_states_come_back_from_disk_as_they_were("blocks", tmp_path)
        contract.test_arrival_order_does_not_matter("blocks")
        contract.test_entries_that_nobody_trained_keep_their_bits("blocks")
        contract.test_no_training_leaves_the_model_as_it_was("blocks")
        contract.test_bytes_on_the_wire_are_those_accounted_for("blocks")
        contract.test_neutral_and_capable_is_fedavg_bit_for_bit("blocks")
        contract.test_assignment_is_a_function_of_round_and_device("blocks")
        contract.test_same_bits_for_any_number_of_workers("blocks", "classes:2")
        contract.test_resumed_after_an_interrupt_and_a_kill_it_has_the_same_bits("blocks", tmp_path / "runs")

    def test_takes_about_a_hundred_lines(self) -> None:
        assert 80 <= len(blocks("docs/adding-a-method.md")[0].splitlines()) <= 125

    def test_is_fedavg_where_every_device_can_do_everything(self, blocks_method: Any) -> None:
        ours, theirs = Bench(blocks_method().neutral()), Bench(FedAvg())
        for index in range(3):
            for bench in (ours, theirs):
                replies = [bench.reply(device, index, count=4 + device) for device in range(4)]
                bench.state = bench.method.aggregate(bench.state, replies, bench.round(index)).state
        for name, tensor in theirs.state.tensors.items():
            assert torch.equal(ours.state.tensors[name], tensor)

    def test_trains_one_block_within_the_budget_and_leaves_the_rest(self, blocks_method: Any) -> None:
        small: dict[str, Any] = {**SMALL, "budget": "operations=0.6"}
        run = api.run(blocks_method(), **small)
        assert run.result is not None
        assert run.result.budget_action == "device"
        devices = [device for step in run.rounds for device in step.devices]
        assert not any(device.over_budget for device in devices)
        assert len({device.part for device in devices}) > 1
        bench = Bench(blocks_method())
        reply = bench.reply(0, budget=60.0)
        state = bench.method.aggregate(bench.state, [reply], bench.round(0)).state
        untrained = set(bench.state.tensors) - set(reply.part.trained)
        assert untrained
        assert all(torch.equal(state.tensors[name], bench.state.tensors[name]) for name in untrained)


def test_public_names_are_all_there_and_documented() -> None:
    for name in fedpmt.__all__:
        value = getattr(fedpmt, name)
        assert value.__doc__
        assert getattr(fedpmt, name) is getattr(importlib.import_module(value.__module__), name)
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        fedpmt.runs  # noqa: B018


@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_page_has_its_settings_and_their_defaults(name: str) -> None:
    """A cell begins with the default, or with those of several settings; where there is none, with words of its own."""
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    cells: dict[str, str] = {}
    for line in text.splitlines():
        first, *others = re.split(r"(?<!\\)\|", line.strip("| "))
        settings = re.findall(rf"`{name}\.(\w+)`", first)
        words = re.sub(r"(\d),(\d{3})", r"\1\2", others[0].replace("`", "").strip()) if others else ""
        starts = re.split(r", | and ", words, maxsplit=len(settings))
        cells |= dict(zip(settings, starts if len(settings) > 1 else [words], strict=False))
    made: Any = method_class(name)  # a dataclass, whichever it is
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(made)}
    assert set(cells) <= set(fields)
    for setting, default in fields.items():
        if setting in SHARED_SETTINGS:
            continue
        assert setting in cells, f"{name}.{setting} is not on its page"
        if isinstance(default, bool):
            assert cells[setting].startswith(str(default).lower())
        elif isinstance(default, int | float):
            assert re.match(rf"{re.escape(f'{default:.10g}')}(?![\d.])", cells[setting]), cells[setting]
        elif default is not None:
            assert cells[setting].startswith(default)
