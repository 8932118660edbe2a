"""A Flower run: what it reads from its run config, and the folder of its app. Loads no torch.

The run config has the settings of any run, and those of the deployment. Both `fedpmt deploy` and plain `flwr run` can
run the folder. `deployment.json`, in the folder of the records, keeps what a deployment was begun with, so that a
resume goes on in the same way.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import uuid
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpmt import __version__
from fedpmt.api import settings_of
from fedpmt.methods.registry import METHODS, method_class
from fedpmt.records import read_config as read_stored
from fedpmt.records import write_atomically
from fedpmt.settings import Settings
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fedpmt.methods.base import Method


OPTION = "options."
SIMULATED = {
    "over_select": 1,
    "level_draw": "fixed",
    "failure": 0,
    "availability": 1,
    "availability_trace": None,
    "drift": "",
    "speed_trace": None,
    "time_budget": None,
    "server_speed": None,
}
"""Settings that simulate what happens by itself on real devices; on Flower they keep these values."""

FILE = "deployment.json"
HELD = ("secagg", "min_devices", "secagg_range", "transport_seconds", "sample_limit")
"""Settings of a deployment that a resume may not change: the weights, or a promise to devices, depend on them."""


class Deployment(BaseModel):
    """How a run is deployed, in addition to what it computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: str = Field("", description="folder of the records, where the ServerApp runs")
    resume: bool = Field(False, description="continue the run in that folder after its last finished round")
    state_dir: str = Field("", description="where nodes without `state-dir` in their node config keep state")
    min_nodes: int = Field(0, ge=0, description="nodes to wait for before the first round; 0: all devices")
    wait_seconds: float = Field(120.0, gt=0, description="how long to wait for them; then those there begin")
    update_limit: float = Field(
        10.0, gt=0, description="largest norm of an update, as a multiple of the norm of the model sent"
    )
    transport_seconds: float = Field(
        0.0,
        ge=0,
        description="seconds of a round that are not training; depths are fitted to the deadline less these",
    )
    secagg: bool = Field(False, description="secure aggregation: the server learns sums per layer")
    min_devices: int = Field(
        2,
        ge=2,
        description="with secagg: a layer is opened only if so many devices trained it; 3 are advised",
    )
    secagg_range: float = Field(
        8.0,
        gt=0,
        allow_inf_nan=False,
        description="with secagg: the largest change of one weight in a round; a larger one is cut",
    )
    sample_limit: int = Field(0, ge=0, description="most samples a node may claim; 0: ten times `samples`")


def read_config(run_config: Mapping[str, Any]) -> tuple[Settings, Deployment]:
    """Read both from one flat table in kebab case; an empty text stands for a setting that is not given."""
    given = {key.replace("-", "_"): value for key, value in run_config.items() if value != ""}
    options = {key.removeprefix(OPTION): given.pop(key) for key in list(given) if key.startswith(OPTION)}
    own = {key: given.pop(key) for key in list(given) if key in Deployment.model_fields}
    deployment = make_deployment(own)
    settings = settings_of({**given, "options": options})
    refuse_simulated(settings)
    return settings, deployment


def make_deployment(given: Mapping[str, Any]) -> Deployment:
    """Check the settings of a deployment; a wrong value is refused in one line."""
    try:
        return Deployment.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]).replace("_", "-")
        raise SettingError(f"{key} = '{first['input']}' is refused: {first['msg'].lower()}") from None


def check_deployable(method: Method[Any, Any], settings: Settings, deployment: Deployment) -> None:
    """Refuse a method that cannot be deployed in this way."""
    name = settings.method
    if method.traits.keeps_net:
        raise SettingError(
            f"method = '{name}' is refused on Flower: its devices keep nets of their own, which only the simulator "
            "can evaluate"
        )
    if deployment.secagg and settings.clock == "events":
        raise SettingError("secagg needs clock = 'rounds': a sum is of devices that take part in it together")
    if deployment.secagg:
        _check_summable(method, settings, deployment)


def _check_summable(method: Method[Any, Any], settings: Settings, deployment: Deployment) -> None:
    """Refuse what secure aggregation cannot carry, where nothing but sums per layer leaves a device."""
    name = settings.method
    if method.traits.sums != "layers":
        why = {
            "entries": "its parts are entries of layers, and sums are of whole ones",
            "none": "it needs each device's reply, and not their sum",
        }[method.traits.sums]
        raise SettingError(
            f"method = '{name}' is refused with secagg: {why} (allowed: {', '.join(summable())})"
        )
    if settings.mean != "plain":
        raise SettingError(
            f"mean = '{settings.mean}' is refused with secagg: it compares the devices' updates, and the server sees "
            "only their sum"
        )
    normalise = getattr(method, "normalise", "none")
    if normalise != "none":
        raise SettingError(
            f"{name}.normalise must be none with secagg, where the server cannot scale single updates (got {normalise})"
        )
    if settings.splitting == "device" and getattr(method, "weight", "uniform") != "uniform":
        # Σ a_k f_k of a layer is opened, and every a_k is known: with unequal ones it tells who trained the layer.
        raise SettingError(
            f"splitting = 'device' is refused with secagg: weights by samples would show who trained which layer "
            f"(set {name}.weight=uniform)"
        )
    if settings.cohort < deployment.min_devices:
        raise SettingError(
            f"cohort = {settings.cohort} is refused with secagg: min-devices = {deployment.min_devices}"
        )
    if settings.limits is not None and settings.limits.resource in ("bytes", "upload"):
        raise SettingError(
            f"budget = '{settings.budget}' is refused with secagg: every upload is as long as the whole model"
        )


def summable() -> list[str]:
    """The methods that secure aggregation can carry; it knows rounds alone."""
    traits = {name: method_class(name)().traits for name in METHODS}
    return sorted(
        name for name, one in traits.items() if one.sums == "layers" and "step_every" not in one.events
    )


def refuse_simulated(settings: Settings) -> None:
    """Refuse settings that only the simulator has."""
    for key, usual in SIMULATED.items():
        if getattr(settings, key) != usual:
            name = key.replace("_", "-")
            raise SettingError(f"{name} = '{getattr(settings, key)}' is refused: only the simulator has it")


def write_config(settings: Settings, deployment: Deployment) -> dict[str, Any]:
    """Write the flat table that `read_config` reads."""
    table = {**settings.model_dump(mode="json", exclude={"options", "digest"}), **deployment.model_dump()}
    flat = {key.replace("_", "-"): _none(key) if value is None else value for key, value in table.items()}
    return {**flat, **{OPTION + key: value for key, value in settings.options.items()}}


def _none(key: str) -> str:
    """How a table states None: by an empty text, unless the setting would then have another default."""
    usual = Settings.model_fields[key].default
    return "" if usual is None else "none"


class Stated(BaseModel):
    """What the node config of a device states; None: nothing."""

    model_config = ConfigDict(frozen=True)

    speed: float | None = None  # κ_k
    memory: float | None = None  # bytes


class Start(BaseModel):
    """What a deployment was begun with, over all of its starts."""

    model_config = ConfigDict(frozen=True)

    run: str  # the run's name on every node, different from all others
    held: dict[str, bool | int | float]  # the settings of HELD
    starts: int = 0  # of the server; each but the first may repeat a round that devices have answered
    devices: tuple[int, ...] | None = None  # those that were online at the first start; None before it
    deadline: float | None = None  # what depths are fitted to
    nodes: dict[int, Stated] = {}  # what these devices stated of themselves


def read_start(folder: Path, deployment: Deployment | None) -> Start | None:
    """Read what the deployment in this folder was begun with; None where there is none.

    Raises:
        SettingError: Settings that a resume may not change are different now.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        start = Start.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise SettingError(f"{path} cannot be read: {error.errors()[0]['msg'].lower()}") from error
    for key, before in start.held.items():
        now = getattr(deployment, key, before)  # without a deployment, nothing is compared
        if now != before:
            name = key.replace("_", "-")
            raise SettingError(
                f"{name} = {_show(now)} is refused: this run was begun with {name} = {_show(before)}"
            )
    return start


def check_promise(folder: Path, settings: Settings) -> None:
    """Refuse more rounds than devices were promised: the privacy of each holds for that many replies."""
    before = (read_stored(folder) or {}).get("rounds", settings.rounds)
    if settings.dp_clip is not None and settings.rounds != before:
        raise SettingError(
            f"rounds must be {before}, for which devices were promised their privacy (got {settings.rounds})"
        )


def begin(folder: Path, deployment: Deployment) -> Start:
    """Count one more start of the deployment in this folder, or its first."""
    start = read_start(folder, deployment)
    if start is None:
        # It becomes the name of a folder on nodes, which accept only plain ones.
        stem = re.sub(r"[^A-Za-z0-9]+", "-", folder.name).strip("-")[:60] or "run"
        held = {key: getattr(deployment, key) for key in HELD}
        start = Start(run=f"{stem}-{uuid.uuid4().hex[:12]}", held=held)
    return write_start(folder, start.model_copy(update={"starts": start.starts + 1}))


def without_transport(settings: Settings, deployment: Deployment) -> Settings:
    """The settings that depths are fitted to: with what of a real deadline is left for training."""
    if settings.deadline is None or not deployment.transport_seconds:
        return settings
    left = settings.deadline - deployment.transport_seconds
    if left <= 0:
        raise SettingError(
            f"deadline = {settings.deadline:g} is refused: transport-seconds = {deployment.transport_seconds:g} "
            "leaves nothing of it"
        )
    return settings.model_copy(update={"deadline": left})


def write_start(folder: Path, start: Start) -> Start:
    """Write what the deployment was begun with."""
    write_atomically(folder / FILE, start.model_dump_json().encode())
    return start


def _show(value: bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


MODULE = "fedpmt_app"
CODE = '''"""One of the tasks that come with fedpmt; `apps(problem)` is for a model of your own."""

from fedpmt.flower import paper_apps

apps = paper_apps()
server = apps.server
client = apps.client
'''


def write_app(folder: Path, settings: Settings, deployment: Deployment) -> None:
    """Write an app; its config holds every setting, so that `--run-config` can change any of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Mapping[str, Any]] = {
        "project": {
            "name": "fedpmt-run",
            "version": "1.0.0",
            "description": f"{settings.method} on {settings.data}",
            "license": "Apache-2.0",
            "dependencies": [f"fedpmt[flower]>={__version__}"],
        },
        "tool.flwr.app": {"publisher": "fedpmt"},
        "tool.flwr.app.components": {"serverapp": f"{MODULE}:server", "clientapp": f"{MODULE}:client"},
        "tool.flwr.app.config": write_config(settings, deployment),
    }
    text = "\n\n".join(f"[{name}]\n{_lines(table)}" for name, table in tables.items())
    write_atomically(folder / f"{MODULE}.py", CODE.encode())
    write_atomically(folder / "pyproject.toml", f"{text}\n".encode())


def read_app(folder: Path) -> dict[str, Any]:
    """Read the config of a written app; the method's own settings are left out."""
    table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    return {key.replace("-", "_"): value for key, value in table["tool"]["flwr"]["app"]["config"].items()}


def _lines(table: Mapping[str, Any]) -> str:
    return "\n".join(f"{_key(key)} = {toml(value)}" for key, value in table.items())


def _key(key: str) -> str:
    """Write a key. A dotted one is a table in TOML, which Flower flattens to a dotted key again."""
    return ".".join(
        part if part.replace("-", "").replace("_", "").isalnum() else toml(part) for part in key.split(".")
    )


def toml(value: Any) -> str:
    """Write one value as TOML.

    >>> toml("a\\"b"), toml(True), toml(0.5), toml(["x"])
    ('"a\\\\"b"', 'true', '0.5', '["x"]')
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(f"'{value}' cannot stand in a run's config")
    return json.dumps(value, ensure_ascii=False)
