"""A local round in compiled code is what autograd and SGD make of the same batches, within rounding."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedpmt
from fedpmt import kernels
from fedpmt.kernels import StepRule
from fedpmt.kernels.layout import Net
from fedpmt.models.build import build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import block, full, suffix, suffixes
from fedpmt.parts.part import Mask, Part, take, within
from fedpmt.parts.width import corners, random_channels, thinned
from fedpmt.seeds import generator
from fedpmt.training.batches import channels_last, gather
from fedpmt.training.optimizers import SGD
from fedpmt.types import Examples, Rows
from support import samples, small_net

needs_compiler = pytest.mark.skipif(not kernels.available(), reason="there is no C compiler here")


@dataclass(frozen=True)
class Case:
    """One device's local round."""

    model: LayeredModel
    part: Part
    data: Examples
    rule: StepRule
    epochs: int = 1
    batch: int = 7
    limit: int | None = None
    cached: bool = True

    @property
    def received(self) -> dict[str, Tensor]:
        return {name: take(one, self.part.sent[name]) for name, one in self.model.initial().items()}

    @property
    def orders(self) -> np.ndarray:
        rng = np.random.default_rng(0)
        return np.stack([rng.permutation(len(self.data)) for _ in range(self.epochs)])

    def compiled(self, **changes: Any) -> tuple[dict[str, Tensor], float] | None:
        given: dict[str, Any] = {
            "batch": self.batch,
            "limit": self.limit,
            "cached": self.cached,
            "rule": self.rule,
        }
        given |= changes
        found = kernels.train(self.model, self.part, self.received, self.data, self.orders, **given)
        if found is None:
            return None
        trained, loss, steps = found
        whole = self.epochs * -(-len(self.data) // self.batch)
        assert steps == (whole if self.limit is None else min(self.limit, whole))
        return trained, loss

    def by_autograd(self) -> tuple[dict[str, Tensor], float]:
        """In double precision, every step written out."""
        received = {name: one.double() for name, one in self.received.items()}
        params = {name: received[name].clone().requires_grad_() for name in self.part.trained}
        rule, losses = self.rule, list[float]()
        stepper = SGD(rule.momentum, rule.nesterov, rule.weight_decay).start()
        for positions in self.orders:
            for start in range(0, len(self.data), self.batch):
                step = len(losses)
                if step == self.limit:
                    break
                corner: dict[str, tuple[slice, ...]] = {}
                if rule.draws is not None and rule.draws[step] < len(self.part.inner):
                    corner = corners(self.model.structure, self.part.inner[rule.draws[step]])
                tensors = {
                    name: one[corner.get(name, ...)] * rule.factors.get(name, 1.0)
                    for name, one in {**received, **params}.items()
                }
                batch = self.data.take(positions[start : start + self.batch])
                logits = self.model.forward(tensors, batch.inputs.double())
                if rule.absent is not None:
                    logits = logits.masked_fill(torch.from_numpy(rule.absent), 0)
                loss = functional.cross_entropy(logits, batch.targets)
                found = torch.autograd.grad(loss, list(params.values()))
                gradients = dict(zip(params, found, strict=True))
                for name, one in params.items():
                    gradients[name] += rule.constant.get(name, 0)
                    gradients[name] += rule.strength * (one.detach() - received[name])
                stepper.step(params, gradients, rule.learning_rate, corner)
                losses.append(float(loss.detach()))
        sent = {name: within(kept, self.part.sent[name]) for name, kept in self.part.trained.items()}
        return {name: take(params[name].detach(), sent[name]) for name in sent}, float(np.mean(losses))

    def check(self, tolerance: float = 2e-5) -> None:
        """Both ways end alike."""
        found = self.compiled()
        assert found is not None
        (tensors, loss), (wanted, wanted_loss) = found, self.by_autograd()
        assert set(tensors) == set(self.part.trained)
        for name, one in wanted.items():
            assert tensors[name].shape == one.shape
            assert tensors[name].is_contiguous()
            assert (tensors[name] - one).norm() <= tolerance * one.norm() + 1e-7, name
        assert loss == pytest.approx(wanted_loss, rel=1e-4)


def paper_net(name: str, seed: int = 1) -> LayeredModel:
    return build(NETS[name], generator(seed, "init"))


def noise(model: LayeredModel, scale: float = 0.1) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return {name: scale * torch.randn(one.shape, generator=drawn) for name, one in model.initial().items()}


PLAIN, MOVING = StepRule(0.1), StepRule(0.03, 0.9)
STEPS: dict[str, tuple[StepRule, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "decay": (replace(PLAIN, weight_decay=0.1), {"epochs": 2}),
    "recomputed": (PLAIN, {"cached": False}),
    "limit": (PLAIN, {"epochs": 2, "limit": 3}),
    "momentum": (MOVING, {"epochs": 2}),
    "Nesterov": (replace(MOVING, nesterov=True), {"epochs": 2}),
    "all": (replace(MOVING, nesterov=True, weight_decay=0.1), {"epochs": 2, "cached": False}),
}


@needs_compiler
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("steps", STEPS)
def test_the_papers_nets(steps: str, name: str) -> None:
    """All depths; the last batch is short. Few samples, so that rounding has no time to flip a max-pool."""
    model, (rule, options) = paper_net(name), STEPS[steps]
    data = samples(17, NETS[name].input_shape, 10)
    for part in suffixes(model.structure, NETS[name].depths[0]):
        Case(model, part, data, rule, **options).check()


@needs_compiler
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("pull", ["constant", "spring", "both", "scaled"])
def test_a_pull_beside_the_gradient(pull: str, momentum: dict[str, Any], name: str) -> None:
    """As SCAFFOLD and FedProx have it, and both on scaled layers; with decay, and with velocities."""
    model = paper_net(name)
    rule = StepRule(0.03, weight_decay=0.05, **momentum)
    if pull != "spring":
        rule = replace(rule, constant=noise(model))
    if pull != "constant":
        rule = replace(rule, strength=2.0)
    if pull == "scaled":
        last = model.structure.layers[-2].parameters
        rule = replace(rule, factors=dict.fromkeys(last, 1.5))
    data = samples(17, NETS[name].input_shape, 10)
    Case(model, full(model.structure), data, rule, epochs=2).check(5e-5)


@needs_compiler
def test_a_constant_may_be_there_for_some_tensors_only() -> None:
    model = layered(small_net())
    some = {name: one for name, one in noise(model).items() if name.startswith("4")}
    part = suffix(model.structure, 1, "some")
    for rule in (PLAIN, MOVING):
        Case(model, part, samples(17), replace(rule, constant=some)).check()


@needs_compiler
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("rule", [PLAIN, MOVING, replace(PLAIN, strength=2.0, weight_decay=0.05)])
def test_layers_behind_the_trained_ones_stay(rule: StepRule, name: str) -> None:
    """The error goes down through them, and nothing of what a step adds moves them."""
    model = paper_net(name)
    rule = replace(rule, constant=noise(model))
    data, layers = samples(17, NETS[name].input_shape, 10), len(model.structure.layers)
    for first, last in ((0, 1), (1, 3), (1, layers - 1), (layers - 2, layers - 1)):
        Case(model, block(model.structure, first, last, "some"), data, rule, epochs=2).check(5e-5)


@needs_compiler
@pytest.mark.parametrize("rule", [PLAIN, replace(MOVING, nesterov=True)])
def test_of_a_layer_only_the_bias_or_only_the_weight_may_be_trained(rule: StepRule) -> None:
    model = paper_net("cnn-mnist")
    for names in (["conv1.bias"], ["conv2.weight", "fc1.bias"]):
        part = full(model.structure)
        part = replace(part, trained={name: part.trained[name] for name in names})
        Case(model, part, samples(17, (1, 28, 28), 10), rule, epochs=2).check()


@needs_compiler
@pytest.mark.parametrize("rule", [PLAIN, replace(MOVING, nesterov=True)])
def test_scaled_layers_and_absent_classes(rule: StepRule) -> None:
    """A layer's outputs are scaled by its weight and bias, what enters it by its weight alone."""
    model = paper_net("cnn-mnist")
    factors = dict.fromkeys(("conv1.weight", "conv1.bias"), 2.0) | {"fc1.weight": 0.5, "conv2.weight": 1.5}
    rule = replace(rule, factors=factors, absent=np.arange(10) >= 6)
    Case(model, full(model.structure), samples(17, (1, 28, 28), 6), rule, epochs=2).check(5e-5)


@needs_compiler
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    "rule",
    [
        replace(PLAIN, weight_decay=0.05),
        replace(MOVING, weight_decay=0.05, nesterov=True),
        replace(MOVING, strength=1.0),
    ],
)
def test_each_step_trains_a_drawn_width(rule: StepRule, name: str) -> None:
    """Nothing outside of it moves, by decay or momentum either."""
    model = paper_net(name)
    axes = model.structure.require_axes("this test")
    inner = tuple(thinned(model.structure, axes, share) for share in (0.3, 0.6))
    part = replace(thinned(model.structure, axes, 0.9), inner=inner)
    draws = np.array([2, 0, 1, 1, 0, 2, 0])  # one more than there are steps
    data = samples(17, NETS[name].input_shape, 10)
    Case(model, part, data, replace(rule, draws=draws), epochs=2).check(5e-5)
    narrow = Case(model, part, data, replace(rule, draws=np.zeros(6, dtype=int)), epochs=2)
    narrow.check(5e-5)
    found, corner = narrow.compiled(), corners(model.structure, inner[0])
    assert found is not None
    for key, one in narrow.received.items():
        rest = found[0][key].clone()
        assert not torch.equal(rest[corner[key]], one[corner[key]])
        rest[corner[key]] = one[corner[key]]
        assert torch.equal(rest, one)


CHAINS = {
    "odd sizes": (nn.Sequential(nn.Linear(13, 11), nn.ReLU(), nn.Linear(11, 3)), (13,)),
    "no bias": (
        nn.Sequential(nn.Linear(9, 17, bias=False), nn.ReLU(), nn.Linear(17, 5, bias=False)),
        (9,),
    ),
    "no ReLU": (nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Linear(7, 3)), (3, 2, 2)),
    "ReLU before the pool": (
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)),
        (2, 6, 7),
    ),
    "no pool": (
        nn.Sequential(nn.Conv2d(3, 9, (2, 3)), nn.ReLU(), nn.Conv2d(9, 4, 1), nn.Flatten(), nn.Linear(80, 3)),
        (3, 6, 6),
    ),
    "pool without ReLU, odd leftovers": (
        nn.Sequential(
            nn.Conv2d(1, 3, 2), nn.MaxPool2d(2), nn.Conv2d(3, 17, 2), nn.Flatten(), nn.Linear(68, 4)
        ),
        (1, 8, 8),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", CHAINS)
def test_other_chains(name: str) -> None:
    module, shape = CHAINS[name]
    model, data = layered(module), samples(23, shape, 3)
    for frozen in range(len(model.structure.layers)):
        part = suffix(model.structure, frozen, "some")
        for rule in (PLAIN, replace(MOVING, weight_decay=0.1)):
            Case(model, part, data, rule).check()


@needs_compiler
def test_narrow_parts() -> None:
    model = paper_net("cnn-mnist")
    rng, axes = generator(0, "channels"), model.structure.require_axes("this test")
    part = thinned(
        model.structure, axes, 0.4, ("linear", "conv"), lambda size, count: random_channels(size, count, rng)
    )
    for rule in (PLAIN, MOVING):
        Case(model, part, samples(12, (1, 28, 28), 10), rule).check()


@needs_compiler
def test_a_local_round_begins_without_velocity_and_leaves_its_inputs_alone() -> None:
    """Buffers are used again: nothing of one device may reach the next, not even if its training diverged."""
    model = paper_net("cnn-mnist")
    axes = model.structure.require_axes("this test")
    inner = tuple(thinned(model.structure, axes, share) for share in (0.3, 0.6))
    part = replace(full(model.structure), inner=inner)
    case = Case(model, part, samples(17, (1, 28, 28), 10), MOVING)
    inputs = case.data.inputs.clone()
    for one in (
        case,
        replace(case, rule=PLAIN),
        replace(case, rule=replace(MOVING, draws=np.array([0, 1, 2]))),
    ):
        diverging = replace(
            one, rule=replace(one.rule, learning_rate=1e30), data=samples(17, (1, 28, 28), 10, 5)
        )
        first, lost, again = one.compiled(), diverging.compiled(), one.compiled()
        assert first is not None
        assert lost is not None
        assert again is not None
        assert not all(tensor.isfinite().all() for tensor in lost[0].values())
        assert all(torch.equal(again[0][name], tensor) for name, tensor in first[0].items())
    assert torch.equal(case.data.inputs, inputs)
    assert all(
        torch.equal(paper_net("cnn-mnist").initial()[name], one) for name, one in model.initial().items()
    )


@needs_compiler
def test_evaluation() -> None:
    for name in NETS:
        model = paper_net(name)
        inputs = samples(131, NETS[name].input_shape, 10).inputs
        outputs = kernels.forward(model, model.initial(), inputs)
        assert outputs is not None
        torch.testing.assert_close(outputs, model.forward(model.initial(), inputs), rtol=1e-5, atol=1e-5)


UNKNOWN = {
    "padding": (nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Flatten(), nn.Linear(192, 3)), (1, 8, 8)),
    "stride": (nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.Flatten(), nn.Linear(27, 3)), (1, 8, 8)),
    "a pool of three": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(12, 3)),
        (1, 8, 8),
    ),
    "a pool that overlaps": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(75, 3)),
        (1, 8, 8),
    ),
    "BatchNorm": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)), (4,)),
    "dropout": (nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 3)), (4,)),
    "a flatten of another size": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(30, 3)),
        (1, 8, 8),
    ),
    "ReLU first": (nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), (4,)),
    "ReLU last": (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_models_it_does_not_know(name: str) -> None:
    module, shape = UNKNOWN[name]
    model, data = layered(module), samples(5, shape)
    assert not kernels.knows(model, data.inputs)
    assert Case(model, full(model.structure), data, PLAIN).compiled() is None
    assert kernels.forward(model, model.initial(), data.inputs) is None


@needs_compiler
def test_what_else_it_leaves_to_autograd() -> None:
    model, data = layered(small_net()), samples(10)
    case = Case(model, full(model.structure), data, PLAIN)
    assert case.compiled() is not None
    assert kernels.knows(model, data.inputs)
    assert replace(case, data=replace(data, inputs=data.inputs.double())).compiled() is None
    assert replace(case, data=replace(data, targets=data.targets.int())).compiled() is None
    assert replace(case, data=data.take(slice(0, 0))).compiled() is None
    # Weights that are masked, and a part that trains nothing.
    bits = np.ones(model.structure.shapes["4.weight"], dtype=bool)
    masked = {**case.part.sent, "4.weight": Mask(bits)}
    assert kernels.train(
        model, replace(case.part, sent=masked, trained=masked), model.initial(), data, case.orders,
        batch=7, limit=None, cached=True, rule=PLAIN,
    ) is None  # fmt: skip
    assert replace(case, part=replace(case.part, trained={})).compiled() is None


def test_a_label_that_is_no_class_is_not_read() -> None:
    model, data = layered(small_net()), samples(10)
    for label in (-1, 3, 2**40):
        data.targets[3] = label
        assert Case(model, full(model.structure), data, PLAIN).compiled() is None


@needs_compiler
@pytest.mark.parametrize(
    ("wrong", "changes"),
    [
        ("draws", {"rule": replace(PLAIN, draws=np.zeros(1, dtype=int))}),
        ("draws", {"rule": replace(PLAIN, draws=np.array([0, 1]))}),
        ("absent", {"rule": replace(PLAIN, absent=np.zeros(2, dtype=bool))}),
    ],
)
def test_indices_outside_their_arrays_are_refused(wrong: str, changes: dict[str, Any]) -> None:
    model = layered(small_net())
    case = Case(model, full(model.structure), samples(10), PLAIN)
    with pytest.raises(ValueError, match=wrong):
        case.compiled(**changes)
    twice = np.zeros((2, 10), dtype=int)
    for orders in (np.zeros((1, 9), dtype=int), np.full((1, 10), 10), np.full((1, 10), -1), twice):
        with pytest.raises(ValueError, match="orders"):
            kernels.train(
                model, case.part, case.received, case.data, orders,
                batch=7, limit=None, cached=True, rule=PLAIN,
            )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"nesterov": True, "weight_decay": 0.1}])
def test_the_oracle_s_momentum_is_torch_s(options: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(5, generator=rng)
    own, theirs = start.clone(), nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, **options)
    stepper = SGD(0.9, **options).start()
    for _ in range(4):
        gradient = torch.randn(5, generator=rng)
        theirs.grad = gradient.clone()
        optimizer.step()
        stepper.step({"w": own}, {"w": gradient}, 0.1)
    torch.testing.assert_close(own, theirs.detach())


@needs_compiler
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("name", NETS)
def test_changes_are_what_was_received_taken_off(name: str, factor: float) -> None:
    model = paper_net(name)
    rule = replace(PLAIN, factors=dict.fromkeys(model.structure.layers[1].parameters, factor))
    for part in suffixes(model.structure, 3):
        case = Case(model, part, samples(17, NETS[name].input_shape, 10), rule)
        trained, changes = case.compiled(), case.compiled(changes=True)
        assert trained is not None
        assert changes is not None
        assert set(changes[0]) == set(part.trained)
        for tensor, one in changes[0].items():
            assert torch.equal(one, trained[0][tensor] - case.received[tensor])


@needs_compiler
@pytest.mark.parametrize("stored", ["ready", "otherwise"])
@pytest.mark.parametrize("name", NETS)
def test_samples_within_a_larger_set_are_read_where_they_are(name: str, stored: str) -> None:
    """The same bits as of a copy; where they are stored in another way than the net reads them, they are copied."""
    model, everything = paper_net(name), samples(40, NETS[name].input_shape, 10)
    inputs = everything.inputs
    inputs = channels_last(inputs) if stored == "ready" else inputs.movedim(0, -1).contiguous().movedim(-1, 0)
    everything = replace(everything, inputs=inputs)
    copies: list[int] = []

    def copied(arrays: Tensor, rows: np.ndarray) -> Tensor:
        copies.append(len(rows))
        return gather(arrays, rows)  # type: ignore[no-any-return]

    picked = np.array([33, 2, 39, 0, 0, 17, 5, 21, 8])
    for part in suffixes(model.structure, 3):
        for cached in (True, False):
            copies.clear()
            found = Case(model, part, Rows.of(everything, picked, copied), PLAIN).compiled(cached=cached)
            wanted = Case(model, part, everything.take(picked), PLAIN).compiled(cached=cached)
            assert found is not None
            assert wanted is not None
            assert found[1] == wanted[1]
            assert all(torch.equal(one, wanted[0][tensor]) for tensor, one in found[0].items())
            assert bool(copies) == (stored == "otherwise")
    for wrong in (-1, 40):
        with pytest.raises((ValueError, IndexError)):
            Case(model, part, Rows.of(everything, np.array([0, wrong]), gather), PLAIN).compiled()


def test_rows_of_others_become_samples_of_their_own() -> None:
    """A method may put other targets in their place; what is copied or pickled does not take the others along."""
    everything, picked = samples(40, (3,), 10), np.array([33, 2, 39])
    own, taken = Rows.of(everything, picked, gather), everything.take(picked)
    others = replace(own, targets=own.targets + 1)
    assert type(others) is Examples
    assert torch.equal(others.targets, taken.targets + 1)
    for found in (own, others, copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert torch.equal(found.inputs, taken.inputs)
        assert found.ids.tolist() == taken.ids.tolist()
    assert len(pickle.dumps(own)) < len(pickle.dumps(everything))


@needs_compiler
def test_a_run_with_momentum_leaves_nothing_behind_for_one_without() -> None:
    """Widths inside the whole keep their memory from run to run, the whole does not."""
    given = {"devices": 4, "samples": 20, "cohort": 2, "batch": 10, "rounds": 1, "workers": 1, "lr": 0.1}
    found = []
    for momentum in (0.0, 0.5, 0.0, 0.5):
        run = fedpmt.run("fjord", **given, momentum=momentum)  # type: ignore[arg-type]
        assert run.result is not None
        found.append(run.result.weights_sha256)
    assert found[:2] == found[2:]
    assert found[0] != found[1]


@needs_compiler
def test_weights_that_were_given_and_never_laid_out_are_not_taken_for_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(name: str, weights: dict[str, Tensor]) -> float:
        model = paper_net(name)
        given = {"batch": 7, "limit": None, "cached": True, "rule": PLAIN}
        part, data = suffixes(model.structure, 3)[0], samples(17, NETS[name].input_shape, 10)
        found = kernels.train(model, part, weights, data, np.arange(17)[None], **given)  # type: ignore[arg-type]
        assert found is not None
        return found[1]

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    first, second = paper_net("cnn-mnist").initial(), paper_net("cnn-mnist").initial()
    second = {name: 2 * one for name, one in second.items()}
    wanted = loss("cnn-mnist", second)
    loss("cnn-mnist", first)
    with monkeypatch.context() as context:
        context.setattr(Net, "train", fails)
        with pytest.raises(MemoryError):
            loss("cnn-mnist", second)
    assert loss("cnn-mnist", second) == wanted


@needs_compiler
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_layers_that_lie_ready_are_the_ones_that_were_sent(name: str, changes: bool) -> None:
    """Layers that the last device left frozen are not laid out again, unless they are others or were changed since."""
    model, data = build(NETS[name], generator(0, "init")), samples(17, NETS[name].input_shape, 10)
    shallow, whole = suffixes(model.structure, 3)[0], full(model.structure)
    orders, weights = np.arange(17)[None], model.initial()
    first = model.structure.layers[0].parameters[0]

    def trained(part: Part, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {"batch": 7, "limit": None, "cached": True, "rule": StepRule(0.1)}
        found = kernels.train(model, part, tensors, data, orders, changes=changes, **given)  # type: ignore[arg-type]
        assert found is not None
        return found[0]

    def anew(part: Part, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return trained(part, {name: one.clone() for name, one in tensors.items()})

    def same(part: Part) -> bool:
        found, wanted = trained(part, weights), anew(part, weights)
        return all(torch.equal(found[name], wanted[name]) for name in wanted)

    assert same(shallow)
    assert same(whole)
    trained(shallow, weights)
    assert same(whole)  # of which the shallow one left a layer ready
    trained(shallow, weights)
    assert same(shallow)  # it is ready now
    before = trained(shallow, weights)
    weights[first].mul_(-1)
    assert same(shallow)
    after = trained(shallow, weights)
    assert not all(torch.equal(after[name], before[name]) for name in after)
    trained(whole, weights)  # which writes over it
    assert same(shallow)
    other = {name: one.clone().mul_(2) for name, one in weights.items()}
    trained(shallow, weights)
    assert all(map(torch.equal, trained(shallow, other).values(), anew(shallow, other).values()))
