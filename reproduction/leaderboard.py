"""All methods under one budget: what each reaches, takes and needs, and where FedPMT loses.

`python -m reproduction rivals` is the same page of those that exchange no knowledge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpmt import api
from fedpmt.methods.registry import create, method_class
from reproduction.artefact import Artefact, Picture, Table
from reproduction.entrants import (
    BUDGET,
    ENTRANTS,
    PERSONAL_EVERY,
    PERSONAL_TEST,
    STRONGEST,
    Contest,
)
from reproduction.findings import findings, findings_table
from reproduction.frontier import CHARTS, best_table, caption, draw
from reproduction.paper import (
    DATA,
    IID,
    PARTITIONS,
    TITLES,
    TWO_CLASSES,
    Experiment,
    Scope,
    flags,
    seeds_text,
)
from reproduction.readings import TAIL
from reproduction.scores import cost_table, loss_table, losses, result_table, scores, verdict_text
from reproduction.verdicts import CONFIDENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedpmt.settings import Settings
    from reproduction.entrants import Entrant
    from reproduction.library import Library
    from reproduction.scores import Score

NONE = "-"
DATA_TITLES = {
    "embedded": "embedded images",
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
}


def leaderboard(contest: Contest) -> Experiment:
    """The contest as an experiment."""
    name = f"leaderboard-{contest.key}"
    about = [DATA_TITLES[contest.data], *([contest.situation.about] if contest.case else [])]
    title = f"All methods under one budget: {', '.join(about)}"
    return Experiment(
        name,
        "all methods under one budget",
        lambda _: contest.runs(),
        lambda library, _: page(library, contest, name, title, command_of(contest)),
    )


def command_of(contest: Contest) -> str:
    """What makes the page."""
    named = [entrant.name for entrant in contest.entrants]
    if tuple(contest.entrants) == ENTRANTS:
        named = []
    elif {entrant.name for entrant in STRONGEST} <= set(named):
        named = ["--strongest", *(entrant.name for entrant in contest.entrants if entrant.variant)]
    words = [
        "python -m reproduction leaderboard",
        *named,
        *([] if contest.data == "embedded" else [f"--data {contest.data}"]),
        *([f"--case {contest.case}"] if contest.case else []),
    ]
    if tuple(contest.partitions) != (IID, TWO_CLASSES):
        words.append(f"--partition {','.join(contest.partitions)}")
    if contest.rounds is not None:
        words.append(f"--rounds {contest.rounds}")
    return " ".join(words) + flags(contest.seeds, quick=contest.quick)


def page(library: Library, contest: Contest, name: str, title: str, command: str) -> Artefact:
    """Tables and charts of the runs that are there."""
    found = contest.found(library)
    every = scores(contest, found)
    tables = []
    for partition in contest.partitions:
        here = [one for one in every if one.partition == partition]
        about = f"{TITLES[contest.task]}, {PARTITIONS.get(partition, partition)}"
        tables += [result_table(about, here, contest.targets), cost_table(about, here)]
    behind = losses(contest, found, every)
    bests = {against: best_table(contest, found, every, against) for against in CHARTS}
    judged = findings(found)
    counts = sorted({len(members) for members in found.values()})
    return Artefact(
        name,
        title,
        command,
        _text(contest, counts, verdict_text(behind)),
        [
            loss_table(behind),
            *tables,
            *(table for table, _ in bests.values()),
            needs_table(contest.entrants, every),
            findings_table(judged),
            settings_table(contest),
        ],
        [Picture(name, draw(contest, found, every), caption(contest, seeds_text(counts)))],
        {
            "rows": [one.values() for one in every],
            "losses": behind,
            "best_within": {against: values for against, (_, values) in bests.items()},
            "needs": {entrant.name: needs(entrant) for entrant in contest.entrants},
            "findings": judged,
            "seeds": counts,
        },
    )


def _text(contest: Contest, counts: Sequence[int], verdicts: str) -> str:
    one = contest.settings(contest.entrants[0], contest.partitions[0], 0)
    speeds = len(one.levels.split(","))
    epochs = "1 epoch" if one.epochs == 1 else f"{one.epochs} epochs"
    whose = "as in FedPMT's paper" if contest.data in DATA.values() else "ours"
    held = {key.replace("_", "-"): value for key, value in api.HELD_OUT.items()}
    server = personal = adam = ""
    if any(method_class(entrant.method)().traits.server_work for entrant in contest.entrants):
        server = (
            f"The server may do {one.server_cap:g} times the operations of a round's devices, which takes no virtual "
            "time. "
        )
    if any(entrant.personal for entrant in contest.entrants):
        personal = (
            " † marks accuracies that are not of one global model, but means over devices that took part: `mean "
            "personal` of each device's own model, on test samples of the classes it has; `split` of a device's "
            "part with the shared part, on all classes. Each is tested on up to "
            f"{PERSONAL_TEST:,} samples, {PERSONAL_EVERY} times less often than a global model, so times to an "
            "accuracy are coarser."
        )
    if any(entrant.method == "fedgkt" for entrant in contest.entrants):
        adam = " (FedGKT by Adam at its own rate, on both sides)"
    return (
        f"**Where FedPMT stands.**\n\n{verdicts or '- No run of it yet.'}\n\n"
        f"{seeds_text(counts)}, {contest.played} rounds on {contest.data}, {one.devices} devices of {speeds} speeds "
        f"with {one.samples} samples each, {one.cohort} a round.{contest.situation.fleet} "
        f"Budget `{BUDGET}`: on each level a method gets "
        "the largest part that takes no more `exact` operations than FedPMT's depth there. A method on which a budget "
        f"cannot act exceeds it, and the clock shows the cost. {server}"
        f"For every method {held['public']} is held out as public data and {held['validation']} as "
        "validation data, so devices hold the same samples. Every seed has its own split, the same for "
        f"all methods. Devices train by SGD at rate {one.lr:g}, in batches of {one.batch}, {epochs} a round, "
        f"{whose}{adam}. No rate is tuned to a method; one that diverges at this rate is shown so. The last table has "
        "the methods' own settings.\n\n"
        f"Accuracy is the mean over the last {100 * TAIL:.0f} % of the rounds, over seeds, with "
        f"{100 * CONFIDENCE:.0f} % intervals. Time is virtual. Bytes and operations are of all devices in all "
        "rounds; downloads include index lists, masks and seeds. Memory is the most that a device used. An "
        f"accuracy is reached when the mean over the last {100 * TAIL:.0f} % of the evaluations reaches it (≤: "
        "at the first evaluation of a run). A run that "
        f"diverges counts as a guess and reaches nothing.{personal}"
    )


def needs(entrant: Entrant) -> dict[str, str]:
    """What a method needs and tells, by its own declarations."""
    traits = create(entrant.method, entrant.options, {}).traits
    data = {"unlabelled": traits.needs_public, "labelled (validation)": traits.needs_validation}
    return {
        "data": ", ".join(word for word, on in data.items() if on),
        "state": traits.keeps,
        "discloses": traits.discloses,
    }


def needs_table(entrants: Sequence[Entrant], every: Sequence[Score]) -> Table:
    """What a method needs besides devices; variants where they differ from the method."""
    plain = {entrant.method: needs(entrant) for entrant in ENTRANTS if not entrant.variant}
    rows = []
    for entrant in entrants:
        found = needs(entrant)
        if entrant.variant and found == plain[entrant.method]:
            continue
        works = _server([one for one in every if one.entrant.name == entrant.name])
        cells = (found["data"], found["state"], works, found["discloses"])
        rows.append([entrant.title, *(cell or NONE for cell in cells)])
    columns = ("method", "public data", "a device keeps", "server compute", "disclosed besides weights")
    return Table("What it needs", columns, rows, words=True)


def _server(every: Sequence[Score]) -> str:
    """What the server does besides averaging, on each split."""
    shares = []
    for one in every:
        done, devices = one.total.server_operations, one.total.operations
        if done is not None and done.mean and devices is not None:
            shares.append(f"{done.mean / devices.mean:.2g}")
    if not shares:
        return ""
    what = method_class(every[0].entrant.method)().traits.server_work
    return f"{what}, {' or '.join(dict.fromkeys(shares))} × devices' operations"


def settings_table(contest: Contest) -> Table:
    """In which form each takes part."""
    rows = []
    for entrant in contest.entrants:
        settings = contest.settings(entrant, contest.partitions[0], 0)
        options = ", ".join(f"{key} = {value}" for key, value in sorted(settings.options.items()))
        rows.append([entrant.title, f"`{entrant.name}`", entrant.form, options or "defaults"])
    return Table("Entrants", ("entrant", "name", "form", "settings"), rows, words=True)


def _rivals(scope: Scope) -> Contest:
    """Those that exchange weights alone, in their strongest forms; variants are the leaderboard's."""
    return Contest(
        scope.seeds,
        "embedded" if scope.quick else "cifar10",
        entrants=tuple(entrant for entrant in STRONGEST if not entrant.exchanges),
        quick=scope.quick,
        data_dir=scope.data_dir,
    )


def _rival_runs(scope: Scope) -> list[Settings]:
    return _rivals(scope).runs()


def _rival_page(library: Library, scope: Scope) -> Artefact:
    title, command = (
        "Methods that exchange weights, at equal operations",
        f"python -m reproduction rivals{scope.suffix}",
    )
    return page(library, _rivals(scope), "rivals", title, command)


RIVALS = Experiment(
    "rivals",
    "methods that exchange weights, at equal operations, and what their papers found",
    _rival_runs,
    _rival_page,
)
