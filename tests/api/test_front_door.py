"""The front door: one set of keywords, methods and optimizers by name or as values, what comes back and is written."""

from __future__ import annotations

import gc
import pickle
import sys
import tempfile
import typing
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import nn

import fedpmt
import fedpmt.methods
from fedpmt import api, records
from fedpmt.cli.main import program
from fedpmt.methods.registry import METHODS, fields, method_class
from fedpmt.settings import RunSettings, Settings
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


TINY: dict[str, Any] = {"rounds": 2, "devices": 6, "samples": 10, "cohort": 3, "batch": 5, "eval_every": 2}


def test_an_editor_completes_every_setting() -> None:
    keywords = set(typing.get_type_hints(RunSettings, localns={"Callable": typing.Callable, "Mapping": dict}))
    assert keywords == set(Settings.model_fields) - {"method", "digest", "model", "layers", "clients"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_name_and_its_value_are_the_same_run(name: str) -> None:
    """No field of a method is taken for a setting of the run that happens to have its name."""
    by_name, by_value = api.make_request(name, {}), api.make_request(method_class(name)(), {})
    assert by_name.method == by_value.method
    assert by_name.settings == by_value.settings
    assert not set(fields(name)) & set(Settings.model_fields)


@pytest.mark.parametrize("module", [fedpmt, fedpmt.methods])
def test_every_exported_name_is_there(module: Any) -> None:
    for name in module.__all__:
        assert name.isupper() or getattr(module, name).__module__.startswith("fedpmt.")
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_all_methods_are_exported() -> None:
    assert {attribute for _, attribute in METHODS.values()} <= set(fedpmt.__all__)


def test_a_server_optimizer_is_the_same_in_python_and_on_the_command_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = fedpmt.run(fedpmt.FedPMT(server=fedpmt.Momentum(0.8, lr=0.3)), out=tmp_path / "python", **TINY)
    flags = [text for key, value in TINY.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    words = ["--server-optimizer", "momentum", "--server-momentum", "0.8", "--server-lr", "0.3"]
    assert program(["run", *flags, *words, "--out", str(tmp_path / "typed"), "--json"]) == 0
    capsys.readouterr()
    typed = fedpmt.read_run(tmp_path / "typed")
    assert typed.result is not None
    assert given.result is not None
    assert typed.result.weights_sha256 == given.result.weights_sha256
    assert typed.settings == given.settings
    plain = fedpmt.run("fedpmt", **TINY).result
    assert plain is not None
    assert plain.weights_sha256 != given.result.weights_sha256


def test_optimizers_and_rates_of_ones_own() -> None:
    rates: list[int] = []

    def rate(round_index: int) -> float:
        rates.append(round_index)
        return 0.1 / (1 + round_index)

    own = fedpmt.run("fedpmt", optimizer=torch.optim.SGD, schedule=rate, **TINY)
    assert [record.learning_rate for record in own.rounds] == [0.1, 0.05]
    assert set(rates) == {0, 1}
    assert (own.settings["optimizer"], own.settings["schedule"]) == ("custom", "custom")
    same = fedpmt.run("fedpmt", lr=0.1, schedule="inverse:1e-9", executor="plain", **TINY)
    assert own.result is not None
    assert same.result is not None
    assert own.result.path == "autograd"
    # torch's SGD takes the steps of ours, to the bit, by the same passes.
    assert own.result.score == same.result.score


REFUSED: dict[str, tuple[str, str]] = {
    "no server step": ("--method prunefl --server-optimizer adam", "server-optimizer = 'adam'"),
    "no optimizer": ("--server-lr 0.1", "server-lr = 0.1 does nothing with server-optimizer = 'none'"),
    "not its setting": ("--server-optimizer sgd --server-momentum 0.5", "it belongs to momentum, adam, yogi"),
    "Option II": (
        "--method scaffold --set option=II --optimizer adam",
        "optimizer = 'adam' cannot be combined",
    ),
    "its own Adam": (
        "--method fedgkt --optimizer adamw",
        "optimizer = 'adamw' cannot be combined with fedgkt",
    ),
    "two momenta": ("--optimizer adam --momentum 0.9", "momentum = 0.9 is SGD's"),
    "Nesterov alone": ("--nesterov true", "nesterov = 'true' needs"),
    "a word for a function": ("--optimizer custom", "only Python can give"),
    "schedule": ("--schedule cosine:x", "schedule = 'cosine:x' must be"),
    "clip": ("--clip-norm 0", "clip-norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined_is_refused_in_one_line(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, reason = REFUSED[case]
    assert program(["run", *words.split(), "--rounds", "1"]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert told.count("\n") == 1


def test_a_value_and_a_setting_that_disagree_are_refused() -> None:
    with pytest.raises(SettingError, match="drop server_optimizer"):
        api.make_request(fedpmt.FedAvg(server=fedpmt.SGD(0.5)), {"server_optimizer": "adam"})
    with pytest.raises(SettingError, match="was made with '2'"):
        api.make_request(fedpmt.FedPMT(depths=2), {"depths": 3})


RETURNED: dict[str, Any] = {"rounds": 3, "devices": 5, "samples": 20, "cohort": 5, "batch": 10}
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
    return fedpmt.compare(["fedpmt", "fedavg"], seeds=[0, 1], **RETURNED)


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
    run = fedpmt.run(model=net(), train=TRAIN, test=TEST, **{**RETURNED, "samples": 40, "lr": 0.1})
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
    run = fedpmt.run(model=net(), train=TRAIN, test=TEST, **{**RETURNED, "rounds": 1, "samples": 40})
    with pytest.raises(SettingError, match=words) as caught:
        run.model(change())
    assert "\n" not in str(caught.value)


def test_a_method_without_a_global_model_has_none_to_load() -> None:
    run = fedpmt.run("fedgkt", task="cnn-mnist", **{**RETURNED, "rounds": 1})
    with pytest.raises(SettingError, match="fedgkt has no global model"):
        run.model(net())


def test_a_temporary_folder_lasts_as_long_as_somebody_holds_the_run(scratch: Path) -> None:
    run = fedpmt.run("scaffold", **RETURNED)
    copied, pickled = run.model_copy(), pickle.loads(pickle.dumps(run))
    assert run == fedpmt.read_run(run.folder).held_by(run._scratch)
    del run
    gc.collect()
    assert (copied.folder / "model.safetensors").exists()
    assert copied.rounds == pickled.rounds
    del copied
    gc.collect()
    assert list(scratch.rglob("*")) == []
    assert fedpmt.run("fedavg", **RETURNED).result is not None
    first = fedpmt.compare(["fedavg", "fedpmt"], **RETURNED)[0]
    gc.collect()
    assert first.folder.exists()
    del first
    gc.collect()
    assert sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file()) == 0


def test_what_fails_leaves_nothing_and_what_is_interrupted_can_be_continued(scratch: Path) -> None:
    with pytest.raises(SettingError):
        fedpmt.run(**{**RETURNED, "samples": 10**6})
    gc.collect()
    assert list(scratch.iterdir()) == []

    def interrupt(record: fedpmt.RoundEnd) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fedpmt.run(on_round=interrupt, **RETURNED)
    [folder] = [path.parent for path in scratch.rglob("config.json")]
    assert caught.value.__notes__ == [f"continue with the same arguments and out='{folder}', resume=True"]
    gc.collect()
    rest: list[int] = []
    resumed = fedpmt.run(
        out=folder, resume=True, on_round=[lambda record: rest.append(record.round)], **RETURNED
    )
    assert rest == [3]
    assert resumed.rounds == fedpmt.run(**RETURNED).rounds


def test_a_class_stands_for_its_defaults_and_one_method_needs_no_list(tmp_path: Path) -> None:
    """As people write it first."""
    by_class, by_name = fedpmt.run(fedpmt.FedPMT, **TINY), fedpmt.run("fedpmt", **TINY)
    assert by_class.result is not None
    assert by_name.result is not None
    assert by_class.result.weights_sha256 == by_name.result.weights_sha256
    for methods in ("fedpmt", fedpmt.FedPMT, fedpmt.FedPMT(), (one for one in ["fedpmt"])):
        requests = api.compare_requests(methods, [0], TINY)
        assert [(name, request.method) for name, request in requests] == [
            ("fedpmt-seed0", api.make_request("fedpmt", TINY).method)
        ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fedpmt.compare("fedpmt", seeds=3, **TINY), "seeds must be a list, e.g. .* (got 3)"),
        (lambda: fedpmt.compare("fedpmt", seeds=[], **TINY), "at least one seed"),
        (lambda: fedpmt.compare("fedpmt", seeds=[1, 1], **TINY), "none twice"),
        (lambda: fedpmt.compare([], **TINY), "at least one method"),
        (lambda: fedpmt.run(3, **TINY), "method must be a name or a value such as fedpmt.FedPMT() (got 3)"),
        (lambda: fedpmt.run(nn.Linear, **TINY), "method must be a name or a value"),
        (lambda: fedpmt.run(on_round=3, **TINY), "on_round must be a function"),
        (lambda: fedpmt.run(digest="x", **TINY), "setting = 'digest' is unknown"),
        (lambda: fedpmt.run(dp_noise=1.0, **TINY), "dp-noise = 1.0 does nothing without dp-clip"),
        (lambda: fedpmt.run(dp_delta=1e-6, **TINY), "dp-delta = 1e-06 does nothing without dp-clip"),
    ],
)
def test_what_python_refuses_in_one_line(call: Any, words: str) -> None:
    """No TypeError from somewhere inside."""
    pattern = words.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(SettingError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_lists_are_settings_too_and_a_path_is_text(tmp_path: Path) -> None:
    """Levels as a list; the folder of a run as a text, in both of its readers."""
    run = fedpmt.run("fedavg", levels=[0.5, "3/4", 1], out=str(tmp_path / "run"), **TINY)
    assert run.settings["levels"] == "0.5,3/4,1"
    assert fedpmt.read_run(str(tmp_path / "run")).settings == run.settings
    assert records.read_run(str(tmp_path / "run")).settings == run.settings


def test_a_bare_linear_layer_is_a_model(caplog: pytest.LogCaptureFixture) -> None:
    """It has one layer only, which is said."""
    data = np.random.default_rng(0).random((60, 4), np.float32), np.arange(60) % 3
    run = fedpmt.run("fedpmt", model=nn.Linear(4, 3), train=data, test=data, **TINY)
    assert run.result is not None
    assert "only one layer was found in Linear" in caplog.text


def test_epsilon_is_part_of_what_a_run_shows() -> None:
    """And of its result; without privacy there is none."""
    run = fedpmt.run("fedavg", dp_clip=1.0, dp_noise=20.0, **TINY)
    assert run.result is not None
    assert run.result.epsilon == run.rounds[-1].metrics["epsilon"]
    assert f"epsilon {run.result.epsilon:.3g} at delta 1e-05" in repr(run)
    assert "epsilon" in run._repr_html_()
