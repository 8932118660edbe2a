"""A user's own code by name, as `package.module:name`; modules are looked for in the current folder too."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt.types import SettingError

if TYPE_CHECKING:
    import types
    from collections.abc import Callable


def is_reference(text: str) -> bool:
    """Whether a text has the form of a reference.

    >>> is_reference("my_package.nets:small"), is_reference("mnist"), is_reference("arrays:3")
    (True, False, False)
    """
    where, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*where.split("."), *name.split(".")))


def find(label: str, place: str, kind: str, belongs: Callable[[Any], bool]) -> Any:
    """Import what a reference names.

    Args:
        label: What the user wrote, for messages, e.g. "model = 'nets:small'".
        place: The reference.
        kind: What is looked for, in one word, for messages.
        belongs: Whether a value of the module is of that kind, so that its name can be suggested.

    Raises:
        SettingError: The module cannot be imported, or has no such name.
    """
    where, _, attribute = place.partition(":")
    found: Any = _import(label, where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [
                name
                for name, value in vars(found).items()
                if belongs(value) and getattr(value, "__module__", None) == where
            ]
            raise SettingError.unknown(f"{label}: {kind}", part, own)
        found = getattr(found, part)
    return found


def call(key: str, text: str) -> Any:
    """Call the function that a setting names, without arguments, and return what it gives.

    Raises:
        SettingError: There is no such function, or it fails; the text says why.
    """
    label = f"{key} = '{text}'"
    if not is_reference(text):
        raise SettingError(f"{label} must be package.module:function")
    function = find(label, text, "function", inspect.isfunction)
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        raise SettingError(f"{label} must name a function (got a {type(function).__name__})")
    try:
        return function()
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"{label} fails: {_reason(error)}") from error


def _import(label: str, where: str) -> types.ModuleType:
    """Import a module, from the current folder if it is nowhere else."""
    top = where.partition(".")[0]
    here = str(Path.cwd())
    if top not in sys.modules and _is_absent(top) and here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(where)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
            raise SettingError(f"{label}: there is no module '{where}'") from error
        raise SettingError(f"{label}: the module '{where}' cannot be imported ({_reason(error)})") from error


def _is_absent(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is None
    except ValueError:
        return True


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
