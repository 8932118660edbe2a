"""Figures from records, and the drawing that they are made with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from report_samples import SETTINGS, comparison, device, run, step, wrap

from fedpmt.report import busy, group_runs, layers, score, score_by_class, score_by_level
from fedpmt.report.draw import draw_net
from fedpmt.report.drawing import curve, layer_counts
from fedpmt.report.figures import choose_round, horizon, representatives
from fedpmt.report.theme import PALETTE, looks_of, to_svg
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path


def test_curves_average_seeds_round_by_round() -> None:
    """Accuracies 0.2, 0.4 and 0.4, 0.8 at 10 s and 20 s, 100 and 200 bytes."""
    found = curve([run([0.2, 0.4], seed=0), run([0.4, 0.8], seed=1)], "seconds")
    assert found is not None
    assert found.place.tolist() == [10, 20]
    assert found.mean.tolist() == pytest.approx([0.3, 0.6])
    assert (found.low.tolist(), found.high.tolist()) == ([0.2, 0.4], [0.4, 0.8])
    sent = curve([run([0.2, None, 0.4])], "bytes")
    assert sent is not None
    assert sent.place.tolist() == [100, 300]
    assert curve([run([0.2, 0.4])], "joules") is None
    steps = tuple(step(number, 0.1 * number, joules=7.0) for number in (1, 2))
    spent = curve([wrap(steps, SETTINGS, "run")], "joules")
    assert spent is not None
    assert spent.place.tolist() == [7, 14]


def test_a_curve_goes_on_while_half_of_its_seeds_do() -> None:
    found = curve(
        [run([0.2, 0.3, 0.4], seed=0), run([0.4], seed=1), run([0.4, 0.5], seed=2), run([], seed=3)], "rounds"
    )
    assert found is not None
    assert found.place.tolist() == [1, 2]
    assert curve([run([None, None])], "rounds") is None


def test_layers_are_counted_per_round() -> None:
    steps = (step(1, None, layers={"fc1": 0, "fc2": 4}), step(2, None, layers={"fc1": 1, "fc2": 2}))
    [group] = group_runs([wrap(steps, SETTINGS, "run")])
    assert layer_counts(group) == {"fc1": 0.5, "fc2": 3.0}


def test_a_method_keeps_its_colour_whoever_else_is_there() -> None:
    pair = looks_of(group_runs([run([0.5], method=name) for name in ("zebra", "fedavg", "fedpmt")]))
    assert (pair["fedpmt"].colour, pair["fedavg"].colour) == PALETTE[:2]
    assert pair["zebra"].colour not in PALETTE[:2]


def test_variants_of_a_method_are_dashed_and_of_the_only_method_coloured() -> None:
    variants = [
        run([0.5], method=name, deadline=end) for name in ("fedpmt", "fedavg") for end in (20.0, 30.0)
    ]
    looks = looks_of(group_runs(variants))
    assert looks["fedpmt · deadline 20"].colour == looks["fedpmt · deadline 30"].colour
    assert looks["fedpmt · deadline 20"].dashes != looks["fedpmt · deadline 30"].dashes
    alone = looks_of(group_runs(variants[:2]))
    assert len({look.colour for look in alone.values()}) == 2


def test_busy_takes_the_last_round_that_all_have() -> None:
    runs = [run([0.5] * 4), run([0.5] * 2, method="fedavg"), run([], method="feddrop")]
    chosen = representatives(group_runs(runs))
    assert [group.line for group, _ in chosen] == ["fedpmt", "fedavg"]
    assert [one.round for one in choose_round([one for _, one in chosen])] == [2, 2]
    assert [one.round for one in choose_round([one for _, one in chosen], 4)] == [4, 2]


def test_the_axis_reaches_the_slowest_and_survives_a_device_without_end() -> None:
    late = step(1, None, devices=(device(1, "late", seconds=42.0), device(2, "failed", seconds=float("inf"))))
    assert horizon([late], [26.5]) == 42
    busy([wrap((late,), SETTINGS, "run")])


@pytest.mark.parametrize("draw", [score, busy, layers, score_by_level, score_by_class])
def test_figures_of_any_runs(draw: object) -> None:
    assert callable(draw)
    before = dict(mpl.rcParams)
    for runs in (
        comparison(rounds=4, seeds=2, partitions=("iid",)),
        [run([]), run([None], method="fedavg", finished=False)],
        [run([0.5, 0.6], method="_$x^{", partition="日本 $"), run([0.5], method="b" * 300)],
    ):
        text = to_svg(draw(runs), "name", "a <description>")
        root = ElementTree.fromstring(text)
        assert root.attrib["aria-label"] == "a <description>"
        assert all(identity.startswith("name-") for identity in re.findall(r'\bid="([^"]+)"', text))
        referred = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
        assert referred <= set(re.findall(r'\bid="([^"]+)"', text))
    assert dict(mpl.rcParams) == before


def test_text_stays_text_in_the_colours_of_the_page() -> None:
    text = to_svg(score([run([0.5])]), "one", "words")
    assert "virtual time" not in text
    assert ">round</text>" in text
    assert "var(--ink, #1b2331)" in text
    assert "var(--series-0, #0072b2)" in text
    assert "DejaVu" not in text


def test_an_unknown_axis_and_no_runs_are_refused() -> None:
    with pytest.raises(SettingError, match="did you mean 'rounds'"):
        score([run([0.5])], "round")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no run to report on"):
        layers([])


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
