"""The benchmark runs, and its arithmetic is right. Peers other than the plain loop need environments of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import draw, own
from benchmarks.__main__ import main, own_text, parser
from benchmarks.machine import Machine, Peak
from benchmarks.measure import Plan
from benchmarks.methods import MethodResults, job_of, row_of
from benchmarks.page import page, partial_table, setting_table, table
from benchmarks.peers.common import Job
from benchmarks.results import Measurement, Results, Tried
from benchmarks.runner import Way, _parse, command, ways
from benchmarks.scale import Point, ScaleResults, places
from benchmarks.settings import SETTINGS, SMOKE, Variant
from benchmarks.summary import Spread, partial, ratio, rows, share_of_peak, spread, tolerance
from fedpmt import kernels

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = Machine(cpu="a CPU", cores=2, memory_gib=8, system="an OS", python="3.11", torch="2", blas="MKL")


def measured(peer: str, seconds: list[float], **more: object) -> Measurement:
    given = {
        "setting": "smoke",
        "peer": peer,
        "variant": "fedavg E=1",
        "repetition": 0,
        "threads": "2 threads",
        "seconds": seconds,
        "rounds": 20,
        "steps": SMOKE.steps,
        "accuracy": 0.5,
        **more,
    }
    return Measurement.model_validate(given)


def results(*measurements: Measurement) -> Results:
    return Results(
        machine=MACHINE,
        peaks=[Peak(gflops=90, copy_gb_per_second=8), Peak(gflops=100, copy_gb_per_second=9)],
        limit_seconds=60,
        settings={
            "smoke": {
                "about": "a test",
                "steps": SMOKE.steps,
                "devices": 1,
                "cohort": 1,
                "samples": 1,
                "batch": 1,
                "lr": 1,
            }
        },
        measurements=list(measurements),
        threads=[
            Tried(
                setting="smoke",
                peer="plain",
                seconds={"1 threads": 0.2, "2 threads": None},
                chosen="1 threads",
            )
        ],
    )


def test_smoke_runs_and_writes_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "smoke.json"
    assert main(["smoke", "--out", str(out)]) == 0
    assert "plain PyTorch loop" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert set(written) == set(Results.model_fields)
    assert written["machine"]["cores"] >= 1
    assert written["peaks"][0]["gflops"] > 1
    found = {(run["peer"], run["variant"]): run for run in written["measurements"]}
    assert list(found) == [("ours", "fedavg E=1"), ("ours", "fedpmt E=1"), ("plain", "fedavg E=1")]
    for run in found.values():
        assert set(run) == set(Measurement.model_fields)
        assert run["error"] is None
        assert not run["cut_off"]
        assert run["steps"] == SMOKE.steps == 16
        assert run["versions"]["torch"]
        assert 0 < run["accuracy"] <= 1
    # Ours does not time its last round, which is evaluated.
    assert [len(run["seconds"]) for run in found.values()] == [2, 2, 3]
    assert len(found["ours", "fedavg E=1"]["operations"]) == 2
    assert min(seconds for run in found.values() for seconds in run["seconds"]) > 0
    assert main(["draw", str(out), "--figures", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "smoke.svg").stat().st_size > 1000
    assert "| fedpmt | torch" in (tmp_path / "page.md").read_text()


def test_median_of_medians_with_lowest_and_highest() -> None:
    assert spread([[0.1, 0.2, 9.0], [0.4], [], [0.3, 0.3]]) == Spread(0.3, 0.2, 0.4)
    assert spread([]) is None


def test_ratio_and_share_of_peak() -> None:
    assert ratio(Spread(0.6, 0.5, 0.7), Spread(0.2, 0.1, 0.3)) == pytest.approx(3)
    assert ratio(None, Spread(1, 1, 1)) is None
    # 1e9 multiply-adds in 40 ms are 50 GFLOP/s.
    assert share_of_peak(1e9, 0.04, 100) == pytest.approx(0.5)


def test_rows_compare_with_our_fedavg() -> None:
    found = rows(
        results(
            measured("ours", [0.1, 0.1], operations=[1e9, 1e9]),
            measured("ours", [0.05], variant="fedpmt E=1", operations=[6e8]),
            measured("plain", [0.4], accuracy=0.51),
            measured("pfl", [0.3], accuracy=0.7, steps=3.0),
            measured("flower", [], cut_off=True, accuracy=None, steps=None),
            measured("fedjax", [], error="fedjax cannot be installed", accuracy=None, steps=None),
        ),
        "smoke",
    )
    by_peer = {row.peer: row for row in found if row.variant == "fedavg E=1"}
    assert next(iter(by_peer)) == "ours"
    assert by_peer["ours"].share_of_peak == pytest.approx(0.2)
    assert by_peer["plain"].ratio == pytest.approx(4)
    assert by_peer["plain"].same_steps
    assert by_peer["plain"].same_accuracy
    assert not by_peer["pfl"].same_steps
    assert by_peer["pfl"].same_accuracy is False
    assert by_peer["flower"].note == "cut off"
    assert by_peer["fedjax"].note == "fedjax cannot be installed"
    (saved,) = partial(found)
    assert saved.time == pytest.approx(0.5)
    assert saved.operations == pytest.approx(0.6)


def test_tolerance_is_three_deviations_or_a_least_amount() -> None:
    assert tolerance([0.500, 0.501]) == 0.02
    assert tolerance([0.4, 0.5, 0.6]) == pytest.approx(0.3)


def test_tables() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
    made = results(
        measured("ours", [0.1], operations=[1e9], versions={"torch": "2"}),
        measured("plain", [0.45], accuracy=0.9),
        measured("flower", [], cut_off=True, steps=None, accuracy=None),
    )
    lines = setting_table(made, "smoke").splitlines()
    assert "| 4.5 x | 16 | 90.0% (not the same) |" in lines[3]
    assert "over 60 s, cut off" in lines[4]
    assert partial_table(made) == ""
    text = page(made)
    assert "100 GFLOP/s" in text
    assert "2 threads: failed or cut off" in text


def test_settings_are_those_of_the_issue() -> None:
    steps = {name: setting.steps for name, setting in SETTINGS.items()}
    assert steps == {"fcnn-mnist": 200, "cnn-mnist": 200, "cnn-cifar10": 250, "pfl-cifar10": 250}
    assert SETTINGS["cnn-cifar10"].levels.count(",") == 4
    assert SETTINGS["fcnn-mnist"].levels.count(",") == 3
    assert Variant("fedpmt", 5).of(SETTINGS["cnn-cifar10"]).steps == 1250


def test_job_survives_its_file() -> None:
    job = Job("here", (16, 32), (500,), 10, 4, 10, 1, 0.1, 5, 2, options={"threads": 2})
    assert Job.load(job.dump()) == job


def test_only_a_peers_own_lines_are_read() -> None:
    assert _parse('{"round": 1, "seconds": 0.5}') == {"round": 1, "seconds": 0.5}
    assert _parse("INFO: starting") == {}
    assert _parse('{"other": 1}') == {}
    assert _parse("{not json") == {}


def test_every_peer_has_ways_to_use_the_cores(tmp_path: Path) -> None:
    for peer in ("ours", "plain", "pfl", "flower", "fedjax"):
        assert len({way.name for way in ways(peer, 4)}) == len(ways(peer, 4)) >= 2
        assert ways(peer, 1)
    started = command("pfl", tmp_path / "python", Way("", processes=2), tmp_path / "job.json")
    assert "--nproc-per-node=2" in started


def test_scale_figure_and_places(tmp_path: Path) -> None:
    kinds = {place.kind for place in places()}
    assert kinds == {"population", "cohort", "model", "workers"}
    assert max(place.devices for place in places()) == 1_000_000
    points = [
        Point(kind=place.kind, size=place.size, seconds=1, low=0.9, high=1.1, peak_mib=300)
        for place in places(quick=True)
    ]
    draw.save(draw.scale_figure(ScaleResults(machine=MACHINE, points=points)), tmp_path / "scale.svg")
    assert (tmp_path / "scale.svg").stat().st_size > 1000


def test_methods_are_measured_next_to_fedavg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "methods.json"
    flags = ["--setting", "smoke", "--methods", "heterofl,prunefl", "--repeat", "1", "--rounds", "1"]
    assert main(["methods", *flags, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "| time over FedAvg's |" in text
    found = MethodResults.model_validate_json(out.read_text())
    assert [row.method for row in found.methods] == ["fedavg", "heterofl", "prunefl"]
    assert (found.methods[0].times_fedavg, found.methods[0].operations) == (1, 1)
    assert [row.fast for row in found.methods] == [kernels.available()] * 2 + [False]
    assert found.methods[1].operations < 1 < found.methods[2].operations
    assert main(["draw", str(out), "--figures", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text().strip() == text.strip()


def test_a_method_is_held_against_the_fedavg_of_its_own_repetition() -> None:
    """A machine half as fast in the second repetition changes no ratio: 0.2 / 0.1 and 0.4 / 0.2."""
    base = [measured("ours", [0.1, 0.1, 0.5], operations=[10.0]), measured("ours", [0.2], operations=[10.0])]
    runs = [measured("ours", [0.2], operations=[5.0]), measured("ours", [0.4], operations=[5.0])]
    row = row_of("fedpmt", runs, base)
    assert (row.times_fedavg, row.operations) == pytest.approx((2.0, 0.5))
    assert (row.seconds, row.low, row.high) == pytest.approx((0.3, 0.2, 0.4))
    job = job_of(SETTINGS["cnn-cifar10"], "prunefl", rounds=6, warmup=2, seed=1, data_dir=None)
    assert job.options["options"] == {"initial_rounds": 0, "interval": 2}
    assert job.options["budget"] == "operations"
    assert (job.rounds, job.warmup, job.options["levels"]) == (9, 2, "1/5,1/4,1/3,1/2,1")


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["run", "--peers", "tff"])
    assert "allowed: ours, plain" in capsys.readouterr().err


def test_own_rounds_are_measured_depth_by_width(tmp_path: Path) -> None:
    """The full depth is the unit of both columns, and an evaluated round is measured apart from a plain one."""
    plan = Plan((SMOKE,), repeat=1, warmup=1, rounds=3, work=tmp_path, own_environment=False)
    results = own.run(plan, epochs=(1,))
    assert [one.depth for one in results.depths] == [1, 2, 3, 4]
    assert (results.depths[-1].time, results.depths[-1].operations) == (1, 1)
    assert all(
        narrow.operations < wide.operations
        for narrow, wide in zip(results.depths, results.depths[1:], strict=False)
    )
    assert results.evaluations[0].round_seconds > 0
    assert min(results.modules[0].seconds, results.modules[0].plain_seconds) > 0
    assert "smoke | 1 | 4" in own_text(results)
    if kernels.available():
        stages = results.stages[0]
        # Of its round a device spends most on training, whatever the noise.
        assert stages.trained > max(stages.gathered, stages.laid_out, stages.read_back) > 0
