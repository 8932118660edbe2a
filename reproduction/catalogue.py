"""All experiments: those of the paper in its order, then ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reproduction.accuracy import ACCURACY
from reproduction.blocks import BLOCKS
from reproduction.comparison import COMPARISON
from reproduction.completion_time import COMPLETION_TIME
from reproduction.complexity import COMPLEXITY
from reproduction.leaderboard import RIVALS
from reproduction.natural import REAL_CLIENTS, TUNING
from reproduction.paper import Experiment
from reproduction.studies import STUDIES_EXPERIMENT, VARIATIONS_EXPERIMENT
from reproduction.tuned import ABLATION, CIFAR10, CIFAR10_ALL, ELSEWHERE, EMBEDDED, ORDERINGS

if TYPE_CHECKING:
    from reproduction.artefact import Artefact
    from reproduction.library import Library
    from reproduction.paper import Scope


def _convergence(library: Library, scope: Scope) -> Artefact:
    from reproduction.convergence import convergence

    return convergence(quick=scope.quick, seeds=scope.seeds)


EXPERIMENTS = {
    one.name: one
    for one in (
        COMPLEXITY,
        COMPARISON,
        ACCURACY,
        COMPLETION_TIME,
        STUDIES_EXPERIMENT,
        VARIATIONS_EXPERIMENT,
        Experiment("convergence", "the 1/T rate and the bound, Theorem 1", lambda _: [], _convergence),
        RIVALS,
        REAL_CLIENTS,
        TUNING,
        EMBEDDED.experiment,
        CIFAR10.experiment,
        CIFAR10_ALL.experiment,
        ELSEWHERE.experiment,
        ABLATION.experiment,
        ORDERINGS.experiment,
        BLOCKS,
    )
}
