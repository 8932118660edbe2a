"""`fedpmt methods`: all of them, or what one of them is."""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
from typing import Annotated, Any, Literal

import typer

from fedpmt.cli import show
from fedpmt.cli.flags import complete_methods, type_value
from fedpmt.cli.runs import Json
from fedpmt.methods.registry import METHODS, MethodClass, fields, method_class, method_names, short_name
from fedpmt.report.budgets import ACTIONS
from fedpmt.types import SettingError

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Show what this method is, its options and its paper (default: list all methods).",
        autocompletion=complete_methods,
    ),
]


def methods(name: Name = None, as_json: Json = False) -> None:
    """List the methods, the library's and those of installed packages, or show what one of them is.

    Examples:
      fedpmt methods
      fedpmt methods fedprox
      fedpmt run --method fedprox --set fedprox.mu=0.1
    """
    if name is not None:
        _show_one(name, as_json=as_json)
        return
    known = {}
    for one in method_names():
        try:
            known[one] = _defaults(one)
        except SettingError as error:
            show.say(str(error))  # a package's method that cannot be loaded hides no other
    if as_json:
        print(json.dumps(known))
        return
    rows = [[one, about(method_class(one))] for one in known]
    show.table("Methods", ("method", "what it does"), rows, left=2)
    show.sentence("what one of them is, its options and its paper: fedpmt methods NAME")


def _defaults(name: str) -> dict[str, Any]:
    return {key: default for key, (_, default) in fields(name).items()}


def _show_one(name: str, *, as_json: bool) -> None:
    cls = method_class(name)
    title = METHODS[name][1] if name in METHODS else cls.__name__
    acts = ACTIONS[cls(**cls().traits.under_budget).traits.action("operations")]
    # Its own options before those that all methods share that average parts.
    ordered = sorted(fields(name).items(), key=lambda option: option[0] in ("weight", "normalise"))
    options = {key: (allowed(kind), default) for key, (kind, default) in ordered}
    if as_json:
        document = {"name": name, "title": title, "about": about(cls), "paper": paper(cls), "budget": acts}
        told = {key: {"allowed": kind, "default": default} for key, (kind, default) in options.items()}
        print(json.dumps(document | {"options": told}))
        return
    show.sentence(f"{title}: {about(cls)}")
    print()
    for paragraph in paragraphs(cls):
        show.paragraph(paragraph)
        print()
    rows = [[key, text(default), kind] for key, (kind, default) in options.items()]
    if rows:
        show.table(f"Options of {name}", ("option", "default", "allowed"), rows, left=3, keys=3)
        print()
    example = f" --set {short_name(name)}.{rows[0][0]}={rows[0][1]}" if rows else ""
    show.facts({"a budget acts": acts, "paper": paper(cls), "run it": f"fedpmt run --method {name}{example}"})


def about(cls: MethodClass) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(cls) or cls.__name__).splitlines()[0]


def paragraphs(cls: MethodClass) -> list[str]:
    """What its own file says about a method, without the paper; nothing where several methods share a file."""
    first, *others = _document(cls)
    return others if _is_about(cls, first) else []


def paper(cls: MethodClass) -> str:
    """Who published a method, where, and when."""
    named = [part for part in (inspect.getdoc(cls) or "").split("\n\n") if part.startswith("Paper: ")]
    first = _document(cls)[0]
    source = named[0].removeprefix("Paper: ") if named else first if _is_about(cls, first) else "-"
    return " ".join(source.split())


def _document(cls: MethodClass) -> list[str]:
    return inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "").split("\n\n")


def _is_about(cls: MethodClass, text: str) -> bool:
    return cls.__name__.lower() in text.lower()


def text(value: object) -> str:
    """A default as one types it."""
    return "none" if value is None else type_value(value)


def allowed(kind: Any) -> str:
    """What an option may be, in words."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if union else (kind,)
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true, false",
        str: "a name",
        types.NoneType: "none",
    }
    return " or ".join(words.get(one) or allowed(one) for one in kinds)
