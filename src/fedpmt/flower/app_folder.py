"""Write and read the folder of a Flower app, which both `fedpmt deploy` and plain `flwr run` can run."""

from __future__ import annotations

import json
import math
import tomllib
from typing import TYPE_CHECKING, Any

from fedpmt import __version__
from fedpmt.flower.deployment import write_config
from fedpmt.records import write_atomically
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fedpmt.flower.deployment import Deployment
    from fedpmt.settings import Settings

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
