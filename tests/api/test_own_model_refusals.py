"""What cannot work with a user's model is refused in one line before anything is trained; the rest is honest."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedpmt
from fedpmt.types import SettingError

FAST: dict[str, Any] = {"devices": 4, "samples": 21, "cohort": 4, "batch": 10, "rounds": 1, "levels": "1/2,1"}


class Named(nn.Module):
    """Returns a dict of a kind that is not made from a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return defaultdict(Tensor, hidden=torch.relu(self.linear(x)))


class Branches(nn.Module):
    """A dict between its layers, and a tensor that may be changed after it was used."""

    def __init__(self, *, spoil: bool = False) -> None:
        super().__init__()
        self.named, self.last, self.spoil = Named(), nn.Linear(6, 3), spoil

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.named(x)["hidden"]
        scores = self.last(hidden)
        return scores + self.last(hidden.add_(1)) if self.spoil else scores  # type: ignore[no-any-return]


class Listed(nn.Module):
    """Bare parameters, one by one and in a list; the head is made first, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.ones(6, 3))
        self.unused = nn.Parameter(torch.ones(1))
        self.weights = nn.ParameterList(torch.ones(size, 6) for size in (4, 6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x @ self.head


def net(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), *extra, nn.Linear(6, 3))


def pair(count: int, seed: int = 0, low: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 4)).astype(np.float32), rng.integers(low, low + 3, size=count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": pair(100, low=1)}, "labels run from 1 to 3"),
        ({"train": pair(100, low=-1)}, "labels run from -1 to 1"),
        (
            {
                "train": (pair(100)[0], np.ones(100, np.float32)),
                "test": (pair(30)[0], np.ones(30, np.float32)),
            },
            "model: evaluating two samples fails",
        ),
        ({"model": nn.Sequential(nn.Linear(9, 3))}, "model: evaluating two samples fails"),
        ({"model": net(nn.BatchNorm1d(6))}, "training on a batch of 1 fails"),
        (
            {"loss": lambda outputs, targets: outputs.sum(1)},
            r"loss must give the mean over a batch as a tensor of shape \(\)",
        ),
        ({"loss": "mse"}, r"loss must be a function .*objective=\"regression\""),
        ({"metrics": ["f1"]}, r"'f1' is unknown; did you mean 'macro-f1'\? \(allowed: accuracy, macro-f1"),
        ({"model": Branches}, r"got the class Branches; give Branches\(\)"),
        ({"model": 5}, "model must be an nn.Module or package.module:function"),
        ({"layers": ["0", None]}, r"layers must be paths, or lists of paths \(got None\)"),
        ({"layers": [["0"], []]}, r"layers must be paths, or lists of paths \(got \[\]\)"),
        ({"layers": 5}, r"layers must be a list of paths, or of lists of paths \(got 5\)"),
        ({"layers": "0,,2"}, r"a layer must have a path"),
        ({"model": Branches(spoil=True)}, "a training step on two samples fails: RuntimeError: .*inplace"),
    ],
)
def test_what_cannot_work_is_refused_at_once(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments = {
        "model": net(),
        "train": pair(100),
        "test": pair(30, 1),
        "out": tmp_path / "a" / "run",
        **FAST,
        **changes,
    }
    with pytest.raises(SettingError, match=message) as caught:
        fedpmt.run("fedpmt", **arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_an_example_is_one_array_or_names_its_arrays() -> None:
    inputs = torch.zeros(2, 4)
    with pytest.raises(SettingError, match=r"example must be one array, or a dict .*got a tuple of 1"):
        fedpmt.layers(net(), (inputs,))
    with pytest.raises(SettingError, match="got the class Branches"):
        fedpmt.layers(Branches, inputs)  # type: ignore[arg-type]


def test_submodules_may_return_any_kind_of_dict() -> None:
    run = fedpmt.run("fedpmt", model=Branches(), train=pair(100), test=pair(30, 1), **FAST)
    assert list(run.rounds[0].layers) == ["named", "last"]


def test_a_model_of_bare_parameters_is_told_how_to_name_its_layers(caplog: pytest.LogCaptureFixture) -> None:
    inputs = pair(2)[0]
    plan = fedpmt.plan(Listed(), inputs)
    assert {row.trains_from for row in plan.devices} == {"Listed"}
    (record,) = caplog.records
    advice = re.search(r'layers="(.*)"', record.getMessage())
    assert advice is not None
    assert advice[1] == "weights.0,weights.1,head"
    assert [row.name for row in fedpmt.layers(Listed(), inputs, advice[1]).layers] == advice[1].split(",")


def test_a_test_set_of_one_sample_or_without_a_class_will_do() -> None:
    run = fedpmt.run("fedpmt", model=net(), train=pair(100), test=pair(1), **FAST)
    assert run.rounds[0].accuracy in (0.0, 1.0)
    inputs, labels = pair(60, 1)
    seen = labels < 2
    run = fedpmt.run("fedpmt", model=net(), train=pair(100), test=(inputs[seen], labels[seen]), **FAST)
    accuracy, levels = run.rounds[0].accuracy, run.rounds[0].score_by_level
    by_class = run.rounds[0].score_by_class
    assert levels is not None
    assert by_class is not None
    assert accuracy is not None
    assert all(min(by_class.values()) <= level <= max(by_class.values()) for level in levels.values())


def test_the_users_module_keeps_its_mode_and_what_it_froze() -> None:
    module = net()
    module[0].requires_grad_(False)
    module.eval()
    run = fedpmt.run("fedavg", model=module, train=pair(100), test=pair(30, 1), **FAST)
    assert not module.training
    assert list(run.rounds[0].layers) == ["2"]
    assert run.result is not None
    after = load_file(Path(run.result.run) / "model.safetensors")
    before = module.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])


def test_functional_dropout_between_layers_is_not_lost() -> None:
    class Dropping(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.rate = nn.Linear(4, 6), nn.Linear(6, 3), rate

        def forward(self, x: Tensor) -> Tensor:
            return self.b(nn.functional.dropout(self.a(x), self.rate, self.training))  # type: ignore[no-any-return]

    found = set()
    for rate in (0.0, 0.9):
        run = fedpmt.run(
            "fedavg", model=Dropping(rate), train=pair(100), test=pair(30, 1), layers=["a", "b"], **FAST
        )
        assert run.result is not None
        found.add(run.result.weights_sha256)
    assert len(found) == 2


def test_a_run_is_resumed_only_with_its_own_model_and_arrays(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"train": pair(100), "test": pair(30, 1), "out": tmp_path / "run", **FAST}
    fedpmt.run("fedpmt", model=net(), **arguments)
    fedpmt.run("fedpmt", model=net(), resume=True, **arguments)
    for change in ({"model": nn.Sequential(nn.Linear(4, 3))}, {"model": net(), "train": pair(100, 9)}):
        with pytest.raises(SettingError, match="digest"):
            fedpmt.run("fedpmt", resume=True, **{**arguments, **change})


def test_a_fleet_file_that_changed_is_noticed_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("speed,count\n1/2,3\n1,2\n")
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"rounds": 1, "samples": 20, "cohort": 5, "out": tmp_path / "run"}
    fedpmt.run("fedpmt", fleet="fleet.csv", **arguments)
    monkeypatch.chdir("/")
    assert fedpmt.run("fedpmt", fleet=fleet, resume=True, **arguments).result is not None
    fleet.write_text("speed,count\n1/10,3\n1,2\n")
    with pytest.raises(SettingError, match="digest"):
        fedpmt.run("fedpmt", fleet=fleet, resume=True, **arguments)


def test_a_method_value_and_keywords_agree_or_are_refused() -> None:
    tiny: dict[str, Any] = {"rounds": 1, "devices": 5, "samples": 20, "cohort": 5}
    run = fedpmt.run(fedpmt.FedPMT(), depths=1, **tiny)
    assert {device.part for device in run.rounds[0].devices} == {"depth 1"}
    assert fedpmt.run(fedpmt.FedPMT(), splitting="device", **tiny).settings["splitting"] == "device"
    by_value, by_name = fedpmt.run(fedpmt.FedPMT(), **tiny), fedpmt.run("fedpmt", **tiny)
    assert by_value.result is not None
    assert by_name.result is not None
    assert by_value.result.weights_sha256 == by_name.result.weights_sha256
    with pytest.raises(SettingError, match="FedPMT was made with '2'"):
        fedpmt.run(fedpmt.FedPMT(depths=2), depths=3, **tiny)
    with pytest.raises(SettingError, match="feddrop needs speeds"):
        fedpmt.run("feddrop", splitting="device", **tiny)


def test_feddrop_keeps_to_what_fedpmt_costs_over_several_epochs() -> None:
    """The frozen prefix is run once per round: the budget is that of the round, not of its first epoch."""
    settings: dict[str, Any] = {"rounds": 1, "epochs": 3, "devices": 5, "samples": 20, "cohort": 5}
    slowest = [
        max(one.seconds for one in fedpmt.run(name, **settings).rounds[0].devices)
        for name in ("fedpmt", "feddrop")
    ]
    assert slowest[1] == pytest.approx(slowest[0], rel=0.03)


def test_a_device_without_the_memory_takes_no_part(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("speed,count,memory_mib\n1/2,3,0.1\n1,2,\n")
    run = fedpmt.run("fedavg", fleet=fleet, rounds=1, samples=20, cohort=5)
    outcomes = {(device.speed, device.outcome) for device in run.rounds[0].devices}
    assert outcomes == {(0.5, "failed"), (1.0, "arrived")}
    assert run.rounds[0].bytes_down == 2 * run.rounds[0].devices[-1].bytes_down
