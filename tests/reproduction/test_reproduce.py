"""The command, and the pages that it makes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedpmt.cli.main import program as library_program
from fedpmt.report.theme import new_figure
from fedpmt.types import SettingError
from reproduction import accuracy, completion_time, complexity, paper
from reproduction.__main__ import FETCHED, PAGES, PROGRAM, PUBLISHED, program
from reproduction.artefact import Artefact, Picture, Table, publish, versions, write_verdicts
from reproduction.catalogue import EXPERIMENTS
from reproduction.library import Library
from reproduction.paper import IID, TWO_CLASSES, Experiment, Scope
from reproduction.verdicts import Claim, Estimate, exact, not_run
from web_pages import read, shown_by_a_browser

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_every_printed_operation_comes_out(tmp_path: Path) -> None:
    assert program(["complexity", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "complexity.json").read_text())
    assert numbers["as_printed"]
    assert len(numbers["rows"]) == sum(len(rows) for rows in complexity.PRINTED.values()) == 19
    page = (tmp_path / "complexity.md").read_text()
    assert (
        "| conv1, conv2, fc1, fc2 | 12,864,200 (45.83 %) | 12,864,200 (45.83 %) | 0.40: 12,885,200 |" in page
    )
    assert "NO" not in page


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program(["acuracy"]) == 2
    assert capsys.readouterr().err == "reproduction: No such command 'acuracy'. Did you mean 'accuracy'?\n"
    assert program(["accuracy", "--seeds", "2-x"]) == 2
    assert capsys.readouterr().err.startswith("reproduction: seeds = '2-x'")


@pytest.mark.parametrize("name", ["reproduce", "leaderboard"])
def test_the_library_has_no_such_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert library_program([name, "--quick"]) == 2
    assert f"command = '{name}' is unknown" in capsys.readouterr().err


def test_every_page_has_a_command_and_help_loads_no_torch() -> None:
    assert set(PAGES) == set(EXPERIMENTS)
    code = (
        "import sys; from reproduction.__main__ import program; "
        "code = program(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", code, "studies", "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for word in ("--draw-only", "--quick", "python -m reproduction studies --quick"):
        assert word in ended.stdout


def test_the_runs_are_the_papers() -> None:
    scope = Scope(range(10))
    runs = accuracy.runs(scope)
    assert len(runs) == 10 * 6 * 5
    cifar = next(
        one for one in runs if one.task == "cnn-cifar10" and one.method == "fedpmt" and one.depths == 5
    )
    assert (cifar.devices, cifar.cohort, cifar.samples, cifar.batch, cifar.lr, cifar.epochs, cifar.rounds) == (
        100, 10, 500, 20, 0.05, 1, 400,
    )  # fmt: skip
    mnist = next(one for one in runs if one.task == "fcnn-mnist")
    assert (mnist.devices, mnist.cohort, mnist.samples, mnist.batch, mnist.lr, mnist.rounds) == (
        100, 8, 300, 12, 0.01, 500,
    )  # fmt: skip
    assert {one.eval_every for one in runs} <= {1, 2, 5}


def test_completion_time_shares_its_runs_with_the_figure() -> None:
    """Only FedAvg under the deadline has to be trained besides."""
    scope = Scope([0])
    library = Library(Path("none"), Path("none"))
    figure = {one.model_dump_json() for one in library.missing(accuracy.runs(scope))}
    added = [
        one for one in library.missing(completion_time.runs(scope)) if one.model_dump_json() not in figure
    ]
    assert [(one.method, one.deadline) for one in added] == [("fedavg", 26.5)] * 2


def test_the_papers_times_as_rounds() -> None:
    rounds = {
        partition: [
            [
                round(seconds / completion_time.ROUND_SECONDS[case])
                for case, seconds in zip(completion_time.WAYS, row, strict=True)
            ]
            for row in rows.values()
        ]
        for partition, rows in completion_time.PRINTED.items()
    }
    assert rounds[IID] == [[40, 42, 39, 39], [60, 65, 61, 56], [86, 93, 84, 85]]
    assert rounds[TWO_CLASSES] == [[157, 170, 158, 93], [233, 249, 236, 132], [313, 331, 350, 207]]


def test_estimates() -> None:
    found = Estimate.of([10.0, 12.0, 14.0])
    assert found is not None
    # t(0.975, 2) = 4.303, s = 2, n = 3
    assert found.half == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)
    assert found.text() == "12 ± 5"
    assert Estimate.of([None, None]) is None
    one = Estimate.of([5.0, None])
    assert one is not None
    assert one.text(1) == "5.0 (1 of 2)"


def test_verdicts_are_collected_from_what_was_published(tmp_path: Path) -> None:
    assert write_verdicts(tmp_path) is None
    held = Claim(
        "lead", "it is | fast", "IV", [exact("here", True, "2 x"), not_run("there")], remark="up to round 9"
    )
    publish(
        Artefact("accuracy", "Curves", "python -m reproduction accuracy", "text", claims=[held]),
        tmp_path,
    )
    quick = [Claim("taste", "a taste", "IV", [exact("here", True, "1")])]
    publish(
        Artefact("studies", "More", "python -m reproduction studies --quick", "text", claims=quick), tmp_path
    )
    page = write_verdicts(tmp_path)
    assert page is not None
    text = page.read_text()
    verdict = "holds in 1, not run yet in 1 of 2 cases; up to round 9"
    assert f"| it is \\| fast | IV | **{verdict}** | [accuracy](accuracy.md#claim-lead) |" in text
    assert f"at equal operations (Figure 1): {verdict}." in text
    assert "1 claims in 2 cases: 1 hold, 1 are not run yet" in text
    assert "a taste" not in text
    assert "- [More](studies.md)" in text
    evidence = (tmp_path / "accuracy.md").read_text()
    assert "### Claim: lead" in evidence
    assert "| here | 2 x | exact | holds |" in evidence
    assert "| there | not run yet | - | not run yet |" in evidence
    (tmp_path / "studies.json").write_text('{"claims": [{}]}')
    with pytest.raises(SettingError, match="not an artefact of this version"):
        write_verdicts(tmp_path)


def test_the_page_of_verdicts_is_up_to_date_and_begins_with_ten_lines(tmp_path: Path) -> None:
    """Where it is not, drawing any page of the paper again writes it."""
    text = (RESULTS / "README.md").read_text()
    for path in [*RESULTS.glob("*.md"), *RESULTS.glob("*.json")]:
        (tmp_path / path.name).write_text(path.read_text())
    page = write_verdicts(tmp_path)
    assert page is not None
    assert page.read_text() == text
    summary = text.partition("## Claims")[0]
    assert len(re.findall(r"^- ", summary, re.MULTILINE)) == 10
    assert "{" not in summary
    linked = re.findall(r"\[\w[\w-]*\]\(([\w-]+)\.md#claim-([\w-]+)\)", text)
    assert linked
    for page, name in linked:
        claims = json.loads((RESULTS / f"{page}.json").read_text())["claims"]
        assert name in [claim["name"] for claim in claims]


def test_ten_numbers_recompute_from_raw_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script of the page, as it stands there."""
    script = re.findall(r"```python\n(.*?)```", (RESULTS / "README.md").read_text(), re.DOTALL)[0]
    assert len(script.split("\n\n", 1)[1].splitlines()) < 10  # and the import
    monkeypatch.chdir(RESULTS.parents[1])
    exec(compile(script, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("published") == 10


def test_all_makes_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, list[int], bool]] = []

    def produce(
        experiment: Experiment, library: Library, scope: Scope, out: Path, *, draw_only: bool
    ) -> None:
        made.append((experiment.name, list(scope.seeds), draw_only))

    monkeypatch.setattr("reproduction.__main__._produce", produce)
    assert program(["all", "--quick", "--out", str(tmp_path)]) == 0
    assert [name for name, *_ in made] == [name for name in PAGES if name not in FETCHED]
    made.clear()
    assert program(["all", "--draw-only", "--out", str(tmp_path)]) == 0
    assert [name for name, *_ in made] == list(PUBLISHED)
    assert set(PUBLISHED) >= set(EXPERIMENTS)
    assert ("accuracy", list(range(10)), True) in made


def test_all_plays_what_the_pages_name() -> None:
    for path in RESULTS.glob("*.json"):
        command = json.loads(path.read_text())["command"]
        assert command.removesuffix(" --draw-only") == f"{PROGRAM} {PUBLISHED[path.stem]}", path.name


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    artefact = Artefact(
        "a", "A", "python -m reproduction a", "text", [Table("t", ("x", "y"), [("1", "a|b")])]
    )
    with pytest.raises(SettingError, match="cannot be written"):
        publish(artefact, file / "folder")
    assert "a\\|b" in artefact.markdown()


@pytest.mark.slow
def test_figures_of_few_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path with tiny runs: train, keep, draw, and draw again without training."""
    monkeypatch.setattr(paper, "QUICK_ROUNDS", 2)
    monkeypatch.setitem(paper.EVALUATED_EVERY, "embedded", 1)
    monkeypatch.setattr(
        accuracy, "panels_of", lambda scope: [("fcnn-mnist", IID), ("fcnn-mnist", TWO_CLASSES)]
    )
    flags = ["--quick", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--jobs", "2"]
    assert program(["accuracy", *flags]) == 0
    assert program(["completion-time", *flags]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"records", "accuracy-lead.svg"} | {
        f"{name}.{kind}" for name in ("accuracy", "completion-time") for kind in ("md", "html", "json", "svg")
    }
    before = (tmp_path / "out" / "accuracy.md").read_bytes()
    assert program(["accuracy", *flags, "--draw-only"]) == 0
    assert (tmp_path / "out" / "accuracy.md").read_bytes() == before
    # A page that lacks runs says how it was made.
    assert program(["accuracy", *flags, "--draw-only", "--seeds", "0-1"]) == 0
    assert "--seeds 0-1 --quick --draw-only`" in (tmp_path / "out" / "accuracy.md").read_text()


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    """What a newcomer runs: all artefacts on embedded data."""
    assert program(["all", "--quick", "--out", str(tmp_path), "--work", str(tmp_path / "work")]) == 0
    final = json.loads((tmp_path / "accuracy.json").read_text())["final"]
    assert {row["seeds"] for row in final} == {1}


QUICK = ("complexity", "leaderboard-embedded-even", "people")
"""Made in seconds; the others read more runs, or train a little."""

SLOW = (
    "accuracy", "completion-time", "studies", "rivals", "leaderboard-cifar10", "leaderboard-embedded",
    "leaderboard-embedded-deadline", "tuned-embedded", "tuned-cifar10", "tuned-cifar10-all", "tuned-elsewhere",
    "ablation", "orderings", "fine-tuning",
)  # fmt: skip


@pytest.mark.parametrize("page", [*QUICK, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW)])
def test_a_page_is_made_again_to_the_byte(page: str, tmp_path: Path) -> None:
    published = json.loads((RESULTS / f"{page}.json").read_text())
    command = published["command"].removeprefix(PROGRAM).removesuffix("--draw-only")
    places = ["--out", str(tmp_path), "--records", str(RESULTS / "records"), "--draw-only"]
    assert program([*shlex.split(command), *places]) == 0
    made = {
        path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix in (".md", ".json", ".svg")
    }
    made.pop("README.md", None)
    assert {f"{page}.md", f"{page}.json"} <= made.keys()
    for name, text in made.items():
        # The page names the versions it was made with; others may give the same numbers.
        same = text.replace(", ".join(versions()), ", ".join(published["versions"]))
        for here, there in zip(versions(), published["versions"], strict=True):
            same = same.replace(f'"{here}"', f'"{there}"')
        assert same == (RESULTS / name).read_text(), name


def test_every_page_with_kept_runs_is_tried_here() -> None:
    kept = {path.name.partition(".")[0] for path in (RESULTS / "records").iterdir()}
    assert kept <= {*QUICK, *SLOW}


def artefact() -> Artefact:
    figure = new_figure(3, 2)
    figure.subplots().plot([0, 1], [0, 1])
    return Artefact(
        "trial",
        "A <trial>",
        "python -m reproduction trial",
        "It is **so**, see [studies](studies.md).\n\n- <b>one</b>\n- `two`",
        [
            Table("Numbers", ("method", "value"), [("**FedPMT**", "1 < 2")], "A *note*."),
            Table("Words", ("method", "said"), [("FedAvg", "a | b")], words=True),
        ],
        [Picture("trial-curve", figure, "A curve, 1 seed")],
        claims=[Claim("speed", "it is fast", "IV", [exact("here", True, "2 x")])],
    )


def test_the_page_has_all_of_the_artefact_and_needs_nothing_beside_it(tmp_path: Path) -> None:
    paths = publish(artefact(), tmp_path)
    text = (tmp_path / "trial.html").read_text()
    assert tmp_path / "trial.html" in paths
    found = read(text, frozenset({"studies.html"}))
    assert found.tags["table"] == 3
    assert found.tags["svg"] == 1
    assert {"summary", "figures", "table-1", "table-2", "claim-speed"} <= set(found.ids)
    words = "".join(found.words)
    for one in (
        "A <trial>",
        "1 < 2",
        "a | b",
        "A curve, 1 seed",
        "it is fast",
        "python -m reproduction trial",
    ):
        assert one in words
    # Markup of ours is markup, that of records is text.
    assert "<strong>FedPMT</strong>" in text
    assert "<em>note</em>" in text
    assert "<b>one</b>" in words


def test_the_same_artefact_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        publish(artefact(), tmp_path / name)
    assert (tmp_path / "a" / "trial.html").read_bytes() == (tmp_path / "b" / "trial.html").read_bytes()


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it(tmp_path: Path, dark: bool) -> None:
    publish(artefact(), tmp_path)
    sections = ("summary", "figures", "table-1", "table-2", "claim-speed")
    shown_by_a_browser(tmp_path / "trial.html", sections, width=1360, dark=dark)
