"""The one typed schema of a run: flags, TOML files and Python calls all end here. Loads no torch."""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedpmt.data.description import Defaults
from fedpmt.data.registry import default_for, find_dataset, is_own, spellings
from fedpmt.data.spec import held_out, parse_public
from fedpmt.models.nets import NETS, PRETRAINED, RANDOM, TASKS, WHOLE, Net, Task
from fedpmt.models.structure import FrozenPrecision, TrainedPrecision
from fedpmt.records import EVENTS, EXECUTION
from fedpmt.resources import BudgetSetting, parse_budget
from fedpmt.types import Scalar, SettingError, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OWN_TASK = "own"
"""What `task` is where the model is the user's own."""

LEVELS = "1/5,1/4,1/3,1/2,1"
SERVER_USES = {
    "server_lr": ("sgd", "momentum", "adam", "yogi", "adagrad"),
    "server_momentum": ("momentum", "adam", "yogi"),
    "server_nesterov": ("momentum",),
    "server_beta2": ("adam", "yogi"),
    "server_tau": ("adam", "yogi", "adagrad"),
}
"""Which of the server's optimizers make use of a setting; with the others it would be ignored, so it is refused."""

LOWER_PRECISIONS = ("bf16", "int8")
STALENESS = "polynomial:0.5"
"""What a late reply counts where nothing else is said: 1 / sqrt(1 + staleness), as in FedBuff."""

PRECISION_SECONDS = "bf16=1,int8=1/2"
"""An assumption: 8 bits are taken to be twice as fast as 32, and 16 bits, which many devices lack, no faster."""

FLAGS = ("nesterov", "server_nesterov")
"""Settings that are true or false; true is not taken for the number 1 elsewhere."""

PRIVACY = ("dp_noise", "dp_delta")
"""Settings of differential privacy, which needs `dp_clip`: without a clip nothing is noised."""

FINGERPRINT = "digest"
"""A field that the library fills in; no setting of a user's."""

ARRAYS = "arrays"
"""What `data` is where the samples are the user's own arrays."""


class Settings(BaseModel):
    """Everything that decides a run's numbers, resolved: no field is left to be guessed later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field("fedpmt", description="a name of `fedpmt methods`, or package.module:Class")
    task: str = Field(
        "fcnn-mnist",
        description="a net of the paper: " + ", ".join(NETS) + "; or a ready task: " + ", ".join(TASKS),
    )
    model: str = Field(
        "",
        description="your own net instead: package.module:function, a function that returns the nn.Module",
    )
    weights: str = Field(
        "",
        description="what a ready task starts from: pretrained (the default of tasks that have such weights), random, "
        "or a file with all tensors of the model, such as the model.safetensors of a run",
    )
    tune: Literal["all", "head", "lora"] = Field(
        "all",
        description="what a ready task with pretrained weights trains: all of the model, its head alone, or LoRA "
        "adapters of rank 8 and the head",
    )
    layers: str = Field(
        "",
        description="its layers in the order of the forward pass, as a,b,c; modules of one layer as a+b. "
        "Default: found by running two samples",
    )
    tied: Literal["first", "last"] = Field(
        "last",
        description="the layer to which a weight belongs that several of them use, such as an embedding",
    )
    data: str = Field(
        "",
        description=f"the data set: {', '.join(spellings())}; with a net of your own also hf:NAME (Hugging Face), "
        "folder:PATH (images in train/CLASS and test/CLASS) or package.module:function, which returns "
        "(inputs, targets) for training and for testing. "
        f"Default: {', '.join(f'{default_for(net.data)} for {net.name}' for net in NETS.values())}, a ready task's own",
    )
    clients: str = Field(
        "",
        description="the devices' own samples instead, for a net of your own: package.module:function, which returns "
        "{client: examples}, or that and a test set",
    )
    data_dir: Path | None = Field(
        None, description="folder of the data files; else FEDPMT_DATA, else the user cache"
    )
    objective: Literal["classification", "causal-lm", "multi-label", "regression", "custom"] = Field(
        "classification",
        description="what your own model learns: classification (of samples, tokens or pixels), causal-lm, multi-label "
        "or regression; from Python also a loss of your own",
    )
    partition: str = Field(
        "iid",
        description="iid, classes:N, dirichlet:ALPHA, iid:replace, or natural: each device holds what one person owns, "
        "the default where the data says whose its samples are",
    )
    amounts: str = Field(
        "equal",
        description="how many samples devices hold: equal numbers, lognormal:SIGMA, or free: as they fall "
        "with dirichlet:ALPHA",
    )
    held_out: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each device's samples that it keeps for its own test",
    )
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
    score_on: Literal["test", "validation"] = Field(
        "test",
        description="what scores are of: the test set, or the validation data, by which settings may be chosen",
    )
    devices: int = Field(0, ge=1, description="size of the fleet |K|")
    samples: int = Field(
        0,
        ge=1,
        description="samples per device |D_k|, by default fewer where some are held out; their mean where they differ",
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
    fleet: str | None = Field(
        None,
        description="CSV of measured devices: speed, and if known name, count, uplink_mbps, downlink_mbps, "
        "memory_mib, availability, watts_computing, watts_sending, watts_idle, scale",
    )
    availability_trace: str | None = Field(
        None,
        description="CSV of when devices can be reached: client, start, end, in virtual seconds",
    )
    speed_trace: str | None = Field(
        None,
        description="CSV of how fast devices really are: client, time (in virtual seconds), speed; "
        "depths are fitted to the fleet's speeds, or to those measured",
    )
    availability: float = Field(1.0, gt=0, le=1, description="chance that a device can be asked in a round")
    failure: float = Field(0.0, ge=0, lt=1, description="chance that an asked device never replies")
    over_select: float = Field(
        1.0, ge=1, le=10, description="ask this many times the cohort, keep the first to arrive"
    )
    clock: Literal["rounds", "events"] = Field(
        "rounds",
        description="rounds: the server waits for the cohort; events: devices start when they are free, replies arrive "
        "when they are finished, and the server steps by buffer or step-every, each step counting as a round",
    )
    buffer: int | None = Field(
        None,
        ge=1,
        description="with clock = events: the server steps after this many replies; default: half of the concurrency",
    )
    step_every: str | None = Field(
        None,
        description="with clock = events: the server steps, and hands out work, at intervals of this many virtual "
        "seconds; or fastest:SHARE, as long as this share of the fleet needs at most for a whole local round",
    )
    concurrency: int | None = Field(
        None, ge=1, description="with clock = events: devices at work at a time; default: the cohort"
    )
    staleness: str = Field(
        STALENESS,
        description="with clock = events: what a reply counts that is S server steps late: constant, "
        "polynomial:A for (1 + S)^-A, or hinge:A,B for 1 / (A (S - B) + 1) after B steps",
    )
    assign: Literal["deadline", "level"] = Field(
        "deadline",
        description="deadline: the largest depth that fits; level: level i gets depth i, as in the paper",
    )
    deadline: float | None = Field(None, gt=0, description="seconds per round, later replies are dropped")
    budget: str | None = Field(
        None,
        description="what each method may spend on a device: operations, time, bytes, upload, memory or energy, as "
        "much as FedPMT's depth takes there; or a share of the whole model, as operations=0.4, an amount, as time=20s, "
        "memory=8MiB, energy=5J, or one for each level, as upload=0.2,0.5,1. Default: operations, as the "
        "methods match them",
    )
    full_seconds: float = Field(10.0, gt=0, description="seconds for one epoch of the full model at speed 1")
    mode: Literal["exact", "paper"] = Field("exact", description="how operations are counted")
    prefix: Literal["auto", "cache", "recompute", "streamed"] = Field(
        "auto",
        description="frozen layers' outputs: computed once per round and kept, or for each batch; those of a base that "
        "nobody trains are kept over rounds. auto keeps the first with more than one local epoch, the others where "
        "that saves a tenth of a step and they fit into every device's memory. streamed is auto, but where that takes "
        "less memory frozen layers run one by one, each on all samples, so that one's weights are held at a time",
    )
    prefix_tolerance: float | None = Field(
        None,
        ge=0,
        description="frozen layers' outputs are kept over rounds until one of these layers has moved by more than this "
        "share of its norm; default: computed in every round",
    )
    depths: int | None = Field(
        None, ge=1, description="number of depths |I|; default: the paper's larger one, else one per layer"
    )
    plan: Literal["paper", "traded", "rotated"] = Field(
        "paper",
        description="what FedPMT does with a device's budget: the deepest part in all steps, as in the paper; a deeper "
        "one in fewer steps; or the same, and now and then all layers",
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
        "constant",
        description="constant, inverse:LAMBDA (1/t as in Theorem 1), step:EVERY,FACTOR or cosine[:FLOOR]",
    )
    warmup: int = Field(0, ge=0, description="rounds in which the rate first rises linearly")
    optimizer: Literal["sgd", "adam", "adamw", "custom"] = Field(
        "sgd", description="the optimizer on devices: sgd, adam or adamw; from Python also any of torch's"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD on devices")
    nesterov: bool = Field(False, description="Nesterov's momentum on devices: true or false")
    weight_decay: float = Field(0.0, ge=0, description="weight decay on devices")
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="the largest norm of a step's gradient on devices; longer ones are scaled down",
    )
    precision: TrainedPrecision = Field(
        "fp32",
        description="in which trained layers compute on devices: fp32 (as the weights are), or bf16 by autocast",
    )
    frozen_precision: FrozenPrecision = Field(
        "fp32",
        description="in which layers before the first trained one compute, and in which their outputs are kept: "
        "fp32 (as the weights are), bf16 by autocast, or int8, which rounds weights and outputs to 8 bits",
    )
    precision_seconds: str = Field(
        PRECISION_SECONDS,
        description="seconds of an operation in these precisions, relative to fp32's, for the virtual clock",
    )
    mean: str = Field(
        "plain",
        description="how the replies of those that trained an entry become one, for methods that average parts: plain "
        "(by their weights), or robust against some false ones: median, trimmed:SHARE (without that share of the "
        "largest and smallest values) or clipped:NORM (longer updates are scaled down)",
    )
    server_optimizer: Literal["none", "sgd", "momentum", "adam", "yogi", "adagrad"] = Field(
        "none", description="the server's optimizer, for methods that average parts; none takes the mean"
    )
    server_lr: float | None = Field(
        None, gt=0, description="its rate; default: 1 for sgd, 0.3 for momentum, 0.01 for the others"
    )
    server_momentum: float = Field(0.9, ge=0, lt=1, description="its momentum, or beta 1 of adam and yogi")
    server_nesterov: bool = Field(False, description="Nesterov's momentum on the server: true or false")
    server_beta2: float = Field(0.99, ge=0, lt=1, description="beta 2 of adam and yogi on the server")
    server_tau: float = Field(1e-3, gt=0, description="tau of adam, yogi and adagrad on the server")
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
    target: float | None = Field(
        None, description="stop when the score reaches this; an accuracy, unless you bring your own metric"
    )
    patience: int | None = Field(
        None, ge=1, description="stop when the score has not improved for this many evaluations"
    )
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
            if isinstance(value, bool) and key not in FLAGS:
                wanted = "a number" if cls.model_fields[key].annotation in (int, float) else "a value"
                raise SettingError(f"{key.replace('_', '-')} expects {wanted}, got {str(value).lower()}")
        task = _find_task(str(given.get("task", cls.model_fields["task"].default)))
        if "data" not in given:
            given["data"] = default_for(task.data) if task else ARRAYS
        if isinstance(task, Task):
            given.setdefault("weights", PRETRAINED if task.weights else RANDOM)
        data = str(given["data"])
        described = None if data == ARRAYS or is_own(data) else find_dataset(data)[0]
        defaults, train = (described.defaults, described.train) if described else (Defaults(), None)
        if given.get("splitting") == "device":
            given.setdefault("sampling", "uniform")
        usual = asdict(defaults)
        if isinstance(task, Task):
            usual |= task.defaults(str(given.get("tune", WHOLE)))
        filled = {**usual, **given}
        if described is not None and described.clients is not None:
            filled.setdefault("partition", "natural")
        if "samples" not in given and train is not None:
            # What is held out is no device's: each has a little less.
            held = held_out(str(given.get("public", "none")), given.get("validation", 0.0), train)
            filled["samples"] = min(usual["samples"], (train - sum(held)) // usual["devices"])
        if "cohort" not in given and str(filled["devices"]).isdigit():
            filled["cohort"] = min(filled["cohort"], int(filled["devices"]))
        if given.get("clock") == "events":
            filled.setdefault("concurrency", filled["cohort"])
            if "step_every" not in given and str(filled["concurrency"]).isdigit():
                filled.setdefault("buffer", max(1, int(filled["concurrency"]) // 2))
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
        "clip_norm",
        "prefix_tolerance",
        "server_lr",
        "server_tau",
        "checkpoint_seconds",
        "server_cap",
        "server_speed",
        "target",
    )
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @field_validator(
        "schedule", "budget", "public", "drift", "precision_seconds", "step_every", "staleness", "mean"
    )
    @classmethod
    def _parses(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            PARSERS[str(info.field_name)](value)
        return value

    @field_validator("levels", "layers", "drift", "precision_seconds", "budget", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """A list, as TOML and Python have them, stands for its items with commas between them."""
        plain = isinstance(value, list | tuple) and all(type(one) in (str, int, float) for one in value)
        return ",".join(map(str, value)) if plain else value  # type: ignore[call-overload]

    @field_validator("step_every", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return f"{value:g}" if isinstance(value, int | float) else value

    @field_validator("fleet", "availability_trace", "speed_trace", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

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
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum):
            raise SettingError("nesterov = 'true' needs optimizer = 'sgd' and a momentum > 0")
        if self.momentum and self.optimizer not in ("sgd", "custom"):
            raise SettingError(
                f"momentum = {self.momentum:g} is SGD's; optimizer = '{self.optimizer}' has its own"
            )
        for key, kinds in SERVER_USES.items():
            value, usual = getattr(self, key), type(self).model_fields[key].default
            if value != usual and self.server_optimizer not in kinds:
                name, shown = key.replace("_", "-"), str(value).lower()
                raise SettingError(
                    f"{name} = {shown} does nothing with server-optimizer = '{self.server_optimizer}' "
                    f"(it belongs to {', '.join(kinds)})"
                )
        if self.budget is not None and self.mode != "exact":
            raise SettingError(
                f"budget = '{self.budget}' is refused with mode = '{self.mode}': it needs mode = 'exact'"
            )
        if self.score_on == "validation" and not self.validation:
            raise SettingError("score-on = 'validation' needs validation data, e.g. --validation 0.1")
        changed = {key: getattr(self, key) for key in PRIVACY}
        usual = {key: type(self).model_fields[key].default for key in PRIVACY}
        check_privacy(
            {"dp_clip": self.dp_clip, **{key: one for key, one in changed.items() if one != usual[key]}}
        )
        _check_precision(self)
        _check_clock(self)
        _check_tolerance(self)
        _check_traces(self)
        _check_task(self)
        if self.splitting == "device" and self.sampling != "uniform":
            raise SettingError(
                f"sampling = '{self.sampling}' needs speeds that the server does not know "
                "with splitting = 'device' (allowed: uniform)"
            )
        return self

    @property
    def limits(self) -> BudgetSetting | None:
        """The budget, parsed."""
        return None if self.budget is None else parse_budget(self.budget)

    @property
    def keeps_prefix(self) -> bool:
        """Whether devices keep the outputs of frozen layers for a whole round.

        With one epoch each of them is used once a round, so that keeping them for no other would save nothing.
        """
        again = self.epochs > 1 or self.prefix_tolerance is not None
        return self.prefix == "cache" or (self.prefix != "recompute" and again)

    def identity(self) -> dict[str, Any]:
        """What must agree for a run to be resumed."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in EXECUTION}


class RunSettings(TypedDict, total=False):
    """The settings as keywords of `fedpmt.run`, for editors and type checkers; a test holds them to `Settings`."""

    task: str
    weights: str | Path
    tune: Literal["all", "head", "lora"]
    tied: Literal["first", "last"]
    data: str
    data_dir: str | Path | None
    objective: Literal["classification", "causal-lm", "multi-label", "regression"]
    partition: str
    amounts: str
    held_out: float
    partition_seed: int
    public: str
    validation: float
    score_on: Literal["test", "validation"]
    devices: int
    samples: int
    cohort: int
    sampling: Literal["stratified", "uniform", "fastest"]
    levels: str | list[str | float]
    level_draw: Literal["fixed", "round"]
    fleet: Table | None
    availability_trace: Table | None
    speed_trace: Table | None
    availability: float
    failure: float
    over_select: float
    clock: Literal["rounds", "events"]
    buffer: int | None
    step_every: str | float | None
    concurrency: int | None
    staleness: str
    assign: Literal["deadline", "level"]
    deadline: float | None
    budget: str | None
    full_seconds: float
    mode: Literal["exact", "paper"]
    prefix: Literal["auto", "cache", "recompute", "streamed"]
    prefix_tolerance: float | None
    depths: int | None
    plan: Literal["paper", "traded", "rotated"]
    splitting: Literal["server", "device"]
    speeds: Literal["stated", "measured"]
    speed_weight: float
    drift: str
    epochs: int
    batch: int
    lr: float
    schedule: str | Callable[[int], float]
    warmup: int
    optimizer: str | Callable[..., Any]
    momentum: float
    nesterov: bool
    weight_decay: float
    clip_norm: float | None
    precision: TrainedPrecision
    frozen_precision: FrozenPrecision
    precision_seconds: str
    mean: str
    server_optimizer: Literal["none", "sgd", "momentum", "adam", "yogi", "adagrad"]
    server_lr: float | None
    server_momentum: float
    server_nesterov: bool
    server_beta2: float
    server_tau: float
    dp_clip: float | None
    dp_noise: float
    dp_delta: float
    rounds: int
    seed: int
    workers: int
    server_cap: float | Literal["none"] | None
    server_speed: float | Literal["none"] | None
    executor: Literal["auto", "plain"]
    device: Literal["cpu", "cuda", "mps", "auto"]
    eval_every: int
    personal_test: int | None
    target: float | None
    patience: int | None
    time_budget: float | None
    checkpoint_seconds: float
    options: Mapping[str, Any]


def _check_precision(settings: Settings) -> None:
    lowered = [
        f"{key.replace('_', '-')} = '{getattr(settings, key)}'"
        for key in ("precision", "frozen_precision")
        if getattr(settings, key) != "fp32"
    ]
    if lowered and settings.mode != "exact":
        raise SettingError(f"{lowered[0]} needs mode = 'exact': the paper's clock knows one precision only")
    if not lowered and settings.precision_seconds != PRECISION_SECONDS:
        raise SettingError(
            f"precision-seconds = '{settings.precision_seconds}' does nothing "
            "with precision = 'fp32' and frozen-precision = 'fp32'"
        )


def _check_clock(settings: Settings) -> None:
    """Refuse settings that do nothing on the run's clock, or that it cannot keep."""
    if settings.clock == "rounds":
        for key in EVENTS:
            if getattr(settings, key) != Settings.model_fields[key].default:
                raise SettingError(
                    f"{key.replace('_', '-')} = {getattr(settings, key)} needs clock = 'events'"
                )
        return
    if settings.buffer is not None and settings.step_every is not None:
        raise SettingError(
            f"buffer = {settings.buffer} cannot be combined with step-every = {settings.step_every}: "
            "the server steps by one of them"
        )
    if settings.concurrency is not None and settings.concurrency > settings.devices:
        raise SettingError(
            f"concurrency = {settings.concurrency} is more than the fleet (devices = {settings.devices})"
        )
    if settings.over_select != 1:
        raise SettingError(
            f"over-select = {settings.over_select:g} needs clock = 'rounds': with events nobody is waited for"
        )
    if settings.prefix_tolerance is not None:
        raise SettingError(
            f"prefix-tolerance = {settings.prefix_tolerance:g} needs clock = 'rounds': what devices keep is compared "
            "from round to round"
        )
    if settings.dp_clip is not None:
        raise SettingError(
            f"dp-clip = {settings.dp_clip:g} needs clock = 'rounds': epsilon counts one reply per device and round"
        )


def _check_tolerance(settings: Settings) -> None:
    """Refuse to keep outputs over rounds where nothing is kept, or where nobody knows whose."""
    reasons = {
        "prefix = 'recompute' keeps no outputs": settings.prefix == "recompute",
        "mode = 'paper' pays for frozen layers in every epoch": settings.mode == "paper",
        "with splitting = 'device' the server does not know them": settings.splitting == "device",
    }
    for reason, holds in reasons.items():
        if settings.prefix_tolerance is not None and holds:
            raise SettingError(f"prefix-tolerance = {settings.prefix_tolerance:g} is refused: {reason}")


def _check_traces(settings: Settings) -> None:
    """Refuse traces of what another setting decides, too."""
    if settings.availability_trace is not None and settings.availability != 1:
        raise SettingError(
            f"availability = {settings.availability:g} cannot be combined with availability-trace, "
            "which says when devices can be reached"
        )
    for key, usual in {"drift": "", "level_draw": "fixed"}.items():
        value = getattr(settings, key)
        if settings.speed_trace is not None and value != usual:
            raise SettingError(
                f"{key.replace('_', '-')} = '{value}' cannot be combined with speed-trace, "
                "which says how fast devices are"
            )


def _check_task(settings: Settings) -> None:
    task = TASKS.get(settings.task)
    if task is None and (settings.weights or settings.tune != WHOLE):
        key = "weights" if settings.weights else "tune"
        raise SettingError(f"{key} = '{getattr(settings, key)}' needs a ready task ({', '.join(TASKS)})")
    if task is None:
        return
    if settings.weights == PRETRAINED and not task.weights:
        having = [name for name, one in TASKS.items() if one.weights]
        raise SettingError(
            f"weights = '{PRETRAINED}': {task.name} has none (tasks that have: {', '.join(having)})"
        )
    if settings.tune not in {WHOLE, *task.tune}:
        allowed = ", ".join(task.tune or [WHOLE])
        raise SettingError(f"tune = '{settings.tune}' cannot be used with {task.name} (allowed: {allowed})")


def _find_task(name: str) -> Net | Task | None:
    """Look up a net of the paper or a ready task; None: the model is the user's own."""
    if name == OWN_TASK:
        return None
    tasks: dict[str, Net | Task] = {**NETS, **TASKS}
    if name not in tasks:
        raise SettingError.unknown("task", name, tasks)
    return tasks[name]


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
            raise unknown_setting(key)
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


def check_privacy(given: Mapping[str, Any]) -> None:
    """Refuse settings of privacy without a clip, in whose units the noise is: nothing would be noised."""
    for key in PRIVACY:
        if given.get(key) is not None and given.get("dp_clip") is None:
            name = key.replace("_", "-")
            raise SettingError(f"{name} = {given[key]} does nothing without dp-clip, e.g. dp-clip = 1")


def unknown_setting(key: str) -> SettingError:
    """The error of a key that is no setting, with the nearest that is one."""
    return SettingError.unknown(
        "setting", key, [name for name in Settings.model_fields if name != FINGERPRINT]
    )


def stored_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run's configuration as a user would give them: nothing that the library filled in by itself."""
    private = config.get("dp_clip") is not None
    return {
        key: value
        for key, value in config.items()
        # What settings only name is looked at again: the fingerprint must come out as before.
        if key != FINGERPRINT and (private or key not in PRIVACY)
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, by the names of their fields; the method's own stand in the table [options]."""
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"config = '{path}' cannot be read: {error}") from error
    given = {key.replace("-", "_"): value for key, value in table.items()}
    if FINGERPRINT in given:
        raise unknown_setting(FINGERPRINT)
    return given


@cache
def parse_schedule(text: str) -> tuple[str, tuple[float, ...]]:
    """Split a schedule into its name and numbers.

    >>> parse_schedule("step:100,0.5")
    ('step', (100.0, 0.5))
    """
    name, _, rest = text.partition(":")
    counts = {"constant": (0,), "inverse": (1,), "step": (2,), "cosine": (0, 1), "custom": (0,)}
    if name not in counts:
        known = ["constant", "inverse:LAMBDA", "step:EVERY,FACTOR", "cosine", "cosine:FLOOR"]
        raise SettingError.unknown("schedule", text, known)
    try:
        numbers = tuple(float(part) for part in rest.split(",")) if rest else ()
    except ValueError:
        numbers = (math.nan,)
    if len(numbers) not in counts[name] or not all(
        math.isfinite(number) and number > 0 for number in numbers
    ):
        raise SettingError(
            f"schedule = '{text}' must be constant, inverse:LAMBDA, step:EVERY,FACTOR or cosine[:FLOOR] "
            "with positive numbers"
        )
    return name, numbers


@cache
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


@cache
def parse_step_every(text: str) -> tuple[float | None, float | None]:
    """Virtual seconds, or the share of the fleet that needs no more than the interval; the other one is None.

    >>> parse_step_every("30"), parse_step_every("fastest:0.5")
    ((30.0, None), (None, 0.5))
    """
    name, colon, number = text.partition(":")
    if not colon:
        return parse_number("step-every", text), None
    share = parse_number("step-every", number) if name == "fastest" else math.nan
    if not 0 < share <= 1:
        raise SettingError(
            f"step-every = '{text}' must be a number of seconds, or fastest:SHARE with a share > 0 and <= 1"
        )
    return None, share


@cache
def parse_staleness(text: str) -> Callable[[int], float]:
    """What a reply counts by the number of server steps that it is late; 1 where it is not (FedAsync, section 5.2).

    >>> [parse_staleness("polynomial:0.5")(late) for late in (0, 3)]
    [1.0, 0.5]
    >>> [parse_staleness("hinge:10,4")(late) for late in (0, 4, 5)]
    [1.0, 1.0, 0.09090909090909091]
    >>> parse_staleness("constant")(9)
    1.0
    """
    name, _, rest = text.partition(":")
    counts = {"constant": 0, "polynomial": 1, "hinge": 2}
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = [math.nan]
    right = all(math.isfinite(number) and number >= 0 for number in numbers)
    if len(numbers) != counts.get(name) or not right:
        raise SettingError(
            f"staleness = '{text}' must be constant, polynomial:A or hinge:A,B with numbers >= 0"
        )
    if name == "polynomial":
        # s(τ) = (1 + τ)^-a
        return lambda late: float((1 + late) ** -numbers[0])
    if name == "hinge":
        # s(τ) = 1 up to b, then 1 / (a (τ - b) + 1)
        return lambda late: 1.0 if late <= numbers[1] else 1 / (numbers[0] * (late - numbers[1]) + 1)
    return lambda late: 1.0


@cache
def parse_precision_seconds(text: str) -> Mapping[str, float]:
    """The seconds of an operation in each precision, relative to fp32's.

    >>> parse_precision_seconds("int8=1/4")
    {'fp32': 1.0, 'bf16': 1.0, 'int8': 0.25}
    """
    given = {} if text == PRECISION_SECONDS else dict(parse_precision_seconds(PRECISION_SECONDS))
    found = {"fp32": 1.0, **given}
    for one in text.split(","):
        name, _, number = one.partition("=")
        if name.strip() not in LOWER_PRECISIONS:
            raise SettingError.unknown("precision-seconds", name.strip(), LOWER_PRECISIONS)
        found[name.strip()] = parse_number("precision-seconds", number)
    return found


@cache
def parse_mean(text: str) -> tuple[str, float]:
    """The kind of a mean and its number; the median cuts a half at either end.

    >>> parse_mean("trimmed:0.2"), parse_mean("clipped:10"), parse_mean("median")
    (('trimmed', 0.2), ('clipped', 10.0), ('trimmed', 0.5))
    """
    known = {"plain": ("plain", 0.0), "median": ("trimmed", 0.5)}
    if text in known:
        return known[text]
    name, colon, number = text.partition(":")
    if name not in ("trimmed", "clipped") or not colon:
        raise SettingError.unknown("mean", text, [*known, "trimmed:SHARE", "clipped:NORM"])
    value = parse_number("mean", number)
    if name == "trimmed" and value >= 0.5:
        raise SettingError(f"mean = '{text}' is refused: a share below 1/2 must be left in the middle")
    return name, value


def parse_number(key: str, text: str, *, zero: bool = False) -> float:
    """A positive number, fractions allowed; with `zero`, 0 as well.

    >>> parse_number("speed", "1/4")
    0.25
    """
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        hint = " (decimals have a point: 0.5)" if "," in text else ""
        raise SettingError(f"{key} = '{text}' must be a number or a fraction, {least}{hint}")
    return value


PARSERS: dict[str, Callable[[str], object]] = {
    "schedule": parse_schedule,
    "budget": parse_budget,
    "public": parse_public,
    "drift": parse_drift,
    "step_every": parse_step_every,
    "staleness": parse_staleness,
    "precision_seconds": parse_precision_seconds,
    "mean": parse_mean,
}
"""Settings written in a small language of their own: what does not parse is refused when it is given."""
