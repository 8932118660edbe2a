"""The example methods keep the contract, are as short as promised, and are what docs/adding-a-method.md shows."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from fedpmt import api
from fedpmt.methods.base import Method, aggregate
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.scaffold import Scaffold
from fedpmt.models.layered import layered
from fedpmt.parts.depth import full
from fedpmt.parts.part import GLOBAL, mask
from fedpmt.seeds import Seeds
from fedpmt.testing import CHECKS, ON_A_BENCH, Bench, Subject, check_method
from fedpmt.training.local import Job, LocalSettings, LocalWork, Site
from fedpmt.training.loop import train
from fedpmt.training.messages import UPDATE, Client, Reply
from fedpmt.training.objective import Objective
from fedpmt.training.optimizers import SGD
from fedpmt.types import Examples
from support import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "methods"
sys.path.insert(0, str(EXAMPLES))
from blocks import Blocks  # noqa: E402
from fednova import FedNova  # noqa: E402
from short_scaffold import ShortScaffold  # noqa: E402


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("method", [Blocks(), FedNova()], ids=lambda method: type(method).__name__)
def test_keeps_the_contract(method: Any, check: Callable[[Subject], None]) -> None:
    check(Subject(method))


def code_lines(source: str, *, imports: bool = True) -> int:
    """Lines that are neither blank nor comments nor docstrings; all others count, each import and bracket too."""
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        importing = isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if docstring or (importing and not imports):
            assert isinstance(node, ast.stmt)
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(
        1
        for number, line in lines
        if line.strip() and not line.lstrip().startswith("#") and number not in left_out
    )


def test_a_method_is_short() -> None:
    """Choosing parts takes 15 lines, imports included; changing what devices do takes 60.

    The library's own files write imports for type checkers apart, which are not counted there.
    """
    assert code_lines((EXAMPLES / "blocks.py").read_text()) <= 15
    assert code_lines((EXAMPLES / "fednova.py").read_text()) <= 60
    assert code_lines((Path(__file__).parent / "short_scaffold.py").read_text()) <= 60
    library = ROOT / "src" / "fedpmt" / "methods"
    for name, most in {"fedavg": 15, "heterofl": 15, "fedrolex": 15, "fedprox": 60}.items():
        assert code_lines((library / f"{name}.py").read_text(), imports=False) <= most, name


def test_members_that_an_author_can_meet() -> None:
    """What can be overridden of a method, and of what its devices do."""
    members = [
        f"{kind.__name__}.{name}"
        for kind in (Method, LocalWork)
        for name in vars(kind)
        if not name.startswith("_")
    ]
    assert len(members) <= 20, members
    inherited = {name for kind in (Method, LocalWork) for name, _ in inspect.getmembers(kind)}
    assert {name for name in inherited if not name.startswith("_")} == {
        name.split(".")[1] for name in members
    }


def test_the_page_shows_the_files_and_names_every_hook() -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert (EXAMPLES / "blocks.py").read_text() in shown
    assert (EXAMPLES / "fednova.py").read_text() in shown
    for kind in (Method, LocalWork):
        table = page.split(f"| `{kind.__name__}` |")[1].split("\n\n")[0]
        listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert sorted(listed) == sorted(name for name in vars(kind) if not name.startswith("_"))


def test_a_short_scaffold_is_the_library_s() -> None:
    """So the limit above is kept by a method that trains, and not by one that leaves out what matters."""
    check_method(ShortScaffold(), checks=ON_A_BENCH)
    benches = Bench(ShortScaffold()), Bench(Scaffold(option="II"))
    kept: list[dict[int, Any]] = [{}, {}]
    for index in range(3):
        for bench, own in zip(benches, kept, strict=True):
            answers = [
                bench.work(device, index, count=6 + device, own=own.get(device)) for device in range(3)
            ]
            own |= {device: one for device, (_, one) in enumerate(answers)}
            bench.state = bench.aggregate([reply for reply, _ in answers], index).state
    for name, tensor in benches[1].tensors.items():
        torch.testing.assert_close(benches[0].tensors[name], tensor, rtol=1e-6, atol=1e-7)


class TestBlocks:
    def test_a_device_trains_the_longest_block_that_it_can_afford(self) -> None:
        bench = Bench(Blocks())
        structure = bench.model.structure
        seen = set()
        for device in range(20):
            part = bench.task(device, 0, 60.0).offer[0]
            assert mask(structure, part) in (
                (1, 0, 0),
                (0, 0, 1),
            )  # 40 and 27 entries; the middle one has 296
            seen.add(part.label)
            assert mask(structure, bench.task(device, 0, 350.0).offer[0]) in ((1, 1, 0), (0, 1, 1))
            assert all(mask(structure, bench.task(device, 0).offer[0]))
        assert seen == {"layers 1-1", "layers 3-3"}
        assert bench.task(0, 0, 1.0).offer[0].label == "layers 3-3"  # nothing fits: the classifier

    def test_a_budget_acts_on_each_device(self) -> None:
        run = api.run(Blocks(), **{**SMALL, "budget": "operations=0.6"})
        assert run.result is not None
        assert run.result.budget_action == "device"
        devices = [device for step in run.rounds for device in step.devices]
        assert not any(device.over_budget for device in devices)
        assert len({device.part for device in devices}) > 1


class TestFedNova:
    def test_the_server_step_by_hand(self) -> None:
        """w = 1, changes -2 in 2 steps of 10 samples and -3 in 6 steps of 30: p = 1/4, 3/4 and τ_eff = 5.

        w + 5 (1/4 (-2 / 2) + 3/4 (-3 / 6)) = 1 - 5 · 0.625 = -2.125; the plain mean would give -1.75.
        """
        model = layered(nn.Sequential(nn.Linear(1, 1, bias=False)))
        with torch.no_grad():
            model.module.get_parameter("0.weight").fill_(1.0)
        part = full(model.structure)
        replies = [
            Reply(device, 0, part, count, {UPDATE: {"0.weight": torch.tensor([[change]])}}, {"tau": tau})
            for device, (change, count, tau) in enumerate([(-2.0, 10, 2.0), (-3.0, 30, 6.0)])
        ]
        for method, expected in ((FedNova(), -2.125), (FedNova(normalise="none"), -1.75)):
            bench = Bench(method, model)
            bench.state = bench.method.init(_setup(bench))
            assert float(bench.aggregate(replies).state.tensors["0.weight"]) == pytest.approx(expected)

    def test_it_ends_where_the_objective_is_least_and_fedavg_does_not(self) -> None:
        """F_k = (w - c_k)² / 2 with c = 0 on one sample and 1 on four, each step on one sample at rate η.

        A device's change is -(1 - (1 - η)^τ) (w - c), so that with p = 1/5, 4/5 and τ = 1, 4 rounds come to rest at
        w* = Σ p_k g_k c_k / Σ p_k g_k, where g_k is that factor; FedNova divides it by τ_k, and w* is 4/5 but for O(η).
        """
        rate = 0.01
        factor = [1 - (1 - rate) ** steps for steps in (1, 4)]
        plain = 0.8 * factor[1] / (0.2 * factor[0] + 0.8 * factor[1])
        normalised = 0.8 * factor[1] / 4 / (0.2 * factor[0] + 0.8 * factor[1] / 4)
        assert plain == pytest.approx(0.94, abs=0.001)
        assert normalised == pytest.approx(0.798, abs=0.001)
        assert rest(FedAvg(), rate) == pytest.approx(plain, abs=1e-4)
        assert rest(FedNova(), rate) == pytest.approx(normalised, abs=1e-4)

    def test_a_weak_device_takes_fewer_steps_and_says_how_many(self) -> None:
        bench = Bench(FedNova(), batch=2)  # four steps
        whole = bench.price(full(bench.model.structure)).sustained
        for share, steps in ((1.0, 4), (0.8, 3), (0.5, 2), (0.01, 1)):
            reply = bench.reply(0, budget=share * whole)
            assert reply.scalars["tau"] == steps
        momentum = Bench(FedNova(), batch=2, optimizer=SGD(momentum=0.5))
        assert momentum.reply(0).scalars["tau"] == 1 + 1.5 + 1.75 + 1.875


def _setup(bench: Bench) -> Any:
    from fedpmt.methods.base import Prototype, Setup

    return Setup({GLOBAL: Prototype(bench.model.structure, bench.model.initial())}, 2, bench.price)


def rest(method: Method[Any, Any], rate: float) -> float:
    """Where rounds of two devices with one and four samples come to rest."""
    model = layered(nn.Sequential(nn.Linear(1, 1, bias=False)))
    bench = Bench(FedAvg(), model)
    state = method.init(_setup(bench))
    objective = Objective(lambda y, c: ((y[:, 0] - c) ** 2 / 2).mean())
    site = Site({GLOBAL: model}, objective, LocalSettings(1, 1, rate))
    data = [
        Examples(torch.ones(count, 1), torch.full((count,), target), np.arange(count))
        for count, target in ((1, 0.0), (4, 1.0))
    ]
    for index in range(800):
        replies = []
        for device, own in enumerate(data):
            client = Client(device, None, None, len(own), len(own))
            task = method.assign(state, client, bench.round(index))
            job: Job[Any] = Job(site, task, task.offer[0], None, own, Seeds(0, index), device, index)
            replies.append(train(method.local, job)[0])
        state = aggregate(method, state, replies, bench.round(index), bench.server).state
    return float(state.tensors["0.weight"])
