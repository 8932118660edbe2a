"""What a person sees, on terminals of any width and with any letters."""

from __future__ import annotations

import io
import itertools
import re
import sys
import tomllib
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from command_line import READ_ONCE, TINY, Called, call, refused
from report_samples import run as sample_run
from report_samples import step

import fedpmt
from fedpmt import api, records
from fedpmt.cli import show
from fedpmt.cli.deploy import _tables
from fedpmt.cli.init import settings_file
from fedpmt.cli.main import COMMANDS, program
from fedpmt.cli.results import TITLES
from fedpmt.cli.runs import parse_sweep
from fedpmt.progress import Pace
from fedpmt.report.figures import busy
from fedpmt.report.headline import headline
from fedpmt.report.markup import Material
from fedpmt.report.results import targets_section
from fedpmt.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTHS = (40, 80, 120, 200)
WIDE = 400
LEVELS = ("--levels", "1/4,1/3,1/2,1", "--assign", "level", "--devices", "8", "--cohort", "8")
COMPARE = (
    *("compare", "fedpmt", "fedavg", "fedprox:mu=0.1", *TINY, *LEVELS, "--budget", "time"),
    *("--seeds", "0-1", "--held-out", "0.2", "--out", "three", "--resume"),
)
RUN = (
    *("run", *TINY, "--devices", "15", "--dp-clip", "1", "--fleet", "fleet.csv"),
    *("--deadline", "500", "--out", "one", "--resume"),
)
FLEET = "name,speed,count,uplink_mbps,memory_mib,watts_computing,watts_sending,watts_idle\n" + "".join(
    f"a-board-with-a-long-name-{number},1/{number},5,10,800,4,2,1\n" for number in range(1, 4)
)
SHOWN = {
    "run": RUN,
    "run --dry-run": (*RUN, "--dry-run"),
    "compare": COMPARE,
    "runs": ("runs", "."),
    "cost": ("cost",),
    "plan": ("plan", "--fleet", "fleet.csv", "--deadline", "60"),
    "plan traded": ("plan", "--plan", "traded"),
    "methods": ("methods",),
    "methods fedpmt": ("methods", "fedpmt"),
    "data list": ("data", "list", "--data-dir", "."),
    "model list": ("model", "list", "--data-dir", "."),
    "init": ("init", "-"),
    **{f"{name} --help": (name, "--help") for name in COMMANDS},
    "data get --help": ("data", "get", "--help"),
    "--help": ("--help",),
    "a mistake": ("run", "--method", "fedpnt"),
}
QUANTITY = re.compile(r"\d[\d.,]*(?: ± [\d.]+)? (?:%|s|min|h|[kMGT]?B|[kM]?J|[kMGT])(?![\w.])")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, a finished comparison and a fleet."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "fleet.csv").write_text(FLEET)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in (RUN, COMPARE):
            called = call(*(word for word in command if word != "--resume"))
            assert called.code == 0, called.err
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def too_long(lines: list[str], width: int) -> list[str]:
    """Lines that do not fit; on a very narrow terminal long names and commands to copy may go on in the next line."""
    found = [line for line in lines if len(line) > width]
    if width >= 80:
        return found
    return [
        line
        for line in found
        if max(map(len, line.split())) <= 20 and not line.startswith((*show.COPIED, "#"))
    ]


@pytest.mark.parametrize("name", SHOWN)
def test_output_fits_and_no_number_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quantity that a very wide terminal shows stands in one piece on all others, and no line is too long."""

    def shown(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        called = call(*SHOWN[name])
        assert called.code == (2 if name == "a mistake" else 0), called.err
        assert "Traceback" not in called.err
        return called.out

    quantities = set(QUANTITY.findall(shown(WIDE)))
    for width in WIDTHS:
        lines = shown(width).splitlines()
        assert too_long(lines, width) == []
        assert quantities <= set(QUANTITY.findall("\n".join(lines)))


@pytest.mark.slow
@pytest.mark.parametrize("command", [("report", "one", "--out", "page.html"), ("profile",)])
def test_what_measures_or_draws_fits_too(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        called = call(*command)
        assert called.code == 0, called.err
        assert too_long(called.out.splitlines(), width) == []


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("name", SHOWN)
def test_output_in_any_letters(name: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that knows few letters gets the same lines, as wide as 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with READ_ONCE:
        code = program(SHOWN[name])
    out.seek(0)
    assert code == (2 if name == "a mistake" else 0)
    text = out.read()
    assert [line for line in text.splitlines() if len(line) > 80] == []
    if name in ("run", "compare", "runs"):
        assert "?" not in text


def test_what_devices_did_on_flower_fits_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        _tables(sample_run([0.5, 0.75]))
        assert too_long(capsys.readouterr().out.splitlines(), width) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_real_defaults(name: str) -> None:
    """Each command shows how it is called, and each flag that takes a value what happens without it."""
    if name in ("data", "model"):
        assert call(name, "get", "--help").out.count(f"  fedpmt {name} get ") >= 1
        return
    text = call(name, "--help").out
    assert re.search(r"^Examples:\n  fedpmt ", text, re.MULTILINE)
    flags = re.split(r"\n  (?=--)", text.split("\n\n", 3)[3])
    silent = [
        flag.split()[0]
        for flag in flags[1:]
        if re.match(r"--[\w-]+ [\w|A-Z.,=\[\]:]+", flag) and "efault" not in flag
    ]
    assert [flag for flag in silent if flag not in ("--track", "--help")] == []


def test_the_overview_says_what_each_command_says() -> None:
    """A line of the overview is no other command's: names and first words agree."""
    overview = call("--help").out
    for name, (_, about) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(about)}$", overview, re.MULTILINE)
        assert call(name, "--help").out.startswith(f"Usage: fedpmt {name}")


# compare: the sentence, variants and sweeps


def test_a_comparison_begins_with_who_was_sooner() -> None:
    """FedPMT has 50 % after 20 s and FedAvg after 40; FedAvg ends higher."""
    ours = sample_run([0.3, 0.5, 0.55, 0.6], method="fedpmt")
    theirs = sample_run([0.1, 0.2, 0.3, 0.5, 0.65], method="fedavg")
    [sentences] = headline([ours, theirs], [0.5], TITLES)
    assert sentences == (
        "FedPMT reached 50 % in 20 s of virtual time, 2.0 times sooner than FedAvg. "
        "FedAvg ended with the best accuracy, 65.0 %."
    )
    # The hardest target that both reached is the one that counts.
    [sentences] = headline([ours, theirs], None, TITLES)
    assert sentences.startswith("FedPMT reached 60 % in 40 s of virtual time, 1.2 times sooner than FedAvg.")
    [alone] = headline([ours], None, TITLES)
    assert alone == "FedPMT ended with accuracy 60.0 %."
    assert headline([], None, TITLES) == []


def test_a_sentence_names_few_rivals_and_says_how_many_there_were() -> None:
    runs = [sample_run([*[0.0] * late, 0.9], method=f"m{late}") for late in range(1, 7)]
    [sentences] = headline(runs, [0.9])
    assert sentences.startswith("m1 reached 90 % in 20 s")
    assert "1.5 times sooner than m2 and 3.5 times sooner than m6 (of 6 that reached it)" in sentences
    same = [sample_run([0.9], method="one"), sample_run([0.9], method="two")]
    assert "at the same time as two" in headline(same, [0.9])[0]


def test_loss_like_scores_are_better_when_they_are_lower() -> None:
    runs = [
        sample_run([5.0, 1.0], method="slow").model_copy(),
        sample_run([1.0, 0.5], method="quick"),
    ]
    changed = [
        run.model_copy(
            update={
                "rounds": tuple(
                    one.model_copy(update={"score_name": "mse", "maximize": False}) for one in run.rounds
                ),
                "result": None,
            }
        )
        for run in runs
    ]
    [sentences] = headline(changed, [1.0])
    assert sentences == (
        "quick reached mse 1 in 10 s of virtual time, 2.0 times sooner than slow. "
        "quick ended with the best mse, 0.500."
    )


def test_variants_of_a_method_are_compared(home: Path) -> None:
    requests = api.compare_requests(["fedprox:mu=0.1", "fedprox:mu=1,partial=false", "fedpmt"], [0], {})
    assert [name for name, _ in requests] == [
        "fedprox-mu-0.1-seed0",
        "fedprox-mu-1-partial-false-seed0",
        "fedpmt-seed0",
    ]
    assert [request.settings.options for _, request in requests] == [
        {"mu": 0.1},
        {"mu": 1.0, "partial": False},
        {},
    ]
    assert "option of fedprox = 'nu' is unknown" in refused("compare", "fedprox:nu=1", *TINY)
    assert "METHOD:KEY=VALUE" in refused("compare", "fedprox:mu=", *TINY)


def test_a_setting_or_an_option_is_swept() -> None:
    swept = api.compare_requests(["fedpmt", "fedavg"], [0], {}, sweep=parse_sweep("lr=0.01,0.1"))
    assert [(name, request.settings.lr) for name, request in swept] == [
        ("fedpmt-lr-0.01-seed0", 0.01),
        ("fedavg-lr-0.01-seed0", 0.01),
        ("fedpmt-lr-0.1-seed0", 0.1),
        ("fedavg-lr-0.1-seed0", 0.1),
    ]
    options = api.compare_requests(["fedprox"], [0], {}, sweep={"fedprox.mu": [0.5, 2]})
    assert [request.settings.options["mu"] for _, request in options] == [0.5, 2.0]
    dashed = api.compare_requests(["fedpmt"], [0], {}, sweep={"eval-every": ["2", "5"]})
    assert [request.settings.eval_every for _, request in dashed] == [2, 5]
    for wrong in ("lr", "lr=", "lr=1,,2", "lr=1,1", "=1,2"):
        assert "write KEY=VALUE,VALUE" in refused("compare", "fedpmt", "--sweep", wrong)
    assert "lrr" in refused("compare", "fedpmt", "--sweep", "lrr=0.1,0.2", *TINY)


def test_python_sweeps_too(tmp_path: Path) -> None:
    small = {"rounds": 1, "devices": 5, "samples": 10, "cohort": 5}
    runs = fedpmt.compare(["fedpmt"], sweep={"lr": [0.01, 0.1]}, out=tmp_path, **small)  # type: ignore[arg-type]
    assert [run.settings["lr"] for run in runs] == [0.01, 0.1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fedpmt-lr-0.01-seed0", "fedpmt-lr-0.1-seed0"]


def test_json_of_a_comparison_has_raw_targets_and_the_sentence() -> None:
    document = call(*COMPARE, "--json").json
    assert len(document["runs"]) == 6
    assert all(isinstance(row["target"], float) for row in document["targets"])
    assert document["headline"]
    assert "±" not in str(document["runs"])


# init, runs, completion, report


def test_init_writes_a_file_that_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads as it is, and a run with it is the run without; every setting is in it."""
    monkeypatch.chdir(tmp_path)
    assert call("init").code == 0
    assert "exists already" in refused("init")
    plain = call("run", "--dry-run", "--json").json
    assert call("run", "--config", "fedpmt.toml", "--dry-run", "--json").json == plain
    text = Path("fedpmt.toml").read_text()
    for name in Settings.model_fields:
        assert name in ("options", "digest") or re.search(rf"^(# )?{name} =", text, re.MULTILINE)
    assert call("plan", "--config", "fedpmt.toml").out == call("plan").out
    assert call("compare", "fedavg", "--config", "fedpmt.toml", "--dry-run").code == 0


def test_defaults_that_hang_on_others_are_values_too() -> None:
    """Without their marks, the lines that set nothing load as well: they show the defaults of a plain run."""
    text = re.sub(r"^# (\w+ = .+)$", r"\1", settings_file("x.toml"), flags=re.MULTILINE)
    given = tomllib.loads(text)
    assert given["rounds"] == 100
    assert given["partition"] == "iid"


def test_runs_lists_what_is_in_a_folder(home: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "half"
    unfinished.mkdir()
    for name in (records.CONFIG, records.ROUNDS):
        (unfinished / name).write_bytes((home / "one" / name).read_bytes())
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / records.CONFIG).write_text("{")
    listed = {Path(one["run"]).name: one for one in call("runs", tmp_path, "--json").json}
    assert (listed["half"]["state"], listed["damaged"]["state"]) == ("unfinished", "damaged")
    assert (listed["half"]["rounds"], listed["half"]["of"], listed["half"]["method"]) == (2, 2, "fedpmt")
    text = " ".join(call("runs", tmp_path).out.split())
    assert text.startswith("2 runs in ")
    assert "not finished" in text
    assert f"fedpmt run --resume --out {unfinished}" in text
    assert "nor does it hold one" in refused("runs", tmp_path / "none")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    script = call("completion", shell).out
    assert "_FEDPMT_COMPLETE" in script
    assert "did you mean 'bash'" in refused("completion", "bsh")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fedpmt comp", {"compare", "completion"}),
        ("fedpmt compare fedp", {"fedpmt", "fedpart", "fedprox"}),
        ("fedpmt run --data emb", {"embedded"}),
        ("fedpmt run --optimizer a", {"adam", "adamw"}),
        ("fedpmt run --rounds 3 --evalu", set()),
        ("fedpmt run --eval", {"--eval-every"}),
    ],
)
def test_a_shell_is_offered_what_fits(
    line: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FEDPMT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    with pytest.raises(SystemExit):
        program([])
    assert set(capsys.readouterr().out.split()) == offered


def test_report_opens_the_page(tmp_path: Path) -> None:
    with mock.patch.object(webbrowser, "open", return_value=True) as opened:
        assert call("report", "one", "--out", tmp_path / "page.html", "--open").code == 0
    opened.assert_called_once_with((tmp_path / "page.html").as_uri())
    with mock.patch.object(webbrowser, "open", return_value=False):
        called = call("report", "one", "--out", tmp_path / "page.html", "--open")
    assert (called.code, "no browser" in called.err) == (0, True)


# progress


def test_time_left_leaves_start_up_out() -> None:
    """The first round ends after 60 s of start-up, then one every two seconds."""
    clock: Iterator[float] = itertools.chain([60.0], itertools.count(62.0, 2.0))
    pace = Pace(10, "round", lambda: next(clock))
    pace.see(1)
    assert pace.words == pace.left == ""
    pace.see(2)
    assert pace.words == "2 s a round, 16 s left"
    pace.see(3)
    assert pace.left == "14 s left"
    resumed = Pace(100, "round", iter([0.0, 0.1]).__next__)
    resumed.see(50)
    resumed.see(51)
    assert resumed.words == "10.0 rounds/s, 5 s left"
    over = Pace(2, "step", iter([0.0, 0.5]).__next__)
    over.see(1)
    over.see(2)
    assert over.words == "2.0 steps/s"


def test_the_bar_shows_score_rounds_speed_and_time_left() -> None:
    from rich.console import Console

    from fedpmt import progress

    for width, words in ((40, ("2/9", "accuracy 50.0%", "left")), (80, ("fedpmt", "rounds/s", "left"))):
        file = io.StringIO()
        console = Console(width=width, file=file, force_terminal=True, color_system=None)
        with progress._bar("fedpmt, seed 0", 9, "round", console) as on_record:
            for number in (1, 2):
                on_record(step(number, 0.5))
        plain = re.sub(r"\x1b\[\??\d*[A-Za-z]", "", file.getvalue())
        line = [line for line in re.split(r"[\r\n]", plain) if "2/9" in line][-1]
        assert all(word in line for word in words)
        assert len(line.rstrip()) <= width


def test_a_sparkline_has_one_bar_per_score_or_fewer() -> None:
    assert show.sparkline([0.1] * 3, 10) == "▁▁▁"
    assert len(show.sparkline(list(range(100)), 32)) == 32
    assert show.sparkline(list(range(100)), 32)[-1] == "█"


def test_lines_are_shown_where_there_is_no_terminal(tmp_path: Path) -> None:
    called: Called = call("run", *TINY, "--rounds", "3", "--out", tmp_path / "run")
    assert re.search(r"round 3/3, accuracy \d+\.\d%, [\d.]+ (rounds/s|s a round)$", called.err, re.MULTILINE)


def test_a_run_without_rounds_counts_steps(tmp_path: Path) -> None:
    """In its progress, its result, its dry run and the report of it; nothing calls a step of the server a round."""
    flags = ("run", *TINY, "--rounds", "3", "--clock", "events", "--buffer", "2")
    called: Called = call(*flags, "--out", tmp_path / "run")
    assert re.search(r"step 3/3, accuracy \d+\.\d%, [\d.]+ (steps/s|s a step)$", called.err, re.MULTILINE)
    assert "after 3 steps" in called.out
    assert re.search(r"best \d+\.\d % in step [123]$", called.out, re.MULTILINE)
    run = records.read_run(tmp_path / "run")
    for text in (called.err, called.out):
        assert "round" not in text.replace(str(tmp_path), "")
    last = call(*flags, "--dry-run").out.splitlines()[-1]
    assert re.fullmatch(r"predicted: .* of virtual time a step, .* for 3 steps", last)
    (tmp_path / "run" / records.RESULT).unlink()
    assert "not finished, 3 steps," in repr(fedpmt.read_run(tmp_path / "run"))
    assert busy([run]).axes[0].get_title(loc="left").endswith(", step 3")
    cells = targets_section(Material.of([run], (0.0001,)))
    assert "<small>step 1</small>" in cells


@pytest.mark.slow
def test_readme_shows_what_the_demo_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word but for the digits: another processor moves accuracies by a few tenths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    root = Path(__file__).parents[2]
    commands = re.findall(r"bin/fedpmt (compare .*)", (root / "Makefile").read_text())
    shown = re.search(
        r"<!-- from: make demo -->\n```\n(.*?)\n```", (root / "README.md").read_text(), re.DOTALL
    )
    assert shown is not None
    printed = "\n".join(call(*command.split()).out for command in commands)

    def words(text: str) -> list[str]:
        return re.sub(r"[\d.]+", "0", re.sub(r"-{3,}", "", text)).split()

    assert words(printed) == words(shown[1])
    assert max(map(len, shown[1].splitlines())) <= 80
