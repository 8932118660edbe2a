"""The table of methods. A line here is all it takes to make one known; its file is loaded when it is used."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Any, Literal

from fedpmt.types import Scalar, SettingError

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpmt.methods.base import Method

METHODS = {
    "fedavg": ("fedpmt.methods.fedavg", "FedAvg"),
    "fedpmt": ("fedpmt.methods.fedpmt", "FedPMT"),
    "feddrop": ("fedpmt.methods.feddrop", "FedDrop"),
    "heterofl": ("fedpmt.methods.heterofl", "HeteroFL"),
    "fedrolex": ("fedpmt.methods.fedrolex", "FedRolex"),
    "fjord": ("fedpmt.methods.fjord", "FjORD"),
    "ist": ("fedpmt.methods.ist", "IST"),
    "fedprox": ("fedpmt.methods.fedprox", "FedProx"),
    "scaffold": ("fedpmt.methods.scaffold", "Scaffold"),
    "slimfl": ("fedpmt.methods.slimfl", "SlimFL"),
    "fedmp": ("fedpmt.methods.fedmp", "FedMP"),
    "prunefl": ("fedpmt.methods.prunefl", "PruneFL"),
    "feddf": ("fedpmt.methods.feddf", "FedDF"),
    "comet": ("fedpmt.methods.comet", "Comet"),
    "fedgkt": ("fedpmt.methods.fedgkt", "FedGKT"),
    "fedgen": ("fedpmt.methods.fedgen", "FedGen"),
}


def method_class(name: str) -> type[Method[Any, Any]]:
    """The class of a method."""
    if name not in METHODS:
        raise SettingError.unknown("method", name, METHODS)
    module, attribute = METHODS[name]
    found: type[Method[Any, Any]] = getattr(importlib.import_module(module), attribute)
    return found


def name_of(method: Method[Any, Any]) -> str:
    """The name by which a run's record calls a method: the registered one, or module:Class."""
    home = type(method).__module__, type(method).__qualname__
    known = next((name for name, place in METHODS.items() if place == home), None)
    return known or ":".join(home)


def fields(name: str) -> dict[str, tuple[Any, Any]]:
    """The settings of a method: name -> (type, default)."""
    cls = method_class(name)
    hints = typing.get_type_hints(cls)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def create(name: str, options: Mapping[str, Scalar], shared: Mapping[str, Any]) -> Method[Any, Any]:
    """A method from its name and settings; a field that bears a run setting's name takes that one's value."""
    known = fields(name)
    values = {key: value for key, value in shared.items() if key in known}
    for key, value in options.items():
        if key not in known or key in shared:
            raise SettingError.unknown(
                f"option of {name}", key, [field for field in known if field not in shared]
            )
        values[key] = _convert(f"{name}.{key}", value, known[key][0])
    return method_class(name)(**values)


def _convert(key: str, value: Scalar, kind: Any) -> Any:
    """Read a value given as text; what does not fit the field's type is refused."""
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        if value not in choices:
            raise SettingError.unknown(key, value, choices)
        return value
    kinds = tuple(choice for choice in choices if choice is not type(None)) or (kind,)
    text = str(value).strip().lower()
    if len(kinds) < len(choices) and text in ("none", ""):
        return None
    if bool in kinds:
        if text not in ("true", "false"):
            raise SettingError(f"{key} = '{value}' is refused: true or false is needed")
        return text == "true"
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                raise SettingError(f"{key} = '{value}' is refused: a number is needed") from None
    return value
