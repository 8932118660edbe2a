"""The paper's experiments as settings (section IV-B), and the small version of them on embedded data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedpmt.models.nets import net
from fedpmt.settings import Settings, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from reproduction.artefact import Artefact
    from reproduction.library import Library

IID, TWO_CLASSES = "iid", "classes:2"
PARTITIONS = {IID: "i.i.d.", TWO_CLASSES: "2 classes per device"}
DATA = {"fcnn-mnist": "mnist", "cnn-mnist": "mnist", "cnn-cifar10": "cifar10"}
TITLES = {"fcnn-mnist": "FCNN-MNIST", "cnn-mnist": "CNN-MNIST", "cnn-cifar10": "CNN-CIFAR10"}
LEVELS = {5: "1/5,1/4,1/3,1/2,1", 4: "1/4,1/3,1/2,1", 2: "1/2,1"}
"""Speeds for |I| depths. The paper gives the first; the others are ours, after the same pattern."""

QUICK_ROUNDS = 30
EVALUATED_EVERY = {"mnist": 5, "cifar10": 2, "embedded": 5}


@dataclass(frozen=True)
class Scope:
    """How much is done."""

    seeds: Sequence[int]
    quick: bool = False
    data_dir: Path | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """The nets: without CIFAR-10 those of the embedded images."""
        return ("fcnn-mnist", "cnn-mnist") if self.quick else ("fcnn-mnist", "cnn-mnist", "cnn-cifar10")

    @property
    def suffix(self) -> str:
        """What is added to a command."""
        return flags(self.seeds, quick=self.quick)

    def settings(
        self, method: str, task: str, partition: str, seed: int, depths: int | None = None, **more: Any
    ) -> Settings:
        """One run of the paper's; `depths` is |I|, and says how many levels of speed there are."""
        count = depths or net(task).depths[0]
        data = "embedded" if self.quick else DATA[task]
        given = {
            "method": method,
            "task": task,
            "data": data,
            "data_dir": self.data_dir,
            "partition": partition,
            "seed": seed,
            "depths": count,
            "levels": LEVELS[count],
            "assign": "level",
            "mode": "paper",
            "prefix": "cache",
            "eval_every": EVALUATED_EVERY[data],
            **({"rounds": QUICK_ROUNDS} if self.quick else {}),
            **more,
        }
        return resolve(given)


@dataclass(frozen=True)
class Experiment:
    """One artefact of the paper: the runs it needs, and what is made of them."""

    name: str
    about: str
    runs: Callable[[Scope], list[Settings]]
    make: Callable[[Library, Scope], Artefact]
    then: Callable[[Library, Scope], list[Settings]] = (
        lambda library, scope: []
    )  # what depends on runs that are there; asked until it says nothing new


def ranges(seeds: Sequence[int]) -> str:
    """Seeds as the option has them.

    >>> ranges([0, 1, 2, 5]), ranges([3])
    ('0-2,5', '3')
    """
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def flags(seeds: Sequence[int], *, quick: bool) -> str:
    """The end of a command; the defaults, seed 0 and all of it, are not written.

    >>> flags([0], quick=False), flags([3], quick=True)
    ('', ' --seeds 3 --quick')
    """
    return ("" if list(seeds) == [0] else f" --seeds {ranges(seeds)}") + (" --quick" if quick else "")


def seeds_text(counts: Collection[int]) -> str:
    """How many seeds there are, in words; of what has different numbers of them, the least and the most.

    >>> seeds_text([1]), seeds_text([3, 3]), seeds_text([2, 3])
    ('1 seed', '3 seeds', '2 to 3 seeds')
    """
    least, most = min(counts), max(counts)
    if least < most:
        return f"{least} to {most} seeds"
    return "1 seed" if most == 1 else f"{most} seeds"
