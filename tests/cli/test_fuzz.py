"""Random wrong input: whatever it is, it is taken, or refused in one line with exit code 2 and nothing half-written.

A few examples of each kind by default; `make test-slow` tries 2,000.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from command_line import TINY, Called, call, tree
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedpmt.cli.flags import GROUPS
from fedpmt.devices.rows import COLUMNS
from fedpmt.devices.traces import COLUMNS as TRACE_COLUMNS
from fedpmt.methods.registry import METHODS
from fedpmt.settings import Settings
from fedpmt.types import is_control

FEW, MANY = 20, 500
"""Examples of each of the four kinds."""

COMMON = settings(
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class TakenError(BaseException):
    """The input is right: training would begin now."""


@contextlib.contextmanager
def untrained() -> Iterator[None]:
    """End runs where their first round would begin."""
    with mock.patch("fedpmt.simulation.coverage.warn_before_training", side_effect=TakenError):
        yield


def attempt(*arguments: object) -> Called | None:
    """Call the program; None where it would have trained."""
    try:
        with untrained():
            return call(*arguments)
    except TakenError:
        return None


def check(arguments: Sequence[object], prepare: Callable[[Path], None]) -> bool:
    """Try a command in a folder of its own; says whether it was refused."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare(Path(folder))
        before = tree(Path(folder))
        called = attempt(*arguments)
        if called is None or called.code == 0:
            return False
        assert called.code == 2, (arguments, called)
        assert called.out == "", (arguments, called)
        assert called.err.count("\n") == 1, (arguments, called.err)
        assert called.err.startswith("fedpmt: "), (arguments, called.err)
        assert not any(map(is_control, called.err[:-1])), (arguments, called.err)
        assert tree(Path(folder)) == before, arguments
        return True


# values

NUMBERS = st.one_of(
    st.sampled_from(
        ["0", "-1", "1", "2", "3.5", "1e-9", "1e300", "-0.0", "nan", "inf", "1/0", "1/3", "٣", "²"]
    ),
    st.integers(-(10**6), 10**6).map(str),
    st.floats().map(str),
    st.sampled_from([10**20, 10**400, 2**63, -(2**31)]).map(str),
)
LETTERS = st.text(max_size=12)
NAMES = st.sampled_from(
    ["fedpmt", "own", "custom", "arrays", "none", "true", "[/x]", "a:b", "x.y:z", "folder:.", "é"]
)
WORDS = st.one_of(NUMBERS, LETTERS, NAMES)
LANGUAGES = (
    *(
        "classes",
        "dirichlet",
        "iid",
        "natural",
        "holdout",
        "generated",
        "synthetic",
        "embedded",
        "median",
        "trimmed",
    ),
    *(
        "clipped",
        "lognormal",
        "uniform",
        "hinge",
        "polynomial",
        "step",
        "cosine",
        "inverse",
        "fastest",
        "bf16",
        "int8",
    ),
    *("memory", "time", "operations", "upload", "energy"),
)
LANGUAGE = st.builds(
    lambda name, mark, parts: name + mark + ",".join(parts),
    st.sampled_from(LANGUAGES),
    st.sampled_from([":", "=", "", "::"]),
    st.lists(NUMBERS, max_size=3),
)
TEXTS = st.one_of(WORDS, LANGUAGE, st.lists(WORDS, min_size=1, max_size=3).map(",".join))
KEYS = [name for names in GROUPS.values() for name in names if name not in ("options", "data_dir")]


def as_flag(key: str, value: str) -> str:
    """A flag with its value, in one argument: values may begin with a dash."""
    return f"--{key.replace('_', '-')}={value}"


def values_of(key: str) -> st.SearchStrategy[str]:
    """Values of a setting, most of them wrong."""
    choices = [one for one in get_args(Settings.model_fields[key].annotation) if isinstance(one, str)]
    return st.sampled_from(choices) | TEXTS if choices else NUMBERS | TEXTS


FLAG = st.sampled_from(KEYS).flatmap(lambda key: values_of(key).map(lambda value: as_flag(key, value)))
FLAGS = st.one_of(st.lists(FLAG, min_size=1, max_size=1), st.lists(FLAG, min_size=2, max_size=3))
OPTIONS = st.lists(
    st.builds("--set={}{}={}".format, st.sampled_from(["", "fedpmt.", "no."]), LETTERS, WORDS), max_size=1
)
METHOD = st.sampled_from(sorted(METHODS)).map(lambda name: [f"--method={name}"])
SEEDS = WORDS.map(lambda text: [f"--seeds={text}"])
RUN = ("run", *TINY, "--out", "new")
COMPARE = ("compare", "fedpmt", "fedavg", *TINY, "--out", "new")


def nothing(folder: Path) -> None:
    """A command that needs no files."""


def wrong_settings(number: int) -> Callable[[], None]:
    @settings(COMMON, max_examples=number)
    @given(
        st.one_of(
            st.tuples(st.just(RUN), METHOD, FLAGS),
            st.tuples(st.just(RUN), METHOD, FLAGS, OPTIONS),
            st.tuples(st.just(COMPARE), FLAGS, OPTIONS),
            st.tuples(st.just(COMPARE), SEEDS),
            st.tuples(st.sampled_from([("plan",), ("cost",)]), FLAGS),
        )
    )
    def try_settings(groups: tuple[Sequence[str], ...]) -> None:
        check([word for group in groups for word in group], nothing)

    return try_settings


# tables

RIGHT_CELLS = st.sampled_from(["1", "1/2", "0.25", "3", "0", "10"])
CELLS = st.one_of(WORDS, st.sampled_from(["1", "1/2", "0,5", '"0,5"', "1\n", "phone", "\x1b[31m", '"', ""]))


@st.composite
def tables(draw: st.DrawFn, columns: Sequence[str]) -> bytes:
    """A table that is wrong in one cell, in many ways, or in none."""
    misspelt = st.sampled_from([f"{columns[0]}s", "SPEED", "", " ", "name;speed"])
    if draw(st.booleans()):
        header = [
            *columns[:3],
            *draw(st.lists(st.sampled_from(columns[3:] or columns[:1]), max_size=2, unique=True)),
        ]
        rows = draw(
            st.lists(
                st.lists(RIGHT_CELLS, min_size=len(header), max_size=len(header)), min_size=1, max_size=3
            )
        )
        rows[draw(st.integers(0, len(rows) - 1))][draw(st.integers(0, len(header) - 1))] = draw(CELLS)
    else:
        header = draw(st.lists(st.one_of(st.sampled_from(columns), misspelt), min_size=1, max_size=4))
        rows = draw(st.lists(st.lists(CELLS, min_size=1, max_size=len(header) + 1), max_size=4))
    mark = draw(st.sampled_from([",", ",", ",", ";", "\t"]))
    text = "\n".join(mark.join(row) for row in [header, *rows])
    coding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    return draw(st.sampled_from([b"", b"", b"", b"", b"\x00", b"\xff"])) + text.encode(coding, "replace")


def wrong_tables(number: int) -> Callable[[], None]:
    kinds = {"fleet": COLUMNS, **TRACE_COLUMNS}
    table = st.sampled_from(sorted(kinds)).flatmap(lambda key: st.tuples(st.just(key), tables(kinds[key])))

    @settings(COMMON, max_examples=number)
    @given(table, st.booleans())
    def try_table(table: tuple[str, bytes], planned: bool) -> None:
        key, content = table
        command: Sequence[str] = RUN if key != "fleet" else ("plan",) if planned else ("run", "--out", "new")
        check([*command, f"--{key}", "table.csv"], lambda folder: _write(folder / "table.csv", content))

    return try_table


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


# settings files

VALUES = st.recursive(
    st.one_of(
        WORDS.map(json.dumps),
        st.integers(-(2**63), 2**63).map(str),
        st.floats().map(str),
        st.sampled_from(
            ["true", "false", "1979-05-27", "07:32:00", "{}", "[]", '"""\na\n"""', "= 3", "", '"\\q"']
        ),
    ),
    lambda values: st.one_of(
        st.lists(values, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        values.map("{{key = {}}}".format),
    ),
    max_leaves=4,
)
OF_FILES = [*KEYS, "out", "seeds", "set", "digest", "rouns", "fedprox.mu"]
HEADS = ["options", "options.fedprox", "set", "fedprox", "rounds"]
LINES = st.one_of(
    st.builds("{} = {}".format, st.sampled_from(OF_FILES), VALUES),
    st.builds("[{}]\nmu = {}".format, st.sampled_from(HEADS), VALUES),
    LETTERS,
)


def wrong_files(number: int) -> Callable[[], None]:
    commands = st.sampled_from(
        [("run", *TINY), ("compare", "fedprox", "fedavg", *TINY), ("plan",), ("cost",)]
    )

    @settings(COMMON, max_examples=number)
    @given(
        commands, st.lists(LINES, min_size=1, max_size=3), st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])
    )
    def try_file(command: Sequence[str], lines: Sequence[str], coding: str) -> None:
        content = "\n".join(lines).encode(coding, "replace")
        place = [] if command[0] in ("plan", "cost") else ["--out", "new"]
        check([*command, "--config", "a.toml", *place], lambda folder: _write(folder / "a.toml", content))

    return try_file


# run folders


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds; without its result it is one that can be continued."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    assert call("run", *TINY, "--out", folder).code == 0
    return folder


Damage = Callable[[Path], None]
FILES = ("config.json", "rounds.jsonl", "result.json", "checkpoint.safetensors", "model.safetensors")
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


def cut(name: str, share: float) -> Damage:
    """Keep the beginning of a file."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return damage


def flip(name: str, share: float, bits: int) -> Damage:
    """Change one byte."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(share * (len(content) - 1))] ^= bits
        (folder / name).write_bytes(content)

    return damage


def replace(name: str, kind: str) -> Damage:
    """Put something else in a file's place."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        if kind == "folder":
            (folder / name).mkdir()
        elif kind != "nothing":
            (folder / name).write_bytes(b"" if kind == "empty" else b"[1, 2]\n")

    return damage


def set_value(name: str, key: str, value: Any) -> Damage:
    """Change one value of a file of JSON, in its first line."""

    def damage(folder: Path) -> None:
        lines = (
            (folder / name).read_text().split("\n") if name.endswith("l") else [(folder / name).read_text()]
        )
        table = json.loads(lines[0])
        inner = table["settings"] if name == "config.json" else table
        inner[key] = value
        (folder / name).write_text("\n".join([json.dumps(table), *lines[1:]]))

    return damage


ROUND_KEYS = (
    "round",
    "score",
    "layers",
    "devices",
    "metrics",
    "bytes_up",
    "virtual_seconds",
    "score_by_class",
    "no",
)
RESULT_KEYS = ("score", "rounds", "stopped", "method", "weights_sha256", "run", "budget_action", "clients")
DAMAGES = st.one_of(
    st.builds(cut, st.sampled_from(FILES), st.floats(0, 1)),
    st.builds(flip, st.sampled_from(FILES), st.floats(0, 1), st.integers(1, 255)),
    st.builds(replace, st.sampled_from(FILES), st.sampled_from(["folder", "nothing", "empty", "list"])),
    st.builds(set_value, st.just("config.json"), st.sampled_from(sorted(Settings.model_fields)), JUNK),
    st.builds(set_value, st.just("rounds.jsonl"), st.sampled_from(ROUND_KEYS), JUNK),
    st.builds(set_value, st.just("result.json"), st.sampled_from(RESULT_KEYS), JUNK),
)


def wrong_folders(number: int, original: Path) -> Callable[[], None]:
    commands = st.sampled_from(
        [
            ("run", "--resume", "--out", "run"),
            ("run", "--resume", "--rounds", "3", "--out", "run"),
            ("report", "run"),
        ]
    )

    @settings(COMMON, max_examples=number)
    @given(commands, st.booleans(), st.lists(DAMAGES, min_size=1, max_size=2))
    def try_folder(command: Sequence[str], finished: bool, damages: Sequence[Damage]) -> None:
        def prepare(folder: Path) -> None:
            shutil.copytree(original, folder / "run")
            if not finished:
                (folder / "run" / "result.json").unlink()
                (folder / "run" / "model.safetensors").unlink()
            for damage in damages:
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError, IndexError):
                    damage(folder / "run")

        check(command, prepare)

    return try_folder


NUMBERS_OF_EXAMPLES = [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("number", NUMBERS_OF_EXAMPLES)
@pytest.mark.parametrize("kind", [wrong_settings, wrong_tables, wrong_files])
def test_wrong_input(
    kind: Callable[[int], Callable[[], None]], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command line, of tables and of settings files."""
    monkeypatch.setenv("FEDPMT_DATA", "no-data")
    kind(number)()


@pytest.mark.parametrize("number", NUMBERS_OF_EXAMPLES)
def test_wrong_run_folders(number: int, run_folder: Path) -> None:
    """A run that is continued or reported on."""
    wrong_folders(number, run_folder)()
