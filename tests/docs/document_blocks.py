"""The fenced blocks of a document, run one after another; as a program, write what they print into the document.

python tests/docs/document_blocks.py docs/own-model.md
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FENCED = re.compile(r"```(python|shell|text)\n(.*?)```", re.DOTALL)
POINTS = 5.0


def run_blocks(document: str, text: str, module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield each block's kind, its text, and what was printed last; files are written to the current folder.

    Python that begins with the name of a file is that file, and a block of text is what was printed before it.
    """
    printed = ""
    for kind, block in FENCED.findall(text):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if kind == "shell":
                _commands(block)
            elif kind == "python" and (file := re.match(r"# (\w+\.py)\n", block)):
                Path(file[1]).write_text(block)
            elif kind == "python":
                exec(compile(block, document, "exec"), module.__dict__)
        printed = out.getvalue() or printed
        yield kind, block, printed


def prints_what_is_shown(shown: str, printed: str) -> bool:
    """Whether the texts agree; whole percentages may differ by 5 points, since processors round differently.

    >>> prints_what_is_shown("91% in 30 min", "90% in 30 min"), prints_what_is_shown("30 min", "31 min")
    (True, False)
    """
    percentage = re.compile(r" *(?<![\d.])(\d+)%")
    pairs = zip(percentage.findall(shown), percentage.findall(printed), strict=False)
    near = all(abs(float(one) - float(other)) <= POINTS for one, other in pairs)
    return near and percentage.sub("%", shown) == percentage.sub("%", printed)


def _commands(block: str) -> None:
    from fedpmt.cli.main import program

    for command in block.splitlines():
        name, *arguments = command.split()
        assert (name, program(arguments)) == ("fedpmt", 0), command


def main(path: Path) -> None:
    """Replace the blocks of text by what is printed now."""
    sys.path.append(str(Path(__file__).parents[1]))
    importlib.import_module("published")  # before transformers, where torchvision lacks its operators
    text, module = path.read_text(), ModuleType("documented")
    target = path.absolute()
    sys.modules["documented"] = module
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        for kind, block, printed in run_blocks(str(path), text, module):
            if kind == "text":
                text = text.replace(block, f"{printed.rstrip()}\n", 1)
    target.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
