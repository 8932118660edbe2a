"""Room for what devices keep: what it takes is what is then written, and what does not fit is refused."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

import pytest

from fedpmt import api
from fedpmt.methods.registry import METHODS, create
from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.coverage import kept_bytes
from fedpmt.simulation.loop import Federation
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.simulation.loop import Progress

SMALL: dict[str, Any] = {"devices": 5, "cohort": 5, "samples": 40, "task": "cnn-mnist"}
KEEPERS: dict[str, dict[str, Any]] = {
    "comet": {"asked": 40},
    "depthfl": {"dynamic": 0.1},
    "fedgen": {"share": "head"},
    "fedgkt": {},
    "scaffold": {},
    "prunefl": {"initial_rounds": 0},
}
HEADER = 4_000
"""Bytes of a state file beside its tensors, at most."""

Disk = namedtuple("Disk", "free")


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Disk(free))


def expected(name: str, folder: Path) -> list[int]:
    """What each device will keep."""
    settings = api.settings_of({**SMALL, "method": name, "options": KEEPERS[name], "rounds": 1})
    method, problem = api.method_of(settings), api.paper_problem_of(settings)
    with assemble(settings, problem, method, folder) as federation:
        found = kept_bytes(federation)
    assert max(found) > 0
    return sorted(int(one) for one in found)


def test_those_that_keep_something_are_known() -> None:
    """Of all methods, in the form in which they keep the most."""
    assert {name for name in METHODS if create(name, KEEPERS.get(name, {}), {}).traits.keeps} == {*KEEPERS}


@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_written_is_what_was_expected(name: str, tmp_path: Path) -> None:
    api.run(name, rounds=1, out=tmp_path / "run", options=KEEPERS[name], **SMALL)
    written = sorted(path.stat().st_size for path in (tmp_path / "run/devices").rglob("*.safetensors"))
    for size, wanted in zip(written, expected(name, tmp_path), strict=True):
        assert wanted <= size <= wanted + HEADER


@pytest.mark.parametrize("name", KEEPERS)
def test_a_population_fits_to_the_byte(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three states of each of the five; nets at the depths that devices can afford, not at full depth."""
    needed = 3 * sum(expected(name, tmp_path))
    with_free(monkeypatch, needed - 1)
    with pytest.raises(SettingError, match=f"devices = 5: {name} keeps .* and 15 states of up to"):
        api.run(name, rounds=2, out=tmp_path / "run", options=KEEPERS[name], **SMALL)
    assert not (tmp_path / "run").exists()
    with_free(monkeypatch, needed)
    assert api.run(name, rounds=2, options=KEEPERS[name], **SMALL).result is not None


def test_few_rounds_need_room_for_the_few_that_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 3 * expected("scaffold", tmp_path)[0]
    with_free(monkeypatch, needed)
    assert api.run("scaffold", rounds=1, **{**SMALL, "devices": 50, "cohort": 1}).result is not None
    with pytest.raises(SettingError, match="devices = 50: scaffold keeps a control variate"):
        api.run("scaffold", rounds=2, **{**SMALL, "devices": 50, "cohort": 1})


def test_what_a_resumed_run_has_written_is_no_lost_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the disk as full as its own states have made it."""
    play, folder = Federation.play, tmp_path / "run"

    def cut(federation: Federation, progress: Progress) -> Any:
        if progress.rounds == 1:
            raise KeyboardInterrupt
        return play(federation, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "play", cut)
        with pytest.raises(KeyboardInterrupt):
            api.run("fedgkt", rounds=2, out=folder, **SMALL)
    kept = sum(path.stat().st_size for path in (folder / "devices").rglob("*.safetensors"))
    with_free(monkeypatch, 3 * sum(expected("fedgkt", tmp_path)) - kept)
    assert api.run("fedgkt", rounds=2, out=folder, resume=True, **SMALL).result is not None


def test_amounts_are_said_in_units_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 3_000_000)
    with pytest.raises(SettingError) as refused:
        api.run("scaffold", rounds=2)
    assert str(refused.value) == (
        "devices = 50: scaffold keeps a control variate on each device, and 50 states of up to 2.1 MB, "
        "103.1 MB in all, do not fit into the 3.0 MB that are free"
    )
    with pytest.raises(SettingError, match="that are free"):
        api.predict(api.make_request("scaffold", {"rounds": 2}))


def test_a_prediction_looks_at_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at the temporary one in which nothing is kept."""
    looked: list[Path] = []

    def usage(path: Path) -> Disk:
        looked.append(path)
        return Disk(10**12)

    monkeypatch.setattr("shutil.disk_usage", usage)
    api.predict(api.make_request("scaffold", {"rounds": 2}), tmp_path / "not/yet")
    assert looked == [tmp_path]
    assert not list(tmp_path.iterdir())
