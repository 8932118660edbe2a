"""What `fedpmt.run` and `fedpmt.compare` return, and what they leave on the disk."""

from __future__ import annotations

import gc
import pickle
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import nn

import fedpmt
from fedpmt import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TINY: dict[str, Any] = {"rounds": 3, "devices": 5, "samples": 20, "cohort": 5, "batch": 10}
RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=300)
INPUTS = (RNG.normal(size=(300, 6)) + 2 * np.eye(6)[LABELS]).astype(np.float32)
TRAIN, TEST = (INPUTS[:200], LABELS[:200]), (INPUTS[200:], LABELS[200:])


def net() -> nn.Sequential:
    """A classifier on a base that is frozen everywhere, with a norm that counts."""
    torch.manual_seed(0)
    base = nn.Linear(6, 16).requires_grad_(False)
    return nn.Sequential(base, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


@pytest.fixture(scope="module")
def runs() -> fedpmt.Runs:
    return fedpmt.compare(["fedpmt", "fedavg"], seeds=[0, 1], **TINY)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_frame_has_a_row_per_round(runs: fedpmt.Runs) -> None:
    frame = runs[0].frame()
    assert list(frame["round"]) == [1, 2, 3]
    assert list(frame["accuracy"]) == [step.score for step in runs[0].rounds]
    every = runs.frame()
    assert len(every) == 12
    assert every.groupby(["method", "seed"]).size().to_dict() == {
        (method, seed): 3 for method in ("fedpmt", "fedavg") for seed in ("0", "1")
    }


def test_without_pandas_one_line_says_so(runs: fedpmt.Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SettingError, match="pip install pandas"):
        runs.frame()


@pytest.fixture
def pyplot() -> Iterator[Any]:
    with mpl.rc_context({"backend": "agg"}):
        from matplotlib import pyplot as plt

        plt.switch_backend("agg")
        yield plt
        plt.close("all")


def test_a_plot_shows_the_score_against_time_and_rounds(runs: fedpmt.Runs, pyplot: Any) -> None:
    against_time, against_rounds = runs[0].plot()
    [line] = against_rounds.lines
    assert list(line.get_xdata()) == [1, 2, 3]
    assert list(line.get_ydata()) == [step.score for step in runs[0].rounds]
    assert "time" in against_time.get_xlabel()
    assert against_rounds.figure is pyplot.gcf()
    assert len(runs.plot()[0].lines) == 2  # one for each method, the mean of its seeds


def test_what_it_looks_like(runs: fedpmt.Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = runs[0]
    assert run.result is not None
    score = f"{run.result.score:.1%}"
    assert repr(run).startswith(f"<Run fedpmt on embedded: accuracy {score}, rounds 3, virtual time ")
    assert "\n" not in str(run)
    assert repr(runs).count("\n") == 3
    html = run._repr_html_()
    assert html.count("<tr>") == 2
    assert score in html
    assert runs._repr_html_().count("<tr>") == 5
    unfinished = run.model_copy(update={"result": None})
    assert "not finished" in repr(unfinished)
    assert "not finished" in unfinished._repr_html_()


def test_the_loaded_model_scores_what_is_recorded() -> None:
    run = fedpmt.run(model=net(), train=TRAIN, test=TEST, **{**TINY, "samples": 40, "lr": 0.1})
    fresh = net()
    with torch.no_grad():
        fresh.get_parameter("0.weight").zero_()  # the base is part of what is saved
    module = run.model(fresh)
    assert module is fresh
    assert not module.training
    with torch.no_grad():
        right = module(torch.from_numpy(TEST[0])).argmax(1).numpy() == TEST[1]
    assert run.result is not None
    assert run.result.score == pytest.approx(right.mean())
    # As a wrapped module, too.
    run.model(nn.DataParallel(net()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: net().append(nn.Linear(3, 3)), 'Missing key.*"4.weight"'),
        (lambda: net()[:3], 'Unexpected key.*"3.weight"'),
        (lambda: nn.Sequential(*list(net())[:3], nn.Linear(16, 4)), "size mismatch for 3.weight"),
    ],
)
def test_another_module_is_refused_in_one_line(change: Any, words: str) -> None:
    run = fedpmt.run(model=net(), train=TRAIN, test=TEST, **{**TINY, "rounds": 1, "samples": 40})
    with pytest.raises(SettingError, match=words) as caught:
        run.model(change())
    assert "\n" not in str(caught.value)


def test_a_method_without_a_global_model_has_none_to_load() -> None:
    run = fedpmt.run("fedgkt", task="cnn-mnist", **{**TINY, "rounds": 1})
    with pytest.raises(SettingError, match="fedgkt has no global model"):
        run.model(net())


def test_a_temporary_folder_lasts_as_long_as_somebody_holds_the_run(scratch: Path) -> None:
    run = fedpmt.run("scaffold", **TINY)
    copied, pickled = run.model_copy(), pickle.loads(pickle.dumps(run))
    assert run == fedpmt.read_run(run.folder).held_by(run._scratch)
    del run
    gc.collect()
    assert (copied.folder / "model.safetensors").exists()
    assert copied.rounds == pickled.rounds
    del copied
    gc.collect()
    assert list(scratch.rglob("*")) == []
    assert fedpmt.run("fedavg", **TINY).result is not None
    first = fedpmt.compare(["fedavg", "fedpmt"], **TINY)[0]
    gc.collect()
    assert first.folder.exists()
    del first
    gc.collect()
    assert sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file()) == 0


def test_what_fails_leaves_nothing_and_what_is_interrupted_can_be_continued(scratch: Path) -> None:
    with pytest.raises(SettingError):
        fedpmt.run(**{**TINY, "samples": 10**6})
    gc.collect()
    assert list(scratch.iterdir()) == []

    def interrupt(record: fedpmt.RoundEnd) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fedpmt.run(on_round=interrupt, **TINY)
    [folder] = [path.parent for path in scratch.rglob("config.json")]
    assert caught.value.__notes__ == [f"continue with the same arguments and out='{folder}', resume=True"]
    gc.collect()
    rest: list[int] = []
    resumed = fedpmt.run(out=folder, resume=True, on_round=[lambda record: rest.append(record.round)], **TINY)
    assert rest == [3]
    assert resumed.rounds == fedpmt.run(**TINY).rounds
