"""Compiled code is built, checked and, where that fails, done without."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from fedpmt import kernels
from fedpmt.kernels import library
from fedpmt.kernels.calls import SLICE
from fedpmt.models.build import build
from fedpmt.models.layered import LayeredModel, layered
from fedpmt.models.nets import NETS
from fedpmt.parts.depth import full
from fedpmt.parts.part import Indices, add_at, local_shape
from fedpmt.seeds import generator
from support import samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


needs_compiler = pytest.mark.skipif(not kernels.available(), reason="there is no C compiler here")


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library is built and loaded anew, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.library.cache_clear()
    yield tmp_path
    library.library.cache_clear()


FAILS = "#!/bin/sh\nexit 1\n"
MAKES_NO_LIBRARY = "#!/bin/sh\nwhile [ $1 != -o ]; do shift; done; echo nothing > $2\n"


@pytest.mark.parametrize("compiler", ["", FAILS, MAKES_NO_LIBRARY])
def test_without_a_working_compiler_there_is_none(
    compiler: str, anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler:
        (anew / "cc").write_text(compiler)
        (anew / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(anew))
    monkeypatch.delenv("CC", raising=False)
    assert not kernels.available()


def test_it_can_be_switched_off(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert not kernels.available()


OLD_FIELD = (
    "native.c",
    "    float rate, kept, momentum, decay;\n",
    "    float kept, rate, momentum, decay;\n",
)
OLD_VERSION = ("native.c", f"#define VERSION {library.VERSION}\n", "#define VERSION 0\n")
NO_INTERFACE = ("native.c", "int32_t fedpmt_interface(", "int32_t fedpmt_other(")
LONGER = ("native.c", "    const uint8_t *absent; ", "    int64_t more; const uint8_t *absent; ")
WIDER = ("operations.c", "    float scale, kept; ", "    float kept, scale; ")


@needs_compiler
@pytest.mark.parametrize("change", [OLD_FIELD, OLD_VERSION, NO_INTERFACE, LONGER, WIDER])
def test_a_library_of_another_interface_is_not_used(
    change: tuple[str, str, str],
    anew: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its structures would be read at other places than they are written: one line, and no compiled code."""
    package = Path(library.__file__).parent
    changed, old, new = change
    for name in (*library.SOURCES, *library.HEADERS):
        source = (package / name).read_text()
        assert old in source or name != changed
        (anew / name).write_text(source.replace(old, new) if name == changed else source)
    monkeypatch.setattr("importlib.resources.files", lambda _: anew)
    # Speed does not matter here, and the test is quick without it.
    monkeypatch.setattr(library, "FLAGS", ("-O0", "-march=native", "-fPIC", "-shared"))
    with caplog.at_level(logging.WARNING, "fedpmt"):
        assert not kernels.available()
        assert not kernels.available()
    assert len(caplog.records) == 1
    assert "does not match this version of fedpmt" in caplog.text


def paper_net(name: str) -> LayeredModel:
    """One of the paper's nets."""
    return build(NETS[name], generator(0, "init"))


def grey(kernel: tuple[int, int]) -> LayeredModel:
    """A net on small grey pictures, whose first layer makes 7 x 17 of them or thereabouts."""
    torch.manual_seed(0)
    rows, columns = 10 - kernel[0], 20 - kernel[1]
    flat = 5 * (rows // 2) * (columns // 2)
    return layered(
        nn.Sequential(nn.Conv2d(1, 5, kernel), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(flat, 10))
    )


CASES: dict[str, tuple[Callable[[], LayeredModel], tuple[int, ...]]] = {
    **{name: (partial(paper_net, name), net.input_shape) for name, net in NETS.items()},
    **{f"grey, {kernel}": (partial(grey, kernel), (1, 9, 19)) for kernel in ((3, 3), (2, 5), (4, 4))},
}


def trained(name: str) -> list[torch.Tensor]:
    """A net after a few compiled steps, the last batch a small one."""
    make, shape = CASES[name]
    model, data = make(), samples(31, shape, 10)
    orders = np.stack([np.random.default_rng(seed).permutation(31) for seed in range(2)])
    rule = kernels.StepRule(0.1, momentum=0.5)
    found = kernels.train(
        model,
        full(model.structure),
        model.initial(),
        data,
        orders,
        batch=14,
        limit=None,
        cached=True,
        rule=rule,
    )
    assert found is not None
    return list(found[0].values())


@needs_compiler
def test_wide_vectors_do_not_change_the_bits(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run can be repeated on a processor that has none."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no vectors of 512 bits")
    wide = [one for name in CASES for one in trained(name)]
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-mno-avx512f"))
    library.library.cache_clear()
    narrow = [one for name in CASES for one in trained(name)]
    assert all(map(torch.equal, wide, narrow))


def test_a_rule_needs_no_torch() -> None:
    """A method says what its steps do before torch is loaded."""
    code = "import sys; from fedpmt.kernels import StepRule; StepRule(0.1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_compiler
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("entries", [1, 1000, 3 * SLICE + 17])
def test_replies_are_summed_to_the_bits_of_torch(entries: int, fresh: bool) -> None:
    draw = torch.Generator().manual_seed(entries)
    before, *replies = (torch.randn(entries, generator=draw) for _ in range(4))
    shares = [1.0, 0.3, 7.0]
    wanted = torch.zeros(entries) if fresh else before.clone()
    for reply, share in zip(replies, shares, strict=True):
        wanted += reply * share
    assert kernels.fold(before, replies, shares, fresh=fresh)
    assert torch.equal(before, wanted)


@needs_compiler
@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_step_of_one_reply_has_the_bits_of_a_sum_a_division_and_another_sum(
    share: float, divisor: float
) -> None:
    draw = torch.Generator().manual_seed(1)
    weights, replies = ([torch.randn(size, 7, generator=draw) for size in (1, 300)] for _ in range(2))
    weights[0][0, 0], replies[0][0, 0] = -0.0, -0.0
    moved = kernels.step(weights, replies, [share] * 2, [divisor] * 2)
    assert moved is not None
    for new, old, reply in zip(moved, weights, replies, strict=True):
        wanted = (torch.zeros_like(old) + reply * share).div_(divisor).add_(old)
        assert new.numpy().tobytes() == wanted.numpy().tobytes()  # the signs of zeros, too
    assert kernels.step([one.double() for one in weights], replies, [share] * 2, [divisor] * 2) is None


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((7,), ([0, 3, 6],)),
        ((5, 9), ([1, 4], None)),
        ((5, 9), (None, [0, 2, 8])),
        ((5, 9), ([], [0, 2])),
        ((4, 6, 3, 3), ([0, 3], [1, 2, 5], None, None)),
        ((4, 6, 3, 3), (None, None, None, None)),
    ],
)
def test_cut_replies_are_added_to_the_bits_of_torch(
    shape: tuple[int, ...], axes: tuple[list[int] | None, ...]
) -> None:
    draw = torch.Generator().manual_seed(len(shape))
    sums, covers = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
    places = tuple(None if kept is None else np.array(kept, dtype=np.int64) for kept in axes)
    values = torch.randn(local_shape(Indices(places), shape), generator=draw)
    wanted, covered = sums.clone(), covers.clone()
    add_at(wanted, Indices(places), values)
    add_at(covered, Indices(places), 0.3)
    assert kernels.add_at(sums, covers, places, values, 0.3)
    assert torch.equal(sums, wanted)
    assert torch.equal(covers, covered)


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        ((np.array([0, 4]), None), (2, 4)),
        ((np.array([-1, 2]), None), (2, 4)),
        ((np.array([0, 1]), None), (3, 4)),
    ],
)
def test_no_cut_reply_is_written_outside_its_tensor(
    axes: tuple[np.ndarray | None, ...], cut: tuple[int, ...]
) -> None:
    sums, covers = torch.zeros(4, 4), torch.zeros(4, 4)
    assert not kernels.add_at(sums, covers, axes, torch.ones(cut), 1.0)
    assert not sums.any()
    assert not covers.any()


def test_what_the_compiled_sum_does_not_know_is_left_to_torch() -> None:
    single, double = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float64)
    assert not kernels.fold(double, [double], [1.0], fresh=True)
    assert not kernels.fold(single.t()[:2], [single.t()[:2]], [1.0], fresh=True)
    assert torch.equal(double, torch.ones_like(double))
