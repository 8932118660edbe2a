"""A frozen layer costs no gradient, no graph and no bit, and a frozen base is kept; trained ones get full gradients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import fedpmt
from fedpmt import api
from fedpmt.methods.fedavg import FedAvg
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.parts.depth import full, suffix, suffixes
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.pricing.price import Price
from fedpmt.seeds import Seeds
from fedpmt.training import loop
from fedpmt.training.kept import KeptOutputs
from fedpmt.training.local import Job, LocalSettings, LocalWork, Run, Site
from fedpmt.training.loop import train
from fedpmt.training.messages import Reply, Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import SGD, Adam, Optimizer
from fedpmt.types import MODEL
from support import Bench, samples, small_net

if TYPE_CHECKING:
    from pathlib import Path

    from fedpmt.models.precision import Prefix


class Spy(LocalWork[None]):
    """Keeps the gradients of the first step and the graph of its loss."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.leaves: set[int] = set()
        self.run: Run[None] | None = None

    def loss(self, run: Run[None], batch: Any) -> Tensor:
        loss = super().loss(run, batch)
        self.run = run
        self.leaves |= leaves(loss.grad_fn)
        return loss

    def correct(self, run: Run[None], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        if run.steps == 0:
            self.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        return gradients


def leaves(node: Any) -> set[int]:
    """The tensors a graph can send gradients to."""
    found, waiting, seen = set(), [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [parent for parent, _ in node.next_functions]
    return found


def trained(
    model: LayeredModel, part: Part, work: LocalWork[None], steps: int | None = None, **settings: Any
) -> Reply:
    local = LocalSettings(**{"epochs": 1, "batch": 5, "learning_rate": 0.1, **settings})
    task = Task((part,), {MODEL: model.initial()}, steps=steps)
    site = Site({GLOBAL: model}, CLASSIFICATION, local)
    return train(work, Job(site, task, part, None, samples(23), Seeds(3, 0), device=1))[0]


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("prefix", ["recompute", "cache"])
def test_gradients_of_trained_layers_are_those_of_full_back_propagation(frozen: int, prefix: str) -> None:
    model = layered(small_net())
    everything, some = Spy(), Spy()
    trained(model, full(model.structure), everything)
    trained(model, suffix(model.structure, frozen, "some"), some, prefix=prefix)
    assert set(some.gradients) == {
        name for layer in model.structure.layers[frozen:] for name in layer.parameters
    }
    for name, gradient in some.gradients.items():
        if prefix == "recompute":
            assert torch.equal(gradient, everything.gradients[name])
        else:
            torch.testing.assert_close(gradient, everything.gradients[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("prefix", ["recompute", "cache"])
def test_no_graph_reaches_a_frozen_layer(frozen: int, prefix: str) -> None:
    model = layered(small_net())
    spy = Spy()
    trained(model, suffix(model.structure, frozen, "some"), spy, prefix=prefix)
    assert spy.run is not None
    assert spy.leaves == {id(tensor) for tensor in spy.run.params.values()}
    assert not any(tensor.requires_grad for tensor in spy.run.fixed.values())


@pytest.mark.parametrize(
    "optimizer",
    [SGD(), SGD(0.9, weight_decay=0.1), SGD(0.9, nesterov=True), Adam(0.1), Adam(0.1, decoupled=True)],
)
def test_frozen_layers_keep_their_bits_and_are_not_sent(optimizer: Optimizer) -> None:
    model = layered(small_net())
    before = {name: tensor.clone() for name, tensor in model.initial().items()}
    spy = Spy()
    reply = trained(model, suffix(model.structure, 1, "some"), spy, epochs=2, optimizer=optimizer)
    assert spy.run is not None
    frozen = model.structure.layers[0].tensors
    assert all(torch.equal(spy.run.fixed[name], before[name]) for name in frozen)
    assert set(reply.update) == set(model.structure.tensors) - set(frozen)
    for name, change in reply.update.items():
        assert change.any()
        assert torch.equal(change, spy.run.params[name].detach() - before[name])


def test_one_device_and_one_full_batch_step_is_central_sgd() -> None:
    bench = Bench(FedAvg(), batch=8)
    step = bench.aggregate([bench.reply(0)])
    module = small_net()
    data = samples(8, seed=0)
    nn.functional.cross_entropy(module(data.inputs), data.targets).backward()  # type: ignore[no-untyped-call]
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            step.state.tensors[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-5, atol=1e-7
        )


def test_fewer_steps_can_be_asked_for() -> None:
    model = layered(small_net())
    spy = Spy()
    trained(model, full(model.structure), spy, steps=2, epochs=3)
    assert spy.run is not None
    assert spy.run.steps == 2


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
