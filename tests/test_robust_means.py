"""Robust means: exact values, and federations in which two of ten devices lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fedpmt import api
from fedpmt.aggregation import CoverageMean, make_mean
from fedpmt.methods.averaging import Averaged
from fedpmt.methods.base import Fold, Server, Step
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.methods.fjord import FjORD
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.parts.part import WHOLE, Indices, Part, Selection
from fedpmt.settings import parse_mean
from fedpmt.testing import ON_A_BENCH, check_method
from fedpmt.training.messages import UPDATE
from fedpmt.types import DivergedError, SettingError

if TYPE_CHECKING:
    from fedpmt.aggregation import Rule
    from fedpmt.methods.base import Round
    from fedpmt.training.messages import Reply

ROBUST = ("median", "trimmed:0.2", "clipped:1")


def folded(mean: CoverageMean, *replies: tuple[Selection, list[float]], weight: float = 1.0) -> CoverageMean:
    for selection, values in replies:
        trained = {"w": selection}
        mean.add(Part("global", trained, trained, "some"), {"w": torch.tensor(values)}, weight)
    return mean


def some(*kept: int) -> Indices:
    return Indices((np.array(kept),))


COLUMNS = [[1.0, -4.0], [2.0, 0.5], [3.0, 1.0], [4.0, 1.5], [100.0, 2.0]]
"""Five devices, two entries; the last value of one and the first of the other are far off."""


@pytest.mark.parametrize(
    ("mean", "devices", "expected"),
    [
        ("plain", 5, [22.0, 0.2]),
        ("median", 5, [3.0, 1.0]),
        ("median", 4, [2.5, 0.75]),  # of an even number, the mean of the two in the middle
        ("median", 2, [1.5, -1.75]),
        ("median", 1, [1.0, -4.0]),
        ("trimmed:0.2", 5, [3.0, 1.0]),  # (2 + 3 + 4) / 3, (0.5 + 1 + 1.5) / 3
        ("trimmed:0.2", 4, [2.5, -0.25]),  # floor(0.8) = 0 are cut
        ("trimmed:1/4", 4, [2.5, 0.75]),
        ("trimmed:0.49", 5, [3.0, 1.0]),
    ],
)
def test_values_by_hand(mean: str, devices: int, expected: list[float]) -> None:
    replies = [(WHOLE, column) for column in COLUMNS[:devices]]
    found = folded(make_mean({"w": torch.zeros(2)}, "overlap", mean), *replies).changes()["w"]
    assert found[0].tolist() == pytest.approx(expected)
    assert found[1] is None
    backwards = folded(make_mean({"w": torch.zeros(2)}, "overlap", mean), *reversed(replies)).result()["w"]
    assert backwards.tolist() == pytest.approx(expected)


def test_a_clipped_update_keeps_its_direction() -> None:
    """‖(6, 8)‖ = 10 is scaled to 5, ‖(0, 1)‖ stays; the mean by weights of (3, 4) and (0, 1)."""
    mean = make_mean({"w": torch.zeros(2)}, "overlap", "clipped:5")
    folded(mean, (WHOLE, [6.0, 8.0]), weight=3.0)
    assert folded(mean, (WHOLE, [0.0, 1.0])).result()["w"].tolist() == pytest.approx([2.25, 3.25])


def test_each_entry_is_over_its_own_trainers() -> None:
    """And one that nobody trained keeps its bits: entry 0 has values 1, 2, 9, entry 1 has 4, entry 2 has none."""
    weights = {"w": torch.tensor([10.0, 20.0, 3e-41]), "idle": torch.ones(1)}
    mean = make_mean(weights, "overlap", "median")
    folded(mean, (some(0), [9.0]), (some(0, 1), [1.0, 4.0]), (some(0), [2.0]))
    change, covered = mean.changes()["w"]
    assert change.tolist() == [2.0, 4.0, 0.0]
    assert covered is not None
    assert covered.tolist() == [True, True, False]
    after = mean.result()
    assert after["idle"] is weights["idle"]
    assert torch.equal(after["w"].view(torch.int32)[2:], weights["w"].view(torch.int32)[2:])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("overlap", [12.0, 24.0, 30.0]),
        ("fill", [12.0, 20.0 + 4 / 3, 30.0]),  # one device of three
        ("zero", [12.0, 24.0 / 3, 0.0]),  # two of three count as zero, and all of them
    ],
)
def test_rules_hold_for_robust_means(rule: Rule, expected: list[float]) -> None:
    mean = make_mean({"w": torch.tensor([10.0, 20.0, 30.0])}, rule, "median")
    folded(mean, (some(0), [9.0]), (some(0, 1), [1.0, 4.0]), (some(0), [2.0]))
    assert mean.result()["w"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rule", ["overlap", "fill", "zero"])
def test_without_outliers_to_cut_a_robust_mean_is_the_mean(rule: Rule) -> None:
    """Blocks of a large tensor, too; no share of nine devices is cut at 1/10, and no update is as long as the limit."""
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.rand(400, 400, generator=generator)}
    rows = [np.arange(start, 400) for start in range(0, 90, 10)]
    means = [make_mean(weights, rule, kind) for kind in ("plain", "trimmed:0.1", "clipped:1e6")]
    for kept in rows:
        update = {"w": torch.randn(len(kept), 400, generator=generator)}
        trained: dict[str, Selection] = {"w": Indices((kept, None))}
        for mean in means:
            mean.add(Part("global", trained, trained, "some"), update, 5)
    plain, trimmed, clipped = (mean.result()["w"] for mean in means)
    torch.testing.assert_close(trimmed, plain)
    assert torch.equal(clipped, plain)


@pytest.mark.parametrize("mean", ROBUST)
@pytest.mark.parametrize("kind", [FedPMT, HeteroFL, FjORD], ids=lambda kind: kind.__name__)
def test_methods_with_a_robust_mean_keep_the_contract(kind: Any, mean: str) -> None:
    check_method(kind(mean=mean), checks=ON_A_BENCH)


LIARS = (0, 1)
LIMIT = 10.0
"""Devices refuse nothing here; a deployment refuses updates longer than this many times the model."""

FLEET: dict[str, Any] = {
    "task": "fcnn-mnist", "devices": 10, "cohort": 10, "samples": 80, "batch": 10, "rounds": 9, "eval_every": 9,
    "epochs": 2, "lr": 0.1, "levels": "1/2,1",
}  # fmt: skip


class Poisoned(Fold[Averaged]):
    """Two devices multiply their update by a factor, as far as a deployment would accept it."""

    def __init__(self, fold: Fold[Averaged], state: Averaged, factor: float) -> None:
        self._fold, self._factor = fold, factor
        self._limit = LIMIT * max(1.0, norm(state.tensors))

    def add(self, reply: Reply) -> None:
        if reply.device in LIARS:
            most = self._limit / norm(reply.update)
            factor = min(most, max(-most, self._factor))
            false = {name: factor * change for name, change in reply.update.items()}
            reply = replace(reply, tensors={UPDATE: false})
        self._fold.add(reply)

    def finish(self, server: Server) -> Step[Averaged]:
        return self._fold.finish(server)


def norm(tensors: Any) -> float:
    return float(torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).norm())


@dataclass(frozen=True)
class LiedToFedAvg(FedAvg):
    factor: float = 1.0

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Poisoned(super().fold(state, round), state, self.factor)


@dataclass(frozen=True)
class LiedToFedPMT(FedPMT):
    factor: float = 1.0

    def fold(self, state: Averaged, round: Round) -> Fold[Averaged]:
        return Poisoned(super().fold(state, round), state, self.factor)


def accuracy(method: Any) -> float:
    """At the end of a run; 0 where the weights have left the finite numbers before."""
    try:
        result = api.run(method, **FLEET).result
    except DivergedError:
        return 0.0
    assert result is not None
    assert result.accuracy is not None
    return result.accuracy


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        pytest.param(LiedToFedAvg, -20.0, id="fedavg-flipped", marks=pytest.mark.slow),
        pytest.param(LiedToFedPMT, -20.0, id="fedpmt-flipped"),
        pytest.param(LiedToFedPMT, 50.0, id="fedpmt-scaled", marks=pytest.mark.slow),
    ],
)
def test_two_liars_of_ten_break_the_plain_mean_and_no_robust_one(kind: Any, factor: float) -> None:
    honest = accuracy(kind())
    assert honest > 0.75
    found = {mean: accuracy(kind(factor=factor, mean=mean)) for mean in ("plain", *ROBUST)}
    assert found.pop("plain") < 0.2, found
    assert min(found.values()) > 0.5, found


def test_a_keyword_and_the_setting_are_the_same_run_and_the_default_has_its_bits() -> None:
    settings: dict[str, Any] = {**FLEET, "rounds": 2}
    runs = [
        api.run(FedPMT(mean="trimmed:0.2"), **settings),
        api.run("fedpmt", mean="trimmed:0.2", **settings),
        api.run("fedpmt", mean="plain", **settings),
        api.run("fedpmt", **settings),
    ]
    value, named, plain, usual = (run.result.weights_sha256 for run in runs if run.result is not None)
    assert value == named != plain == usual
    assert runs[0].settings == runs[1].settings


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("medain", "did you mean 'median'"),
        ("trimmed", "allowed: clipped:NORM, median, plain, trimmed:SHARE"),
        ("trimmed:0.5", "a share below 1/2 must be left"),
        ("trimmed:x", "must be a number or a fraction, more than 0"),
        ("clipped:0", "must be a number or a fraction, more than 0"),
        ("median:2", "mean = 'median:2' is unknown"),
    ],
)
def test_other_means_are_refused(text: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        parse_mean(text)
    with pytest.raises(SettingError, match=why):
        api.settings_of({"mean": text})


@pytest.mark.parametrize("method", ["scaffold", "feddf", "prunefl", "fedgen"])
def test_methods_that_do_more_than_average_parts_refuse_it(method: str) -> None:
    with pytest.raises(SettingError, match=f"^mean = 'median' cannot be combined with {method}: [^\n]*$"):
        api.make_request(method, {"mean": "median"})


def test_a_robust_mean_of_normalised_replies_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"^mean = 'median' cannot be combined with fedpmt.normalise = steps$"
    ):
        api.make_request(FedPMT(normalise="steps"), {"mean": "median"})


def test_a_value_and_a_setting_that_disagree_are_refused() -> None:
    with pytest.raises(SettingError, match="was made with 'median'"):
        api.make_request(FedAvg(mean="median"), {"mean": "trimmed:0.2"})
