"""What a Flower run is told by its run config: the settings of any run, and a few of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpmt.api import settings_of
from fedpmt.methods.registry import METHODS, method_class
from fedpmt.settings import Settings
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.methods.base import Method

OPTION = "options."
SIMULATED = {
    "over_select": 1,
    "level_draw": "fixed",
    "failure": 0,
    "availability": 1,
    "drift": "",
    "time_budget": None,
    "server_speed": None,
}
"""Settings that make up what happens by itself on real devices; on Flower they keep these values."""


class Deployment(BaseModel):
    """How a run is deployed, beside what it computes."""

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
    """Both from one flat table in kebab case; an empty text is a setting that is not given."""
    given = {key.replace("-", "_"): value for key, value in run_config.items() if value != ""}
    options = {key.removeprefix(OPTION): given.pop(key) for key in list(given) if key.startswith(OPTION)}
    own = {key: given.pop(key) for key in list(given) if key in Deployment.model_fields}
    deployment = deployment_of(own)
    settings = settings_of({**given, "options": options})
    refuse_simulated(settings)
    return settings, deployment


def deployment_of(given: Mapping[str, Any]) -> Deployment:
    """How a run is deployed; a wrong value is refused in one line."""
    try:
        return Deployment.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]).replace("_", "-")
        raise SettingError(f"{key} = '{first['input']}' is refused: {first['msg'].lower()}") from None


def refuse_unsummed(method: Method[Any, Any], settings: Settings, deployment: Deployment) -> None:
    """Refuse what secure aggregation cannot carry: all that leaves a device there are sums per layer."""
    if not deployment.secagg:
        return
    name = settings.method
    if method.traits.sums != "layers":
        why = {
            "entries": "its parts are entries of layers, and sums are of whole ones",
            "none": "it needs each device's reply, and not their sum",
        }[method.traits.sums]
        raise SettingError(
            f"method = '{name}' is refused with secagg: {why} (allowed: {', '.join(summed())})"
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


def summed() -> list[str]:
    """The methods that secure aggregation carries."""
    return sorted(name for name in METHODS if method_class(name)().traits.sums == "layers")


def refuse_simulated(settings: Settings) -> None:
    """Refuse what only the simulator has."""
    for key, usual in SIMULATED.items():
        if getattr(settings, key) != usual:
            name = key.replace("_", "-")
            raise SettingError(f"{name} = '{getattr(settings, key)}' is refused: only the simulator has it")


def refuse_uncarried(method: Method[Any, Any], name: str) -> None:
    """Refuse methods whose nets stay on the devices: Flower's server has none of them to evaluate."""
    if method.traits.keeps_net:
        raise SettingError(
            f"method = '{name}' is refused on Flower: its devices keep nets of their own, which only the simulator "
            "can evaluate"
        )


def write_config(settings: Settings, deployment: Deployment) -> dict[str, Any]:
    """The flat table that `read_config` reads back."""
    table = {**settings.model_dump(mode="json", exclude={"options", "digest"}), **deployment.model_dump()}
    flat = {key.replace("_", "-"): _none(key) if value is None else value for key, value in table.items()}
    return {**flat, **{OPTION + key: value for key, value in settings.options.items()}}


def _none(key: str) -> str:
    """How a table says that a setting has no value: by leaving it out, unless that would give it one."""
    usual = Settings.model_fields[key].default
    return "" if usual is None else "none"
