"""All methods under one budget: which runs, who leads at what price, and what the page says."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpmt import api
from fedpmt.data.partition import partition as split
from fedpmt.data.public import hold_out
from fedpmt.methods.registry import METHODS, create, general_methods
from fedpmt.parts.part import add_at
from fedpmt.report.theme import SIGNS
from fedpmt.simulation.assemble import assemble
from fedpmt.training.local import LocalWork
from fedpmt.types import SettingError
from reproduction import entrants
from reproduction.__main__ import program
from reproduction.comparison import EXTRA, PRINTED
from reproduction.entrants import CASES, ENTRANTS, KNOWN, LATER, SAME, STRONGEST, Contest, entrants_of
from reproduction.frontier import best_table, drawn, frontier, spread, track, tracks_of
from reproduction.guide import NOT_YET, QUESTIONS, SPOT, documents_of, filled
from reproduction.leaderboard import RIVALS, _text, command_of, leaderboard, needs
from reproduction.library import name_of
from reproduction.paper import IID, TWO_CLASSES, Scope
from reproduction.readings import final
from reproduction.scores import (
    Score,
    downloaded,
    losses,
    measures_of,
    result_table,
    scores,
    verdict_text,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from report_samples import run

if TYPE_CHECKING:
    from fedpmt.records import RunRecord
    from reproduction.entrants import RunsByEntrant


def test_every_method_takes_part_once_in_its_strongest_form() -> None:
    strongest = [entrant.method for entrant in ENTRANTS if not entrant.variant]
    assert sorted(strongest) == sorted((*PRINTED, *EXTRA))
    # On the tuned pages there is every method that needs no adapters; some are others under this budget.
    tuned = {entrant.method for entrant in (*STRONGEST, *LATER)}
    assert tuned | set(SAME) == set(general_methods())
    assert not tuned & set(SAME)
    assert len(KNOWN) == len(ENTRANTS) + len(LATER)
    dropped = Contest([0]).settings(KNOWN["feddrop"], IID, 0)
    assert dropped.options == {"scope": "all", "scaling": True, "match": "within"}


def test_fedgen_learns_in_the_form_in_which_it_takes_part(tmp_path: Path) -> None:
    """With B from 10, the other value of its code, it is still at a guess after as many rounds."""
    one = Contest([0], "embedded", rounds=12).settings(KNOWN["fedgen"], TWO_CLASSES, 0)
    run = api.start(api.request_of(one), tmp_path / "run")
    assert run.result is not None
    assert run.result.accuracy is not None
    assert run.result.accuracy > 0.4


def test_runs_are_those_of_the_table() -> None:
    found = Contest(range(3)).runs()
    assert len({name_of(one) for one in found}) == 3 * 2 * len(ENTRANTS)
    for one in found:
        assert (one.task, one.data, one.rounds, one.budget, one.mode, one.server_cap) == (
            "cnn-cifar10", "cifar10", 200, "operations", "exact", 2.0,
        )  # fmt: skip
        assert one.eval_every % 5 == 0
        assert one.levels.count(",") == 4
        # All devices hold the same, whoever needs what is held out.
        assert (one.samples, one.public, one.validation) == (420, "holdout:0.1", 0.01)


@pytest.mark.parametrize("partition", [IID, TWO_CLASSES])
def test_every_seed_has_a_split_of_its_own_for_which_the_data_suffice(partition: str) -> None:
    contest, seen = Contest(range(10), "embedded"), set()
    for seed in contest.seeds:
        one, other = (contest.settings(KNOWN[name], partition, seed) for name in ("fedpmt", "comet"))
        data = api.paper_problem_of(one).data
        assert len(data.shard(49)) == 60
        assert one.partition_seed == other.partition_seed == seed  # equal seeds are equal splits
        seen.add(data.shard(0).ids.tobytes())
    assert len(seen) == 10


def test_the_deal_works_out_for_balanced_classes_of_fifty_thousand() -> None:
    """CIFAR-10 without its images: 5,000 of each class, a tenth and a hundredth held out at random."""
    labels = np.arange(50_000) % 10
    for seed in range(5):
        one = Contest([seed]).settings(KNOWN["fedpmt"], TWO_CLASSES, seed)
        rows = hold_out(one.public, one.validation, len(labels), one.partition_seed)
        assert rows is not None
        drawn = split(one.partition, labels[rows.kept], one.devices, one.samples, one.partition_seed)
        assert {len(np.unique(labels[rows.kept][drawn.indices(device)])) for device in range(100)} == {2}


def test_settings_that_the_size_of_a_contest_decides() -> None:
    for contest, asked, initial in (
        (Contest([0]), 420, 10),
        (Contest([0], "embedded"), 60, 5),
        (Contest([0], "embedded", quick=True), 60, 1),
        (Contest([0], rounds=10), 420, 1),
    ):
        assert contest.settings(KNOWN["comet"], IID, 0).options["asked"] == asked
        assert contest.settings(KNOWN["prunefl"], IID, 0).options["initial_rounds"] == initial


def test_only_the_extra_row_of_slimfl_loses_messages() -> None:
    for name, delivered in (("slimfl", 1.0), ("slimfl:fitted", 1.0), ("slimfl:fading", 0.61)):
        settings = Contest([0]).settings(KNOWN[name], IID, 0)
        assert create("slimfl", settings.options, {}).chance(2, 2) == pytest.approx(delivered, abs=0.005)  # type: ignore[attr-defined]


LEARNED = "fedmp:bandit"
"""What it deals out is learnt by trial, whatever the budget."""


@pytest.mark.parametrize("task", ["cnn-mnist", "cnn-cifar10"])
@pytest.mark.parametrize("name", [one.name for one in ENTRANTS if not one.personal and one.name != LEARNED])
def test_nothing_is_evaluated_that_nobody_trains(name: str, task: str, tmp_path: Path) -> None:
    """Under the contest's budget every entry of the evaluated net is in a part of some level, or is left out."""
    contest = Contest([0], "embedded" if task == "cnn-mnist" else "cifar10")
    one = contest.settings(KNOWN[name], IID, 0)
    # Rows of classes that made-up devices do not happen to hold are not the budget's doing.
    options = {**one.options, **({"masked": False} if name in ("heterofl", "fedrolex") else {})}
    one = one.model_copy(
        update={"data": "synthetic:1,1", "samples": 20, "batch": 10, "server_cap": 0.1, "options": options}
    )
    with assemble(one, api.paper_problem_of(one), api.method_of(one), tmp_path) as federation:
        progress = federation.start()
        structure = federation.problem.model.structure
        covered = {key: torch.zeros(structure.shapes[key]) for key in structure.tensors}
        for index in range(8 if name == "ist" else 2):
            _, asked = federation.open(progress)
            for part in (ask.part for ask in asked):
                # A prototype of FedDF has weights of its own: only the whole one trains the whole one's.
                if name != "feddf" or part.label == "full":
                    for key, selection in part.trained.items():
                        add_at(covered[key], selection, 1.0)
            # The evaluated net may depend on who has trained; one round is enough for that.
            progress = replace(progress, rounds=index + 1) if index else federation.play(progress)[0]
        shown = federation.method.predictor(progress.state)
        assert shown.kind == "global"
        for key, cover in covered.items():
            # Two neurons that IST deals apart are dealt together in half of the rounds: 1 / 2^8 of them not yet.
            untrained = float((shown.tensors[key] * (cover == 0)).bool().float().mean())
            assert untrained <= (0.02 if name == "ist" else 0), key


def test_rivals_are_a_part_of_the_leaderboard() -> None:
    for quick in (False, True):
        scope = Scope(range(2), quick=quick)
        contest = Contest(range(2), "embedded" if quick else "cifar10", quick=quick)
        rivals = {name_of(one) for one in RIVALS.runs(scope)}
        assert rivals < {name_of(one) for one in contest.runs()}
        methods = {one.method for one in RIVALS.runs(scope)}
        assert methods == {*PRINTED, *EXTRA} - {"feddf", "comet", "fedgkt", "fedgen"}


def test_the_command_makes_the_page_again() -> None:
    assert command_of(Contest([0], "embedded")) == "python -m reproduction leaderboard"
    assert (
        command_of(Contest([0], entrants=STRONGEST))
        == "python -m reproduction leaderboard --strongest --data cifar10"
    )
    more = (*STRONGEST, KNOWN["comet:alone"])
    assert command_of(Contest([0], entrants=more)) == (
        "python -m reproduction leaderboard --strongest comet:alone --data cifar10"
    )
    contest = Contest([0, 1, 2], "cifar10", (IID,), 50, entrants_of(["fedpmt", "fedavg"]))
    assert command_of(contest) == (
        "python -m reproduction leaderboard fedpmt fedavg --data cifar10 --partition iid --rounds 50 --seeds 0-2"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["fedpnt"], "did you mean 'fedpmt'"),
        (["--data", "cifar"], "did you mean 'cifar10'"),
        (["--data", "cifar10", "--quick"], "allowed: embedded"),
        (["--partition", "iid,classes"], "classes"),
        (["--partition", "iid,iid"], "names a split twice"),
        (["--rounds", "0"], "0"),
    ],
)
def test_wrong_settings_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program(["leaderboard", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_contest_on_unknown_data_is_refused() -> None:
    with pytest.raises(SettingError, match="synthetic"):
        Contest([0], "synthetic")


@pytest.mark.parametrize("name", METHODS)
def test_what_a_device_keeps_is_declared(name: str) -> None:
    method = create(name, {}, {})
    assert bool(method.traits.keeps) == (type(method.local).first is not LocalWork.first)


def test_what_is_disclosed() -> None:
    told = {entrant.name for entrant in ENTRANTS if needs(entrant)["discloses"]}
    assert told == {
        "comet",
        "comet:alone",
        "fedgkt",
        "fedgen",
        "fedgen:head-only",
        "heterofl",
        "fedrolex",
        "prunefl",
        "fedmp:bandit",
    }


def test_signs_tell_all_methods_apart() -> None:
    assert set(SIGNS) == set(METHODS) >= {entrant.method for entrant in ENTRANTS}
    assert len(set(SIGNS.values())) == len(SIGNS)


points = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8)


@given(st.dictionaries(st.sampled_from("abc"), points, min_size=1))
def test_the_frontier_is_what_nobody_beats(tracks: dict[str, list[tuple[float, float]]]) -> None:
    every = {point for line in tracks.values() for point in line}
    best = {
        (spent, accuracy)
        for spent, accuracy in every
        if not any(
            (other <= spent and more > accuracy) or (other < spent and more == accuracy)
            for other, more in every
        )
    }
    leads = frontier(tracks)
    assert {(lead.spent, lead.accuracy) for lead in leads} == best
    assert all((lead.spent, lead.accuracy) in tracks[lead.name] for lead in leads)


@given(st.lists(st.floats(0, 1), max_size=20))
def test_labels_keep_their_order_and_distance(wanted: list[float]) -> None:
    places = spread(wanted, 0.05, 0.0, 1.0)
    ordered = sorted(zip(wanted, places, strict=True))
    for (_, below), (_, above) in pairwise(ordered):
        assert above - below >= 0.05 - 1e-9
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_a_track_ends_at_the_final_accuracy() -> None:
    members = [run([seed / 100 + step / 50 for step in range(40)], seed=seed) for seed in range(3)]
    spent, accuracy = track(members, "seconds")[-1]
    assert spent == 400.0
    assert accuracy == pytest.approx(sum(map(final, members)) / 3)


def test_where_fedpmt_loses_is_said() -> None:
    """FedAvg ends higher, FedDrop lower; SCAFFOLD now higher, now lower. All are as dear."""
    ends = {"fedpmt": (0.6, 0.61), "fedavg": (0.7, 0.71), "feddrop": (0.5, 0.51), "scaffold": (0.7, 0.5)}
    found: RunsByEntrant = {
        (IID, name): [run([0.1, end], seed=seed, method=name) for seed, end in enumerate(values)]
        for name, values in ends.items()
    }
    contest = Contest([0, 1], partitions=(IID,), entrants=entrants_of(list(ends)))
    every = scores(contest, found)
    assert [one.entrant.name for one in every][:2] == ["fedavg", "fedpmt"]
    rows = {row["measure"]: row for row in losses(contest, found, every)}
    assert rows["accuracy"]["ahead"] == {"fedavg": "70.5 %"}
    assert rows["accuracy"]["within_noise"] == ["scaffold"]
    assert rows["uploaded"]["ahead"] == {}
    # Better in both seeds, by two points and by thirty: not significantly, but no noise either.
    found[IID, "scaffold"] = [
        run([0.1, end], seed=seed, method="scaffold") for seed, end in enumerate((0.62, 0.91))
    ]
    likely = next(row for row in losses(contest, found, every) if row["measure"] == "accuracy")
    assert (likely["likely_ahead"], likely["within_noise"]) == ({"scaffold": "76.5 %"}, [])
    said = "Better in all 2 seeds, but not significantly: SCAFFOLD (76.5 %). Within noise: 0 of 3 rivals."
    assert said in verdict_text([likely])
    # A byte less is not worth a word, a hundredth is.
    for less, ahead in ((0, set()), (1, set()), (10_000, {"fedavg"})):
        million = {
            (partition, name): [
                one.model_copy(
                    update={
                        "rounds": tuple(
                            step.model_copy(update={"bytes_up": 1_000_000 - less * (name == "fedavg")})
                            for step in one.rounds
                        )
                    }
                )
                for one in members
            ]
            for (partition, name), members in found.items()
        }
        changed = losses(contest, million, every)
        assert next(set(row["ahead"]) for row in changed if row["measure"] == "uploaded") == ahead
    assert verdict_text(list(rows.values())) == (
        "- i.i.d.: FedPMT ends at 60.5 %. Significantly better: FedAvg (70.5 %). Within noise: 1 of 3 rivals."
    )


def test_most_of_feddfs_cap_is_not_spent_on_looking(tmp_path: Path) -> None:
    """On CIFAR-10, before the first step and after the last: less than a quarter of what the server may do."""
    one = Contest([0]).settings(KNOWN["feddf"], IID, 0)
    made_up = one.model_copy(
        update={"data": "synthetic:1,1", "devices": 100, "public": "none", "validation": 0.0}
    )
    with assemble(one, api.paper_problem_of(made_up), api.method_of(one), tmp_path) as federation:
        progress = federation.start()
        round_, asked = federation.open(progress)
        prices = {ask.part.label: round_.price(ask.part) for ask in asked}
        assert len(prices) == 5
        looks = 2 * one.validation * 50_000 / one.batch * sum(cost.inference for cost in prices.values())
        assert one.server_cap is not None
        assert looks < 0.25 * one.server_cap * sum(ask.usage.operations for ask in asked)


def lost(accuracies: list[float | None], **changes: Any) -> RunRecord:
    """A run that diverged after these rounds, of ten classes."""
    one = run(accuracies, **changes)
    assert one.result is not None
    return one.model_copy(
        update={"result": one.result.model_copy(update={"stopped": "diverged", "score": 0.1})}
    )


def test_a_run_that_diverged_counts_as_a_guess_and_spares_nothing() -> None:
    """FedAvg is ahead in two seeds; in the third it is lost after two of four rounds."""
    good: list[float | None] = [0.3, 0.5, 0.7, 0.9]
    found: RunsByEntrant = {
        (IID, "fedpmt"): [run([0.3, 0.4, 0.5, 0.6], seed=seed, method="fedpmt") for seed in range(3)],
        (IID, "fedavg"): [
            *(run(good, seed=seed, method="fedavg") for seed in range(2)),
            lost([0.3, 0.5], seed=2, method="fedavg"),
        ],
    }
    contest = Contest([0, 1, 2], partitions=(IID,), entrants=entrants_of(["fedpmt", "fedavg"]))
    every = {one.entrant.name: one for one in scores(contest, found)}
    score = every["fedavg"]
    assert score.accuracy.mean == pytest.approx((0.9 + 0.9 + 0.1) / 3)
    assert (score.diverged, score.accuracy.runs) == (1, 3)
    assert score.total.bytes_up is not None
    assert score.total.bytes_up.mean == 400  # of the runs that went on
    cells = result_table("", [score], contest.targets).rows[0]
    assert cells[2] == "3, diverged in 1 of 3"
    assert "(2 of 3)" in cells[3]  # minutes to 40 %
    # It has sent less only because it was lost.
    rows = {row["measure"]: row for row in losses(contest, found, list(every.values()))}
    assert rows["uploaded"]["ahead"] == {}
    assert rows["accuracy"]["ahead"] == {}
    # On the frontier the lost seed pulls the mean down from where it is lost.
    spent, means = zip(*track(found[IID, "fedavg"], "bytes"), strict=True)
    assert spent == (100, 200, 300, 400)
    assert means == pytest.approx((0.3, 0.5, (0.7 + 0.7 + 0.1) / 3, (0.9 + 0.9 + 0.1) / 3))
    assert track([lost(good)], "bytes") == []


def test_what_a_lost_run_would_have_sent_is_not_known() -> None:
    """FedAvg takes half as many rounds, and one of its three runs is lost: it is ahead by those that went on."""
    found: RunsByEntrant = {
        (IID, "fedpmt"): [run([0.1, 0.3, 0.5, 0.7], seed=seed) for seed in range(3)],
        (IID, "fedavg"): [*(run([0.1, 0.3], seed=seed) for seed in range(2)), lost([0.1], seed=2)],
    }
    contest = Contest([0, 1, 2], partitions=(IID,), entrants=entrants_of(["fedpmt", "fedavg"]))
    rows = {row["measure"]: row for row in losses(contest, found, scores(contest, found))}
    assert set(rows["uploaded"]["ahead"]) == {"fedavg"}


def test_a_target_that_the_first_look_is_at_was_reached_before() -> None:
    early, late = run([0.5, 0.6]), run([0.1, 0.6])
    for members, cell in (([early], "≤ 0.2"), ([late], "0.3")):
        one = Score.of(KNOWN["fedpmt"], IID, members, (0.5,))
        assert one is not None
        assert result_table("", [one], (0.5,)).rows[0][3] == cell


def test_cases_are_other_situations_with_pages_of_their_own() -> None:
    own = Contest([0], "embedded").settings(KNOWN["fedpmt"], IID, 0)
    even, timed = (Contest([0], "embedded", case=case) for case in ("even", "deadline"))
    assert (own.depths, own.deadline) == (4, None)
    assert even.settings(KNOWN["fedpmt"], IID, 0).levels == "1/2,1"
    assert timed.settings(KNOWN["fedpmt"], IID, 0).deadline == 15
    assert [leaderboard(one).name for one in (even, timed)] == [
        "leaderboard-embedded-even",
        "leaderboard-embedded-deadline",
    ]
    assert command_of(even).startswith("python -m reproduction leaderboard --case even")
    with pytest.raises(SettingError, match="case = 'evn' is unknown; did you mean 'even'"):
        Contest([0], "embedded", case="evn")
    with pytest.raises(SettingError, match="data = 'cifar10' is refused with case"):
        Contest([0], "cifar10", case="even")


def test_runs_with_splits_of_their_own_are_one_row() -> None:
    members = [run([0.5, 0.6], seed=seed, partition_seed=seed) for seed in range(3)]
    one = Score.of(KNOWN["fedpmt"], IID, members, (0.5,))
    assert one is not None
    assert one.total.runs == one.accuracy.runs == 3


def test_variants_lead_and_a_method_loses_to_another_once() -> None:
    """FedProx ends low in its main form and high in another: that one is on the frontier, drawn, and counted."""
    ends = {
        "fedpmt": 0.6,
        "fedavg": 0.5,
        "fedprox": 0.55,
        "fedprox:mu-0.01": 0.8,
        "slimfl": 0.7,
        "slimfl:fading": 0.65,
    }
    found: RunsByEntrant = {
        (IID, name): [run([0.1, end + seed / 100], seed=seed, method=name) for seed in range(2)]
        for name, end in ends.items()
    }
    contest = Contest([0, 1], partitions=(IID,), entrants=entrants_of(list(ends)))
    every = scores(contest, found)
    rows = {row["measure"]: row for row in losses(contest, found, every)}
    assert set(rows["accuracy"]["ahead"]) == {"fedprox:mu-0.01", "slimfl"}
    assert rows["accuracy"]["rivals"] == 3
    tracks = tracks_of(contest, found, every, IID, "seconds")
    assert set(tracks) == set(ends)
    names = [one.entrant.name for one in drawn(every, frontier(tracks))]
    assert "fedprox:mu-0.01" in names
    assert "slimfl:fading" not in names
    # Where the main form is lost in some seed, another stands in for it.
    broken = [replace(one, diverged=int(one.entrant.name == "slimfl")) for one in every]
    assert "slimfl:fading" in [one.entrant.name for one in drawn(broken, frontier(tracks))]
    _, values = best_table(contest, found, every, "seconds")
    assert values[-1]["best"] == "fedprox:mu-0.01"


def test_downloads_have_what_says_which_part_it_is() -> None:
    one = run([0.5, 0.6])
    heavy = one.model_copy(
        update={"rounds": tuple(step.model_copy(update={"overhead_bytes": 7}) for step in one.rounds)}
    )
    assert [downloaded(either) for either in (one, heavy)] == [400, 414]
    score = Score.of(KNOWN["ist"], IID, [heavy], (0.5,))
    assert score is not None
    assert score.values()["bytes_down"] == 414
    downloads = next(measure for measure in measures_of((0.5,)) if measure.name == "downloaded")
    assert downloads.of(heavy) == 414


def test_the_page_says_what_is_evaluated_and_how_devices_train() -> None:
    for data, whose in (("embedded", "ours"), ("cifar10", "as in FedPMT's paper")):
        contest = Contest([0], data)
        text = _text(contest, [1], "")
        one = contest.settings(KNOWN["fedpmt"], IID, 0)
        assert f"SGD at rate {one.lr:g}, in batches of {one.batch}, 1 epoch a round, {whose}" in text
        assert "FedGKT by Adam" in text
        assert "`split` of a device's part with the shared part, on all classes" in text


@pytest.mark.slow
def test_the_page_of_a_few_tiny_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrants, "QUICK_ROUNDS", 3)
    names, split = ["fedpmt", "fedavg", "comet", "heterofl"], TWO_CLASSES
    flags = ["--quick", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--jobs", "2"]
    assert program(["leaderboard", *names, "--partition", split, *flags]) == 0
    folder = tmp_path / "out"
    charts = {"leaderboard-embedded.svg"}
    assert {path.name for path in folder.iterdir()} == {
        "records", *(f"leaderboard-embedded.{kind}" for kind in ("md", "html", "json")), *charts,
    }  # fmt: skip
    numbers = json.loads((folder / "leaderboard-embedded.json").read_text())
    rows = {row["entrant"]: row for row in numbers["rows"]}
    assert set(rows) == set(names)
    assert rows["heterofl"]["over_budget"] == 0
    assert rows["fedavg"]["over_budget"] == pytest.approx(0.75, abs=0.11)  # all levels but the fastest
    for name in ("operations", "memory_slowest_level"):
        assert rows["heterofl"][name] < rows["fedavg"][name]
    assert rows["comet"]["evaluates"] == "personal"
    lost = {row["measure"]: row["ahead"] for row in numbers["losses"]}
    # FedAvg always sends more than FedPMT; nets of devices' own are not set against it.
    assert "fedavg" not in lost["uploaded"]
    assert "comet" in lost["uploaded"]
    assert "comet" not in lost["accuracy"]
    assert all(point["best"] != "comet" for point in numbers["best_within"]["bytes"])
    page = (folder / "leaderboard-embedded.md").read_text()
    assert "Where FedPMT loses" in page
    assert "| COMET | unlabelled | a net |" in page
    assert " †" in page
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "records").iterdir()}
    # The same runs are the rivals' too; what is not there yet is left out.
    assert program(["rivals", *flags, "--draw-only"]) == 0
    rivals = json.loads((folder / "rivals.json").read_text())
    assert {row["entrant"] for row in rivals["rows"]} == {"fedpmt", "fedavg", "heterofl"}
    assert "--draw-only`" in (folder / "rivals.md").read_text()
    assert "--draw-only" not in page
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "records").iterdir()} == before


def test_the_guide_says_what_was_measured_and_no_more() -> None:
    def row(entrant: str, accuracy: float, **more: Any) -> dict[str, Any]:
        plain = {
            "entrant": entrant, "partition": IID, "evaluates": "global", "accuracy": accuracy,
            "accuracy_half_interval": 0.01, "memory_slowest_level": 2e6, "server_operations": 0.0,
            "virtual_seconds": 600.0, "bytes_up": 3e6, "over_budget": 0.0,
        }  # fmt: skip
        return {**plain, **more}

    rows = [
        row("fedavg", 0.61, over_budget=0.8),
        row("fedpmt", 0.6, memory_slowest_level=1e6),
        row("feddf", 0.7, server_operations=5.0),
        row("feddf:no-distillation", 0.55),
        row("feddf:one-net", 0.69, server_operations=9.0, over_budget=0.8),
        row("fedprox", 0.5),
        row("fedprox:mu-0.01", 0.605, diverged=1, runs=3),
        row("comet", 0.9, evaluates="personal"),
        row("fedgkt", 0.8, evaluates="split"),
    ]
    lead = {"partition": IID, "limit": 120.0, "best": "fedpmt", "accuracy": 0.4, "fedpmt": 0.4}
    numbers = {
        "rows": rows,
        "needs": {one["entrant"]: needs(KNOWN[one["entrant"]]) for one in rows},
        "best_within": {"seconds": [lead], "bytes": []},
    }

    def said(question: str, data: str = "cifar10") -> str:
        spot = f"<!-- measured: {data} iid {question} -->?<!-- end -->"
        return filled(spot, "cifar10", numbers).split("-->")[1].removesuffix("<!-- end ")

    assert said("accuracy") == (
        "FedDF 70.0 ± 1.0 %; FedAvg 61.0 ± 1.0 %; FedProx, mu 0.01 60.5 ± 1.0 %, diverged in 1 of 3; "
        "FedPMT is number 4 of 4 with 60.0 %"
    )
    # FedProx stands once, with its better form.
    assert said("lean") == (
        "FedAvg 61.0 ± 1.0 %; FedProx, mu 0.01 60.5 ± 1.0 %, diverged in 1 of 3; FedPMT 60.0 ± 1.0 %"
    )
    assert said("time") == "2 min: FedPMT (40.0 %)"
    assert said("uploads") == NOT_YET
    assert said("own") == "COMET 90.0 ± 1.0 %"
    assert said("split") == "FedGKT 80.0 ± 1.0 %"
    # FedAvg is higher, but over the budget that FedDF keeps to.
    assert said("public") == (
        "best with it: FedDF 70.0 ± 1.0 %; FedDF, no distillation 55.0 ± 1.0 %; "
        "best without: FedProx, mu 0.01 60.5 ± 1.0 %, diverged in 1 of 3"
    )
    assert said("fedprox") == (
        "FedProx 50.0 ± 1.0 % in 10 min, 3 MB up; FedProx, mu 0.01 60.5 ± 1.0 %, diverged in 1 of 3 in 10 min, "
        "3 MB up; number 3 of 4 by accuracy"
    )
    assert said("comet") == "COMET 90.0 ± 1.0 % (devices' own nets) in 10 min, 3 MB up"
    assert said("ist") == NOT_YET
    assert said("accuracy", "embedded") == "?"
    with pytest.raises(SettingError, match="did you mean 'accuracy'"):
        said("acuracy")


def test_every_spot_of_the_docs_can_be_filled() -> None:
    docs = Path(__file__).parents[2] / "docs"
    asked = {docs / "choosing-a-method.md": set(QUESTIONS)}
    asked |= {docs / "methods" / f"{entrant.method}.md": {entrant.method} for entrant in ENTRANTS}
    cases = {(data, split) for data in ("cifar10", "embedded") for split in (IID, TWO_CLASSES)}
    for document, questions in asked.items():
        spots = SPOT.findall(document.read_text())
        assert {question for _, _, _, question, _, _ in spots} == questions
        main = {(contest, split) for _, contest, split, _, _, _ in spots if "-" not in contest}
        assert main == cases
    guide = SPOT.findall((docs / "choosing-a-method.md").read_text())
    others = {(contest, split) for _, contest, split, _, _, _ in guide} - cases
    assert others == {(f"embedded-{case}", split) for case in CASES for split in (IID, TWO_CLASSES)}
    for data in ("cifar10", "embedded"):
        assert set(documents_of(docs, data)) == set(asked)


def test_a_guide_without_spots_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "plain.md").write_text("<!-- measured: mnist iid accuracy -->?<!-- end -->")
    (tmp_path / "bytes.md").write_bytes(b"\xff\xfe")
    for guide, why in (
        ("plain.md", "no spot"),
        ("bytes.md", "cannot be read"),
        ("absent.md", "cannot be read"),
    ):
        with pytest.raises(SettingError, match=why):
            documents_of(tmp_path / guide, "embedded")
    flags = [
        "leaderboard",
        "fedpmt",
        "--quick",
        "--guide",
        str(tmp_path / "plain.md"),
        "--out",
        str(tmp_path / "o"),
    ]
    assert program(flags) == 2
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    """All entrants on embedded data: under ten minutes on two cores."""
    flags = ["--quick", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    begun = time.monotonic()
    assert program(["leaderboard", *flags]) == 0
    assert time.monotonic() - begun < 600
    numbers = json.loads((tmp_path / "leaderboard-embedded.json").read_text())
    assert len(numbers["rows"]) == 2 * len(ENTRANTS)
