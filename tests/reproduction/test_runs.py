"""Runs that experiments share: kept small, found again, continued, and read under another clock."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fedpmt import api
from fedpmt.methods.comet import clustered
from fedpmt.settings import Settings, resolve
from fedpmt.types import DivergedError, SettingError
from reproduction.archive import RUN_SUFFIX, thick, thin
from reproduction.library import Library, Status, name_of
from reproduction.readings import final, reaching

if TYPE_CHECKING:
    from fedpmt.records import RunRecord

TINY: dict[str, Any] = {"devices": 8, "samples": 12, "cohort": 4, "levels": "1/4,1/3,1/2,1", "rounds": 3}


def settings(**more: Any) -> Settings:
    return resolve({**TINY, "assign": "level", "mode": "paper", **more})


def played(tmp_path: Path, **more: Any) -> RunRecord:
    chosen = settings(**more)
    return api.start(api.request_of(chosen), tmp_path / name_of(chosen))


def test_a_thin_record_is_the_run_without_its_details(tmp_path: Path) -> None:
    run = played(tmp_path, eval_every=2)
    read = thick(thin(run), tmp_path / f"some{RUN_SUFFIX}")
    assert read.folder == tmp_path / "some"
    assert read.settings == run.settings
    assert read.result is not None
    assert run.result is not None
    assert read.result.model_dump(exclude={"run"}) == run.result.model_dump(exclude={"run"})
    details = {"score_by_level", "score_by_class"}
    for mine, own in zip(read.rounds, run.rounds, strict=True):
        assert mine.model_dump(exclude=details) == own.model_dump(exclude=details)
    assert read.rounds[-1] == run.rounds[-1]


def test_five_hundred_rounds_are_small(tmp_path: Path) -> None:
    run = played(tmp_path)
    long = run.model_copy(update={"rounds": run.rounds * 167})
    assert len(lzma.compress(thin(long))) < 2**16


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"bad{RUN_SUFFIX}"
    for content in (b"", b"hello", b"[]", thin(played(tmp_path))[:-20]):
        with pytest.raises(SettingError, match="is not a run's record"):
            thick(content, path)
    unfinished = played(tmp_path, seed=1).model_copy(update={"result": None})
    with pytest.raises(SettingError, match="is not finished"):
        thin(unfinished)


def test_names_tell_runs_apart_and_not_how_they_are_computed() -> None:
    base = name_of(settings())
    assert base == name_of(settings(workers=3, checkpoint_seconds=1))
    others = [settings(seed=1), settings(lr=0.2), settings(method="fedavg"), settings(deadline=20)]
    assert len({base, *map(name_of, others)}) == 5


def test_only_what_is_missing_is_played(tmp_path: Path) -> None:
    library = Library(tmp_path / "kept", tmp_path / "work", jobs=2)
    wanted = [settings(seed=seed) for seed in (0, 1)]
    seen: list[Status] = []
    library.play([*wanted, wanted[0]], seen.append)
    assert library.missing(wanted) == []
    assert (seen[-1].runs, seen[-1].done, seen[-1].share) == (2, 2, 1.0)
    assert not any((tmp_path / "work").iterdir())
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}
    third = settings(seed=2)
    assert library.missing([*wanted, third]) == [third]
    assert library.find(third) is None
    library.play(wanted)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()} == kept
    alone, found = played(tmp_path), library.find(wanted[0])
    assert found is not None
    assert found.result is not None
    assert alone.result is not None
    assert found.result.weights_sha256 == alone.result.weights_sha256


def test_a_run_that_diverges_is_kept_and_stops_no_other(tmp_path: Path) -> None:
    """With steps of a thousand weights overflow in the first round; evaluated in the second, it is found out there."""
    library = Library(tmp_path / "kept", tmp_path / "work", jobs=1)
    wild, tame = settings(lr=1e3, eval_every=2, method="fedavg"), settings(seed=1)
    with pytest.raises(DivergedError, match="diverged"):
        played(tmp_path, lr=1e3, eval_every=2, method="fedavg")
    library.play([wild, tame])
    assert library.missing([wild, tame]) == []
    lost, whole = library.find(wild), library.find(tame)
    assert lost is not None
    assert whole is not None
    assert (lost.diverged, whole.diverged) == (True, False)
    assert [step.round for step in lost.rounds] == [1]
    assert lost.result is not None
    # What is left of it predicts nothing: the accuracy of a guess.
    assert (lost.result.stopped, lost.result.accuracy, lost.result.rounds) == ("diverged", 0.1, 1)
    assert final(lost) == 0.1
    assert reaching(lost, 0.05) is None
    assert not any((tmp_path / "work").iterdir())


@pytest.mark.parametrize("method", ["fedgen", "comet", "scaffold"])
def test_whatever_a_method_reports_when_it_diverges_can_be_read_back(method: str, tmp_path: Path) -> None:
    """FedGen's loss of the generator, say, is no number any more, rounds before anything is evaluated."""
    wild = api.settings_of({**TINY, "method": method, "lr": 1e3, "rounds": 6, "eval_every": 6})
    run = api.start(api.request_of(wild), tmp_path / "run", keep_diverged=True)
    assert run.result is not None
    assert run.result.rounds == len(run.rounds)
    assert run.result.accuracy is not None
    assert run.result.accuracy < 0.5


def test_answers_that_are_not_finite_are_a_divergence() -> None:
    points = np.array([[0.1, 0.9], [np.nan, 0.2]])
    with pytest.raises(DivergedError, match="answers"):
        clustered(points, 2, 1, np.random.default_rng(0))


def test_an_unfinished_run_is_continued(tmp_path: Path) -> None:
    chosen = settings(rounds=4)
    folder = tmp_path / "work" / name_of(chosen)

    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.start(api.request_of(chosen), folder, on_round=stop)
    library = Library(tmp_path / "kept", tmp_path / "work", jobs=1)
    library.play([chosen])
    found, whole = library.find(chosen), played(tmp_path, rounds=4)
    assert found is not None
    assert found.result is not None
    assert whole.result is not None
    assert found.result.weights_sha256 == whole.result.weights_sha256


@pytest.mark.parametrize("method", ["fedpmt", "fedavg"])
@pytest.mark.parametrize("change", [{"deadline": 60.0}, {"mode": "exact"}, {"full_seconds": 3.0}])
def test_another_clock_gives_the_record_that_training_again_would(
    method: str, change: dict[str, Any], tmp_path: Path
) -> None:
    old = played(tmp_path, method=method)
    new = played(tmp_path, method=method, **change)
    stamped = api.restamp(old, settings(method=method, **change))
    assert stamped is not None
    details = {"score_by_level", "score_by_class"}
    for mine, own in zip(stamped.rounds, new.rounds, strict=True):
        assert mine.model_dump(exclude=details) == own.model_dump(exclude=details)
    assert stamped.result is not None
    assert new.result is not None
    assert stamped.result.model_dump(exclude={"run"}) == new.result.model_dump(exclude={"run"})


def test_a_clock_under_which_others_arrive_needs_training(tmp_path: Path) -> None:
    old = played(tmp_path, method="fedavg")
    assert api.restamp(old, settings(method="fedavg", deadline=25.0)) is None


LONG = """
import sys
from pathlib import Path
from reproduction.library import Library
from fedpmt.settings import resolve

if __name__ == "__main__":
    given = {"devices": 8, "samples": 12, "cohort": 4, "rounds": 100000, "eval_every": 100000}
    Library(Path(sys.argv[1]) / "kept", Path(sys.argv[1]) / "work", 1).play([resolve(given)])
"""


def test_a_killed_batch_of_runs_leaves_nobody_playing(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(LONG, encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": paths}
    )

    def played_rounds() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob("work/*/rounds.jsonl"))

    try:
        deadline = time.monotonic() + 60
        while not played_rounds() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert played_rounds()
    finally:
        parent.kill()
        parent.wait()
    time.sleep(1.5)
    stopped = played_rounds()
    time.sleep(1.5)
    assert played_rounds() == stopped
