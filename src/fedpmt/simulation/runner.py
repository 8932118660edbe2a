"""A run from its settings to its folder of records, safe against a kill at any moment."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from pydantic import ValidationError

from fedpmt import records
from fedpmt.methods.registry import typed_options
from fedpmt.records import EVALUATION, ResultRecord, RoundRecord, write_atomically
from fedpmt.settings import parse_schedule
from fedpmt.simulation.callbacks import RoundEnd
from fedpmt.simulation.repeat import repeat_command
from fedpmt.types import DivergedError, SettingError, Stop
from fedpmt.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Set

    from torch import Tensor

    from fedpmt.methods.base import Method, Predictor
    from fedpmt.records import ComputePath, Stopped
    from fedpmt.settings import Settings
    from fedpmt.simulation.callbacks import OnRound
    from fedpmt.simulation.loop import Federation, Progress
    from fedpmt.simulation.problem import Problem
    from fedpmt.types import Examples

LOCK = ".lock"
MOST_SHOWN = 100
"""Characters of a table that a message shows."""

_log = logging.getLogger("fedpmt")


def open_folder(folder: Path, settings: Settings, *, resume: bool) -> bool:
    """Make the run's folder with its settings in it, in one step, or find the one to continue. Loads no torch.

    Says whether the folder was made here: only then is it ours to take away again.
    """
    try:
        stored = records.read_config(folder) if folder.is_dir() else None
        taken = stored is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise SettingError(f"out = '{folder}' cannot be read: {error.strerror}") from error
    if stored is not None:
        if not resume:
            raise SettingError(
                f"out = '{folder}' already holds a run; continue it with --resume or name another folder"
            )
        check_same(folder, stored, settings)
        return False
    if taken:
        raise SettingError(f"out = '{folder}' exists and is not a run folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            (temporary / records.CONFIG).write_bytes(_config(settings))
            session = records.new_session(__version__, repeat_command(settings)).model_dump_json()
            (temporary / records.SESSION).write_bytes(session.encode() + b"\n")
            temporary.chmod(0o755)
            temporary.replace(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise SettingError(f"out = '{folder}' cannot be written: {error.strerror}") from error
    return True


def _config(settings: Settings) -> bytes:
    config = {"format": 1, "settings": settings.model_dump(mode="json")}
    return json.dumps(config, indent=1).encode() + b"\n"


def is_finished(folder: Path, settings: Settings) -> bool:
    """Whether there is nothing left to play: not where more rounds are wanted, or where a callback ended the run."""
    result = records.read_result(folder)
    if result is None:
        return False
    short = result.stopped == "rounds" and result.rounds < settings.rounds
    return not short and result.stopped != "callback"


def check_same(folder: Path, stored: Mapping[str, Any], settings: Settings) -> None:
    """Refuse to continue a run with settings that are not its own."""
    key = differing(stored, settings)
    if key is not None:
        raise SettingError(
            f"out = '{folder}' is a run of another configuration: "
            f"its {key} is '{_in_short(stored[key])}', not '{_in_short(settings.identity()[key])}'"
        )
    _check_rounds(folder, stored.get("rounds", settings.rounds), settings)


def _check_rounds(folder: Path, before: Any, settings: Settings) -> None:
    """Refuse to change the rounds of a run, except to more of them that change nothing in those before."""
    if not isinstance(before, int) or before < 1:
        raise SettingError(f"{folder / records.CONFIG} is not a run's configuration (rounds is '{before}')")
    if settings.rounds != before and parse_schedule(settings.schedule)[0] == "cosine":
        raise SettingError(
            f"rounds must be {before}, as in the run in '{folder}' (got {settings.rounds}): "
            f"the rates of schedule = '{settings.schedule}' depend on it"
        )
    if settings.rounds < before:
        raise SettingError(
            f"rounds must be >= {before}, those of the run in '{folder}' (got {settings.rounds})"
        )


def _in_short(value: object) -> str:
    """A value within one line of a message: a fleet given in Python has many."""
    text = str(value)
    return f"{text[:MOST_SHOWN].strip().replace(chr(10), ' | ')} ..." if "\n" in text else text


def differing(stored: Mapping[str, Any], settings: Settings) -> str | None:
    """The first setting in which a stored run differs; what an older version did not know cannot differ.

    A run may be extended, so rounds are not compared.
    """
    identity = {key: value for key, value in settings.identity().items() if key != "rounds"}
    options = stored.get("options", {})
    if stored.get("method") == settings.method and isinstance(options, dict):
        with suppress(SettingError):
            # Older versions stored options as they were typed.
            stored = {**stored, "options": typed_options(settings.method, options)}
    return next((key for key, value in identity.items() if key in stored and stored[key] != value), None)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Only one process works in a run folder."""
    try:
        handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise SettingError(f"out = '{folder}' cannot be written: {error.strerror}") from error
    _locks.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingError(f"out = '{folder}' is in use by another process") from None
        yield
    finally:
        _locks.remove(handle)
        os.close(handle)


_locks: set[int] = set()


def _release_locks() -> None:
    for handle in _locks:
        os.close(handle)
    _locks.clear()


# A fork that outlives its parent, if only for a moment, would keep the folder locked.
os.register_at_fork(after_in_child=_release_locks)


@dataclass(frozen=True)
class Totals:
    """Sums over the rounds so far, and the last evaluation."""

    bytes_up: int = 0
    bytes_down: int = 0
    operations: float = 0.0
    score: float | None = None
    loss: float | None = None
    server_operations: float = 0.0
    path: ComputePath | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None
    stale: int = 0  # evaluations since the best one
    joules: float | None = None

    def plus(self, record: RoundRecord) -> Totals:
        """With one more round."""
        evaluated, better = record.score is not None, self._improves(record)
        return Totals(
            self.bytes_up + record.bytes_up,
            self.bytes_down + record.bytes_down,
            self.operations + record.operations,
            record.score if evaluated else self.score,
            record.loss if evaluated else self.loss,
            self.server_operations + record.server_operations,
            self.path,
            record.scores if evaluated else self.scores,
            record.score if better else self.best,
            0 if better else self.stale + evaluated,
            self.joules if record.joules is None else (self.joules or 0.0) + record.joules,
        )

    def _improves(self, record: RoundRecord) -> bool:
        if record.score is None or self.best is None:
            return record.score is not None
        return record.score > self.best if record.maximize else record.score < self.best

    def by(self, seen: Set[ComputePath]) -> Totals:
        """The same with these paths among those taken."""
        taken = [*seen, *([self.path] if self.path and self.path not in seen else [])]
        return self if not taken else replace(self, path=taken[0] if len(taken) == 1 else "mixed")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    progress: Progress
    totals: Totals
    records_length: int  # bytes of rounds.jsonl that belong to it


def simulate(
    settings: Settings,
    problem: Problem,
    method: Method[Any, Any],
    folder: Path,
    on_round: OnRound | None = None,
    on_start: Callable[[], None] | None = None,
    *,
    keep_diverged: bool = False,
    keep_idle: bool = False,
) -> ResultRecord:
    """Play all rounds, or those that are missing; the folder must be open, and held by `exclusive`.

    With `keep_diverged` a run that diverges is finished with the rounds before, and says so. With `keep_idle` a method
    that no device can keep the deadline with is played for comparison, instead of raising `SettingError`.
    """
    from fedpmt.simulation.assemble import assemble
    from fedpmt.simulation.coverage import check_replies, check_room, warn_before_training

    with assemble(settings, problem, method, folder) as federation:
        check_room(federation, folder)
        with Journal(federation, folder) as journal:
            if journal.stopped is None:
                check_replies(federation, journal.progress, keep_idle=keep_idle)
            if on_start is not None:
                on_start()
            if journal.stopped is None:
                warn_before_training(federation, journal.progress)
            while journal.stopped is None:
                try:
                    played = federation.play(journal.progress)
                except DivergedError:
                    if not keep_diverged:
                        raise
                    journal.stopped = "diverged"
                    break
                record = journal.add(*played)
                if on_round is not None:
                    journal.call(on_round, record)
            word = records.step_word(settings.clock)
            if journal.stopped == "unreachable":
                _log.warning(
                    "%s: no device can be reached any more after %g virtual seconds; the run ends with %d of %s",
                    settings.method,
                    journal.progress.virtual_seconds,
                    journal.progress.rounds,
                    records.plural(settings.rounds, word),
                )
            elif journal.learnt_nothing:
                _log.warning(
                    "%s: no reply has counted in %s, so the model is as it was at the start; "
                    "devices were out of reach, failed or were late",
                    settings.method,
                    records.plural(journal.progress.rounds, word),
                )
        return journal.finish()


class Journal:
    """A run's folder while it is being played: a line for each round, a checkpoint now and then."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.federation, self.folder = federation, folder
        self._saved = self._before = _continue(federation, folder)
        self.stopped: Stopped | None = _stop(federation, self._saved)
        self._begun = self._written = time.monotonic()
        self._lines: BinaryIO | None = None
        self._said = False

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self._saved.progress

    @property
    def learnt_nothing(self) -> bool:
        """Whether rounds were played and no device's work is in the model."""
        return self.progress.rounds > 0 and self._saved.totals.operations == 0

    def add(self, progress: Progress, record: RoundRecord) -> RoundRecord:
        """Write down a round that has been played."""
        self._before = self._saved
        self._write(progress, record)
        self._say_path()
        self.stopped = _stop(self.federation, self._saved)
        seconds = time.monotonic() - self._written
        if self.stopped is not None or seconds >= self.federation.settings.checkpoint_seconds:
            self.checkpoint()
            self._written = time.monotonic()
        self.federation.store.outdate(progress.accepted or {})
        return record

    def _write(self, progress: Progress, record: RoundRecord) -> None:
        """Write the line of the last round."""
        assert self._lines is not None
        with records.naming(self.folder / records.ROUNDS):
            self._lines.truncate(self._before.records_length)
            self._lines.write(_line(record))
            self._lines.flush()
        # One assignment: an interrupt finds the round in all of it or in none.
        totals = self._before.totals.plus(record).by(self.federation.executor.paths.seen)
        self._saved = Saved(progress, totals, self._lines.tell())

    def call(self, on_round: OnRound, record: RoundRecord) -> None:
        """Call back with the last round; the run ends here if `Stop` is raised."""
        end = RoundEnd.of(record, self.folder, lambda: copy_state(self.federation, self.progress))
        try:
            on_round(end)
        except Stop:
            self._stop_here(record)
        finally:
            end.close()

    def _stop_here(self, record: RoundRecord) -> None:
        from fedpmt.simulation.evaluation import evaluate

        if self.stopped is not None:
            return
        if record.score is None:
            # What the result says is of the weights that are saved.
            evaluated = evaluate(self.federation, self.progress)
            self._write(self.progress, record.model_copy(update=evaluated))
        self.stopped = "callback"
        self.checkpoint()

    def _say_path(self) -> None:
        """Say once what keeps this run from compiled code that could train its model."""
        reason = self.federation.executor.paths.left_to_autograd
        if reason is not None and not self._said:
            self._said = True
            _log.warning(
                "fedpmt: %s: compiled code does not support %s; training runs on autograd",
                self.federation.settings.method,
                reason,
            )

    def checkpoint(self) -> None:
        """Keep what a resume needs."""
        from fedpmt.simulation.checkpoint import write_value

        write_value(self.folder / records.CHECKPOINT, self._saved)
        self.federation.store.settle(self.progress.accepted or {})

    def finish(self) -> ResultRecord:
        """Write the model and the result."""
        return _finish(self.federation, self.folder, self._saved, self.stopped)

    def __enter__(self) -> Self:
        settings = self.federation.settings
        if (records.read_config(self.folder) or {}).get("rounds", settings.rounds) != settings.rounds:
            write_atomically(self.folder / records.CONFIG, _config(settings))
        # It was of fewer rounds.
        (self.folder / records.RESULT).unlink(missing_ok=True)
        self._lines = (self.folder / records.ROUNDS).open("ab")
        self._lines.truncate(self._saved.records_length)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lines is not None:
            with records.naming(self.folder / records.ROUNDS):
                self._lines.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            # A line that the checkpoint does not know of is cut off by the resume.
            self.checkpoint()
        command = repeat_command(self.federation.settings)
        records.add_session(self.folder, time.monotonic() - self._begun, command)


def _continue(federation: Federation, folder: Path) -> Saved:
    """Where the last checkpoint left off; what followed it is computed again, to the same bits."""
    from fedpmt.simulation.checkpoint import read_value
    from fedpmt.training.batches import compute_device

    records.remove_leftovers(folder)
    path = folder / records.CHECKPOINT
    if path.exists():
        saved = read_value(path, compute_device(federation.settings.device))
        if not isinstance(saved, Saved):
            raise SettingError(f"{path} is not a checkpoint")
        saved = _reopen(federation, folder / records.ROUNDS, saved)
    else:
        saved = Saved(federation.start(), Totals(), 0)
    federation.store.recover(saved.progress.accepted or {})
    return saved


def _reopen(federation: Federation, path: Path, saved: Saved) -> Saved:
    """The checkpoint with the records that belong to it, as if the run had never been meant to end here."""
    lines, steps = _read_lines(path, saved.progress.rounds)
    if steps and steps[-1].score is not None and not federation.is_due(saved.progress):
        # It was the last round then: a run that goes on would not have evaluated it.
        steps[-1] = RoundRecord(**{key: value for key, value in steps[-1] if key not in EVALUATION})
        lines[-1] = _line(steps[-1])
        write_atomically(path, *lines)
    totals = reduce(Totals.plus, steps, Totals(path=saved.totals.path))
    return Saved(saved.progress, totals, sum(map(len, lines)))


def _read_lines(path: Path, rounds: int) -> tuple[list[bytes], list[RoundRecord]]:
    """Read the first rounds; refuse to continue behind records that are not those of the checkpoint."""
    whole = (records.read_bytes(path) if path.exists() else b"").split(b"\n")[:-1]
    lines = [line + b"\n" for line in whole[:rounds]]
    try:
        steps = [RoundRecord.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise SettingError(f"{path} holds a line that is not a round ({error.errors()[0]['msg']})") from error
    if [step.round for step in steps] != list(range(1, rounds + 1)):
        raise SettingError(f"{path} does not hold the {rounds} rounds of its checkpoint")
    return lines, steps


def _line(record: RoundRecord) -> bytes:
    return record.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _stop(federation: Federation, saved: Saved) -> Stopped | None:
    settings, progress, totals = federation.settings, saved.progress, saved.totals
    if settings.target is not None and totals.score is not None:
        maximize = federation.problem.objective.maximize
        if records.reaches(totals.score, settings.target, maximize=maximize):
            return "target"
    if settings.patience is not None and totals.stale >= settings.patience:
        return "patience"
    return federation.ended(progress)


def _finish(federation: Federation, folder: Path, saved: Saved, stopped: Any) -> ResultRecord:
    from safetensors.torch import save

    from fedpmt.models.trees import weights_sha256
    from fedpmt.simulation.evaluation import evaluate_clients, score_by_width

    settings, progress, totals = federation.settings, saved.progress, saved.totals
    predictor, objective = federation.predictor(progress), federation.problem.objective
    if stopped == "diverged":
        classes = federation.problem.data.classes
        guess = 1 / classes if classes and objective.score_name == records.ACCURACY else None
        totals = replace(totals, score=guess, loss=None, scores={})
    write_atomically(folder / records.MODEL_FILE, save(_copy(federation, predictor)))
    result = ResultRecord(
        method=settings.method,
        task=settings.task,
        seed=settings.seed,
        rounds=progress.rounds,
        score=totals.score,
        score_name=objective.score_name,
        maximize=objective.maximize,
        scores=dict(totals.scores),
        loss=totals.loss,
        virtual_seconds=progress.virtual_seconds,
        bytes_up=totals.bytes_up,
        bytes_down=totals.bytes_down,
        operations=totals.operations,
        server_operations=totals.server_operations,
        joules=totals.joules,
        epsilon=federation.epsilon(progress) if settings.dp_clip is not None and settings.dp_noise else None,
        weights_sha256=weights_sha256(predictor.tensors),
        evaluates=predictor.kind,
        score_by_width=None if stopped == "diverged" else score_by_width(federation, progress.state),
        stopped=stopped,
        run=str(folder),
        data=settings.data,
        partition=settings.partition,
        budget=settings.budget,
        budget_action=settings.limits and federation.method.traits.action(settings.limits.resource),
        public_samples=_count(federation.data.public),
        validation_samples=_count(federation.data.validation),
        path=totals.path,
        **({} if stopped == "diverged" else evaluate_clients(federation, progress)),
    )
    write_atomically(folder / records.RESULT, result.model_dump_json(indent=1).encode() + b"\n")
    return result


def copy_state(federation: Federation, progress: Progress) -> dict[str, Tensor]:
    """Copy what the run would save as its model here."""
    return _copy(federation, federation.predictor(progress))


def _copy(federation: Federation, predictor: Predictor) -> dict[str, Tensor]:
    """Copy all of the module's state, so that it loads strictly; what methods without a global model share, alone."""
    model = federation.problem.models[predictor.model]
    state = model.state_dict(predictor.tensors) if predictor.kind == "global" else predictor.tensors
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def _count(examples: Examples | None) -> int:
    return 0 if examples is None else len(examples)
