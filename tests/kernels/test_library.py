"""Compiled code is built, checked and, where that fails, done without."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedpmt import kernels
from fedpmt.kernels import library

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_compiler = pytest.mark.skipif(not kernels.available(), reason="there is no C compiler here")


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library is built and loaded anew, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.library.cache_clear()
    yield tmp_path
    library.library.cache_clear()


FAILS = "#!/bin/sh\nexit 1\n"
MAKES_NO_LIBRARY = "#!/bin/sh\nwhile [ $1 != -o ]; do shift; done; echo nothing > $2\n"


@pytest.mark.parametrize("compiler", ["", FAILS, MAKES_NO_LIBRARY])
def test_without_a_working_compiler_there_is_none(
    compiler: str, anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler:
        (anew / "cc").write_text(compiler)
        (anew / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(anew))
    monkeypatch.delenv("CC", raising=False)
    assert not kernels.available()


def test_it_can_be_switched_off(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert not kernels.available()


OLD_FIELD = ("    float rate, kept, momentum, decay;\n", "    float kept, rate, momentum, decay;\n")
OLD_VERSION = (f"#define VERSION {library.VERSION}\n", "#define VERSION 0\n")
NO_INTERFACE = ("int32_t fedpmt_interface(", "int32_t fedpmt_other(")
LONGER = ("    const uint8_t *absent; ", "    int64_t more; const uint8_t *absent; ")


@needs_compiler
@pytest.mark.parametrize("change", [OLD_FIELD, OLD_VERSION, NO_INTERFACE, LONGER])
def test_a_library_of_another_interface_is_not_used(
    change: tuple[str, str], anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its structures would be read at other places than they are written: one line, and no compiled code."""
    package = Path(library.__file__).parent
    source = (package / "native.c").read_text()
    assert change[0] in source
    (anew / "native.c").write_text(source.replace(*change))
    monkeypatch.setattr("importlib.resources.files", lambda _: anew)
    # Speed does not matter here, and the test is quick without it.
    monkeypatch.setattr(library, "FLAGS", ("-O0", "-march=native", "-fPIC", "-shared"))
    with caplog.at_level(logging.WARNING, "fedpmt"):
        assert not kernels.available()
        assert not kernels.available()
    assert len(caplog.records) == 1
    assert "does not match this version of fedpmt" in caplog.text


def test_a_rule_needs_no_torch() -> None:
    """A method says what its steps do before torch is loaded."""
    code = "import sys; from fedpmt.kernels import StepRule; StepRule(0.1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
