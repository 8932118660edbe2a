"""All experiments, in the order of the paper."""

from __future__ import annotations

from fedpmt.experiments.accuracy import ACCURACY
from fedpmt.experiments.completion_time import COMPLETION_TIME
from fedpmt.experiments.complexity import COMPLEXITY
from fedpmt.experiments.studies import STUDIES_EXPERIMENT

EXPERIMENTS = {
    one.name: one
    for one in (
        COMPLEXITY,
        ACCURACY,
        COMPLETION_TIME,
        STUDIES_EXPERIMENT,
    )
}
