"""What the documents say is true: names exist, examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from document_blocks import prints_what_is_shown, run_blocks

import fedpmt
import published  # noqa: F401 (before transformers, where torchvision lacks its operators)
import reproduction
from fedpmt import api
from fedpmt.flower.deployment import check_deployable, make_deployment
from fedpmt.methods.registry import METHODS, fields
from fedpmt.types import SettingError
from reproduction.guide import documents_of, filled

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


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/tutorial.md",
        "docs/how-it-works.md",
        "docs/adding-a-method.md",
        "docs/own-model.md",
        "docs/methods/fedpmt.md",
        "docs/own-clients.md",
        pytest.param("docs/fine-tuning.md", marks=pytest.mark.slow),
        "docs/fleets.md",
    ],
)
def test_examples_run_and_print_what_is_shown(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a price has changed, `python tests/docs/document_blocks.py DOCUMENT` writes what is printed now."""
    text = (ROOT / document).read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # A module of its own, since checkpoints look state classes up by module.
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    last = ""
    for kind, block, last in run_blocks(document, text, module):
        if kind == "text":
            assert prints_what_is_shown(block, last), last
    assert last


def test_public_names_are_all_there_and_documented() -> None:
    for name in fedpmt.__all__:
        value = getattr(fedpmt, name)
        assert value.__doc__
        assert getattr(fedpmt, name) is getattr(importlib.import_module(value.__module__), name)
    with pytest.raises(AttributeError, match="no attribute 'simulate'"):
        fedpmt.simulate  # noqa: B018


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
    options = fields(name)
    assert set(cells) <= set(options)
    for setting, (_, default) in options.items():
        assert setting in cells, f"{name}.{setting} is not on its page"
        if isinstance(default, bool):
            assert cells[setting].startswith(str(default).lower())
        elif isinstance(default, int | float):
            assert re.match(rf"{re.escape(f'{default:.10g}')}(?![\d.])", cells[setting]), cells[setting]
        elif default is not None:
            assert cells[setting].startswith(default)


MODULES = sorted(
    info.name
    for package in (fedpmt, reproduction)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


RESULTS = ROOT / "docs" / "results"
DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.is_relative_to(RESULTS)),
]
CITED = re.compile(r"\]\((?:[./]|docs/)*results/([\w-]+)\.md[^)]*\)")
DECIMAL = re.compile(r"(?<![\w.,/-])(\d+\.\d+)(?![\d.]|-\w)(?: ?(%|points|min|h|MB|GB|s)(?!\w))?")
SCALES: dict[str, list[float]] = {
    "%": [100],
    "points": [100],
    "min": [1 / 60],
    "h": [1 / 3600],
    "MB": [1e-6],
    "GB": [1e-9],
    "s": [1],
}


def cited_numbers(text: str) -> list[tuple[str, str, str]]:
    """Page, number and unit of every decimal after a link to a page of results, up to the next such link or heading."""
    found = []
    plain = re.sub(r"<!-- measured:.*?<!-- end -->|```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for section in re.split(r"^#+ ", plain, flags=re.MULTILINE):
        _, *parts = CITED.split(section)
        for page, words in zip(parts[::2], parts[1::2], strict=True):
            # What a leaderboard says stands in spots, which the next test compares.
            if (RESULTS / f"{page}.json").exists() and not page.startswith("leaderboard"):
                found += [(page, number, unit) for number, unit in DECIMAL.findall(words)]
    return found


def leaves(value: Any) -> list[Any]:
    """All numbers and texts in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]


def is_printed(number: str, unit: str, known: list[Any]) -> bool:
    """Whether a number is one of the JSON's, rounded to its digits, or stands in one of its texts."""
    digits = len(number.partition(".")[2])
    scales = SCALES.get(unit) or [1, 100, 1 / 60]
    texts = (re.findall(r"\d+\.\d+", value) for value in known if isinstance(value, str))
    return any(number in found for found in texts) or any(
        f"{abs(value) * scale:.{digits}f}" == number
        for value in known
        if isinstance(value, float)
        for scale in scales
    )


def test_numbers_next_to_a_link_are_those_of_its_json() -> None:
    wrong, seen = [], 0
    for document in DOCUMENTS:
        for page, number, unit in cited_numbers(document.read_text()):
            known = leaves(json.loads((RESULTS / f"{page}.json").read_text()))
            seen += 1
            if not is_printed(number, unit, known):
                wrong.append(f"{document.relative_to(ROOT)}: {number} {unit} is not in {page}.json")
    assert not wrong
    assert seen > 50


def test_numbers_that_a_leaderboard_fills_in_are_its_own() -> None:
    for path in RESULTS.glob("leaderboard-*.json"):
        contest, numbers = path.stem.removeprefix("leaderboard-"), json.loads(path.read_text())
        for document in documents_of(ROOT / "docs", contest):
            text = document.read_text()
            assert filled(text, contest, numbers) == text, document


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "secure aggregation": ({"clock": "rounds"}, {"secagg": True}),
    "Flower": ({}, {}),
    "`--dp-clip`": ({"clock": "rounds", "dp_clip": 1.0}, None),
    "`--clock events`": ({"clock": "events"}, None),
}
"""Settings of a run, and of a deployment if it is one, by a word of the row of the guide that they stand for."""


def refuses(need: str, method: str, options: dict[str, str]) -> bool:
    given, deployment = REFUSALS[need]
    try:
        settings = api.settings_of({"method": method, "options": options, **given})
        api.check(settings)
        if deployment is not None:
            check_deployable(api.method_of(settings), settings, make_deployment(deployment))
    except SettingError:
        return True
    return False


@pytest.mark.parametrize("need", REFUSALS)
def test_the_guide_rules_out_what_the_code_refuses(need: str) -> None:
    """A cell lists methods, or `all but` some; "`fedgen` with `share=head`" is refused with that setting only."""
    guide = (ROOT / "docs" / "choosing-a-method.md").read_text().split("## What is ruled out")[1]
    (cell,) = [
        row.split("|")[2] for row in guide.splitlines() if row.startswith("|") and need in row.split("|")[1]
    ]
    listed = dict(re.findall(r"`(\w+)`(?: with `(\w+=\w+)`)?", cell))
    plain = {name for name, option in listed.items() if not option}
    expected = METHODS.keys() - plain if cell.strip().startswith("all but") else plain
    assert {name for name in METHODS if refuses(need, name, {})} == expected
    for name, option in listed.items():
        if option:
            setting, _, value = option.partition("=")
            assert refuses(need, name, {f"{name}.{setting}": value})


@pytest.mark.slow
def test_the_demo_ends_with_what_readme_says() -> None:
    """Times and bytes are exact; accuracies may differ, since processors round differently."""
    shown = (ROOT / "README.md").read_text().split("<!-- from: make demo -->")[1]
    row = r"(?i)\b(fedpmt|fedavg|feddrop)\b\W+([\d.]+) %.*?([\d.]+) min\W+([\d.]+) GB"
    runs = [
        run
        for partition in ("iid", "classes:2")
        for run in fedpmt.compare(
            ["fedpmt", "fedavg", "feddrop"], rounds=100, eval_every=100, partition=partition
        )
    ]
    for (method, accuracy, minutes, uploaded), run in zip(re.findall(row, shown), runs, strict=True):
        result = run.result
        assert result is not None
        assert result.accuracy is not None
        assert (method.lower(), minutes) == (result.method, f"{result.virtual_seconds / 60:.1f}")
        assert uploaded == f"{result.bytes_up / 1e9:.2f}"
        assert abs(float(accuracy) - 100 * result.accuracy) < 1.5
