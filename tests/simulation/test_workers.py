"""Local training in processes: the same bits as without, the same errors, and nothing left behind."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpmt
from fedpmt.parts.part import Indices, Part
from fedpmt.simulation import executors, workers
from fedpmt.simulation.parcels import FIRST_BYTES, Arena, Outbox, unpack
from fedpmt.simulation.workers import can_fork
from fedpmt.types import DivergedError, SettingError
from models.nets_of_users import ResNet, Transformer
from support import FEW, images

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.skipif(not can_fork(torch.device("cpu")), reason="there is no safe fork here")

PARENT = os.getpid()
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """No process, not even a dead one, and no open file stays behind."""
    files, before = len(list(Path("/proc/self/fd").iterdir())), children(os.getpid())
    yield
    assert multiprocessing.active_children() == []
    assert children(os.getpid()) == before  # other tests may have left theirs
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 1  # torch may open one of its own


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes were forked, each time."""
    counts: list[int] = []

    class Counted(workers.Workers):
        def __init__(self, compute: Any, count: int, known: Any) -> None:
            counts.append(count)
            super().__init__(compute, count, known)

    monkeypatch.setattr(executors, "Workers", Counted)
    return counts


def net() -> nn.Module:
    """A class that no pickle could find."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(36, 8)
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x.flatten(1))))  # type: ignore[no-any-return]

    return Net()


def tokens(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    return {"tokens": rng.integers(9, size=(count, 5)), "scale": np.ones(count, dtype=np.float32)}, labels


CASES: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
    "fedavg": ("fedavg", net, {}),
    "two epochs of fedpmt": ("fedpmt", net, {"epochs": 2}),
    "batch norm": ("fedpmt", ResNet, {}),
    "dropout": ("fedpmt", lambda: Transformer(dropout=0.5), {"train": tokens(120), "test": tokens(60, 1)}),
    "state on devices": ("scaffold", net, {}),
    "parts by width": ("heterofl", ResNet, {}),
    "parts by mask": ("prunefl", net, {"options": {"initial_rounds": 1, "interval": 1}}),
    "torch optimizer": ("fedavg", net, {"optimizer": lambda params: torch.optim.Adam(params, lr=0.1)}),
    "own loss": (
        "fedavg",
        net,
        {"loss": lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) * 2},
    ),
    "privacy": ("fedavg", net, {"dp_clip": 1.0, "dp_noise": 0.5}),
}


def play(method: str, make: Callable[[], nn.Module], **more: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "train": images(120),
        "test": images(60, 1),
        "rounds": 3,
        "lr": 0.1,
        **FEW,
        **more,
    }
    result = fedpmt.run(method, model=make(), **given).result
    assert result is not None
    return result.model_copy(update={"run": ""})


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_for_any_number_of_workers(case: str, forked: list[int]) -> None:
    method, make, more = CASES[case]
    one = play(method, make, workers=1, **more)
    assert forked == []
    assert [play(method, make, workers=count, **more) for count in (2, 3)] == [one, one]
    assert forked == [2, 3]
    assert one.path == "autograd"


def test_compiled_code_runs_in_threads(forked: list[int]) -> None:
    result = fedpmt.run("fedavg", rounds=2, workers=2, devices=4, samples=20, cohort=3).result
    assert result is not None
    assert forked == ([2] if result.path == "autograd" else [])


class Refusal(Exception):
    """Not made of what it is made with, so that no pickle brings it back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def failing(error: Callable[[], BaseException]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if os.getpid() != PARENT:
            raise error()
        return nn.functional.cross_entropy(outputs, targets)

    return loss


@pytest.mark.parametrize("kind", [SettingError, DivergedError, KeyError])
def test_an_error_of_a_worker_is_the_users(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="a reason") as caught:
        play("fedavg", net, workers=2, loss=failing(lambda: kind("a reason")))
    assert type(caught.value) is kind
    (note,) = caught.value.__notes__
    assert "in loss" in note  # where it was raised


def test_an_error_that_cannot_travel_is_told() -> None:
    with pytest.raises(RuntimeError, match="Refusal: a reason"):
        play("fedavg", net, workers=2, loss=failing(lambda: Refusal("a ", "reason")))


def test_a_killed_worker_is_one_clear_error() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, targets)

    with pytest.raises(ChildProcessError, match="killed by SIGKILL; often memory has run out"):
        play("fedavg", net, workers=2, loss=loss)


def test_workers_that_are_killed_at_rest_are_noticed() -> None:
    def kill(_: object) -> None:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    with pytest.raises(ChildProcessError, match="killed by SIGKILL"):
        play("fedavg", net, workers=2, on_round=kill)


def test_an_interrupted_round_ends_its_workers() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play("fedavg", net, workers=2, on_round=interrupt)


def test_no_processes_inside_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    assert not can_fork(torch.device("cpu"))
    assert not can_fork(torch.device("cuda"))


SCRIPT = """
import signal, sys, torch
from torch import nn
import fedpmt
from support import images

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(36, 3)
        def forward(self, x):
            return self.last(x.flatten(1)).tanh()  # not a chain that compiled code knows

    data = images(120)
    fedpmt.run("fedavg", model=Net(), train=data, test=data, rounds=100000, eval_every=100000, devices=4,
               samples=20, cohort=4, workers=2, out=sys.argv[1], on_round=lambda _: print(flush=True))
"""


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    """Also by Ctrl-C, which reaches the whole group, in a script with a class of its own."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "run")]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, start_new_session=True, env={**os.environ, "PYTHONPATH": paths}, **pipes
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        forks = children(process.pid)
        assert len(forks) == 2
        send = os.killpg if number == signal.SIGINT else os.kill
        send(process.pid, number)
        err = process.communicate(timeout=PATIENCE)[1].decode()
        assert process.returncode == -number
    until = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{fork}").exists() for fork in forks) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{fork}").exists() for fork in forks)
    assert err.count("Traceback") == (number == signal.SIGINT), err  # the parent's alone


TENSORS = {
    "scalar": torch.tensor(3.5),
    "matrix": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": torch.arange(10)[1::2],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 2),
    "traced": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_keeps_its_values_its_type_and_its_layout(name: str, own: bool) -> None:
    arena, sent = Arena(), TENSORS[name]
    found = unpack(arena, Outbox(arena).pack({"a": [sent], "b": sent}), own=own)["a"][0]
    assert found.dtype == sent.dtype
    assert torch.equal(found, sent)
    assert own or found.stride() == sent.stride()


def test_values_of_any_size_and_kind_arrive() -> None:
    arena, known = Arena(), object()
    large = torch.rand(FIRST_BYTES)  # four times what there is
    indices = Indices((np.array([0, 2]), None))
    part = Part("global", {"w": indices}, {"w": indices}, "half")
    value = {"small": torch.ones(2), "large": large, "part": part, "known": known}
    outbox = Outbox(arena)
    found = unpack(arena, outbox.pack(value, (known,)), (known,), own=True)
    assert torch.equal(found["large"], large)
    assert found["known"] is known
    assert found["part"].sent["w"] is found["part"].trained["w"]  # as `within` asks for
    assert found["part"].sent["w"].axes[0].tolist() == [0, 2]


def test_a_copy_of_ones_own_outlives_the_parcel() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    parcel = outbox.pack(torch.ones(3))
    kept, seen = unpack(arena, parcel, own=True), unpack(arena, parcel, own=False)
    outbox.forget(parcel)
    outbox.pack(torch.zeros(3))
    assert kept.tolist() == [1, 1, 1]
    assert seen.tolist() == [0, 0, 0]


def addresses(arena: Arena, outbox: Outbox, tensors: list[Tensor]) -> list[int]:
    return [unpack(arena, outbox.pack(tensor), own=False).data_ptr() for tensor in tensors]


def test_what_several_parcels_hold_is_copied_once() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    whole, cuts = torch.ones(100), [torch.ones(50) for _ in range(4)]
    parcels = [outbox.pack((whole, cut)) for cut in cuts[:2]]
    first, second = (unpack(arena, parcel, own=False) for parcel in parcels)
    assert first[0].data_ptr() == second[0].data_ptr()
    assert first[1].data_ptr() != second[1].data_ptr()
    outbox.forget(parcels[0])
    parcels.append(outbox.pack((whole, cuts[2])))
    again = unpack(arena, parcels[2], own=False)
    # What another one still needs is there; what this one alone needed has made room.
    assert again[0].data_ptr() == first[0].data_ptr()
    assert again[1].data_ptr() == first[1].data_ptr()
    for parcel in parcels[1:]:
        outbox.forget(parcel)
    assert unpack(arena, outbox.pack(torch.zeros(100)), own=False).data_ptr() == first[0].data_ptr()


def test_a_cleared_outbox_begins_again() -> None:
    arena = Arena()
    outbox = Outbox(arena)
    tensors = [torch.full((10,), float(value)) for value in range(3)]
    before = addresses(arena, outbox, tensors)
    outbox.clear()
    assert addresses(arena, outbox, tensors) == before


def test_an_arena_never_gets_smaller_for_another_process() -> None:
    """A fork that has not written since another one made it larger must not cut off what that one counts on."""
    arena = Arena()
    other = copy.copy(arena)  # as a fork has it
    arena.take(4 * FIRST_BYTES)
    other.take(FIRST_BYTES + 1)
    assert os.fstat(arena._file).st_size >= 4 * FIRST_BYTES
    assert len(other.bytes(0, 2 * FIRST_BYTES)) == 2 * FIRST_BYTES
