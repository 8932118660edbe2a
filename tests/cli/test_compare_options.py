"""Options of several methods in one file, and a comparison that is only predicted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fedpmt.cli.main import program

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TINY = ["--rounds", "1", "--devices", "5", "--samples", "20", "--cohort", "5"]


def test_tables_and_bare_keys_reach_the_methods_they_are_for(tmp_path: Path) -> None:
    for number, text in enumerate(("[options]\nkeep = 0.5\n", "[options.feddrop]\nkeep = 0.5\n")):
        config = tmp_path / f"{number}.toml"
        config.write_text(text)
        out = tmp_path / str(number)
        assert (
            program(["compare", "fedpmt", "feddrop", *TINY, "--config", str(config), "--out", str(out)]) == 0
        )
        stored = json.loads((out / "feddrop-seed0" / "config.json").read_bytes())["settings"]
        assert float(stored["options"]["keep"]) == 0.5
        assert json.loads((out / "fedpmt-seed0" / "config.json").read_bytes())["settings"]["options"] == {}


def test_a_key_that_no_method_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[options]\nkeeps = 0.5\n")
    assert (
        program(
            ["compare", "fedpmt", "feddrop", *TINY, "--config", str(config), "--out", str(tmp_path / "o")]
        )
        == 2
    )
    assert "keeps" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_comparison_can_be_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        program(["compare", "fedpmt", "fedavg", *TINY, "--dry-run", "--json", "--out", str(tmp_path / "o")])
        == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["settings"]["method"] for line in lines] == ["fedpmt", "fedavg"]
    assert lines[0]["round_seconds"] < lines[1]["round_seconds"] == 50.0
    assert not (tmp_path / "o").exists()
