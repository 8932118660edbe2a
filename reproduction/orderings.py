"""Orderings that papers of rivals publish, on a net and a data set that run here: DepthFL and FIARSE over HeteroFL.

Their nets and numbers of rounds are others (ResNet18, 800 and 1,000 rounds), so that only the order is checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reproduction.natural import Entrant
from reproduction.readings import final, guess
from reproduction.tuned import EMBEDDED_CASES, GRID, TRIAL_SEEDS, Tuned, how

if TYPE_CHECKING:
    from fedpmt.records import RunRecord

WIDTHS = {"1": "1", "0.25": "0.5", "0.0625": "0.25", "0.015625": "0.125"}
"""The sizes of sub-models in FIARSE's paper, as a share of the weights, and the widths that have these sizes."""


def mean_over_sizes(run: RunRecord) -> float:
    """The mean accuracy of the sub-models of four sizes, as FIARSE's paper has it; a guess where a run diverged."""
    if run.diverged:
        return guess(run)
    scores = None if run.result is None else run.result.score_by_width
    if scores is None:
        return final(run)
    found = [scores.get(size, scores.get(width)) for size, width in WIDTHS.items()]
    known = [score for score in found if score is not None]
    return sum(known) / len(known)


DEPTH = (
    Entrant("DepthFL", "depthfl"),
    Entrant("DepthFL, heads alone", "inclusivefl"),
    Entrant("HeteroFL", "heterofl"),
)
SIZES = tuple(Entrant(title, title.lower()) for title in ("FIARSE", "HeteroFL", "FedRolex"))
LEVELS = "0.7,0.8,0.9,1"  # who may upload how much; time is not compared
ABOUT = (
    "What two papers say of their methods, checked on embedded images: DepthFL is above HeteroFL (CIFAR-100 with "
    "ResNet18: 72.7 % with plain averaging, 76.1 % with FedDyn, against 57.6 %), and FIARSE's sub-models of 1/64, "
    "1/16, 1/4 and all of the weights are on average above those of HeteroFL and FedRolex (CIFAR-10, Dirichlet 0.3: "
    "73.8 % against 66.1 % and 66.0 %). In FIARSE's case a quarter of the devices each may upload 1/64, 1/16, 1/4 "
    "and all of the model, and the accuracy is the mean over the four sizes.\n\n"
)

ORDERINGS = Tuned(
    "orderings",
    "Published orderings of DepthFL and FIARSE",
    (
        *(
            replace(
                case,
                name=f"depthfl-{case.name}",
                title=f"DepthFL: {case.title}",
                entrants=DEPTH,
                champion="DepthFL",
                trial_seeds=TRIAL_SEEDS[:1],
            )
            for case in EMBEDDED_CASES
        ),
        replace(
            EMBEDDED_CASES[0],
            name="fiarse",
            title="FIARSE: embedded images, Dirichlet 0.3, mean over four sizes",
            partition="dirichlet:0.3",
            entrants=SIZES,
            champion="FIARSE",
            trial_seeds=TRIAL_SEEDS[:1],
            reading=mean_over_sizes,
            more={"levels": LEVELS, "budget": f"upload={','.join(reversed(WIDTHS))}"},
        ),
    ),
    ABOUT + how(GRID),
)
