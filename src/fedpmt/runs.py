"""Runs as Python users get them back: as a frame, a plot, a model or a table. Loads no torch by itself."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import PrivateAttr

from fedpmt import records
from fedpmt.records import RunRecord, plural, step_word, total_joules
from fedpmt.report.quantities import bytes_unit, joules_unit, score_title, show, time_unit
from fedpmt.types import DivergedError, SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

M = TypeVar("M", bound="nn.Module")


class Run(RunRecord):
    """A run: its settings, rounds and result, and what one does with them."""

    _scratch: Any = PrivateAttr(None)

    def frame(self) -> Any:
        """Return a pandas frame with one row per round; its columns are those of `fedpmt report`'s CSV."""
        return _frame([self])

    def plot(self) -> Any:
        """Draw the score against virtual time and against rounds; returns matplotlib's two axes."""
        return _plot([self])

    def model(self, module: M) -> M:
        """Load the trained weights into a module of the same class, and return it in evaluation mode.

        Args:
            module: It must have exactly the tensors that were saved: those of the model that was trained.

        Raises:
            SettingError: The run has no model, or the module's tensors are others.
        """
        path = self.folder / records.MODEL_FILE
        if self.result is None or not path.exists():
            raise SettingError(
                f"'{self.folder}' has no model: the run is not finished, or its folder is gone"
            )
        if self.result.evaluates != "global":
            raise SettingError(f"{self.result.method} has no global model: what it scores are devices' own")
        _load_strictly(module, path)
        return module.eval()

    def held_by(self, scratch: Scratch | None) -> Self:
        """Keep a temporary folder for as long as this record, or a copy of it, is there."""
        self._scratch = scratch
        return self

    def __repr__(self) -> str:
        named = f"<Run {self.settings.get('method')} on {self.settings.get('data')}"
        if self.result is None:
            steps = plural(len(self.rounds), step_word(self.settings.get("clock")))
            return f"{named}: not finished, {steps}, {self.folder}>"
        shown = {
            name: value for name, value in _summary(self).items() if name not in ("method", "data", "seed")
        }
        return f"{named}: {', '.join(f'{name} {value}' for name, value in shown.items())}, {self.folder}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return _table([self])


class Runs(list[Run]):
    """The runs of a comparison, in the order in which they were made."""

    def frame(self) -> Any:
        """Return a pandas frame with one row per run and round."""
        return _frame(self)

    def plot(self) -> Any:
        """Draw all scores against virtual time and against rounds; returns matplotlib's two axes."""
        return _plot(self)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no runs"

    def _repr_html_(self) -> str:
        return _table(self)


def read_run(folder: str | Path) -> Run:
    """Read one run folder, finished or not."""
    found = records.read_run(folder)
    return Run.model_construct(found.model_fields_set, **dict(found))


class Scratch:
    """A temporary folder that is removed when nobody holds this any more, or when the program ends."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fedpmt-"))
        self._removal = weakref.finalize(self, _remove, self.folder, os.getpid())

    def remove(self) -> None:
        """Remove the folder now."""
        self._removal()

    def keep(self) -> None:
        """Leave the folder where it is."""
        self._removal.detach()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # What is pickled does not own the folder: None takes its place.
        return type(None), ()


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork leaves its parent's folders alone
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def resumable(out: Path, scratch: Scratch | None) -> Iterator[None]:
    """Say how to continue what is interrupted here; a temporary folder is kept only if it can be continued."""
    try:
        yield
    except (SettingError, DivergedError):
        if scratch is not None:
            scratch.remove()
        raise
    except BaseException as error:
        if (out / records.CHECKPOINT).exists() or any(out.glob(f"*/{records.CHECKPOINT}")):
            error.add_note(f"continue with the same arguments and out='{out}', resume=True")
            if scratch is not None:
                scratch.keep()
        elif scratch is not None:
            scratch.remove()
        raise


def _frame(runs: Sequence[Run]) -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise SettingError("pandas is not installed: pip install pandas") from error
    from fedpmt.report.tables import tidy

    return pd.DataFrame(tidy(runs))


def _plot(runs: Sequence[Run]) -> Any:
    from fedpmt.report.figures import plot

    return plot(runs)


def _load_strictly(module: nn.Module, path: Path) -> None:
    from safetensors.torch import load_file

    from fedpmt.models.unwrap import unwrap

    try:
        unwrap(module).load_state_dict(load_file(path))
    except RuntimeError as error:
        # torch names each missing, unexpected or misshapen tensor in a line of its own.
        reasons = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise SettingError(f"'{path}' does not fit into {type(module).__name__}: {reasons[0]}") from error


def _summary(run: Run) -> dict[str, str]:
    """What one wants to know of a run at a glance."""
    result, settings = run.result, run.settings
    last = result or next((step for step in reversed(run.rounds) if step.score is not None), None)
    played = run.rounds[-1] if run.rounds else None
    seconds = result.virtual_seconds if result else played.virtual_seconds if played else 0.0
    shown = {
        "method": str(settings.get("method")),
        "data": str(settings.get("data")),
        "seed": str(settings.get("seed")),
        score_title(run.score_name): last.score_text if last else "-",
        "rounds": str(len(run.rounds)),
        "virtual time": show(seconds, time_unit),
        "uploaded": show(float(sum(step.bytes_up for step in run.rounds)), bytes_unit),
    }
    joules = total_joules(run.rounds)
    if joules is not None:
        shown["energy"] = show(joules, joules_unit)
    if result is not None and result.epsilon is not None:
        shown["epsilon"] = f"{result.epsilon:.3g} at delta {settings.get('dp_delta'):g}"
    if result is None or result.stopped != "rounds":
        shown["stopped by"] = result.stopped if result else "not finished"
    return shown


def _table(runs: Sequence[Run]) -> str:
    """A small HTML table, one row per run."""
    rows = [_summary(run) for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
