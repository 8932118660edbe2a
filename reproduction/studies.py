"""What the paper leaves open or only asserts, as small studies on the embedded images and on kept runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fedpmt import api
from fedpmt.pricing.plan import splitting_constant
from fedpmt.report.quantities import Spread
from fedpmt.report.tables import first_reaching
from reproduction import accuracy, completion_time
from reproduction.artefact import Artefact, Case, Claim, Table
from reproduction.drift import drift_table
from reproduction.paper import IID, PARTITIONS, TITLES, TWO_CLASSES, Experiment, Scope

if TYPE_CHECKING:
    from fedpmt.records import RoundRecord, RunRecord
    from fedpmt.settings import Settings
    from reproduction.library import Library

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


OURS = "FedPMT"
MIX = "Who trains how much (FCNN-MNIST)"
BLOCKS = "A prefix, a middle block or a suffix at equal operations (CNN-MNIST)"


@dataclass(frozen=True)
class Study:
    """Variants that differ in one thing, on one net and partition."""

    title: str
    task: str
    partitions: tuple[str, ...]
    variants: dict[str, dict[str, Any]]  # name -> settings beyond the paper's
    note: str = ""
    target: float | None = None  # an accuracy whose virtual time is shown

    def settings(self, scope: Scope, variant: str, partition: str, seed: int) -> Settings:
        """One run, on embedded data whatever the scope."""
        more = {"method": "fedpmt", "mode": "exact", **self.variants[variant]}
        small = Scope(scope.seeds, quick=True, data_dir=scope.data_dir)
        rounds = QUICK_ROUNDS if scope.quick else ROUNDS
        method = more.pop("method")
        return small.settings(method, self.task, partition, seed, **{"rounds": rounds, **more})

    def runs(self, scope: Scope) -> list[Settings]:
        """All runs of the study."""
        return [
            self.settings(scope, variant, partition, seed)
            for seed in scope.seeds
            for partition in self.partitions
            for variant in self.variants
        ]

    def table(self, library: Library, scope: Scope) -> tuple[Table, list[dict[str, Any]]]:
        """Final accuracy of each variant, ψ of the depths that took part, and time to the target."""
        rows, values = [], []
        for variant in self.variants:
            cells = [variant]
            value: dict[str, Any] = {"study": self.title, "variant": variant}
            for partition in self.partitions:
                every = (library.find(self.settings(scope, variant, partition, seed)) for seed in scope.seeds)
                members = [run for run in every if run is not None]
                final = Spread.of(accuracy.final(run) for run in members)
                cells.append(accuracy.percent(final))
                value[partition] = final.mean if final else None
                if partition == self.partitions[-1]:
                    psi = Spread.of(splitting_of(run) for run in members)
                    cells.append("-" if psi is None else f"{psi.mean:.2f}")
                    value["psi"] = psi.mean if psi else None
                    if self.target is not None:
                        reached = [first_reaching(run, self.target) for run in members]
                        when = completion_time.Estimate.of([one.seconds if one else None for one in reached])
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


STUDIES = (
    Study(
        "Levels fixed per device, or redrawn each round (CNN-MNIST)",
        "cnn-mnist",
        (IID, TWO_CLASSES),
        {"fixed": {}, "redrawn": {"level_draw": "round"}},
        "The paper does not say which it used; its analysis needs every device to train every layer now and then.",
    ),
    Study(
        "Depth by level or by deadline (CNN-MNIST)",
        "cnn-mnist",
        (IID, TWO_CLASSES),
        {
            "by level": {},
            "by the tightest deadline for all": {"assign": "deadline"},
            "by twice that": {"assign": "deadline", "deadline": 30.0},
        },
        "Prices are exact. By deadline each device trains the largest depth it has time for.",
        target=0.8,
    ),
    Study(
        MIX,
        "fcnn-mnist",
        (IID, TWO_CLASSES),
        {name: {"levels": levels, "sampling": "uniform"} for name, levels in MIXES.items()},
        "Numbers of devices on four levels change, and with them psi: the paper says that a larger psi widens the gap.",
    ),
    Study(
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
        BLOCKS,
        "cnn-mnist",
        (IID, TWO_CLASSES),
        {place: {"options": {"block": place}} for place in ("suffix", "middle", "prefix")},
        "Each device gets the dearest block in that place that costs no more than its suffix (exact prices).",
    ),
    *(
        Study(
            f"FedDrop's variants and FedPMT ({TITLES[task]})",
            task,
            (IID, TWO_CLASSES),
            {
                OURS: {"mode": "paper"},
                **{
                    f"FedDrop, {name}": {"method": "feddrop", "mode": "paper", "options": options}
                    for name, options in FEDDROP_VARIANTS.items()
                },
            },
            "Neither paper says how FedDrop's sub-nets are averaged or whether kept activations are scaled.",
        )
        for task in ("fcnn-mnist", "cnn-mnist")
    ),
)


def runs(scope: Scope) -> list[Settings]:
    """All runs of all studies; the clocks are read off the runs of completion-time."""
    return [settings for study in STUDIES for settings in study.runs(scope)]


def make(library: Library, scope: Scope) -> Artefact:
    """One table per study."""
    tables, values = [], []
    for study in STUDIES:
        table, found = study.table(library, scope)
        tables.append(table)
        values += found
    clocks, times = _clocks(library, scope)
    drift, drifts = drift_table(scope)
    return Artefact(
        "studies",
        "What the paper leaves open",
        f"python -m reproduction studies{scope.suffix}",
        f"Small studies on the 5,000 embedded images ({QUICK_ROUNDS if scope.quick else ROUNDS} rounds), four depths; "
        f"accuracy is the mean of the last {accuracy.TAIL} evaluations, ± the deviation over {len(scope.seeds)} seeds.",
        [*tables, clocks, drift],
        claims=claims(values, drifts),
        values={"studies": values, "clocks": times, "drift": drifts},
    )


def claims(values: list[dict[str, Any]], drifts: list[dict[str, Any]]) -> list[Claim]:
    """What the paper only asserts."""
    blocks = {row["variant"]: row for row in values if row["study"] == BLOCKS}
    mixes = sorted((row for row in values if row["study"] == MIX and row["psi"]), key=lambda row: row["psi"])
    return [
        Claim(
            "at equal operations the last layers are the ones to train",
            "IV-C",
            [
                Case(
                    f"{PARTITIONS[partition]}, against a {place}",
                    blocks["suffix"][partition] > blocks[place][partition],
                    f"{100 * blocks['suffix'][partition]:.1f} % and {100 * blocks[place][partition]:.1f} %",
                )
                for partition in (IID, TWO_CLASSES)
                for place in ("prefix", "middle")
                if blocks[place][partition] is not None and blocks["suffix"][partition] is not None
            ],
        ),
        _against_variants(values),
        Claim(
            "with two classes per device the classifier is the layer on which devices disagree most",
            "IV-C",
            [_most_biased(row) for row in drifts if row["partition"] == TWO_CLASSES],
        ),
        Claim(
            "the poorer the mix of depths (the larger psi), the lower the accuracy",
            "III-C, remark 2",
            [
                Case(
                    PARTITIONS[partition],
                    all(low[partition] >= high[partition] for low, high in pairwise(mixes)),
                    ", ".join(f"psi {row['psi']:.1f}: {100 * row[partition]:.1f} %" for row in mixes),
                )
                for partition in (IID, TWO_CLASSES)
                if len(mixes) == len(MIXES) and all(row[partition] is not None for row in mixes)
            ],
        ),
    ]


def _against_variants(values: list[dict[str, Any]]) -> Claim:
    """FedPMT's lead over each variant of FedDrop, and which of them shows a gap like the paper's."""
    cases, wide = [], []
    for study in (one for one in STUDIES if OURS in one.variants):
        rows = {row["variant"]: row[TWO_CLASSES] for row in values if row["study"] == study.title}
        for variant, theirs in rows.items():
            if variant == OURS or theirs is None or rows[OURS] is None:
                continue
            lead, where = rows[OURS] - theirs, f"{TITLES[study.task]}, {variant.removeprefix('FedDrop, ')}"
            cases.append(Case(where, lead > 0, f"{100 * lead:+.1f}"))
            if lead >= accuracy.ABOVE - accuracy.BELOW:
                wide.append(where)
    return Claim(
        "with two classes per device FedPMT is above FedDrop, in whatever form",
        "IV-C",
        cases,
        f"FedDrop's averaging, scaling and scope; as far apart as in the paper only: {'; '.join(wide) or 'none'}",
    )


def _most_biased(row: dict[str, Any]) -> Case:
    layers = {name: value for name, value in row.items() if name != "partition" and value is not None}
    highest = max(layers, key=lambda name: layers[name])
    shown = ", ".join(f"{name} {value:.2f}" for name, value in layers.items())
    return Case(PARTITIONS[row["partition"]], highest == list(layers)[-1], shown)


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
                found[method] = completion_time.Estimate.of(seconds)
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
