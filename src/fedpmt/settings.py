"""The one typed schema of a run: flags, TOML files and Python calls all end here. Loads no torch."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedpmt.records import EXECUTION
from fedpmt.resources import Allowance, parse_budget
from fedpmt.types import Scalar, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

TASKS = ("fcnn-mnist", "cnn-mnist", "cnn-cifar10")
IMAGES = ("embedded", "mnist", "fashion-mnist", "cifar10")
DATA = (*IMAGES, "synthetic")
LEVELS = "1/5,1/4,1/3,1/2,1"


class Defaults(BaseModel):
    """What a data set brings with it where the user says nothing (section IV-B of the paper)."""

    model_config = ConfigDict(frozen=True)
    devices: int  # |K|
    samples: int  # |D_k|
    cohort: int  # |S|
    batch: int
    lr: float  # η
    rounds: int  # T
    train: int | None = Field(None, exclude=True)  # samples there are; None where that is not known here


PAPER_MNIST = Defaults(devices=100, samples=300, cohort=8, batch=12, lr=0.01, rounds=500, train=60_000)
DEFAULTS = {
    # The paper's rates with a fifth of its samples would take thousands of rounds: these reach 90 % in about a hundred.
    "embedded": Defaults(devices=50, samples=80, cohort=10, batch=10, lr=0.05, rounds=100, train=4_000),
    "mnist": PAPER_MNIST,
    "fashion-mnist": PAPER_MNIST,
    "cifar10": Defaults(devices=100, samples=500, cohort=10, batch=20, lr=0.05, rounds=400, train=50_000),
    "synthetic": Defaults(devices=100, samples=100, cohort=10, batch=10, lr=0.01, rounds=100),
    "arrays": Defaults(devices=50, samples=80, cohort=10, batch=10, lr=0.05, rounds=100),
}


class Settings(BaseModel):
    """Everything that decides a run's numbers, resolved: no field is left to be guessed later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field("fedpmt", description="fedpmt, fedavg, feddrop; see `fedpmt methods`")
    task: str = Field("fcnn-mnist", description="the net: " + ", ".join(TASKS))
    data: str = Field(
        "",
        description="the data set: "
        + ", ".join(DATA)
        + "; synthetic:ALPHA,BETA. Default: embedded, or cifar10 for cnn-cifar10",
    )
    data_dir: Path | None = Field(
        None, description="folder of the data files; else FEDPMT_DATA, else the user cache"
    )
    partition: str = Field("iid", description="iid, classes:N, dirichlet:ALPHA or iid:replace")
    partition_seed: int = Field(
        0, ge=0, description="fixes the split and the fleet, apart from the run's seed"
    )
    public: str = Field(
        "none",
        description="unlabelled data that everybody has and no device owns: none, holdout:SHARE of the training set, "
        "another data set as NAME or NAME:N, or generated:N; methods that need some hold out a tenth",
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training set that the server alone has, with labels; methods that need some: 0.01",
    )
    devices: int = Field(0, ge=1, description="size of the fleet |K|")
    samples: int = Field(
        0, ge=1, description="samples per device |D_k|, by default fewer where some are held out"
    )
    cohort: int = Field(0, ge=1, description="devices asked per round |S|")
    sampling: Literal["stratified", "uniform", "fastest"] = Field(
        "stratified",
        description="by level in equal shares, uniform, or the fastest of those polled (FedCS)",
    )
    levels: str = Field(
        LEVELS,
        description="speeds of the levels, slowest first; SPEEDxCOUNT fixes how many devices have one; "
        "or lognormal:SIGMA, uniform:LOW,HIGH to draw them",
    )
    level_draw: Literal["fixed", "round"] = Field(
        "fixed", description="a device keeps its level, or levels are redrawn each round"
    )
    fleet: Path | None = Field(
        None,
        description="CSV of measured devices: speed, and if known name, count, uplink_mbps, downlink_mbps, "
        "memory_mib, availability",
    )
    availability: float = Field(1.0, gt=0, le=1, description="chance that a device can be asked in a round")
    failure: float = Field(0.0, ge=0, lt=1, description="chance that an asked device never replies")
    over_select: float = Field(
        1.0, ge=1, le=10, description="ask this many times the cohort, keep the first to arrive"
    )
    assign: Literal["deadline", "level"] = Field(
        "deadline",
        description="deadline: the largest depth that fits; level: level i gets depth i, as in the paper",
    )
    deadline: float | None = Field(None, gt=0, description="seconds per round, later replies are dropped")
    budget: str | None = Field(
        None,
        description="what each method may spend on a device: operations, time, bytes, upload or memory, as much as "
        "FedPMT's depth takes there; or a share of the whole model, as operations=0.4, an amount, as time=20s, "
        "memory=8MiB, or one for each level, as upload=0.2,0.5,1. Default: operations, as the methods match them",
    )
    full_seconds: float = Field(10.0, gt=0, description="seconds for one epoch of the full model at speed 1")
    mode: Literal["exact", "paper"] = Field("exact", description="how operations are counted")
    prefix: Literal["cache", "recompute"] = Field(
        "cache", description="frozen layers' activations: computed once per round, or for each batch"
    )
    depths: int | None = Field(
        None, ge=1, description="number of depths |I|; default: the paper's larger one, else one per layer"
    )
    splitting: Literal["server", "device"] = Field(
        "server", description="who chooses the depth: Option I or Option II"
    )
    speeds: Literal["stated", "measured"] = Field(
        "stated", description="speeds that depths are fitted to: the fleet's, or fitted to measured seconds"
    )
    speed_weight: float = Field(0.5, gt=0, le=1, description="weight of the newest measurement of a speed")
    drift: str = Field(
        "", description="FACTOR,ROUNDS: speeds swing between 1/FACTOR and FACTOR times what is stated"
    )
    epochs: int = Field(1, ge=1, description="local epochs E")
    batch: int = Field(0, ge=1, description="batch size")
    lr: float = Field(0.0, ge=0, description="learning rate")
    schedule: str = Field(
        "constant", description="constant, inverse:LAMBDA (1/t as in Theorem 1) or step:EVERY,FACTOR"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="local momentum")
    weight_decay: float = Field(0.0, ge=0, description="local weight decay")
    dp_clip: float | None = Field(
        None,
        gt=0,
        description="differential privacy on the device: clip each device's whole update to this norm",
    )
    dp_noise: float = Field(1.0, ge=0, description="standard deviation of the noise, in units of the clip")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is stated")
    rounds: int = Field(0, ge=1, description="global rounds T")
    seed: int = Field(0, ge=0, description="seed of everything but the split and the fleet")
    workers: int = Field(0, ge=0, description="devices trained at a time; 0: one per core")
    server_cap: float | None = Field(
        2.0,
        gt=0,
        description="the server's operations per round, at most this many times its devices'; none: no limit",
    )
    server_speed: float | None = Field(
        None, gt=0, description="the server's speed, as devices' are; none: its work takes no virtual time"
    )
    executor: Literal["auto", "plain"] = Field(
        "auto",
        description="auto: the fastest that the model allows; plain: one device after another, by autograd",
    )
    device: Literal["cpu", "cuda", "mps", "auto"] = Field(
        "cpu", description="where tensors live and devices are computed"
    )
    eval_every: int = Field(1, ge=1, description="rounds between evaluations")
    personal_test: int | None = Field(
        None,
        ge=1,
        description="test samples that each device's own model is tested on, drawn once; none: all",
    )
    target: float | None = Field(None, gt=0, le=1, description="stop at this accuracy")
    time_budget: float | None = Field(None, gt=0, description="stop when the virtual clock passes this")
    checkpoint_seconds: float = Field(10.0, ge=0, description="real seconds between checkpoints")
    digest: str = Field(
        "", description="fingerprint of what settings only name: a fleet file, a user's model and arrays"
    )
    options: dict[str, Scalar] = Field({}, description="the method's own settings")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Defaults that hang on other settings."""
        given = {key: value for key, value in given.items() if value is not None}
        for key, value in given.items():
            if isinstance(value, bool):
                raise SettingError(f"{key.replace('_', '-')} = '{value}' is refused: it is not a yes or no")
        data = str(given.setdefault("data", "cifar10" if given.get("task") == "cnn-cifar10" else "embedded"))
        defaults = DEFAULTS.get(data.partition(":")[0])
        if defaults is None:
            raise SettingError.unknown("data", data, [*DATA, "synthetic:ALPHA,BETA"])
        if given.get("splitting") == "device":
            given.setdefault("sampling", "uniform")
        filled = {**defaults.model_dump(), **given}
        if "samples" not in given and defaults.train is not None:
            # What is held out is no device's: each has a little less.
            held = held_out(str(given.get("public", "none")), given.get("validation", 0.0), defaults.train)
            filled["samples"] = min(defaults.samples, (defaults.train - sum(held)) // defaults.devices)
        if "cohort" not in given and str(filled["devices"]).isdigit():
            filled["cohort"] = min(filled["cohort"], int(filled["devices"]))
        return filled

    @field_validator(
        "deadline",
        "full_seconds",
        "dp_clip",
        "dp_noise",
        "lr",
        "weight_decay",
        "time_budget",
        "over_select",
        "checkpoint_seconds",
        "server_cap",
        "server_speed",
    )
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @field_validator("schedule", "budget", "public", "drift")
    @classmethod
    def _parses(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            PARSERS[str(info.field_name)](value)
        return value

    @field_validator("server_cap", "server_speed", mode="before")
    @classmethod
    def _may_be_none(cls, value: object) -> object:
        return None if value == "none" else value

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        held_out(self.public, self.validation, 1)
        if self.speeds == "measured" and (self.assign == "level" or self.splitting == "device"):
            raise SettingError(
                "speeds = 'measured' needs a server that fits depths to speeds: "
                "assign = 'deadline' and splitting = 'server'"
            )
        if self.cohort > self.devices:
            raise SettingError(f"cohort = {self.cohort} is more than the fleet (devices = {self.devices})")
        if self.budget is not None and self.mode != "exact":
            raise SettingError(
                f"budget = '{self.budget}' is refused with mode = '{self.mode}': it needs mode = 'exact'"
            )
        if self.splitting == "device" and self.sampling != "uniform":
            raise SettingError(
                f"sampling = '{self.sampling}' needs speeds that the server does not know "
                "with splitting = 'device' (allowed: uniform)"
            )
        return self

    @property
    def allowance(self) -> Allowance | None:
        """The budget, read."""
        return None if self.budget is None else parse_budget(self.budget)

    def identity(self) -> dict[str, Any]:
        """What must agree for a run to be resumed."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in EXECUTION}


def resolve(given: dict[str, Any]) -> Settings:
    """Check settings and fill in defaults; a wrong one is refused in one line.

    >>> resolve({"rounds": "20"}).cohort
    10
    >>> resolve({"round": 20})
    Traceback (most recent call last):
    fedpmt.types.SettingError: setting = 'round' is unknown; did you mean 'rounds'? (allowed: ...)
    """
    given = {key.replace("-", "_"): value for key, value in given.items()}
    for key in given:
        if key not in Settings.model_fields:
            raise SettingError.unknown("setting", key, Settings.model_fields)
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            raise cause from None
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        reason = reason[0].lower() + reason[1:]
        raise SettingError(f"{key.replace('_', '-')} = '{first['input']}' is refused: {reason}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Settings from a TOML file; the method's own stand in the table [options]."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"config = '{path}' cannot be read: {error}") from error


def parse_schedule(text: str) -> tuple[str, tuple[float, ...]]:
    """Split a schedule into its name and numbers.

    >>> parse_schedule("step:100,0.5")
    ('step', (100.0, 0.5))
    """
    name, _, rest = text.partition(":")
    counts = {"constant": (0,), "inverse": (1,), "step": (2,)}
    if name not in counts:
        raise SettingError.unknown("schedule", text, ["constant", "inverse:LAMBDA", "step:EVERY,FACTOR"])
    try:
        numbers = tuple(float(part) for part in rest.split(",")) if rest else ()
    except ValueError:
        numbers = (math.nan,)
    if len(numbers) not in counts[name] or not all(
        math.isfinite(number) and number > 0 for number in numbers
    ):
        raise SettingError(
            f"schedule = '{text}' is refused: "
            "write constant, inverse:LAMBDA or step:EVERY,FACTOR with positive numbers"
        )
    return name, numbers


PUBLIC = ("none", "holdout:SHARE", "generated:N", *(f"{name}:N" for name in IMAGES))


def parse_public(text: str) -> tuple[str, float]:
    """Where public data comes from, and how much: a share for `holdout`, else a number of samples, 0 for all.

    >>> parse_public("holdout:0.1"), parse_public("mnist:2000"), parse_public("mnist")
    (('holdout', 0.1), ('mnist', 2000.0), ('mnist', 0.0))
    """
    name, colon, argument = text.partition(":")
    if name not in ("none", "holdout", "generated", *IMAGES):
        raise SettingError.unknown("public", text, PUBLIC)
    try:
        number = float(argument) if colon else 0.0
    except ValueError:
        number = math.nan
    if name == "holdout":
        if not 0 < number < 1:
            raise SettingError(
                f"public = '{text}' is refused: write holdout:SHARE with a share between 0 and 1"
            )
        return name, number
    if name == "none" and colon:
        raise SettingError(f"public = '{text}' is refused: none takes no number")
    if not number.is_integer() or number < (1 if colon or name == "generated" else 0):
        raise SettingError(
            f"public = '{text}' is refused: write {name}:N with a whole number N of at least 1"
        )
    return name, number


def held_out(public: str, validation: Any, total: int) -> tuple[int, int]:
    """How many of `total` samples are held out: without labels for everybody, with labels for the server.

    >>> held_out("holdout:0.1", 0.02, 4000)
    (400, 80)
    """
    kind, number = parse_public(public)
    try:
        labelled = float(validation)
    except (TypeError, ValueError):
        labelled = math.nan
    if not 0 <= labelled < 1:
        labelled = 0.0  # refused by the schema, which names it
    shares = (number if kind == "holdout" else 0.0, labelled)
    if sum(shares) >= 1:
        raise SettingError(
            f"public = '{public}' and validation = '{validation}' are refused: they leave nothing for the devices"
        )
    return round(shares[0] * total), round(shares[1] * total)


def parse_drift(text: str) -> tuple[float, float] | None:
    """How far speeds swing, and over how many rounds; None where they stay.

    >>> parse_drift("2,50")
    (2.0, 50.0)
    """
    if not text:
        return None
    numbers = text.split(",")
    factor, rounds = (parse_number("drift", numbers[0]), parse_number("drift", numbers[-1]))
    if len(numbers) != 2 or factor < 1:
        raise SettingError(f"drift = '{text}' is refused: write FACTOR,ROUNDS with a factor of at least 1")
    return factor, rounds


def parse_number(key: str, text: str) -> float:
    """A positive number, fractions allowed.

    >>> parse_number("speed", "1/4")
    0.25
    """
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise SettingError(f"{key} = '{text}' is refused: a positive number or fraction is needed")
    return value


PARSERS: dict[str, Callable[[str], object]] = {
    "schedule": parse_schedule,
    "budget": parse_budget,
    "public": parse_public,
    "drift": parse_drift,
}
"""Settings written in a small language of their own: what does not parse is refused when it is given."""
