"""Every command, as a person and as a script would call it."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from command_line import TINY, Called, call, tree

from fedpmt import records
from fedpmt.cli.flags import type_value
from fedpmt.data.description import DataFile
from fedpmt.data.registry import DATASETS
from fedpmt.methods.registry import METHODS
from fedpmt.simulation import executors

RUN_FLAGS = (
    "--method --task --model --layers --data --data-dir "
    "--partition --partition-seed --public --validation --devices --samples "
    "--cohort --sampling --levels --level-draw --fleet --availability --failure --over-select --assign "
    "--availability-trace --speed-trace "
    "--deadline --full-seconds --mode --prefix --depths --splitting --server-cap --server-speed --epochs "
    "--batch --lr --schedule --momentum --weight-decay --rounds --seed --workers --executor --eval-every "
    "--target --time-budget --checkpoint-seconds --set --out --resume --dry-run --json --config"
)
NOT_OF_COMPARE = {"--method", "--seed", "--dry-run"}
FLAGS = {
    "run": RUN_FLAGS,
    "compare": "METHOD... --seeds "
    + " ".join(flag for flag in RUN_FLAGS.split() if flag not in NOT_OF_COMPARE),
    "cost": "--task --model --layers --data --input-shape --mode --depths --batch --samples --epochs --draw --json",
    "plan": (
        "--task --model --layers --input-shape --data "
        "--devices --samples --levels --fleet --availability --assign --deadline --full-seconds "
        "--mode --prefix --depths --epochs --batch --momentum --config --json"
    ),
    "profile": (
        "--task --model --layers --input-shape --data "
        "--samples --full-seconds --mode --prefix --depths --epochs --batch --lr --momentum --name "
        "--repeat --config --json"
    ),
    "methods": "--json",
    "data": "list get",
    "data list": "--data-dir --json",
    "data get": "NAME --data-dir",
    "report": "RUN... --out --targets --title --json",
}
DEPTH_KEYS = (
    "depth frozen operations ratio upload_bytes overhead_bytes memory_bytes "
    "feddrop_keep feddrop_operations feddrop_within_budget"
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, so that what a command leaves there shows."""
    home = tmp_path / "work"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("FEDPMT_DATA", str(tmp_path / "no-data"))
    return home


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Called]:
    """A finished run and what was printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    called = call("run", *TINY, "--out", folder, "--json")
    assert called.code == 0, called.err
    return folder, called


@pytest.mark.parametrize("command", FLAGS)
def test_help_names_every_flag(command: str) -> None:
    """`--help` leaves with 0, on standard output, and is enough to use the command."""
    called = call(*command.split(), "--help")
    assert (called.code, called.err) == (0, "")
    words = called.out.replace(",", " ").replace("[", " ").replace("]", " ").split()
    missing = [flag for flag in FLAGS[command].split() if flag not in words]
    assert not missing


def test_help_names_every_command() -> None:
    """The program's own help lists the commands; called with nothing at all it shows the same."""
    called = call("--help")
    assert called.code == 0
    for command in ("run", "compare", "cost", "plan", "profile", "methods", "data", "report"):
        assert f" {command} " in called.out
    bare = call()
    assert (bare.code, bare.out.strip(), bare.err) == (0, called.out.strip(), "")


def test_a_group_without_a_command_shows_its_help() -> None:
    """`fedpmt data` is a question, not a mistake; its help keeps its lines."""
    called = call("data")
    assert (called.code, called.err) == (0, "")
    assert "Usage: fedpmt data" in called.out
    assert len(called.out.splitlines()) > 5


def test_version() -> None:
    """`--version` says which."""
    assert call("--version").out == "fedpmt 0.1.0\n"


# run


def test_run_ends_with_one_line_of_json(finished: tuple[Path, Called]) -> None:
    """Standard output holds exactly one line, and it agrees with the records."""
    folder, called = finished
    assert len(called.out.splitlines()) == 1
    result = called.json
    rounds = records.read_run(folder).rounds
    assert (result["method"], result["task"], result["seed"], result["rounds"]) == (
        "fedpmt",
        "fcnn-mnist",
        0,
        2,
    )
    assert result["virtual_seconds"] == rounds[-1].virtual_seconds
    assert result["accuracy"] == result["score"] == rounds[-1].accuracy == rounds[-1].score
    for key in ("bytes_up", "bytes_down", "operations"):
        assert result[key] == sum(getattr(one, key) for one in rounds)
    assert len(bytes.fromhex(result["weights_sha256"])) == 32
    assert {**json.loads((folder / "result.json").read_bytes()), "accuracy": result["score"]} == result


def test_run_says_where_its_records_go(finished: tuple[Path, Called]) -> None:
    """What is for a person stands on standard error."""
    folder, called = finished
    assert f"fedpmt, seed 0: {folder}" in called.err
    assert "round 2/2" in called.err


def test_run_in_text_ends_with_what_a_person_wants(elsewhere: Path, finished: tuple[Path, Called]) -> None:
    """The score first, then its course, both times, bytes in units, the folder and the next command."""
    called = call("run", *TINY, "--out", "here")
    assert called.code == 0
    first, _, *facts = called.out.splitlines()
    result = finished[1].json
    assert (
        first
        == f"FedPMT on fcnn-mnist, embedded, iid: accuracy {result['score']:.1%} after 2 rounds".replace(
            "%", " %"
        )
    )
    named = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in facts)
    assert re.fullmatch(r"[▁▂▃▄▅▆▇█]{2} best \d+\.\d % in round \d", named["accuracy"])
    assert named["virtual time"] == f"{result['virtual_seconds']:.1f} s"
    assert re.fullmatch(r"[\d.]+ s", named["real time"])
    up, down = result["bytes_up"] / 1e6, result["bytes_down"] / 1e6
    assert named["uploaded"] == f"{up:.1f} MB (downloaded: {down:.1f} MB)"
    assert (named["run"], named["next"]) == ("here", "fedpmt report here --open")


def test_a_run_without_out_takes_a_fresh_folder(elsewhere: Path) -> None:
    """Runs never write over one another; `--resume` finds the one with the same settings."""
    first, second = (call("run", *TINY, "--rounds", "1", "--json").json for _ in range(2))
    assert Path(first["run"]) == Path("runs/fedpmt-fcnn-mnist-embedded-iid-seed0")
    assert Path(second["run"]) == Path("runs/fedpmt-fcnn-mnist-embedded-iid-seed0-2")
    other = call("run", *TINY, "--rounds", "1", "--lr", "0.5", "--json").json
    before = tree(elsewhere)
    again = call("run", *TINY, "--rounds", "1", "--lr", "0.5", "--resume", "--json")
    assert again.json == other
    assert tree(elsewhere) == before


def test_dry_run_trains_nothing_and_writes_nothing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, prices and time are shown; no device is trained, no folder appears."""

    def trained(*_: object, **__: object) -> None:
        raise AssertionError("a device was trained")

    monkeypatch.setattr(executors.Plain, "compute", trained)
    called = call("run", *TINY, "--dry-run")
    assert called.code == 0
    assert list(elsewhere.iterdir()) == []
    for words in ("\nbatch      10\n", "\nlevels", "depth 1", "depth 4", "upload", "memory", "predicted: "):
        assert words in called.out
    assert "momentum" not in called.out  # it has its default
    with pytest.raises(AssertionError, match="a device was trained"):
        call("run", *TINY)


def test_dry_run_predicts_what_the_run_then_takes(finished: tuple[Path, Called]) -> None:
    """With the same devices of each level in every round, the prediction is exact."""
    predicted = call("run", *TINY, "--dry-run", "--json").json
    result = finished[1].json
    for key in ("virtual_seconds", "bytes_up", "bytes_down", "operations"):
        assert predicted[key] == pytest.approx(result[key])
    assert predicted["settings"] == records.read_run(finished[0]).settings
    assert [row["level"] for row in predicted["devices"]] == [1, 2, 3, 4, 5]
    assert all(row["upload_bytes"] > 0 and row["memory_bytes"] > 0 for row in predicted["devices"])


def test_dry_run_says_what_the_server_does_at_most() -> None:
    """In words and as a number, for methods whose server works."""
    assert "server" not in call("run", *TINY, "--dry-run").out.splitlines()[-1]
    flags = ("run", *TINY, "--method", "fedgen", "--dry-run")
    predicted = call(*flags, "--json").json
    assert predicted["server_operations_at_most"] == pytest.approx(2 * predicted["operations"])
    shown = f"{predicted['server_operations_at_most'] / 1e6:.0f} M"
    last = call(*flags).out.splitlines()[-1]
    assert last == f"server: at most 2 x the devices' operations, {shown} in 2 rounds"
    assert "more a round" in call(*flags, "--server-speed", "4").out.splitlines()[-1]
    unlimited = (*flags, "--server-cap", "none")
    assert call(*unlimited, "--json").json["server_operations_at_most"] is None
    assert call(*unlimited).out.splitlines()[-1].startswith("server: no limit to its operations")
    assert "server_operations_at_most" not in call("run", *TINY, "--dry-run", "--json").json


# --config and --set


def settings(*arguments: object) -> dict[str, object]:
    """The resolved settings of a run that is not run."""
    called = call("run", *arguments, "--dry-run", "--json")
    assert called.code == 0, called.err
    found: dict[str, object] = called.json["settings"]
    return found


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    """A TOML file gives settings, in words joined either way; a flag overrides it."""
    file = tmp_path / "run.toml"
    file.write_text(
        'method = "feddrop"\nrounds = 7\neval-every = 3\nfull_seconds = 2.5\n[options]\nscope = "all"\n'
    )
    found = settings("--config", file, "--rounds", "4", "--seed", "9")
    assert (found["method"], found["rounds"], found["eval_every"]) == ("feddrop", 4, 3)
    assert (found["full_seconds"], found["seed"], found["options"]) == (2.5, 9, {"scope": "all"})


def test_set_goes_before_the_files_options(tmp_path: Path) -> None:
    """`--set` overrides the same key of [options] and leaves the others."""
    file = tmp_path / "run.toml"
    file.write_text('method = "feddrop"\n[options]\nscope = "all"\naggregation = "fill"\n')
    found = settings("--config", file, "--set", "feddrop.scope=fc")
    assert found["options"] == {"scope": "fc", "aggregation": "fill"}


@pytest.mark.parametrize("text", ["feddrop.scope=all", "method.scope=all", "scope=all", " scope = all "])
def test_a_methods_own_setting(text: str) -> None:
    """An option bears its method's name, or no name."""
    assert settings("--method", "feddrop", "--set", text)["options"] == {"scope": "all"}


def test_several_options() -> None:
    """`--set` may be given more than once; the record has numbers, not what was typed."""
    found = settings("--method", "feddrop", "--set", "keep=0.5", "--set", "feddrop.scaling=true")
    assert found["options"] == {"keep": 0.5, "scaling": True}


def test_the_data_set_brings_its_defaults() -> None:
    """What hangs on the data set follows it, unless it is said."""
    found = settings("--data", "synthetic", "--cohort", "5")
    assert (found["devices"], found["samples"], found["cohort"], found["lr"]) == (100, 100, 5, 0.01)
    assert settings("--splitting", "device")["sampling"] == "uniform"


# compare


def test_compare(tmp_path: Path) -> None:
    """One folder per method and seed; the same seeds see the same devices; an option goes to its method."""
    out = tmp_path / "all"
    command = (
        "compare",
        "fedpmt",
        "feddrop",
        *TINY,
        "--seeds",
        "0-1",
        "--set",
        "feddrop.scope=all",
        "--out",
        out,
    )
    called = call(*command, "--json")
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 1
    runs = called.json["runs"]
    assert [(run["method"], run["seed"]) for run in runs] == [
        ("fedpmt", 0),
        ("feddrop", 0),
        ("fedpmt", 1),
        ("feddrop", 1),
    ]
    assert sorted(path.name for path in out.iterdir()) == [
        "feddrop-seed0",
        "feddrop-seed1",
        "fedpmt-seed0",
        "fedpmt-seed1",
    ]
    ours, theirs = (records.read_run(out / f"{method}-seed0") for method in ("fedpmt", "feddrop"))
    assert (ours.settings["options"], theirs.settings["options"]) == ({}, {"scope": "all"})
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert [device.device for device in one.devices] == [device.device for device in other.devices]
    before = tree(out)
    text = call(*command, "--resume")
    assert text.code == 0
    assert "feddrop" in text.out
    assert "fedpmt" in text.out
    assert str(out) in text.out
    assert tree(out) == before


# cost, plan, profile


@pytest.mark.parametrize("mode", ["exact", "paper"])
def test_cost_json(mode: str) -> None:
    """One object; a depth for each row, the last one the whole model."""
    called = call("cost", "--task", "cnn-mnist", "--mode", mode, "--json")
    assert called.code == 0
    assert len(called.out.splitlines()) == 1
    table = called.json
    assert (table["task"], table["mode"]) == ("cnn-mnist", mode)
    assert [layer["name"] for layer in table["layers"]] == ["conv1", "conv2", "fc1", "out"]
    assert all(set(DEPTH_KEYS.split()) <= set(row) for row in table["depths"])
    assert [row["depth"] for row in table["depths"]] == [1, 2, 3, 4]
    assert [len(row["frozen"]) for row in table["depths"]] == [3, 2, 1, 0]
    assert table["depths"][-1]["ratio"] == 1
    assert table["depths"][-1]["upload_bytes"] == 4 * sum(layer["parameters"] for layer in table["layers"])


def test_cost_in_text_and_drawn(tmp_path: Path) -> None:
    """The tables name layers and depths; `--draw` writes a picture."""
    picture = tmp_path / "net.svg"
    called = call("cost", "--depths", "2", "--draw", picture)
    assert called.code == 0
    for words in ("activations", "fc4", "FedDrop keep", "100.0%"):
        assert words in called.out
    assert "<svg" in picture.read_text()
    assert str(picture) in called.err


PLAN = ("plan", "--task", "cnn-cifar10", "--mode", "paper", "--full-seconds", "10")


def test_plan_by_level_gives_the_papers_times() -> None:
    """Section IV of the paper: 23.0, 23.2, 26.4, 18.8 and 10.0 s, where FedAvg waits 50 s."""
    table = call(*PLAN, "--assign", "level", "--json").json
    assert [row["seconds"] for row in table["devices"]] == pytest.approx(
        [23.0, 23.2, 26.4, 18.8, 10.0], abs=1e-6
    )
    assert [row["depth"] for row in table["devices"]] == [1, 2, 3, 4, 5]
    assert table["round_seconds"] == pytest.approx(26.4, abs=1e-6)
    assert table["fedavg_round_seconds"] == pytest.approx(50, abs=1e-6)


def test_plan_by_deadline_gives_the_largest_depth_that_fits() -> None:
    """At 26.5 s the device of speed 1/2 has time for the full model: 20 s."""
    table = call(*PLAN, "--assign", "deadline", "--deadline", "26.5", "--json").json
    (half,) = (row for row in table["devices"] if row["speed"] == 0.5)
    assert (half["depth"], half["frozen"], half["fits"]) == (5, [], True)
    assert half["seconds"] == pytest.approx(20.0, abs=1e-6)
    assert [row["depth"] for row in table["devices"]] == [1, 2, 3, 5, 5]


def test_plan_says_who_is_too_slow() -> None:
    """Who misses the deadline is marked; a deadline that nobody meets is refused."""
    table = call(*PLAN, "--deadline", "10", "--json").json
    assert [(row["fits"], row["binds"]) for row in table["devices"]] == [(False, ["time"])] * 3 + [
        (True, ["time"]),
        (True, []),
    ]
    called = call(*PLAN, "--deadline", "1")
    assert called.code == 2
    assert (
        "deadline must be >= 4.6, which the fastest device needs for the smallest part (got 1)" in called.err
    )


def test_plan_in_text() -> None:
    """The same, as a table and a sentence."""
    called = call(*PLAN, "--assign", "level")
    assert called.code == 0
    for words in (
        "level 1",
        "trains from",
        "26.4",
        "A FedPMT round takes 26.4 s, a FedAvg round 50.0 s.",
    ):
        assert words in called.out


def test_layers_that_nobody_trains_are_said_by_plan_and_run(tmp_path: Path) -> None:
    """A full model takes 10 s on the fastest device."""
    said = "no device of this fleet trains fc1, so these weights stay as they are at the start; set --deadline to 10"
    assert said[1:] in " ".join(call("plan", "--deadline", "8").out.split())
    called = call("run", "--data", "synthetic", "--deadline", "8", *TINY, "--out", tmp_path / "run")
    assert f"warning: fedpmt: {said}" in called.err
    assert "this fleet trains" not in call("plan").out


def test_plan_of_a_measured_fleet(tmp_path: Path) -> None:
    """Rows bear the devices' names and counts, and a link takes its time."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("name,speed,count,uplink_mbps\nphone,1/2,3,8\nboard,1,1,\n")
    table = call("plan", "--fleet", fleet, "--assign", "deadline", "--deadline", "1000", "--json").json
    phone, board = table["devices"]
    assert (phone["name"], phone["devices"], board["name"], board["devices"]) == ("phone", 3, "board", 1)
    # 8 Mbit/s are a million bytes a second.
    assert phone["seconds"] == pytest.approx(20.0 + phone["upload_bytes"] / 1e6)
    assert board["seconds"] == pytest.approx(10.0)


def test_profile_gives_a_row_for_the_fleet(tmp_path: Path) -> None:
    """What is measured here can be planned with."""
    called = call("profile", "--samples", "20", "--repeat", "1", "--name", "bench, old", "--json")
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 1
    measured = called.json
    assert [row["depth"] for row in measured["depths"]] == [1, 2, 3, 4]
    assert all(row["seconds_per_sample"] > 0 and row["peak_bytes"] > 0 for row in measured["depths"])
    (row,) = csv.DictReader(io.StringIO(measured["csv"]))
    assert row["name"] == "bench, old"
    assert float(row["speed"]) == pytest.approx(measured["speed"], rel=1e-4)
    fleet = tmp_path / "fleet.csv"
    fleet.write_text(measured["csv"] + "\n")
    (planned,) = call("plan", "--fleet", fleet, "--samples", "20", "--json").json["devices"]
    assert planned["name"] == "bench, old"


def test_profile_measures_the_precision_that_buys_depth() -> None:
    """Seconds of frozen layers in fewer bits are measured, and depths follow what the factor is set to."""
    measured = call("profile", "--task", "cnn-mnist", "--samples", "20", "--repeat", "1")
    assert re.search(r"--precision-seconds bf16=\d+\.\d\d,int8=\d+\.\d\d ", measured.out)

    def depth(factor: str) -> int:
        given = ("--levels", "1/2", "--deadline", "12.5", "--frozen-precision", "bf16")
        table = call("plan", *given, "--precision-seconds", f"bf16={factor}", "--json")
        return int(table.json["devices"][0]["depth"])

    assert depth("0.5") > depth("1")


def test_profile_in_text() -> None:
    """A table, then the CSV row."""
    called = call("profile", "--task", "cnn-mnist", "--samples", "20", "--repeat", "1")
    assert called.code == 0
    assert "microseconds a sample" in called.out
    assert called.out.splitlines()[-1].startswith("this-machine,")


# methods, data, report


def test_methods() -> None:
    """Every method of the table, with its own settings."""
    listed = call("methods", "--json")
    assert len(listed.out.splitlines()) == 1
    assert set(listed.json) == set(METHODS)
    assert listed.json["feddrop"]["scope"] == "auto"
    text = call("methods").out
    assert all(name in text for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_one_method(name: str) -> None:
    """What it is, each of its options with its default, and its paper with a title or a year."""
    text = call("methods", name).out
    known = call("methods", name, "--json").json
    for option, told in known["options"].items():
        default = "none" if told["default"] is None else type_value(told["default"])
        assert re.search(rf"^{option} +{re.escape(default)} ", text, re.MULTILINE)
    assert known["about"].split()[0] in text
    assert re.search(r"et al\.| and ", known["paper"])
    assert '"' in known["paper"]
    assert f"fedpmt run --method {name}" in text


def test_data_list(tmp_path: Path) -> None:
    """What is built in is there; the others are not in an empty folder."""
    listed = call("data", "list", "--data-dir", tmp_path, "--json").json
    assert {one["name"]: one["state"] for one in listed} == {
        **dict.fromkeys(DATASETS, "absent"),
        "embedded": "built in",
        "synthetic": "built in",
    }
    text = call("data", "list", "--data-dir", tmp_path).out
    assert "cifar10" in text
    assert "absent" in text


def test_data_get_finds_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that is there and sound is not fetched again; its folder is the one line of output."""
    content = b"all of it"
    file = DataFile("train-labels-idx1-ubyte", len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(DATASETS["mnist"], files=(file,)))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / file.name).write_bytes(content)
    called = call("data", "get", "mnist", "--data-dir", tmp_path)
    assert (called.code, called.out) == (0, f"{tmp_path / 'mnist'}\n")
    states = {
        one["name"]: one["state"] for one in call("data", "list", "--data-dir", tmp_path, "--json").json
    }
    assert states["mnist"] == "present"


def test_report(tmp_path: Path, finished: tuple[Path, Called]) -> None:
    """A page and its CSV, from a run folder or from the folder that holds it."""
    folder = finished[0]
    page = tmp_path / "page.html"
    called = call("report", folder, "--out", page, "--targets", "0.5", "--title", "A fine title", "--json")
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 1
    assert (called.json["page"], called.json["runs"]) == (str(page), 1)
    assert "A fine title" in page.read_text()
    assert Path(called.json["csv"]).exists()
    other = tmp_path / "other.html"
    text = call("report", folder.parent, "--out", other)
    assert (text.code, text.out) == (0, "")
    assert str(other) in text.err
    assert other.exists()
    refused = call("report", folder, "--out", tmp_path / "none.html", "--targets", "0.5,2")
    assert refused.code == 2
    assert "target must be > 0 and <= 1 for an accuracy (got 2)" in refused.err


def test_report_names_its_own_file(elsewhere: Path, finished: tuple[Path, Called]) -> None:
    """Without `--out` the page is report.html in the working folder."""
    assert call("report", finished[0]).code == 0
    assert (elsewhere / "report.html").exists()
