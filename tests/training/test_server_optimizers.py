"""The server's optimizers against NumPy, entry by entry, over five rounds with unequal coverage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fedpmt import api
from fedpmt.aggregation import CoverageMean
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.parts.part import WHOLE, Indices, Part, Selection
from fedpmt.training.server import (
    REPLACE,
    SGD,
    Adagrad,
    Adam,
    Momentum,
    ServerOptimizer,
    Yogi,
    make_server,
    server_settings,
)
from fedpmt.types import SettingError
from support import SMALL, Bench

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {"w": (4, 3), "b": (5,), "idle": (2,), "norm.running_mean": (3,)}
PARAMETERS = ("w", "b", "idle")
ROUNDS = 5

Cover = dict[str, "Selection | None"]
COVERS: list[list[Cover]] = [
    [
        {"w": WHOLE, "b": WHOLE, "norm.running_mean": WHOLE},
        {"w": Indices((np.array([0, 2]), None)), "b": None},
    ],
    [
        {"w": Indices((np.array([0]), np.array([1, 2]))), "b": None},
        {"w": None, "b": Indices((np.array([0, 4]),))},
    ],
    [{"w": WHOLE, "b": None, "norm.running_mean": WHOLE}, {"w": WHOLE, "b": None}],
    [{"w": None, "b": None}, {"w": Indices((np.array([3]), np.array([0]))), "b": Indices((np.array([2]),))}],
    [{"w": Indices((np.array([1]), None)), "b": WHOLE}, {"w": WHOLE, "b": Indices((np.array([0]),))}],
]
"""What each of two devices trains in each round; entry (3, 1) of w is idle for three rounds."""


class Oracle:
    """One entry of a tensor: a rule of the paper on Python floats, stepped only when somebody trained it."""

    def __init__(
        self, rule: Callable[[float, float, float], tuple[float, float, float]], square: float
    ) -> None:
        self.rule, self.mean, self.square = rule, 0.0, square

    def step(self, change: float) -> float:
        by, self.mean, self.square = self.rule(change, self.mean, self.square)
        return by


def rule_of(server: Any) -> tuple[Callable[[float, float, float], tuple[float, float, float]], float]:
    """The rule as the papers write it, and v before the first step."""
    if isinstance(server, SGD):
        return lambda d, m, v: (server.lr * d, m, v), 0.0
    if isinstance(server, Momentum):

        def momentum(d: float, m: float, v: float) -> tuple[float, float, float]:
            m = server.beta * m + d
            return server.lr * (d + server.beta * m if server.nesterov else m), m, v

        return momentum, 0.0

    def adaptive(d: float, m: float, v: float) -> tuple[float, float, float]:
        m = server.beta1 * m + (1 - server.beta1) * d
        if isinstance(server, Adam):
            v = server.beta2 * v + (1 - server.beta2) * d**2
        elif isinstance(server, Yogi):
            v = v - (1 - server.beta2) * d**2 * float(np.sign(v - d**2))
        else:
            v = v + d**2
        return server.lr * m / (math.sqrt(v) + server.tau), m, v

    return adaptive, server.tau**2


SERVERS = [
    SGD(0.5),
    Momentum(0.9, lr=0.3),
    Momentum(0.8, lr=0.3, nesterov=True),
    Adam(0.05, tau=0.01),
    Yogi(0.05, beta1=0.8, beta2=0.9, tau=0.01),
    Adagrad(0.1, tau=0.1),
]


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: type(server).__name__)
def test_five_rounds_are_those_of_numpy(server: ServerOptimizer) -> None:
    """And an entry that nobody trained keeps its bits, and its moments theirs."""
    rng = np.random.default_rng(3)
    weights = {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in SHAPES.items()}
    expected = {name: tensor.numpy().copy() for name, tensor in weights.items()}
    rule, square = rule_of(server)
    oracles = {(name, at): Oracle(rule, square) for name in PARAMETERS for at in np.ndindex(*SHAPES[name])}
    moments: Any = {}
    idle = 0
    for index in range(ROUNDS):
        mean = CoverageMean(weights)
        sums = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        covers = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for cover, count in zip(COVERS[index], (3.0, 8.0), strict=True):
            trained = {name: selection for name, selection in cover.items() if selection is not None}
            update = {}
            for name, selection in trained.items():
                grid = np.ix_(*_axes(selection, SHAPES[name]))
                change = rng.normal(size=sums[name][grid].shape)
                update[name] = torch.from_numpy(change)
                sums[name][grid] += count * change
                covers[name][grid] += count
            mean.add(Part("global", trained, trained, "some"), update, count)
        before, kept = weights, moments
        weights, moments = server.apply(mean, PARAMETERS, moments)
        for name, shape in SHAPES.items():
            for at in np.ndindex(*shape):
                if covers[name][at]:
                    change = float(sums[name][at] / covers[name][at])
                    # Running statistics are no gradients: they take the mean itself.
                    expected[name][at] += oracles[name, at].step(change) if name in PARAMETERS else change
                else:
                    idle += 1
                    assert weights[name][at] == before[name][at]
                    for moment in kept:
                        if name in kept[moment]:
                            assert moments[moment][name][at] == kept[moment][name][at]
            np.testing.assert_allclose(weights[name].numpy(), expected[name], rtol=1e-12, atol=1e-14)
        for moment, values in moments.items():
            for name, tensor in values.items():
                theirs = [getattr(oracles[name, at], moment) for at in np.ndindex(*SHAPES[name])]
                np.testing.assert_allclose(tensor.numpy().reshape(-1), theirs, rtol=1e-12)
    assert idle > 20
    assert "idle" not in moments.get("mean", {})  # a tensor that was never stepped has none


def _axes(selection: Selection, shape: tuple[int, ...]) -> list[np.ndarray]:
    if not isinstance(selection, Indices):
        return [np.arange(size) for size in shape]
    return [
        np.arange(size) if axis is None else axis for size, axis in zip(shape, selection.axes, strict=True)
    ]


def test_at_rate_one_sgd_is_the_mean_itself() -> None:
    """And the moments a state begins with are left as they were."""
    plain, sgd = Bench(FedPMT()), Bench(FedPMT(server=SGD(1.0)))
    for bench in (plain, sgd):
        bench.state = bench.aggregate([bench.reply(device, 0, 200.0) for device in range(3)]).state
    for name, tensor in plain.state.tensors.items():
        torch.testing.assert_close(sgd.state.tensors[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("server", [REPLACE, *SERVERS], ids=lambda server: type(server).__name__)
def test_settings_make_the_same_optimizer_again(server: ServerOptimizer) -> None:
    given = {key.removeprefix("server_"): value for key, value in server_settings(server).items()}
    assert make_server(given.pop("optimizer"), **given) == server


def test_a_keyword_and_its_settings_are_the_same_run() -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 3}
    value = api.run(FedPMT(server=Momentum(0.9, lr=0.3)), **settings)
    named = api.run("fedpmt", server_optimizer="momentum", server_momentum=0.9, server_lr=0.3, **settings)
    plain = api.run("fedpmt", **settings)
    found = [one.result.weights_sha256 for one in (value, named, plain) if one.result is not None]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Momentum(1.0), "server-momentum must be >= 0 and < 1 .got 1."),
        (lambda: Adam(0.0), "server-lr must be > 0 .got 0."),
        (lambda: Yogi(beta2=-0.1), "server-beta2 must be >= 0 and < 1"),
        (lambda: Adagrad(tau=0.0), "server-tau must be > 0"),
        (lambda: SGD(math.inf), "server-lr must be"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        make()


@pytest.mark.parametrize("kind", ["momentum", "adam", "yogi", "adagrad"])
def test_defaults_are_safe_where_devices_and_their_data_differ(kind: Any) -> None:
    """Two classes per device, weak devices that train few layers, and nothing set but the optimizer's name."""
    given: dict[str, Any] = {"task": "cnn-mnist", "data": "embedded", "partition": "classes:2", "rounds": 15}
    run = api.run("fedpmt", **given, plan="traded", server_optimizer=kind, eval_every=15)
    assert run.result is not None
    assert not run.diverged
    assert (run.result.score or 0.0) > 0.5
