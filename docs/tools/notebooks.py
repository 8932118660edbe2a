"""Notebooks as values: read them, run their cells, show them as Markdown, write their outputs into them.

python -m docs.tools.notebooks        run all notebooks and store what they print
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[2] / "notebooks"


def read(path: Path) -> dict[str, Any]:
    """Return the notebook as JSON."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def stored_output(cell: dict[str, Any]) -> str:
    """Return what the notebook says that the cell printed."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run_cells(notebook: dict[str, Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Run the code cells in the current folder and yield each with what it prints."""
    # A module of its own, since checkpoints look state classes up by module.
    module = ModuleType("notebook")
    sys.modules["notebook"] = module
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), name, "exec"), module.__dict__)
        yield cell, printed.getvalue()


def as_markdown(notebook: dict[str, Any]) -> str:
    """Return the notebook as a page: its text, its code and what the code prints."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if printed := stored_output(cell):
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def pages(folder: Path = FOLDER) -> dict[str, str]:
    """Return the site's page of each notebook."""
    # Notebooks link to pages as seen from their own folder in the repository.
    return {
        f"notebooks/{path.stem}.md": as_markdown(read(path)).replace("](../docs/", "](../")
        for path in sorted(folder.glob("*.ipynb"))
    }


def store_outputs(path: Path) -> None:
    """Run a notebook in a temporary folder and store what it prints."""
    notebook = read(path)
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for cell, printed in run_cells(notebook, path.name):
            stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
            cell["outputs"] = [stream] if printed else []
        os.chdir(home)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for each in sorted(FOLDER.glob("*.ipynb")):
        store_outputs(each)
