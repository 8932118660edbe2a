"""Outputs of frozen layers that devices keep over rounds while these layers have hardly moved."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import fedpmt
from fedpmt.models.precision import Prefix
from fedpmt.simulation.prefixes import movement
from fedpmt.training import loop
from fedpmt.training.kept import KeptOutputs
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLASSES, WIDE = 4, 64
DEPTHS, SAMPLES = 3, 40


class Net(nn.Module):
    """Layers under a forward pass of its own, so that it is cut at run time."""

    def __init__(self, hidden: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, WIDE)
        self.hidden = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(hidden))
        self.last = nn.Linear(WIDE, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        values = torch.relu(self.first(inputs))
        for layer in self.hidden:
            values = torch.relu(layer(values))
        return self.last(values)  # type: ignore[no-any-return]


def chain(hidden: int = 1) -> nn.Module:
    """The same as a chain of layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(hidden))]
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.ReLU())), nn.Linear(WIDE, CLASSES))


def points() -> tuple[Tensor, Tensor]:
    labels = torch.arange(160) % CLASSES
    inputs = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
    inputs[torch.arange(160), labels] += 3
    return inputs, labels


GIVEN: dict[str, Any] = {
    "devices": 4, "cohort": 4, "samples": SAMPLES, "batch": 10, "rounds": 6, "lr": 0.1, "levels": "1/3,1/2,1",
    "depths": DEPTHS, "assign": "level", "workers": 1, "prefix": "cache",
}  # fmt: skip
play: Any = partial(fedpmt.run, "fedpmt", train=points(), test=points(), **GIVEN)


def digest(run: Any) -> str:
    return str(run.result.weights_sha256)


def operations(run: Any) -> list[dict[int, float]]:
    return [{one.device: one.operations for one in step.devices} for step in run.rounds]


def test_a_layer_has_moved_relative_to_its_norm() -> None:
    before = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "zero": torch.zeros(2)}
    after = {"w": torch.tensor([3.0, 0.3]), "b": torch.tensor([4.4]), "zero": torch.ones(2)}
    assert movement(before, after, ["w", "b"]) == pytest.approx(0.1)  # 0.5 of 5
    assert movement(before, before, ["w", "b", "zero"]) == 0
    assert movement(before, after, ["zero"]) == float("inf")


@pytest.mark.parametrize("executor", ["auto", "plain"])
@pytest.mark.parametrize("make", [Net, chain])
def test_without_tolerance_the_bits_are_those_of_every_round_anew(
    make: Callable[[], nn.Module], executor: str
) -> None:
    given = {"model": make(), "executor": executor}
    anew, exact = play(**given), play(**given, prefix_tolerance=0)
    assert digest(exact) == digest(anew)
    # All layers move in every round.
    assert operations(exact) == operations(anew)


def test_a_round_without_a_refresh_does_not_pay_for_the_frozen_layers() -> None:
    anew, kept = play(model=Net()), play(model=Net(), prefix_tolerance=1e9)
    first, *others = zip(operations(kept), operations(anew), strict=True)
    assert first[0] == first[1]
    forward = {1: 6 * WIDE + WIDE * WIDE, 2: 6 * WIDE, 3: 0}
    level = {one.device: one.level for one in kept.rounds[0].devices}
    for found, whole in others:
        saved = {device: whole[device] - found[device] for device in found}
        assert saved == {device: SAMPLES * forward[level[device]] for device in found}
    seconds = [step.round_seconds for step in kept.rounds]
    assert seconds[1] < seconds[0] == anew.rounds[1].round_seconds


def test_what_has_moved_too_far_is_made_again() -> None:
    """A tolerance between none and all: some rounds refresh, others do not; the same weights come out each time."""
    kept = play(model=Net(), prefix_tolerance=0.1)
    most = max(operations(kept)[0].values())
    weakest = [step[0] for step in operations(kept)]
    assert len(set(weakest)) == 2
    assert weakest[0] == max(weakest) < most
    assert digest(kept) not in {digest(play(model=Net())), digest(play(model=Net(), prefix_tolerance=1e9))}
    assert kept.result.score > 0.8


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_bits_do_not_depend_on_what_was_held(
    epochs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    again = partial(play, model=Net(), prefix_tolerance=0.1, epochs=epochs, failure=0.2)
    held = again(out=tmp_path / "whole")
    found = {"workers": digest(again(workers=2))}
    with monkeypatch.context() as patch:
        patch.setattr(KeptOutputs, "get", lambda self, device, compute, *made_of: compute())
        found["nothing held"] = digest(again())

    def stop(record: Any) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(out=tmp_path / "run", on_round=stop)
    resumed = again(out=tmp_path / "run", resume=True)
    found["resumed"] = digest(resumed)
    assert set(found.values()) == {digest(held)}
    assert resumed.rounds == held.rounds


def test_frozen_layers_run_when_they_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    keep = loop.keep

    def counted(prefix: Prefix, *rest: Any) -> Any:
        ran.append(prefix.cut)
        return keep(prefix, *rest)

    monkeypatch.setattr(loop, "keep", counted)
    play(model=Net(), prefix_tolerance=1e9, executor="plain")
    levels = [2, 1]  # layers before those that levels 1 and 2 train
    assert sorted(set(ran), reverse=True) == levels
    assert len(ran) <= GIVEN["devices"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefix": "recompute"}, "keeps no outputs"),
        ({"mode": "paper", "task": "cnn-mnist"}, "in every epoch"),
        ({"splitting": "device"}, "does not know"),
    ],
)
def test_where_nothing_can_be_kept_a_tolerance_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=f"prefix-tolerance = 0.1 is refused: .*{said}"):
        fedpmt.run("fedpmt", prefix_tolerance=0.1, **settings)


@pytest.mark.parametrize("make", [Net, chain])
def test_streamed_layers_learn_what_kept_ones_do(
    make: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[tuple[int, int]] = []
    run = Prefix.run

    def counted(block: Prefix, inputs: Tensor, *before: Any) -> Any:
        if len(inputs) == SAMPLES:  # prices are measured with fewer
            blocks.append((block.first, block.cut))
        return run(block, inputs, *before)

    monkeypatch.setattr(Prefix, "run", counted)
    again = partial(play, model=make(2), executor="plain", epochs=2, levels="1/4,1/3,1/2,1", depths=4)
    cached = again()
    assert set(blocks) == {(0, 1), (0, 2), (0, 3)}
    blocks.clear()
    streamed = again(prefix="streamed")
    assert set(blocks) == {(0, 1), (1, 2), (2, 3)}
    for one, other in zip(streamed.rounds[0].devices, cached.rounds[0].devices, strict=True):
        assert one.memory_bytes < other.memory_bytes or one.part == "depth 4"
    assert digest(streamed) == digest(cached)
    assert operations(streamed) == operations(cached)


def test_a_device_without_the_memory_for_the_model_takes_part_where_layers_are_streamed(
    tmp_path: Path,
) -> None:
    """Of fcnn-mnist depth 1 takes 2.3 MB at least; its largest layer's weights are 1.3 MB of that."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("name,speed,memory_mib\nboard,1,8\ntag,1/2,1.9\n")
    plans = {how: fedpmt.plan(fleet=fleet, prefix=how).devices for how in ("auto", "streamed")}
    fits = {how: {row.name: row.fits for row in rows} for how, rows in plans.items()}
    assert fits == {"auto": {"board": True, "tag": False}, "streamed": {"board": True, "tag": True}}
    given: dict[str, Any] = {"fleet": fleet, "devices": 2, "cohort": 2, "samples": 40, "rounds": 1}
    expected: dict[Any, set[str]] = {"auto": {"arrived", "failed"}, "streamed": {"arrived"}}
    for how, outcomes in expected.items():
        run: Any = fedpmt.run("fedpmt", prefix=how, **given)
        assert {one.outcome for one in run.rounds[0].devices} == outcomes
        assert all(
            one.memory_bytes <= 1.9 * 2**20
            for one in run.rounds[0].devices
            if one.speed < 1 and one.outcome == "arrived"
        )


@pytest.mark.parametrize("given", [{"prefix": "streamed"}, {"prefix_tolerance": 1e9}], ids=str)
def test_outputs_of_all_samples_are_paid_for_in_fewer_steps_too(given: dict[str, Any]) -> None:
    """A device that has time for one step of eight still runs its frozen layers on all samples, if it keeps that."""
    timed = {"levels": "1/9,1", "depths": 4, "assign": "deadline", "deadline": 10.0, "rounds": 1, "epochs": 2}
    run = play(model=Net(2), plan="traded", **{**timed, **given})
    slow = [one for one in run.rounds[0].devices if one.speed < 1]
    assert {one.part for one in slow} == {"depth 1, 1 of 8 steps"}
    frozen, last = 6 * WIDE + 2 * WIDE * WIDE, WIDE * CLASSES
    step = 10 * 2 * last + last + CLASSES  # forward, gradient and update of the last layer
    assert {one.operations for one in slow} == {SAMPLES * frozen + step}
