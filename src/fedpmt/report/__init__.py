"""Tables, figures and one web page, drawn from the records of runs and from nothing else.

>>> from fedpmt.report import default_targets
>>> default_targets([])
()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedpmt.report.groups import Group, group_runs, run_labels
from fedpmt.report.quantities import Spread
from fedpmt.report.tables import (
    SummaryRow,
    TargetRow,
    default_targets,
    first_reaching,
    summary,
    tidy,
    time_to_target,
    write_csv,
)

if TYPE_CHECKING:
    from fedpmt.report.figures import busy, layers, score, score_by_class, score_by_level
    from fedpmt.report.page import write_page

__all__ = [
    "Group",
    "Spread",
    "SummaryRow",
    "TargetRow",
    "busy",
    "default_targets",
    "first_reaching",
    "group_runs",
    "layers",
    "run_labels",
    "score",
    "score_by_class",
    "score_by_level",
    "summary",
    "tidy",
    "time_to_target",
    "write_csv",
    "write_page",
]

DRAWN = ("busy", "layers", "score", "score_by_class", "score_by_level")


def __getattr__(name: str) -> Any:
    """Load matplotlib, which takes a second, for those who draw; tables do without."""
    if name in DRAWN:
        return getattr(importlib.import_module("fedpmt.report.figures"), name)
    if name == "write_page":
        return importlib.import_module("fedpmt.report.page").write_page
    raise AttributeError(f"module 'fedpmt.report' has no attribute '{name}'")
