"""What a check is given: the method, the variants of it that some checks need, and how to say that one has failed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpmt.simulation.checkpoint import write_value
from fedpmt.training.local import LocalWork

if TYPE_CHECKING:
    from fedpmt.methods.base import Method

BUDGETS = (200.0, 400.0, float("inf"), float("inf"))
"""Of the devices of a bench: two weak ones and two that can train everything."""

WEAK = 60.0
"""A budget that only pays for a small part of the model."""


@dataclass(frozen=True)
class Subject:
    """The method under test.

    Attributes:
        method: The method as it is checked.
        together: The same method with settings under which several devices reply from the first round on; needed only
            where it does not do that anyway.
        early: The same method with settings under which it goes through all its stages within a few rounds.
        rounds: Rounds after which it must be better than a guess on the embedded data, with no other setting.
        settings: Settings of all runs, e.g. `{"task": "cnn-mnist"}`.
    """

    method: Method[Any, Any]
    together: Method[Any, Any] | None = None
    early: Method[Any, Any] | None = None
    rounds: int = 12
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_stages(self) -> Method[Any, Any]:
        """The method as it is run for a few rounds."""
        return self.method if self.early is None else self.early

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something between rounds."""
        return type(self.method.local).first is not LocalWork.first


def expect(condition: bool, message: str) -> None:
    """Raise an AssertionError with this message where a condition does not hold; works under `python -O` too."""
    if not condition:
        raise AssertionError(message)


@contextmanager
def scratch() -> Iterator[Path]:
    """Open a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fedpmt-check-") as folder:
        yield Path(folder)


def encode(value: Any) -> bytes:
    """Return all that a checkpoint would keep of a value, to compare two values by their bits."""
    with scratch() as folder:
        write_value(folder / "value", value)
        return (folder / "value").read_bytes()


def expect_close(one: Any, other: Any, where: str = "state") -> None:
    """Expect two values to be equal within rounding, in all their parts."""
    expect(type(one) is type(other), f"{where}: {type(one).__name__} is not {type(other).__name__}")
    if one is other:
        return
    if dataclasses.is_dataclass(one):
        for item in dataclasses.fields(one):
            expect_close(getattr(one, item.name), getattr(other, item.name), f"{where}.{item.name}")
    elif isinstance(one, Mapping):
        expect(set(one) == set(other), f"{where} has other keys")
        for key in one:
            expect_close(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        expect(len(one) == len(other), f"{where} has another length")
        for place, pair in enumerate(zip(one, other, strict=True)):
            expect_close(*pair, f"{where}[{place}]")
    elif isinstance(one, torch.Tensor | np.ndarray | float):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")
    else:
        expect(bool(one == other), f"{where}: {one!r} is not {other!r}")
