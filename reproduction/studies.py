"""What the paper leaves open or only asserts: small studies on the embedded images, and variations of its figure.

`studies` is a page of minutes; `variations` plays the same on MNIST and CIFAR-10 with the paper's settings, and shares
its unvaried runs with Figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.models.nets import net
from fedpmt.pricing.plan import splitting_constant
from fedpmt.report.quantities import Spread
from fedpmt.report.tables import evaluated, first_reaching
from reproduction import accuracy, completion_time
from reproduction.artefact import Artefact, Table
from reproduction.paper import IID, PARTITIONS, TITLES, TWO_CLASSES, Experiment, Scope, seeds_text
from reproduction.plans import WatchedFedAvg
from reproduction.verdicts import (
    NOT_RUN,
    Claim,
    Estimate,
    above,
    exact,
    near,
    not_run,
    pair,
    percent,
    settle,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fedpmt.records import RoundRecord, RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library
    from reproduction.verdicts import Case

ROUNDS, QUICK_ROUNDS = 100, 20
UPLINK, DOWNLINK = 1e6 / 8, 10e6 / 8
"""Bytes per second: 1 Mbit/s up and 10 Mbit/s down."""

FEDDROP_VARIANTS: dict[str, dict[str, Any]] = {
    "overlap mean": {},
    "fill mean": {"aggregation": "fill"},
    "zero fill": {"aggregation": "zero"},
    "overlap, scaled activations": {"scaling": True},
    "fill, scaled activations": {"aggregation": "fill", "scaling": True},
    "overlap, filters too": {"scope": "all"},
}
MIXES = {
    "as many of each (the paper)": "1/4x13,1/3x13,1/2x12,1x12",
    "mostly strong": "1/4x4,1/3x4,1/2x4,1x38",
    "mostly weak": "1/4x38,1/3x4,1/2x4,1x4",
    "strong devices idle": "1/4x47,1/3x1,1/2x1,1x1",
}
FULL_MIXES = {
    "as many of each (the paper)": "1/5x20,1/4x20,1/3x20,1/2x20,1x20",
    "mostly strong": "1/5x8,1/4x8,1/3x8,1/2x8,1x68",
    "mostly weak": "1/5x68,1/4x8,1/3x8,1/2x8,1x8",
    "strong devices idle": "1/5x96,1/4x1,1/3x1,1/2x1,1x1",
}
MARGINAL = 0.001
"""The share of an upload that the paper's "marginal extra information" may be."""

OURS, REDRAWN, THEIRS, THEIRS_REDRAWN = "FedPMT", "FedPMT, redrawn", "FedDrop", "FedDrop, redrawn"
OPTION_I, OPTION_II = "Option I: the server chooses", "Option II: the device chooses"
OPTIONS: dict[str, dict[str, Any]] = {
    OPTION_I: {"sampling": "uniform"},
    OPTION_II: {"sampling": "uniform", "splitting": "device"},
}
SUFFIX, OTHERS = "suffix", ("middle", "prefix")
PLACES: dict[str, dict[str, Any]] = {place: {"options": {"block": place}} for place in (SUFFIX, *OTHERS)}

BySeed = dict[int, "RunRecord"]
Found = dict[str, dict[str, BySeed]]
"""The runs of a study: by variant, split and seed."""


@dataclass(frozen=True)
class Study:
    """Variants that differ in one thing, on one net."""

    name: str  # that claims find it by
    title: str
    task: str
    partitions: tuple[str, ...]
    variants: dict[str, dict[str, Any]]  # name -> settings beyond the paper's
    note: str = ""
    target: float | None = None  # an accuracy whose virtual time is shown
    full: bool = False  # with the paper's data and rounds; else on embedded images

    def settings(self, scope: Scope, variant: str, partition: str, seed: int) -> Settings:
        """One run."""
        more = {"method": "fedpmt", "mode": "paper" if self.full else "exact", **self.variants[variant]}
        method, depths = more.pop("method"), more.pop("depths", None)
        if self.full:
            return scope.settings(method, self.task, partition, seed, depths, **more)
        small = Scope(scope.seeds, quick=True, data_dir=scope.data_dir)
        rounds = QUICK_ROUNDS if scope.quick else ROUNDS
        return small.settings(method, self.task, partition, seed, depths, **{"rounds": rounds, **more})

    def runs(self, scope: Scope) -> list[Settings]:
        """All runs of the study."""
        return [
            self.settings(scope, variant, partition, seed)
            for seed in scope.seeds
            for partition in self.partitions
            for variant in self.variants
        ]

    def find(self, library: Library, scope: Scope) -> Found:
        """The runs that exist."""
        return {
            variant: {
                partition: {
                    seed: run
                    for seed in scope.seeds
                    if (run := library.find(self.settings(scope, variant, partition, seed))) is not None
                }
                for partition in self.partitions
            }
            for variant in self.variants
        }

    def table(self, found: Found) -> tuple[Table, list[dict[str, Any]]]:
        """Final accuracy of each variant, ψ of the depths that took part, and time to the target."""
        rows, values = [], []
        for variant, by_split in found.items():
            cells = [variant]
            value: dict[str, Any] = {"study": self.title, "variant": variant}
            for partition, members in by_split.items():
                final = Spread.of(map(accuracy.final, members.values()))
                cells.append(accuracy.spread_text(final) if final else NOT_RUN)
                value[partition] = final.mean if final else None
            last = by_split[self.partitions[-1]].values()
            psi = Spread.of(map(splitting_of, last))
            cells.append("-" if psi is None else f"{psi.mean:.2f}")
            value["psi"] = psi.mean if psi else None
            if self.target is not None:
                reached = [first_reaching(run, self.target) for run in last]
                when = Estimate.of([one.seconds if one else None for one in reached])
                cells.append("not reached" if when is None else when.text())
                value["seconds"] = when.mean if when else None
            rows.append(cells)
            values.append(value)
        columns = ["variant", *(PARTITIONS[partition] for partition in self.partitions), "psi"]
        if self.target is not None:
            columns.append(f"s to {100 * self.target:.0f} %")
        return Table(self.title, columns, rows, self.note), values


def splitting_of(run: RunRecord) -> float | None:
    """ψ of the depths whose replies counted, over the whole run; None for parts that are not depths."""
    counts: dict[int, int] = {}
    for step in run.rounds:
        for device in step.devices:
            name, _, number = device.part.partition(" ")
            if name != "depth" or not number.isdecimal():
                return None
            if device.outcome == "arrived":
                counts[int(number)] = counts.get(int(number), 0) + 1
    total = sum(counts.values())
    depths = int(run.settings["depths"] or max(counts, default=0))
    return (
        splitting_constant([counts.get(depth, 0) / total for depth in range(1, depths + 1)])
        if total
        else None
    )


BOTH = (IID, TWO_CLASSES)
LEVELS_NOTE = (
    "The paper does not say which it used; its analysis needs every device to train every layer now and then."
)
FEDDROP_NOTE = (
    "Neither paper says how FedDrop's sub-nets are averaged or whether kept activations are scaled."
)
MIX_NOTE = (
    "The numbers of devices on the levels change, and psi with them; a larger psi is said to widen the gap."
)
BLOCK_NOTE = (
    "Each device gets the dearest block in that place that costs no more than its suffix (exact prices)."
)
OPTION_NOTE = (
    "With Option II the reply also says which layers it is of. The server does not know the levels then, so devices "
    "are drawn uniformly in both rows."
)


def _feddrops(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {
        OURS: {"mode": "paper"},
        **{
            f"FedDrop, {name}": {"method": "feddrop", "mode": "paper", "options": FEDDROP_VARIANTS[name]}
            for name in names
        },
    }


def _mixes(mixes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {name: {"levels": levels, "sampling": "uniform"} for name, levels in mixes.items()}


STUDIES = (
    Study(
        "levels",
        "Levels fixed per device, or redrawn each round (CNN-MNIST)",
        "cnn-mnist",
        BOTH,
        {"fixed": {}, "redrawn": {"level_draw": "round"}},
        LEVELS_NOTE,
    ),
    Study(
        "options",
        "The server chooses a device's layers, or the device does (CNN-MNIST)",
        "cnn-mnist",
        BOTH,
        OPTIONS,
        OPTION_NOTE,
    ),
    Study(
        "deadline",
        "Depth by level or by deadline (CNN-MNIST)",
        "cnn-mnist",
        BOTH,
        {
            "by level": {},
            "by the tightest deadline for all": {"assign": "deadline"},
            "by twice that": {"assign": "deadline", "deadline": 30.0},
        },
        "Prices are exact. By deadline each device trains the largest depth it has time for.",
        target=0.8,
    ),
    Study("mixes", "Who trains how much (FCNN-MNIST)", "fcnn-mnist", BOTH, _mixes(MIXES), MIX_NOTE),
    Study(
        "epochs",
        "Local epochs, frozen layers run once per round or for each batch (CNN-MNIST)",
        "cnn-mnist",
        (IID,),
        {
            f"E = {epochs}, {method}{', ' + prefix if method == 'fedpmt' else ''}": {
                "method": method,
                "epochs": epochs,
                "prefix": prefix,
            }
            for epochs in (1, 2, 5)
            for method, prefix in (("fedpmt", "cache"), ("fedpmt", "recompute"), ("fedavg", "cache"))
        },
        "The cache does not change what is learned, only what it costs.",
        target=0.8,
    ),
    Study(
        "blocks",
        "A prefix, a middle block or a suffix at equal operations (CNN-MNIST)",
        "cnn-mnist",
        BOTH,
        PLACES,
        BLOCK_NOTE,
    ),
    *(
        Study(
            f"feddrop-{task}",
            f"FedDrop's variants and FedPMT ({TITLES[task]})",
            task,
            BOTH,
            _feddrops(FEDDROP_VARIANTS),
            FEDDROP_NOTE,
        )
        for task in ("fcnn-mnist", "cnn-mnist")
    ),
)
SCALED = ("overlap mean", "overlap, scaled activations")
VARIATIONS = (
    *(
        Study(
            f"levels-{task}-{count}",
            f"Levels fixed per device, or redrawn each round ({TITLES[task]}, |I| = {count})",
            task,
            BOTH,
            {
                "FedAvg": {"method": "fedavg"},
                OURS: {"depths": count},
                REDRAWN: {"depths": count, "level_draw": "round"},
                THEIRS: {"method": "feddrop", "depths": count},
                THEIRS_REDRAWN: {"method": "feddrop", "depths": count, "level_draw": "round"},
            },
            LEVELS_NOTE,
            full=True,
        )
        for task in TITLES
        for count in reversed(net(task).depths)
    ),
    *(
        Study(
            f"feddrop-{task}",
            f"FedDrop's variants and FedPMT ({TITLES[task]}, |I| = {net(task).depths[0]})",
            task,
            BOTH,
            _feddrops(FEDDROP_VARIANTS if task == "cnn-cifar10" else SCALED),
            FEDDROP_NOTE,
            full=True,
        )
        for task in TITLES
    ),
    Study(
        "mixes",
        "Who trains how much (CNN-CIFAR10)",
        "cnn-cifar10",
        BOTH,
        _mixes(FULL_MIXES),
        MIX_NOTE,
        full=True,
    ),
    Study(
        "blocks",
        "A prefix, a middle block or a suffix at equal operations (CNN-CIFAR10)",
        "cnn-cifar10",
        BOTH,
        {place: {**more, "mode": "exact"} for place, more in PLACES.items()},
        BLOCK_NOTE,
        full=True,
    ),
    Study(
        "options",
        "The server chooses a device's layers, or the device does (CNN-CIFAR10)",
        "cnn-cifar10",
        BOTH,
        OPTIONS,
        OPTION_NOTE,
        full=True,
    ),
)


def runs(scope: Scope) -> list[Settings]:
    """All runs of all studies; the clocks are read off the runs of completion-time."""
    return [settings for study in STUDIES for settings in study.runs(scope)]


def variations_of(scope: Scope) -> list[Study]:
    """The variations whose nets fit the data of a scope."""
    return [study for study in VARIATIONS if study.task in scope.tasks]


def variation_runs(scope: Scope) -> list[Settings]:
    """All runs of all variations, those of Figure 1 among them; seed by seed."""
    return [
        settings
        for seed in scope.seeds
        for study in variations_of(scope)
        for settings in study.runs(Scope([seed], scope.quick, scope.data_dir))
    ]


def make(library: Library, scope: Scope) -> Artefact:
    """One table per study."""
    found = {study.name: study.find(library, scope) for study in STUDIES}
    tables, values = _tables(STUDIES, found)
    clocks, times = _clocks(library, scope)
    drift, drifts = drift_table(scope)
    return Artefact(
        "studies",
        "What the paper leaves open",
        f"python -m reproduction studies{scope.suffix}",
        f"Small studies on the 5,000 embedded images ({QUICK_ROUNDS if scope.quick else ROUNDS} rounds), four depths; "
        f"accuracy is the mean of the last {accuracy.TAIL} evaluations, ± the deviation over "
        f"{seeds_text([len(scope.seeds)])}.",
        [*tables, clocks, drift],
        claims=settle(
            [
                block_claim(found["blocks"]),
                feddrop_claim({study.task: found[study.name] for study in STUDIES if OURS in study.variants}),
                _drift_claim(drifts),
                mix_claim(found["mixes"]),
                option_claim(found["options"]),
            ]
        ),
        values={"studies": values, "clocks": times, "drift": drifts},
    )


def make_variations(library: Library, scope: Scope) -> Artefact:
    """The same with the paper's data and rounds, and what becomes of Figure 1's claims."""
    studies = variations_of(scope)
    found = {study.name: study.find(library, scope) for study in studies}
    tables, values = _tables(studies, found)
    levels = {
        (study.task, count): found[study.name]
        for study in studies
        for count in net(study.task).depths
        if study.name == f"levels-{study.task}-{count}"
    }
    forms = {study.task: found[study.name] for study in studies if study.name == f"feddrop-{study.task}"}
    more = [
        claim(found[name])
        for name, claim in (("blocks", block_claim), ("mixes", mix_claim), ("options", option_claim))
        if name in found
    ]
    return Artefact(
        "variations",
        "The paper's Figure 1 with one thing changed",
        f"python -m reproduction variations{scope.suffix}",
        "The paper's data, nets, fleet and rounds, with one thing changed that it leaves open. Rows without a change "
        f"are the runs of [accuracy](accuracy.md). Accuracy is the mean of the last {accuracy.TAIL} evaluations, in %; "
        "± is the deviation over seeds.",
        tables,
        claims=settle([*_redrawn_claims(levels), feddrop_claim(forms, BOTH), *more]),
        values={"studies": values},
    )


def _tables(studies: Sequence[Study], found: Mapping[str, Found]) -> tuple[list[Table], list[dict[str, Any]]]:
    made = [study.table(found[study.name]) for study in studies]
    return [table for table, _ in made], [value for _, values in made for value in values]


def _finals(members: BySeed) -> dict[int, float]:
    return {seed: accuracy.final(run) for seed, run in members.items()}


def _less(ours: BySeed, theirs: BySeed) -> Estimate | None:
    """The mean difference of final accuracies on equal seeds."""
    return Estimate.of(pair(lambda mine, other: mine - other, _finals(ours), _finals(theirs)))


def block_claim(found: Found) -> Claim:
    """Which layers to train at equal operations."""
    return Claim(
        "blocks",
        "at equal operations the last layers are the ones to train",
        "IV-C",
        [
            above(f"{PARTITIONS[split]}, against a {place}", _less(found[SUFFIX][split], found[place][split]))
            for split in BOTH
            for place in OTHERS
        ],
        "last layers less others",
    )


def feddrop_claim(by_task: Mapping[str, Found], splits: Sequence[str] = (TWO_CLASSES,)) -> Claim:
    """FedPMT's lead over each variant of FedDrop, and which of them shows a gap like the paper's."""
    cases, wide = [], []
    for task, found in by_task.items():
        for variant, by_split in found.items():
            if variant == OURS:
                continue
            for split in splits:
                shown = f", {PARTITIONS[split]}" if len(splits) > 1 else ""
                where = f"{TITLES[task]}{shown}, {variant.removeprefix('FedDrop, ')}"
                lead = _less(found[OURS][split], by_split[split])
                cases.append(above(where, lead))
                if lead is not None and lead.mean >= accuracy.ABOVE - accuracy.BELOW:
                    wide.append(where)
    text = "FedPMT is above FedDrop, in whatever form"
    return Claim(
        "feddrop",
        f"with two classes per device {text}" if len(splits) == 1 else text,
        "IV-C",
        cases,
        "FedPMT's lead",
        f"As far apart as in the paper (more than {100 * (accuracy.ABOVE - accuracy.BELOW):.0f} points): "
        f"{'; '.join(wide) or 'none'}.",
    )


def mix_claim(found: Found) -> Claim:
    """Whether accuracy falls as ψ rises, from each mix to the next poorer one."""
    cases: list[Case] = []
    for split in BOTH:
        psi = {
            variant: spread.mean
            for variant, by_split in found.items()
            if (spread := Spread.of(map(splitting_of, by_split[split].values()))) is not None
        }
        mixes = sorted(psi, key=lambda variant: psi[variant])
        cases += [
            above(
                f"{PARTITIONS[split]}, psi {psi[rich]:.1f} against {psi[poor]:.1f}",
                _less(found[rich][split], found[poor][split]),
            )
            for rich, poor in pairwise(mixes)
        ] or [not_run(PARTITIONS[split])]
    return Claim(
        "psi",
        "the poorer the mix of depths (the larger psi), the lower the accuracy",
        "III-C, remark 2",
        cases,
        "richer mix less poorer mix",
    )


def option_claim(found: Found) -> Claim:
    """What it costs that devices choose their layers themselves."""
    cases = []
    for split in BOTH:
        ours, theirs = found[OPTION_I][split], found[OPTION_II][split]
        both = sorted(ours.keys() & theirs.keys())
        bytes_name, score_name = (f"{PARTITIONS[split]}, {what}" for what in ("bytes up", "accuracy"))
        if not both:
            cases += [not_run(bytes_name), not_run(score_name)]
            continue
        added = max(map(_added_share, theirs.values()))
        cases.append(exact(bytes_name, added <= MARGINAL, f"{100 * added:.5f} % more"))
        if all(_curve(ours[seed]) == _curve(theirs[seed]) for seed in both):
            cases.append(exact(score_name, True, "the same in every evaluation"))
        else:
            cases.append(near(score_name, _less(theirs, ours), accuracy.ALIKE))
    return Claim(
        "option-two",
        "with Option II only marginal extra information goes up",
        "III-B",
        cases,
        "Option II against Option I",
        f"Marginal: at most {100 * MARGINAL:g} % of the upload. Accuracy: within {100 * accuracy.ALIKE:.0f} points.",
    )


def _added_share(run: RunRecord) -> float:
    """The bytes that say which layers a reply is of, as a share of the upload."""
    return sum(step.overhead_bytes for step in run.rounds) / sum(step.bytes_up for step in run.rounds)


def _curve(run: RunRecord) -> list[float]:
    return [score for _, score in evaluated(run)]


def _redrawn_claims(levels: Mapping[tuple[str, int], Found]) -> list[Claim]:
    """Figure 1's claims with levels redrawn in each round."""
    every = [(task, count, split) for split in BOTH for task, count in levels]
    leads, alike, deep = [], [], []
    for task, count, split in every:
        found, where = levels[task, count], f"{TITLES[task]} {PARTITIONS[split]}, |I| = {count}"
        ours = found[REDRAWN][split]
        leads.append(above(where, _less(ours, found[THEIRS_REDRAWN][split])))
        case = near(where, _less(ours, found["FedAvg"][split]), accuracy.ALIKE)
        if count == net(task).depths[1]:
            alike.append(case)
        elif task != "fcnn-mnist":
            deep.append(case)
    reached = [
        above(
            TITLES[task],
            Estimate.of(list(_finals(levels[task, count][REDRAWN][TWO_CLASSES]).values())),
            accuracy.ABOVE,
            percent,
        )
        for task, count in levels
        if count == 4
    ]
    redrawn, margin = "levels redrawn each round:", f"(within {100 * accuracy.ALIKE:.0f} points)"
    return [
        Claim("lead", f"{redrawn} FedPMT ends above FedDrop", accuracy.FIGURE, leads, "FedPMT's lead"),
        Claim(
            "like-fedavg",
            f"{redrawn} FedPMT with |I| = 2 ends like FedAvg {margin}",
            accuracy.FIGURE,
            alike,
            "FedPMT less FedAvg",
        ),
        Claim(
            "like-fedavg-deep",
            f"{redrawn} on the CNNs so does FedPMT with |I| = 4 or 5 {margin}",
            accuracy.FIGURE,
            deep,
            "FedPMT less FedAvg",
        ),
        Claim(
            "above-90",
            f"{redrawn} MNIST, two classes, |I| = 4: FedPMT reaches more than {100 * accuracy.ABOVE:.0f} %",
            accuracy.FIGURE,
            reached,
            "FedPMT",
        ),
    ]


DRIFT_TASK = "cnn-mnist"
DRIFT_ROUNDS, QUICK_DRIFT_ROUNDS = 30, 3


def drift_table(scope: Scope) -> tuple[Table, list[dict[str, Any]]]:
    """How far devices' updates of each layer disagree; measured anew each time, in seconds."""
    layers: list[str] = []
    rows, values = [], []
    for partition in BOTH:
        runs = [_drift_run(partition, seed, quick=scope.quick) for seed in scope.seeds]
        layers = layers or list(runs[0].rounds[0].layers)
        found = {layer: [_disagreement(run, layer) for run in runs] for layer in layers}
        rows.append([PARTITIONS[partition], *(f"{sum(one) / len(one):.3f}" for one in found.values())])
        values.append({"partition": partition, "layers": found})
    note = (
        "1 - |mean update|² / mean |update|² per layer: 0 where devices agree, near 1 where their updates cancel. "
        f"FedAvg, {QUICK_DRIFT_ROUNDS if scope.quick else DRIFT_ROUNDS} rounds."
    )
    return Table(
        "How far devices disagree, layer by layer (CNN-MNIST)", ("partition", *layers), rows, note
    ), values


def _drift_run(partition: str, seed: int, *, quick: bool) -> RunRecord:
    return api.run(
        WatchedFedAvg(),
        task=DRIFT_TASK,
        data="embedded",
        partition=partition,
        seed=seed,
        rounds=QUICK_DRIFT_ROUNDS if quick else DRIFT_ROUNDS,
        eval_every=DRIFT_ROUNDS,
    )


def _disagreement(run: RunRecord, layer: str) -> float:
    found = [step.metrics[f"disagreement {layer}"] for step in run.rounds]
    return sum(found) / len(found)


def _drift_claim(drifts: Sequence[Mapping[str, Any]]) -> Claim:
    cases = []
    for row in drifts:
        if row["partition"] != TWO_CLASSES:
            continue
        *others, last = row["layers"]
        for other in others:
            more = [
                mine - theirs for mine, theirs in zip(row["layers"][last], row["layers"][other], strict=True)
            ]
            cases.append(above(f"{last} against {other}", Estimate.of(more), show=lambda one: one.text(3)))
    return Claim(
        "classifier",
        "with two classes per device the classifier is the layer on which devices disagree most",
        "IV-C",
        cases,
        "its disagreement less the other layer's",
    )


CLOCKS: dict[str, dict[str, Any]] = {
    "paper's prices": {},
    "exact, frozen layers run for each batch": {"mode": "exact", "prefix": "recompute"},
    "exact, frozen layers run once": {"mode": "exact", "prefix": "cache"},
}


def _clocks(library: Library, scope: Scope) -> tuple[Table, list[dict[str, Any]]]:
    """The kept runs of completion-time under other prices and with links: nothing is trained again."""
    target = completion_time.QUICK_TARGETS[-1] if scope.quick else 0.6
    rows, values = [], []
    for links in (False, True):
        for name, change in CLOCKS.items():
            found = {}
            for method in ("fedpmt", "fedavg"):
                seconds = [
                    _seconds(library, scope, method, seed, change, target, links) for seed in scope.seeds
                ]
                found[method] = Estimate.of(seconds)
            pmt, avg = found["fedpmt"], found["fedavg"]
            label = name + (", with links" if links else "")
            rows.append(
                [
                    label,
                    pmt.text() if pmt else "-",
                    avg.text() if avg else "-",
                    f"{avg.mean / pmt.mean:.2f}" if pmt and avg else "-",
                ]
            )
            values.append(
                {"clock": label, "fedpmt": pmt and pmt.mean, "fedavg": avg and avg.mean, "target": target}
            )
    note = (
        f"Virtual seconds to {100 * target:.0f} %, i.i.d., no deadline, the runs of completion-time. "
        "Links: 1 Mbit/s up, 10 Mbit/s down."
    )
    return Table(
        "The same runs under other clocks", ("clock", "FedPMT", "FedAvg", "ratio"), rows, note
    ), values


def _seconds(
    library: Library, scope: Scope, method: str, seed: int, change: dict[str, Any], target: float, links: bool
) -> float | None:
    settings = completion_time.settings_of(scope, (method, False), IID, seed)
    run = library.find(settings)
    if run is not None and change:
        run = api.restamp(run, settings.model_copy(update=change))
    if run is None:
        return None
    reached = first_reaching(run, target)
    if reached is None:
        return None
    if not links:
        return reached.seconds
    return sum(_with_links(step) for step in run.rounds[: reached.round])


def _with_links(step: RoundRecord) -> float:
    """The slowest device of a round, when what it receives and sends takes time too."""
    return max(
        (device.seconds + device.bytes_down / DOWNLINK + device.bytes_up / UPLINK for device in step.devices),
        default=0.0,
    )


STUDIES_EXPERIMENT = Experiment("studies", "what the paper leaves open, as small studies", runs, make)
VARIATIONS_EXPERIMENT = Experiment(
    "variations", "Figure 1 with one thing changed, on MNIST and CIFAR-10", variation_runs, make_variations
)
