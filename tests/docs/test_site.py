"""The site has no dead link, its reference is complete, and its notebooks and pictures are what the code makes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from document_blocks import prints_what_is_shown

import fedpmt
from docs.tools import notebooks, pictures, reference
from fedpmt.records import DeviceRecord, ResultRecord, RoundRecord
from fedpmt.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = {**reference.pages(), **notebooks.pages()}


def prose(text: str) -> str:
    """The text without code, in which brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


@cache
def anchors(path: Path) -> set[str]:
    """The names of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page.read_text())):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        generated = target.is_relative_to(DOCS) and str(target.relative_to(DOCS)) in GENERATED
        assert target.exists() or generated, link
        if anchor and target.suffix == ".md" and not generated:
            assert anchor in anchors(target), link


def listed(entries: list[Any]) -> list[str]:
    """All pages of a navigation, with those that a pattern stands for."""
    found: list[str] = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            matching = (
                [path.relative_to(DOCS).as_posix() for path in DOCS.glob(value)] if "*" in value else [value]
            )
            found += listed(value) if isinstance(value, list) else matching
    return found


def test_each_page_is_in_the_navigation_once() -> None:
    nav = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    assert sorted(nav) == sorted(written | set(GENERATED))


def test_the_reference_has_all_names_commands_settings_and_fields() -> None:
    grouped = [name for names in reference.api_groups().values() for name in names]
    assert sorted(grouped) == sorted(fedpmt.__all__)
    commands = GENERATED["reference/command-line.md"]
    for command in ("fedpmt run", "fedpmt plan", "fedpmt data get"):
        assert f"\n## {command}\n" in commands
    assert "| `--dry-run` | Show settings" in commands
    for name in Settings.model_fields.keys() - {"digest", "version"}:
        assert (
            f"| `{name}` |" in GENERATED["reference/settings.md"]
            or not Settings.model_fields[name].description
        )
    for kind in (RoundRecord, DeviceRecord, ResultRecord):
        for name in kind.model_fields:
            assert f"| `{name}` |" in GENERATED["reference/records.md"]
    assert (
        "| `path` | `ComputePath \\| None` | None where it is not known" in GENERATED["reference/records.md"]
    )


@pytest.mark.parametrize("name", pictures.pictures())
def test_pictures_are_drawn_from_the_published_results(name: str) -> None:
    """Where results have changed, `python -m docs.tools.pictures` draws them again."""
    assert (pictures.FOLDER / name).read_text() == pictures.pictures()[name]


@pytest.mark.parametrize("path", sorted(notebooks.FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_print_what_they_show(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where output has changed, `python -m docs.tools.notebooks` stores it again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ran = 0
    for cell, printed in notebooks.run_cells(notebooks.read(path), path.name):
        assert prints_what_is_shown(notebooks.stored_output(cell), printed)
        ran += 1
    assert ran > 2


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = pytest.importorskip("mkdocs.config")
    from mkdocs.commands.build import build

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    site = tmp_path / "site"
    with caplog.at_level("WARNING"):
        build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))
    assert not caplog.records
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"""<(?:script|img|iframe)[^>]+src=["']?https?:""", text), page
        assert not re.search(r"""<link[^>]+rel=["']?(?:stylesheet|preconnect|preload)[^>]+https?:""", text), (
            page
        )
    assert "fedpmt.run" in (site / "reference" / "api.html").read_text()
