from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from fedpmt.report.draw import draw_net
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def layer(name: str, kind: str, units: int) -> dict[str, Any]:
    return {"name": name, "kind": kind, "units": units}


def depth(number: int, frozen: list[str], share: float, **feddrop: Any) -> dict[str, Any]:
    row = {"feddrop_keep": None, "feddrop_operations": None, "feddrop_within_budget": None}
    return {
        "depth": number,
        "frozen": frozen,
        "operations": int(1000 * share),
        "ratio": share,
        "upload_bytes": int(400 * share),
        **row,
        **feddrop,
    }


def table(fits: bool = True) -> dict[str, Any]:
    half = {"feddrop_keep": 0.5, "feddrop_operations": 490, "feddrop_within_budget": fits}
    whole = {"feddrop_keep": 1.0, "feddrop_operations": 1000, "feddrop_within_budget": True}
    return {
        "task": "small-net",
        "mode": "exact",
        "layers": [layer("conv1", "conv", 8), layer("fc1", "linear", 300), layer("out", "linear", 10)],
        "depths": [depth(1, ["conv1"], 0.5, **half), depth(2, [], 1.0, **whole)],
    }


def texts(path: Path) -> str:
    """The words of an SVG; matplotlib writes each as a comment before its outlines."""
    return " | ".join(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"), re.DOTALL))


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_suffix_decides_the_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "folder" / f"net{suffix}"
    draw_net(table(), path)
    assert path.read_bytes().startswith(SIGNATURES[suffix])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_same_table_gives_same_bytes(tmp_path: Path) -> None:
    for suffix in SIGNATURES:
        paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
        for path in paths:
            draw_net(table(), path)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_other_formats_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"the file must end in \.pdf, \.png, \.svg$"):
        draw_net(table(), tmp_path / "net.docx")
    assert not list(tmp_path.iterdir())


def test_says_what_each_depth_trains(tmp_path: Path) -> None:
    path = tmp_path / "net.svg"
    draw_net(table(), path)
    words = texts(path)
    assert "depth 2 (full model)" in words
    assert "[0, 1, 1]" in words
    assert "50% of the operations, 50% of the upload" in words
    assert "FedDrop at the budget of depth 1" in words
    assert "keeps 50% of hidden neurons" in words
    assert "counted in mode exact" in words


def test_says_where_feddrop_cannot_meet_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "net.svg"
    draw_net(table(fits=False), path)
    assert "FedDrop at its smallest rate" in texts(path)
    assert "49% of the operations, more than depth 1" in texts(path)


def test_a_model_that_cannot_be_thinned_has_no_feddrop_panel(tmp_path: Path) -> None:
    path = tmp_path / "net.svg"
    names = [f"encoder.layers.{index}" for index in range(12)]
    layers = [layer(name, "other", units) for name, units in zip(names, [1, 2, 3, 5] * 3, strict=True)]
    depths = [depth(number, names[: 12 - number], number / 12) for number in range(1, 13)]
    draw_net({"task": "deep", "mode": "exact", "layers": layers, "depths": depths}, path)
    assert "FedDrop" not in texts(path)
    assert "…layers.0" in texts(path)


def test_draws_a_real_table(tmp_path: Path) -> None:
    from fedpmt.pricing.cost_table import cost_table

    path = tmp_path / "net.svg"
    draw_net(cost_table("fcnn-mnist", "paper").model_dump(mode="json"), path)
    assert "[0, 0, 0, 1, 1]" in texts(path)
    assert "42.3% of the operations, 4.09% of the upload" in texts(path)
