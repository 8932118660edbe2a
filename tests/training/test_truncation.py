"""A frozen layer costs no gradient, no graph and no bit; a trained one gets the gradient of full back-propagation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpmt.methods.fedavg import FedAvg
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.parts.depth import full, suffix
from fedpmt.parts.part import GLOBAL, Part
from fedpmt.seeds import Seeds
from fedpmt.training.local import Job, LocalSettings, LocalWork, Run, Site
from fedpmt.training.loop import train
from fedpmt.training.messages import Reply, Task
from fedpmt.training.objective import CLASSIFICATION
from fedpmt.training.optimizers import SGD, Adam, Optimizer
from fedpmt.types import MODEL
from support import Bench, samples, small_net


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
