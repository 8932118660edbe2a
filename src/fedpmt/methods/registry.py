"""Methods by name: those of the library, those that installed packages offer, and any class as `package.module:Class`.

A line in `METHODS` is all it takes to make a method of the library known; its file is loaded when it is used. A package
offers its own as entry points:

    [project.entry-points."fedpmt.methods"]
    mine = "my_package.mine:Mine"
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
import types
import typing
from functools import cache
from typing import Any, Literal

from fedpmt.methods.base import Method
from fedpmt.references import find, is_reference
from fedpmt.types import Scalar, SettingError

if typing.TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

METHODS = {
    "fedavg": ("fedpmt.methods.fedavg", "FedAvg"),
    "fedpmt": ("fedpmt.methods.fedpmt", "FedPMT"),
    "embracingfl": ("fedpmt.methods.family", "EmbracingFL"),
    "fedolf": ("fedpmt.methods.family", "FedOLF"),
    "salf": ("fedpmt.methods.family", "SALF"),
    "fedpart": ("fedpmt.methods.family", "FedPart"),
    "cocofl": ("fedpmt.methods.family", "CoCoFL"),
    "fedel": ("fedpmt.methods.fedel", "FedEL"),
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
    "fedra": ("fedpmt.methods.fedra", "FedRA"),
    "flexlora": ("fedpmt.methods.flexlora", "FlexLoRA"),
    "fiarse": ("fedpmt.methods.fiarse", "FIARSE"),
    "depthfl": ("fedpmt.methods.depthfl", "DepthFL"),
    "inclusivefl": ("fedpmt.methods.depthfl", "InclusiveFL"),
    "fedepth": ("fedpmt.methods.fedepth", "FeDepth"),
    "fedasync": ("fedpmt.methods.fedasync", "FedAsync"),
    "fedbuff": ("fedpmt.methods.fedbuff", "FedBuff"),
    "timelyfl": ("fedpmt.methods.timelyfl", "TimelyFL"),
}


GROUP = "fedpmt.methods"
"""The group of entry points in which a package offers its methods."""

PROVIDED = ("depths", "splitting", "plan", "mean", "server")
"""Fields that take the value of a run's setting, where a method has them; they are no options of its own."""

MethodClass: typing.TypeAlias = type[Method[Any, Any]]


def method_names() -> list[str]:
    """Return the names of all methods that need no module: the library's, then those of installed packages."""
    return [*METHODS, *(name for name in _offered() if name not in METHODS)]


def general_methods() -> list[str]:
    """Return the names of the library's methods that need nothing special of a model, such as adapters."""
    return [name for name in METHODS if not method_class(name)().traits.needs_adapters]


def method_class(name: str) -> MethodClass:
    """Find the class of a method.

    Args:
        name: A name in `METHODS`, an entry point of an installed package, or `package.module:Class`. Modules are looked
            for in the current folder too.

    Returns:
        The class. All its fields have defaults.

    Raises:
        SettingError: Where there is no such method, or it cannot be loaded; its text says why.
    """
    if name in METHODS:
        module, attribute = METHODS[name]
        found: MethodClass = getattr(importlib.import_module(module), attribute)
        return found
    if name in _offered():
        return _loaded(name, _offered()[name].value)
    if ":" not in name:
        raise SettingError.unknown("method", name, method_names())
    return _given[name] if name in _given else _loaded(name, name)


def name_of(method: Method[Any, Any]) -> str:
    """Return the name by which `method_class` finds this method's class again, e.g. to resume its run.

    >>> from fedpmt.methods.fedavg import FedAvg
    >>> name_of(FedAvg())
    'fedavg'
    """
    kind = type(method)
    place = f"{kind.__module__}:{kind.__qualname__}"
    for name, (module, attribute) in METHODS.items():
        if place == f"{module}:{attribute}":
            return name
    _given[place] = kind
    return next((name for name, point in _offered().items() if point.value == place), place)


def short_name(name: str) -> str:
    """Shorten the name of a method for files, tables and `--set`: a class stands for itself, in lower case.

    >>> short_name("examples.methods.fednova:FedNova"), short_name("fedpmt")
    ('fednova', 'fedpmt')
    """
    return name.rpartition(":")[2].rpartition(".")[2].lower() if ":" in name else name


_given: dict[str, MethodClass] = {}
"""Classes of methods that were given as values: one that stands in a function can be found no other way."""


@cache
def _offered() -> dict[str, EntryPoint]:
    """The entry points of installed packages, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def _loaded(name: str, place: str) -> MethodClass:
    """The class at `module:Class`; `name` is what the user called it."""
    if not is_reference(place):
        raise SettingError(f"method = '{name}' must be a name of `fedpmt methods` or package.module:Class")
    attribute = place.partition(":")[2]
    found = find(f"method = '{name}'", place, "class", _is_method)
    if not _is_method(found):
        raise SettingError(f"method = '{name}': {attribute} is no subclass of fedpmt.Method")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise SettingError(f"method = '{name}': {attribute} is abstract, it has no {', '.join(missing)}")
    kind: MethodClass = found
    if not dataclasses.is_dataclass(kind):
        raise SettingError(f"method = '{name}': {attribute} must be a frozen dataclass")
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SettingError(f"method = '{name}': the field '{field.name}' of {attribute} needs a default")
    return found


def _is_method(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Method)


def fields(name: str) -> dict[str, tuple[Any, Any]]:
    """Return the options of a method that can be given as text: name -> (type, default).

    These are its fields, without those that a run provides (`PROVIDED`) and without those whose
    type text cannot express.
    """
    cls = method_class(name)
    hints = _hints(cls)
    found = {field.name: (hints[field.name], _default(field)) for field in _fields(cls)}
    return {
        key: (kind, default)
        for key, (kind, default) in found.items()
        if key not in PROVIDED and _is_textual(kind)
    }


def create(name: str, options: Mapping[str, Scalar], shared: Mapping[str, Any]) -> Method[Any, Any]:
    """Make a method from its name and options; a field with the name of a shared setting takes that one's value."""
    cls = method_class(name)
    names = [field.name for field in _fields(cls)]
    return cls(**{key: value for key, value in shared.items() if key in names}, **_read(name, options))


def typed_options(name: str, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return a method's options as values of their fields' types, so that text and numbers are one setting.

    >>> typed_options("feddrop", {"keep": "0.5", "scaling": "true"})
    {'keep': 0.5, 'scaling': True}
    """
    return {key: "none" if value is None else value for key, value in _read(name, options).items()}


def _read(name: str, options: Mapping[str, Scalar]) -> dict[str, Any]:
    known, names = fields(name), [field.name for field in _fields(method_class(name))]
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in names or key in PROVIDED:
            raise SettingError.unknown(f"option of {name}", key, known)
        # What text cannot express was given as a value.
        values[key] = _convert(f"{short_name(name)}.{key}", value, known[key][0]) if key in known else value
    return values


def _fields(cls: MethodClass) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _hints(cls: MethodClass) -> dict[str, Any]:
    """The types of a class's fields; where a type is only known to type checkers, that of the default."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {field.name: _hint(cls, field) for field in _fields(cls)}


def _hint(cls: MethodClass, field: dataclasses.Field[Any]) -> Any:
    owner = next(one for one in cls.__mro__ if field.name in inspect.get_annotations(one))
    alone = types.SimpleNamespace(__annotations__={field.name: field.type})
    try:
        return typing.get_type_hints(alone, vars(sys.modules[owner.__module__]))[field.name]
    except NameError:
        return type(_default(field))


TEXTUAL = (str, int, float, bool)


def _kinds(kind: Any) -> list[Any]:
    """The members of a union, or the one type."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return list(typing.get_args(kind)) if union else [kind]


def _is_textual(kind: Any) -> bool:
    """Whether values of a type can be written as text: words, numbers, true and false, or none."""
    kinds = [one for one in _kinds(kind) if one is not types.NoneType]
    return bool(kinds) and all(one in TEXTUAL or typing.get_origin(one) is Literal for one in kinds)


def _convert(key: str, value: Scalar, kind: Any) -> Any:
    """Read a value given as text; what does not fit the field's type is refused."""
    kinds, text = _kinds(kind), str(value).strip()
    if types.NoneType in kinds and text.lower() in ("none", ""):
        return None
    choices = [
        choice for one in kinds if typing.get_origin(one) is Literal for choice in typing.get_args(one)
    ]
    if choices:
        named = {str(choice): choice for choice in choices}
        if text not in named:
            raise SettingError.unknown(key, value, named)
        return named[text]
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise SettingError(f"{key} = '{value}' must be true or false")
        return text.lower() == "true"
    numbers = [number for number in (int, float) if number in kinds]
    for number in numbers:
        with contextlib.suppress(ValueError):
            return number(text)
    if numbers:
        raise SettingError(f"{key} = '{value}' must be a number")
    return value
