"""The few types that every room of the package shares, the one error a user sees, and bytes in words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from unicodedata import category

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Tensors: TypeAlias = "Mapping[str, Tensor]"
"""Named tensors of one model; names are those of `nn.Module.state_dict`."""

Payload: TypeAlias = "Mapping[str, Tensors]"
"""What travels: groups of named tensors. The weights are the group `MODEL`, a method adds its own."""

MODEL = "model"

IGNORED = -100
"""The label of a sample, token or pixel that counts neither in a loss nor in a score."""

Scalar: TypeAlias = float | int | str | bool

Arrays: TypeAlias = Any
"""An array (NumPy or torch) or a dict of arrays, equally long in their first axis; dicts may be nested."""

Table: TypeAlias = Any
"""A table in any of the ways that users have one: the path of a CSV, a list of dicts or a data frame."""

MOST_NAMES = 80
"""An error lists no more than this many allowed names, the nearest."""


class SettingError(ValueError):
    """A setting or an input that cannot be used; its text is one line that a user can act on."""

    @classmethod
    def unknown(cls, key: str, value: object, allowed: Iterable[str]) -> SettingError:
        """Name the key, the value, what is allowed and the nearest right name."""
        names = sorted(allowed)
        near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
        # "f1" is short for a name that it is not much like.
        near = near or [name for name in names if len(str(value)) > 1 and str(value) in name]
        hint = f"; did you mean '{near[0]}'?" if near else ""
        if len(names) > MOST_NAMES:
            names = [*difflib.get_close_matches(str(value), names, n=MOST_NAMES, cutoff=0), "..."]
        return cls(f"{key} = '{value}' is unknown{hint} (allowed: {', '.join(names)})")


@contextmanager
def one_line_errors(what: str, about: str = "") -> Iterator[None]:
    """Turn errors of a user's code into one line: what was tried, the error, and what it may have to do with."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise SettingError(f"{what} fails: {type(error).__name__}: {reason}{about}") from error


class DivergedError(ArithmeticError):
    """What was learnt is no longer finite."""


class Stop(Exception):  # noqa: N818 - like StopIteration, it is no error
    """Raise it in a callback to end the run after this round; result, model and checkpoint are written."""


def is_control(letter: str) -> bool:
    """Whether a terminal would obey this character."""
    return category(letter) == "Cc"


def printable(text: object) -> str:
    """A text in which control characters, which could command a terminal, and invisible ones are spelled out.

    >>> printable("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    # All categories that begin with C: control, format, surrogate, private and unassigned.
    return "".join(
        letter.encode("unicode_escape").decode() if category(letter).startswith("C") else letter
        for letter in shown
    )


def shown_bytes(count: float) -> str:
    """Bytes as people say them.

    >>> shown_bytes(12), shown_bytes(3_000_000)
    ('12 B', '3.0 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def shown_memory(count: float) -> str:
    """Memory in MiB, the unit that fleets and budgets state it in; in KiB or bytes where that is a small fraction.

    >>> shown_memory(2_764_288), shown_memory(24_106 * 2**20), shown_memory(17_500), shown_memory(88)
    ('2.64 MiB', '24,106 MiB', '17.1 KiB', '88 B')
    """
    if count < 2**10:
        return f"{count:.0f} B"
    mebibytes = count / 2**20
    amount, unit = (mebibytes, "MiB") if mebibytes >= 0.1 else (count / 2**10, "KiB")
    return f"{amount:,.{0 if amount >= 100 else 1 if amount >= 10 else 2}f} {unit}"


def shown_joules(joules: float) -> str:
    """Energy as people say it.

    >>> shown_joules(12.34), shown_joules(3_000_000)
    ('12.3 J', '3.0 MJ')
    """
    for unit in ("J", "kJ"):
        if abs(joules) < 1000:
            return f"{joules:,.1f} {unit}"
        joules /= 1000
    return f"{joules:,.1f} MJ"


def shown_count(count: float) -> str:
    """A large number as people say it.

    >>> shown_count(12), shown_count(109_482_240)
    ('12', '109.5 M')
    """
    if abs(count) < 1000:
        return f"{count:,.0f}"
    for unit in ("k", "M", "G"):
        count /= 1000
        if abs(count) < 1000:
            return f"{count:,.1f} {unit}"
    return f"{count / 1000:,.1f} T"


@dataclass(frozen=True)
class Examples:
    """Samples of one device or of a test set, with the identity of each (`z_{k,s}` in the paper).

    >>> import numpy as np
    >>> examples = Examples(np.eye(3), np.array([0, 1, 2]), np.array([7, 8, 9]))
    >>> len(examples), examples.take(np.array([2, 0])).ids.tolist()
    (3, [9, 7])
    """

    inputs: Arrays  # x_{k,s}
    targets: Arrays  # y_{k,s}
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: np.ndarray | slice) -> Examples:
        """The samples at these positions, in this order."""
        return Examples(_take(self.inputs, index), _take(self.targets, index), self.ids[index])

    def view(self, index: np.ndarray | slice) -> Examples:
        """The same; samples that are not in memory are not read yet."""
        return self.take(index)


class Rows(Examples):
    """Some rows of samples that lie in memory; copied when their inputs or targets are first asked for."""

    if TYPE_CHECKING:
        whole: Examples
        rows: np.ndarray
        _gather: Callable[[Arrays, np.ndarray], Arrays]

    def __new__(cls, inputs: Arrays, targets: Arrays, ids: np.ndarray) -> Examples:  # type: ignore[misc]
        """Samples of their own, as `dataclasses.replace` makes them, are no rows of others."""
        return Examples(inputs, targets, ids)

    @classmethod
    def of(cls, whole: Examples, rows: np.ndarray, gather: Callable[[Arrays, np.ndarray], Arrays]) -> Rows:
        """These rows of `whole`, which `gather` copies."""
        made: Rows = object.__new__(cls)
        vars(made).update(ids=whole.ids[rows], whole=whole, rows=rows, _gather=gather)
        return made

    def __reduce__(self) -> tuple[type[Examples], tuple[Arrays, Arrays, np.ndarray]]:
        """A copy needs these samples and no others."""
        return Examples, (self.inputs, self.targets, self.ids)

    @property
    def inputs(self) -> Arrays:
        """Theirs alone."""
        return self._own("inputs")

    @property
    def targets(self) -> Arrays:
        """Theirs alone."""
        return self._own("targets")

    def _own(self, name: str) -> Arrays:
        # Without a lock, unlike a cached property: a device's samples are one thread's.
        held = vars(self)
        if f"_{name}" not in held:
            held[f"_{name}"] = self._gather(getattr(self.whole, name), self.rows)
        found: Arrays = held[f"_{name}"]
        return found


def _take(arrays: Arrays, index: np.ndarray | slice) -> Arrays:
    if isinstance(arrays, Mapping):
        return {name: _take(array, index) for name, array in arrays.items()}
    return arrays[index]
