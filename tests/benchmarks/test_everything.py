"""`python -m benchmarks all`, the clock of events, and the cost model of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cluster, events, everything
from benchmarks.__main__ import PAGES, main, parser, show_file
from benchmarks.measure import PEERS
from benchmarks.page import NAMES, PACKAGES
from benchmarks.results import Machine
from benchmarks.runner import alone, requirements
from benchmarks.settings import SETTINGS, SMOKE

DOCS = Path(__file__).parents[2] / "docs"
MACHINE = Machine(cpu="a CPU", cores=2, memory_gib=8, system="an OS", python="3.11", torch="2", blas="MKL")


class Commands:
    """A stand-in for the command line, which writes an output file for each part except those told to fail."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.started: list[list[str]] = []

    def __call__(self, arguments: list[str]) -> int:
        self.started.append(arguments)
        out = Path(arguments[arguments.index("--out") + 1])
        out.write_text(arguments[0])
        if arguments[0] in self.failing:
            raise RuntimeError(f"{arguments[0]} was told to fail")
        return 0

    @property
    def names(self) -> list[str]:
        return [arguments[0] for arguments in self.started]


def test_all_parts_are_made_once_and_failed_ones_again(tmp_path: Path) -> None:
    first = Commands("own")
    assert everything.run(first, tmp_path) == ["own"]
    assert len(first.names) == len(everything.PARTS)
    assert not (tmp_path / "own.json").exists()
    second = Commands()
    assert everything.run(second, tmp_path) == []
    assert second.names == ["own"]
    third = Commands()
    assert everything.run(third, tmp_path, again=("events",)) == []
    assert third.names == ["events"]
    assert everything.run(Commands(), tmp_path) == []
    assert not list((tmp_path / "partial").iterdir())


def test_parts_use_the_cores_as_the_part_before_found(tmp_path: Path) -> None:
    commands = Commands()
    everything.run(commands, tmp_path, ("threads", "compare", "models", "scale"), data_dir=tmp_path)
    threads, compare, models, scale = commands.started
    assert "--ways" not in threads
    assert compare[compare.index("--ways") + 1] == str(tmp_path / "threads.json")
    assert models[models.index("--ways") + 1] == str(tmp_path / "compare.json")
    assert "--data-dir" not in scale
    assert compare[compare.index("--data-dir") + 1] == str(tmp_path)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("part", everything.PARTS, ids=lambda part: part.name)
def test_every_part_is_a_command_that_the_parser_knows(
    part: everything.Part, quick: bool, tmp_path: Path
) -> None:
    (tmp_path / f"{part.after}.json").touch()
    given = everything.arguments_of(part, tmp_path, tmp_path / "out.json", quick=quick, data_dir=tmp_path)
    assert parser().parse_args(given).out == tmp_path / "out.json"


def test_what_is_complete_is_copied_to_the_documentation(tmp_path: Path) -> None:
    folder, docs = tmp_path / "all", tmp_path / "docs"
    everything.run(Commands("scale"), folder)
    published = everything.publish(folder, docs)
    assert {file.stem for file in published} == set(everything.NAMES) - {"threads", "scale"}
    assert all(file.parent == docs / "benchmarks" for file in published)


def test_pages_have_marks_for_every_part() -> None:
    shown = "".join((DOCS / name).read_text() for name in PAGES)
    marks = ["compare", "models", "scale", "methods", "aggregation", "events"]
    marks += ["own-depths", "own-stages", "own-evaluations", "cluster-costs", "cluster-measured"]
    for name in [*marks, "cluster-predicted"]:
        assert shown.count(f"<!-- {name} -->") == shown.count(f"<!-- /{name} -->") == 1, name


def test_every_peer_has_a_name_an_environment_and_a_package_whose_version_is_shown() -> None:
    assert set(PEERS) == set(NAMES) == set(PACKAGES)
    for peer in PEERS:
        if peer != "ours":
            wanted = [*requirements(peer), *alone(peer)]
            assert any(one.partition("[")[0].partition("=")[0] == PACKAGES[peer] for one in wanted), peer
    # No request may bring in another PyTorch than ours: each one that could names it.
    assert all(
        requirements(peer)[0].startswith("torch==") for peer in PEERS if peer not in ("ours", "fedjax")
    )


def test_a_run_without_rounds_collects_as_many_replies() -> None:
    setting = SETTINGS["cnn-cifar10"]
    rounds = events.job_of(setting, None, replies=80, seed=0, data_dir=None)
    assert (rounds.rounds, rounds.warmup, rounds.options["method"]) == (1 + 8 + 1, 1, "fedavg")
    for buffer, warmup, timed in ((1, 10, 80), (5, 2, 16), (20, 1, 4)):
        job = events.job_of(setting, buffer, replies=80, seed=0, data_dir=None)
        assert (job.rounds, job.warmup) == (warmup + timed + 1, warmup)
        assert (job.options["buffer"], job.options["concurrency"]) == (buffer, setting.cohort)


def test_rates_are_held_against_the_rounds_of_their_own_repetition(tmp_path: Path) -> None:
    """A machine half as fast in the second repetition changes no ratio: 20 / 10 and 10 / 5."""
    base, one = events.rows_of("smoke", {None: [10.0, 5.0], 5: [20.0, 10.0]})
    assert (base.over_rounds, one.over_rounds) == (1, 2)
    assert (one.replies_per_second, one.low, one.high) == (15, 10, 20)
    file = tmp_path / "events.json"
    file.write_text(events.EventResults(machine=MACHINE, repeat=2, events=[base, one]).model_dump_json())
    _, tables = show_file(file)
    assert "| smoke | FedBuff, K = 5 | 15.0 (10.0 to 20.0) | 2.00 |" in tables["events"]


@pytest.mark.slow
def test_replies_per_second_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "events.json"
    assert main(["events", "--only", SMOKE.name, "--repeat", "1", "--replies", "8", "--out", str(out)]) == 0
    found = events.EventResults.model_validate_json(out.read_text()).events
    assert [row.buffer for row in found] == [None, 1, 5, 20]
    assert min(row.replies_per_second for row in found) > 0


COSTS = cluster.Costs(
    cohort=8, cores=2, device_seconds=1.0, message_seconds=0.5, fold_seconds=0.25, round_bytes=250e6
)


def test_a_round_takes_as_many_turns_as_its_devices_need_and_the_server_folds_all() -> None:
    """8 devices on 2, 4 and 32 cores: 4, 2 and 1 turns of 1.5 s, and 8 folds of 0.25 s; 250 MB take 2 s."""
    assert [cluster.predict(COSTS, nodes) for nodes in (1, 2, 16)] == [8.0, 5.0, 3.5]
    assert cluster.predict(COSTS, 2, cluster.LINK) == 7.0


def test_cluster_tables_show_predicted_and_measured(tmp_path: Path) -> None:
    measured = [
        cluster.Measured(nodes=1, seconds=10.0, low=8.0, high=12.5),
        cluster.Measured(nodes=2, seconds=5.0, low=4.0, high=8.0),
    ]
    results = cluster.ClusterResults(
        machine=MACHINE, setting={}, repeat=3, costs=COSTS, clusters=measured, same_weights=True
    )
    file = tmp_path / "cluster.json"
    file.write_text(results.model_dump_json())
    _, tables = show_file(file)
    assert set(tables) == {"cluster-costs", "cluster-measured", "cluster-predicted"}
    assert "| 1 | 0.12 | 0.10 (0.08 to 0.12) | -20% |" in tables["cluster-measured"]
    assert "are the same on both clusters" in tables["cluster-measured"]
    assert "| 250.0 MB |" in tables["cluster-costs"]
    assert "| 2 | 4 | 0.20 | 0.14 |" in tables["cluster-predicted"]
