"""All experiments: those of the paper in its order, then ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt.experiments.accuracy import ACCURACY
from fedpmt.experiments.comparison import COMPARISON
from fedpmt.experiments.completion_time import COMPLETION_TIME
from fedpmt.experiments.complexity import COMPLEXITY
from fedpmt.experiments.leaderboard import RIVALS
from fedpmt.experiments.paper import Experiment
from fedpmt.experiments.studies import STUDIES_EXPERIMENT

if TYPE_CHECKING:
    from fedpmt.experiments.artefact import Artefact
    from fedpmt.experiments.library import Library
    from fedpmt.experiments.paper import Scope


def _convergence(library: Library, scope: Scope) -> Artefact:
    from fedpmt.experiments.convergence import convergence

    return convergence(quick=scope.quick, seeds=scope.seeds)


EXPERIMENTS = {
    one.name: one
    for one in (
        COMPLEXITY,
        COMPARISON,
        ACCURACY,
        COMPLETION_TIME,
        STUDIES_EXPERIMENT,
        Experiment("convergence", "the 1/T rate and the bound, Theorem 1", lambda _: [], _convergence),
        RIVALS,
    )
}
