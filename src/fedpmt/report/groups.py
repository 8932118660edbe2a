"""Which runs are repetitions of one another, and the shortest name that tells the others apart."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedpmt.records import EVENTS, EXECUTION
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fedpmt.records import RunRecord

SEEDS = {"seed": "seed", "partition_seed": "split"}
"""Runs that differ only here are repetitions; the words are what labels call them."""

PANELS = ("task", "data", "partition")
"""Scores under different ones of these are not to be compared: each gets its own panel, as does each kind of score."""

SEPARATOR = " · "


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but seeds: one line in a figure, one row in a table."""

    panel: str  # "classes:2"; empty where all runs share task, data and partition
    line: str  # what sets it apart within its panel: "fedpmt"
    method: str
    runs: tuple[RunRecord, ...]

    @property
    def score_name(self) -> str:
        """What the score of its runs is called."""
        return clean(self.runs[0].score_name)

    @property
    def label(self) -> str:
        """What sets it apart from all other groups."""
        return SEPARATOR.join(part for part in (self.line, self.panel) if part)


def clean(text: object) -> str:
    """Text of a record as one printable line."""
    line = " ".join(str(text).split())
    if line.isprintable():
        return line
    return "".join(letter for letter in line if not unicodedata.category(letter).startswith("C"))


def shorten(text: str, limit: int) -> str:
    """Cut what would not fit into a figure."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


@dataclass(frozen=True, eq=False)
class _Same:
    """The settings of one record, told from others by being the same object."""

    settings: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.settings is self.settings

    def __hash__(self) -> int:
        return id(self.settings)


def flatten(settings: dict[str, Any]) -> Mapping[str, str]:
    """Settings as texts by name; the method's own are named `options.NAME`."""
    return _flatten(_Same(settings))


@lru_cache(4096)
def _flatten(same: _Same) -> Mapping[str, str]:
    """Work out once what every table and label asks for."""
    settings = same.settings
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if key == "options" and isinstance(value, dict):
            flat |= {f"options.{clean(name)}": _text(inner) for name, inner in value.items()}
        else:
            flat[clean(key)] = _text(value)
    return MappingProxyType(flat)


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return clean(json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value)


def method_of(run: RunRecord) -> str:
    """The method's name as the settings, else the result, give it."""
    named = run.settings.get("method", run.result.method if run.result else None)
    return clean(named) if named else "unknown method"


def settings_of(run: RunRecord) -> dict[str, str]:
    """The settings that decide numbers, flattened."""
    return {
        **{key: text for key, text in flatten(run.settings).items() if key not in EXECUTION},
        "method": method_of(run),
    }


def common_settings(runs: Sequence[RunRecord]) -> dict[str, str]:
    """The settings on which all runs agree."""
    every = [settings_of(run) for run in runs]
    return (
        {key: text for key, text in every[0].items() if all(other.get(key) == text for other in every)}
        if every
        else {}
    )


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """The names of settings that are not the same in all runs, seeds included."""
    common = common_settings(runs)
    names = dict.fromkeys(key for run in runs for key in settings_of(run))
    return [key for key in names if key not in common]


def require_runs(runs: Sequence[RunRecord]) -> None:
    """Refuse to report on nothing."""
    if not runs:
        raise SettingError("there is no run to report on: name at least one run folder")


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Gather repetitions, in the order in which they first appear, panel by panel.

    A line is named by its method and by each setting that varies within a panel; a method's own
    settings only where two runs of that method differ in them, those of a clock of events where two runs on it do. What
    differs merely between panels
    (a data set brings its own batch size) stays out: the panel's name stands for it.
    """
    differing = differing_settings(runs)
    panel_keys = [key for key in PANELS if key in differing]
    several_scores = len({run.score_name for run in runs}) > 1
    candidates = [key for key in differing if key not in {*panel_keys, *SEEDS, "method"}]
    gathered: dict[str, dict[tuple[tuple[str, str], ...], list[RunRecord]]] = {}
    values: dict[tuple[str, ...], set[str]] = {}
    for run in runs:
        settings = settings_of(run)
        kind = [clean(run.score_name)] if several_scores else []
        panel = SEPARATOR.join([*(settings.get(key, "none") for key in panel_keys), *kind])
        key = tuple(
            sorted((name, text) for name, text in settings.items() if name not in SEEDS and text != "none")
        )
        gathered.setdefault(panel, {}).setdefault(key, []).append(run)
        for name in candidates:
            values.setdefault(_scope(name, panel, settings), set()).add(settings.get(name, "none"))
    named = [
        name
        for name in candidates
        if any(scope[0] == name and len(texts) > 1 for scope, texts in values.items())
    ]
    groups = []
    for panel, members in gathered.items():
        for same in members.values():
            settings = settings_of(same[0])
            line = SEPARATOR.join([settings["method"], *_parts(named, settings)])
            groups.append(Group(panel, line, settings["method"], tuple(same)))
    return groups


def _scope(name: str, panel: str, settings: dict[str, str]) -> tuple[str, ...]:
    if name in EVENTS:
        return name, panel, settings.get("clock", "none")
    return (name, panel, settings["method"]) if name.startswith("options.") else (name, panel)


def _parts(names: Iterable[str], settings: dict[str, str]) -> list[str]:
    parts = []
    for name in names:
        text, word = settings.get(name, "none"), name.removeprefix("options.").replace("_", " ")
        if text == "none" and (name.startswith("options.") or name in EVENTS):
            continue  # a setting of another method, or of another clock
        if name in EVENTS and settings.get("clock") != "events":
            continue
        parts.append(f"no {word}" if text == "none" else f"{word} {text}")
    return parts


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """One name per run, all different: its group, then what its repetitions differ in."""
    differing = differing_settings(runs)
    names = {id(run): group.label for group in group_runs(runs) for run in group.runs}
    labels = []
    for run in runs:
        settings = settings_of(run)
        seeds = [f"{word} {settings.get(key, 'none')}" for key, word in SEEDS.items() if key in differing]
        labels.append(SEPARATOR.join([names[id(run)], *seeds]))
    for marks in (
        [clean(run.folder.name) for run in runs],
        [f"run {position}" for position in range(1, len(runs) + 1)],
    ):
        seen = Counter(labels)
        labels = [
            f"{label}{SEPARATOR}{mark}" if seen[label] > 1 else label
            for label, mark in zip(labels, marks, strict=True)
        ]
    return labels


def panels_of(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """The groups by panel, in order."""
    panels: dict[str, list[Group]] = {}
    for group in groups:
        panels.setdefault(group.panel, []).append(group)
    return panels
