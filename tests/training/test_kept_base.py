"""What a frozen base makes of samples is computed once in a run: the same bits, and priced so."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import fedpmt
from fedpmt import api
from fedpmt.models.layered import layered
from fedpmt.parts.depth import suffixes
from fedpmt.pricing.price import Price
from fedpmt.training import loop
from fedpmt.training.kept import KeptOutputs

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.models.precision import Prefix

CLASSES, WIDE, NARROW = 4, 64, 8
BASE_FORWARD = 6 * WIDE + WIDE * WIDE + WIDE * NARROW  # operations of a sample
BASE_BYTES = 4 * (6 * WIDE + WIDE + WIDE * WIDE + WIDE + WIDE * NARROW + NARROW)


def net() -> nn.Module:
    """A frozen base of three layers with dropout and a norm, and three layers that are trained."""
    torch.manual_seed(0)
    base = nn.Sequential(
        nn.Linear(6, WIDE),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(WIDE, WIDE),
        nn.ReLU(),
        nn.Linear(WIDE, NARROW),
    ).requires_grad_(requires_grad=False)
    head = [module for _ in range(2) for module in (nn.Linear(NARROW, NARROW), nn.ReLU())]
    return nn.Sequential(base, nn.ReLU(), *head, nn.Linear(NARROW, CLASSES))


def points(count: int = 160) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % CLASSES
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    inputs[torch.arange(count), labels] += 3
    return inputs, labels


GIVEN: dict[str, Any] = {
    "devices": 4, "cohort": 3, "samples": 40, "batch": 10, "rounds": 5, "lr": 0.2, "levels": "1/3,1/2,1",
    "depths": 3, "assign": "level", "sampling": "uniform", "workers": 1,
}  # fmt: skip
tuned: Any = partial(fedpmt.run, "fedpmt", train=points(), test=points(), **GIVEN)


def digest(run: Any) -> str:
    return str(run.result.weights_sha256)


def test_the_base_runs_once_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    keep = loop.keep

    def counted(prefix: Prefix, inputs: Any, count: int) -> Any:
        ran.append(prefix.cut)
        return keep(prefix, inputs, count)

    monkeypatch.setattr(loop, "keep", counted)
    run = tuned(model=net())
    arrived = {one.device for step in run.rounds for one in step.devices}
    assert ran == [0] * len(arrived)
    ran.clear()
    tuned(model=net(), epochs=2)
    # Depths that freeze layers behind the base still run these once a round.
    assert ran.count(0) == len(arrived)
    assert {cut for cut in ran if cut} == {1, 2}


@pytest.mark.parametrize("settings", [{}, {"epochs": 2}, {"frozen_precision": "int8"}], ids=str)
def test_the_bits_do_not_depend_on_what_was_held(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    again = partial(tuned, model=net(), **settings)
    held = digest(again())
    found = {f"{workers} workers": digest(again(workers=workers)) for workers in (2, 3)}
    with monkeypatch.context() as patch:
        patch.setattr(KeptOutputs, "get", lambda self, device, compute: compute())
        found["nothing held"] = digest(again())

    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(out=tmp_path / "run", on_round=stop)
    resumed = again(out=tmp_path / "run", resume=True)
    found["resumed"] = digest(resumed)
    assert set(found.values()) == {held}
    assert resumed.rounds == again(out=tmp_path / "whole").rounds


def test_the_first_round_of_a_device_pays_for_the_base() -> None:
    kept, not_kept = (tuned(model=net(), prefix=prefix) for prefix in ("auto", "recompute"))
    seen: set[int] = set()
    for step, plain in zip(kept.rounds, not_kept.rounds, strict=True):
        for one, other in zip(step.devices, plain.devices, strict=True):
            assert (one.device, one.part) == (other.device, other.part)
            work = 40 * BASE_FORWARD
            first = one.device not in seen
            assert one.operations == pytest.approx(other.operations - (0 if first else work))
            assert one.bytes_down == other.bytes_down
            assert one.transfer_seconds == other.transfer_seconds
            assert one.seconds == pytest.approx(other.seconds * one.operations / other.operations)
            # Eight numbers for each sample; without them the base runs for each batch, which takes memory, too.
            assert one.memory_bytes > other.memory_bytes
            seen.add(one.device)
    assert kept.result.operations == sum(one.operations for step in kept.rounds for one in step.devices)
    request = api.make_request(
        "fedpmt", {**GIVEN, "cohort": 4}, api.Own(model=net(), train=points(), test=points())
    )
    full = fedpmt.run("fedpmt", model=net(), train=points(), test=points(), **{**GIVEN, "cohort": 4})
    predicted = api.predict(request, full.folder.parent)
    assert full.result is not None
    assert predicted["operations"] == pytest.approx(full.result.operations)
    assert predicted["virtual_seconds"] == pytest.approx(full.result.virtual_seconds)


def test_nothing_is_kept_of_samples_that_a_transform_changes() -> None:
    run = tuned(model=net(), transform=lambda inputs: inputs * 1.0)
    plain = tuned(model=net(), prefix="recompute")
    assert [step.operations for step in run.rounds] == [step.operations for step in plain.rounds]


def test_a_deadline_applies_to_rounds_and_not_to_the_base() -> None:
    """A round takes a few percent of what the base does."""
    run = tuned(model=net(), deadline=3, cohort=4, full_seconds=10)
    assert {one.outcome for step in run.rounds for one in step.devices} == {"arrived"}
    first, *others = run.rounds
    assert first.round_seconds > 15
    assert all(step.round_seconds < 3 for step in others)


def test_auto_keeps_what_is_worth_it_and_fits() -> None:
    def price(module: nn.Module, prefix: Any, room: float = float("inf")) -> Price:
        inputs = points(3)[0]
        model = layered(module, example=inputs)
        return Price(
            model,
            mode="exact",
            batch=10,
            samples=40,
            cached=False,
            keep_base=prefix,
            room=room,
            example=inputs,
        )

    kept, plain = price(net(), "auto"), price(net(), "recompute")
    assert (kept.keeps_base, plain.keeps_base) == (True, False)
    smallest = suffixes(kept.structure, 3)[0]
    needed, without = kept(smallest).memory_bytes, plain(smallest).memory_bytes
    assert kept(smallest).memory.prefix_cache == 4 * NARROW * 40
    assert needed > without
    assert price(net(), "auto", room=needed).keeps_base
    assert not price(net(), "auto", room=needed - 1).keeps_base
    # A base that takes less than a tenth of a step is kept only if that is asked for.
    small = nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    small[0].requires_grad_(False)
    assert not price(small, "auto").keeps_base
    assert price(small, "cache").keeps_base
    assert price(small, "cache").base_forward == 10 * 6 * 2


def test_a_device_without_room_gets_the_base_for_each_batch(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.csv"
    roomy = tuned(model=net(), prefix="recompute", cohort=4)
    most = max(one.memory_bytes for step in roomy.rounds for one in step.devices)
    fleet.write_text(f"name,speed,count,memory_mib\nsmall,1,4,{most / 2**20}\n")
    given = {key: value for key, value in GIVEN.items() if key not in ("devices", "levels", "assign")}
    run = fedpmt.run("fedavg", model=net(), train=points(), test=points(), fleet=fleet, **given)
    assert {one.outcome for step in run.rounds for one in step.devices} == {"arrived"}
    assert len({step.operations for step in run.rounds}) == 1


def test_what_was_used_least_recently_makes_room() -> None:
    kept, computed = KeptOutputs(limit=100), list[int]()

    def ask(device: int, size: int = 10) -> None:
        def compute() -> Tensor:
            computed.append(device)
            return torch.zeros(size)

        kept.get(device, compute)

    for device in (0, 1, 0, 2, 0, 1):
        ask(device)
    # Two of 40 bytes fit: when 2 comes, 1 goes; when 1 comes back, 2 goes.
    assert computed == [0, 1, 2, 1]
    ask(3, size=1000)
    ask(0)
    assert computed == [0, 1, 2, 1, 3]
