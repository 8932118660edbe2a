"""What MkDocs does on top of copying pages: generate the reference, show notebooks, keep links inside the site."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.tools import notebooks, reference  # noqa: E402 (MkDocs loads this file by its path)

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:src|tests|examples|benchmarks|reproduction|[A-Z]+\.)[^)]*)\)"
)
"""A link to a file of the repository that is not part of the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List all files of a folder where the navigation says so, as for decisions: `adr/*.md`."""
    for section in config.nav or []:
        for entry in next(iter(section.values())):
            for title, pages in entry.items() if isinstance(entry, dict) else ():
                if isinstance(pages, str) and "*" in pages:
                    docs = Path(config.docs_dir)
                    entry[title] = [path.relative_to(docs).as_posix() for path in sorted(docs.glob(pages))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {**reference.pages(), **notebooks.pages(ROOT / "notebooks")}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show links to source files, which the site does not contain, as plain names."""
    return OUTSIDE.sub(
        lambda link: f"{link[1]} (`{link[2]}`)" if link[2] not in link[1] else link[1], markdown
    )
