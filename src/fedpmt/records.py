"""What a run leaves behind: one folder, written so that a kill at any moment loses nothing that counts.

    config.json            the resolved settings; the folder appears with it, in one step
    rounds.jsonl           one line per round (`RoundRecord`)
    checkpoint.safetensors where a resume continues
    devices/               what devices keep between rounds, for methods that have such state
    model.safetensors      the final model
    result.json            the final numbers; its presence says that the run is finished
    session.json           when it was started, by which version, and how long it took; in no way part of the numbers

Everything that is shown to a person is drawn from these files.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from fedpmt.resources import ROUNDING
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

CONFIG, ROUNDS, RESULT, SESSION = "config.json", "rounds.jsonl", "result.json", "session.json"
CHECKPOINT, MODEL_FILE, DEVICES = "checkpoint.safetensors", "model.safetensors", "devices"

EXECUTION = frozenset({"workers", "checkpoint_seconds", "data_dir"})
"""Settings that say how a run is computed, not what: they may differ when it is resumed."""

EVENTS = ("buffer", "step_every", "concurrency", "staleness")
"""Settings that say how a clock of events goes; without one they have their defaults."""

ACCURACY = "accuracy"
"""The name of the one score that is a share of samples and is shown in percent."""

Outcome = Literal["arrived", "late", "failed", "surplus", "refused"]
Evaluated = Literal["global", "split", "personal"]
"""What a score is of: the server's model, a device's and the server's halves together, or a device's own;
for the last two it is the mean over devices that took part."""

Stopped = Literal["rounds", "target", "patience", "time-budget", "unreachable", "callback", "diverged"]
"""Why a run has ended; `unreachable`: no device can be reached any more, as its trace says.
A run that diverged has the accuracy of a guess, or no score if it is not an accuracy."""


ComputePath = Literal["compiled", "autograd", "mixed"]
"""How local rounds were computed: in compiled code, by autograd, or some this way and some that way."""


class Record(BaseModel):
    """A frozen value that reads and writes as JSON."""

    model_config = ConfigDict(frozen=True)


RENAMED = {
    "accuracy": "score",
    "accuracy_by_level": "score_by_level",
    "accuracy_by_class": "score_by_class",
}


def migrate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields of a round or a result that an older version wrote, when every score was an accuracy.

    >>> migrate({"round": 3, "accuracy": 0.5})
    {'round': 3, 'score': 0.5}
    """
    return {RENAMED.get(key, key): value for key, value in fields.items()}


Score = Annotated[float | None, Field(validation_alias=AliasChoices("score", "accuracy"))]
ScoreByLevel = Annotated[
    dict[str, float] | None, Field(validation_alias=AliasChoices("score_by_level", "accuracy_by_level"))
]
ScoreByClass = Annotated[
    dict[str, float] | None, Field(validation_alias=AliasChoices("score_by_class", "accuracy_by_class"))
]
"""Read under the name that an older version gave it, too."""


def reaches(score: float, target: float, *, maximize: bool) -> bool:
    """Whether a score is at the target or better."""
    return score >= target if maximize else score <= target


def check_target(target: float | None, score_name: str) -> None:
    """Raise SettingError if a score of this name cannot reach the target."""
    if target is None:
        return
    if score_name == ACCURACY and not 0 < target <= 1:
        raise SettingError(f"target must be > 0 and <= 1 for an accuracy (got {target:g})")
    if not math.isfinite(target):
        raise SettingError(f"target must be a finite number (got {target:g})")


class DeviceRecord(Record):
    """One device in one round. Only those that `arrived` are in the average; the others were asked."""

    device: int
    level: int  # 1 is the slowest level
    speed: float  # κ_k, relative to the fastest level
    part: str  # what it trained, e.g. "depth 3" or "keep 0.54"
    samples: int  # |D_k|
    seconds: float  # T_k: training plus transfer, virtual
    transfer_seconds: float = 0.0
    outcome: Outcome = "arrived"
    bytes_up: int = 0
    bytes_down: int = 0
    operations: float = 0.0
    reason: str = ""  # why the reply of a real device did not count
    memory_bytes: int = 0  # at its peak
    joules: float | None = (
        None  # that it spent on training and transfer; None where the fleet states no watts
    )
    idle_joules: float | None = None  # that it spent waiting for the round to end
    used: float | None = (
        None  # of what the run's budget limits, in operations, seconds, bytes or joules of this round
    )
    budget: float | None = None  # how much of it there was
    started: float | None = None  # on a clock of events: when, in virtual seconds
    version: int | None = None  # of the model that it started from: the server steps before
    turn: int = 0  # which draw of devices from that version it was in
    staleness: int | None = None  # server steps between that version and the one it was folded into
    digest: str = ""  # of a real device's reply, by which a replay is compared

    @property
    def over_budget(self) -> bool:
        """Whether not even the smallest that the method has was within the budget."""
        return self.used is not None and self.budget is not None and self.used > self.budget * (1 + ROUNDING)


class Scored(Record):
    """A record with a score that has a name; the fields stand in its subclasses."""

    if TYPE_CHECKING:
        score: float | None
        score_name: str

    @property
    def accuracy(self) -> float | None:
        """The score if it is an accuracy, else None."""
        return self.score if self.score_name == ACCURACY else None

    @property
    def score_text(self) -> str:
        """The score as people read it: in percent if it is an accuracy, else as a plain number; a dash for none."""
        if self.score is None:
            return "-"
        return f"{self.score:.1%}" if self.score_name == ACCURACY else f"{self.score:.4g}"


class ClientScores(Record):
    """The scores of clients' own test samples, each client counting the same."""

    count: int  # clients that have some
    mean: float
    spread: float  # standard deviation over clients
    worst_tenth: float  # the mean of the worst tenth of them


class RoundRecord(Scored):
    """One round. Bytes, operations and `round_seconds` are of this round; `virtual_seconds` is the clock after it."""

    round: int  # t, from 1
    virtual_seconds: float
    round_seconds: float
    bytes_up: int
    bytes_down: int
    overhead_bytes: int = 0  # descriptions of parts: level ids, index lists, masks
    operations: float
    wasted_operations: float = 0.0  # spent by devices whose reply did not count
    server_operations: float = 0.0
    joules: float | None = None  # of all devices that were asked, waiting included; None without watts
    learning_rate: float = 0.0  # η_t
    layers: dict[str, int]  # how many devices trained each layer: Σ_k f_k[l]
    devices: tuple[DeviceRecord, ...]
    score: Score = None  # None where the round was not evaluated
    score_name: str = ACCURACY
    maximize: bool = True  # whether a higher score is better
    scores: dict[str, float] = {}  # the user's other metrics on the test set, by name
    loss: float | None = None
    score_by_level: ScoreByLevel = (
        None  # of its clients; else classes weighted as that level's devices hold them
    )
    score_by_class: ScoreByClass = None
    clients: ClientScores | None = None  # on their own test samples; None where they have none
    evaluates: Evaluated = "global"  # what the score is of
    metrics: dict[str, float] = {}  # of training, e.g. its mean loss


def step_word(clock: object) -> str:
    """What a person calls a line of `rounds.jsonl`: on the clock of events, a step of the server.

    >>> step_word("rounds"), step_word("events")
    ('round', 'step')
    """
    return "step" if clock == "events" else "round"


def plural(count: int, word: str) -> str:
    """A number of things.

    >>> plural(1, "round"), plural(2, "step")
    ('1 round', '2 steps')
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def total_joules(steps: Iterable[RoundRecord]) -> float | None:
    """The energy of some rounds; None where the fleet states no watts."""
    known = [step.joules for step in steps if step.joules is not None]
    return sum(known) if known else None


EVALUATION = (
    "score",
    "score_name",
    "maximize",
    "scores",
    "loss",
    "score_by_level",
    "score_by_class",
    "clients",
    "evaluates",
)
"""The fields of a round that its evaluation fills; without one they have their defaults."""


class ResultRecord(Scored):
    """What a run ended with; `as_json` is what `--json` prints."""

    method: str
    task: str
    seed: int
    rounds: int
    score: Score = None
    score_name: str = ACCURACY
    maximize: bool = True  # whether a higher score is better
    scores: dict[str, float] = {}  # the user's other metrics at the last evaluation, by name
    loss: float | None = None
    virtual_seconds: float
    bytes_up: int
    bytes_down: int
    operations: float
    weights_sha256: str
    server_operations: float = 0.0
    joules: float | None = None  # of devices, waiting included; None where the fleet states no watts
    epsilon: float | None = None  # ε at dp_delta, of a device that was in every round; None without privacy
    evaluates: Evaluated = "global"
    score_by_width: dict[str, float] | None = None  # of narrow nets, by their share of the channels
    clients: ClientScores | None = None  # on their own test samples, at the last evaluation
    score_by_client: dict[str, float] | None = None  # the same one by one, by name
    score_by_level: ScoreByLevel = None
    stopped: Stopped = "rounds"
    run: str = ""  # the folder
    data: str = ""
    partition: str = ""
    budget: str | None = None
    budget_action: Literal["device", "shared", "work", "none"] | None = None  # how it acted on the method
    public_samples: int = 0  # unlabelled, no device's own
    validation_samples: int = 0  # labelled, the server's own
    path: ComputePath | None = None  # None where it is not known: on real devices, or in old records

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values, and `accuracy` as well as `score` if the score is one."""
        named = {ACCURACY: self.score} if self.score_name == ACCURACY else {}
        return {**self.model_dump(mode="json"), **named}


class SessionRecord(Record):
    """The circumstances of a run, which may differ where its numbers are the same."""

    version: str  # of fedpmt, when the run was started
    started: str  # UTC, as 2026-11-18T02:40:00Z
    command: str | None = None  # that makes the run again; None where a part of it exists in Python only
    seconds: float = 0.0  # real ones, of all sessions that ended by themselves or were interrupted


class RunRecord(Record):
    """A run as read back from its folder; `result` is None while it is not finished."""

    folder: Path
    settings: dict[str, Any]
    rounds: tuple[RoundRecord, ...]
    result: ResultRecord | None
    session: SessionRecord | None = None  # None in records of older versions

    @property
    def diverged(self) -> bool:
        """Whether it ended in numbers that are not finite; its rounds are those before."""
        return self.result is not None and self.result.stopped == "diverged"

    @property
    def score_name(self) -> str:
        """What the run's score is called."""
        scored = self._scored
        return scored.score_name if scored else ACCURACY

    @property
    def maximize(self) -> bool:
        """Whether a higher score is better."""
        scored = self._scored
        return scored.maximize if scored else True

    @property
    def _scored(self) -> RoundRecord | ResultRecord | None:
        return self.result or next((step for step in reversed(self.rounds) if step.score is not None), None)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system name this file: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, *parts: bytes) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a mixture of both."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill in the middle of `write_atomically` left behind."""
    for name in (CHECKPOINT, MODEL_FILE, RESULT, SESSION):
        for leftover in folder.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The run folders among these folders and below them, each once; none where there is none yet."""
    found: dict[Path, None] = {}
    for place in places:
        for folder, inner, files in os.walk(place):
            inner.sort()
            if CONFIG in files:
                found[Path(folder)] = None
                inner.clear()  # a run holds no other, but may hold a file for each device
    return list(found)


def read_bytes(path: Path) -> bytes:
    """Read a file of a run folder, or raise SettingError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from error


def read_config(folder: Path) -> dict[str, Any] | None:
    """The settings a run folder was made with; None where there is no run."""
    path = folder / CONFIG
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_bytes())
        settings = config["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} is not a run's configuration ({error})") from error
    if not isinstance(settings, dict):
        raise SettingError(f"{path} is not a run's configuration (settings is not a table)")
    return settings


def read_rounds(path: Path) -> tuple[RoundRecord, ...]:
    """The whole lines of a round file; a last line cut off by a kill does not count."""
    if not path.exists():
        return ()
    return parse_rounds(path, read_bytes(path).split(b"\n")[:-1])


def parse_rounds(path: Path, lines: Iterable[bytes]) -> tuple[RoundRecord, ...]:
    """Whole lines of a round file as records."""
    try:
        return tuple(RoundRecord.model_validate_json(line) for line in lines)
    except ValidationError as error:
        raise SettingError(f"{path} holds a line that is not a round ({error.errors()[0]['msg']})") from error


def read_result(folder: Path) -> ResultRecord | None:
    """The result of a run; None where it is not finished."""
    path = folder / RESULT
    try:
        return ResultRecord.model_validate_json(read_bytes(path)) if path.exists() else None
    except ValidationError as error:
        raise SettingError(f"{path} is not a run's result ({error.errors()[0]['msg']})") from error


def new_session(version: str, command: str | None) -> SessionRecord:
    """A session that starts now."""
    now = datetime.now(UTC)
    return SessionRecord(version=version, started=f"{now:%Y-%m-%dT%H:%M:%SZ}", command=command)


def read_session(folder: Path) -> SessionRecord | None:
    """When and by what a run was made; None where that is not known or not readable."""
    try:
        return SessionRecord.model_validate_json((folder / SESSION).read_bytes())
    except (OSError, ValidationError):
        return None


def add_session(folder: Path, seconds: float, command: str | None) -> None:
    """Add real time to that of a run's earlier sessions; more rounds make it a run of another command."""
    session = read_session(folder)
    if session is not None:
        longer = {"seconds": round(session.seconds + seconds, 3), "command": command}
        text = session.model_copy(update=longer).model_dump_json()
        with suppress(OSError):  # nothing hangs on it
            write_atomically(folder / SESSION, text.encode() + b"\n")


def read_run(folder: str | Path) -> RunRecord:
    """Read one run folder, finished or not."""
    folder = Path(folder)
    settings = read_config(folder)
    if settings is None:
        raise SettingError(f"'{folder}' is not a run folder (no {CONFIG} in it)")
    result = read_result(folder)
    return RunRecord(
        folder=folder,
        settings=settings,
        rounds=read_rounds(folder / ROUNDS),
        result=result,
        session=read_session(folder),
    )
