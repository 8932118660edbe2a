"""Wrong input: one clear line, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import gzip
import io
import resource
import struct
from pathlib import Path

import pytest
from command_line import TINY, call, refused, tree

import fedpmt
from fedpmt.cli.main import program
from fedpmt.records import read_run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, where nothing may appear."""
    home = tmp_path / "work"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("FEDPMT_DATA", str(tmp_path / "no-data"))
    return home


SETTINGS = {
    "method": ("--method fedpmtt", "method = 'fedpmtt'", "did you mean 'fedpmt'", "feddrop"),
    "task": ("--task cnn-minst", "task = 'cnn-minst'", "did you mean 'cnn-mnist'", "fcnn-mnist"),
    "data": ("--data embeded", "data = 'embeded'", "did you mean 'embedded'", "cifar10"),
    "data-arrays": ("--data arrays", "data = 'arrays'"),
    "data-missing": ("--data mnist", "data = 'mnist'", "fedpmt data get mnist"),
    "data-shape": ("--task cnn-cifar10 --data embedded", "embedded", "1 x 28 x 28", "3 x 32 x 32"),
    "synthetic": ("--data synthetic:1", "synthetic:1", "synthetic:ALPHA,BETA"),
    "synthetic-split": ("--data synthetic --partition classes:2", "partition = 'classes:2'", "allowed: iid"),
    "partition": ("--partition idd", "partition = 'idd'", "did you mean 'iid'", "dirichlet:ALPHA"),
    "partition-zero": ("--partition classes:0", "classes:0", "at least 1"),
    "partition-many": ("--partition classes:11", "classes:11", "10 classes"),
    "partition-nan": ("--partition dirichlet:nan", "dirichlet:nan"),
    "rounds-negative": ("--rounds -1", "rounds = '-1'", "greater than or equal to 1"),
    "rounds-text": ("--rounds many", "rounds = 'many'", "integer"),
    "rounds-part": ("--rounds 2.5", "rounds = '2.5'", "integer"),
    "lr-nan": ("--lr nan", "lr = 'nan'"),
    "lr-inf": ("--lr inf", "lr = 'inf'", "finite"),
    "lr-minus-inf": ("--lr=-inf", "lr = '-inf'"),
    "momentum-nan": ("--momentum nan", "momentum = 'nan'"),
    "decay-inf": ("--weight-decay inf", "weight-decay = 'inf'", "finite"),
    "deadline-nan": ("--deadline nan", "deadline = 'nan'"),
    "deadline-inf": ("--deadline inf", "deadline = 'inf'", "finite"),
    "deadline-zero": ("--deadline 0", "deadline = '0'", "greater than 0"),
    "deadline-nobody": ("--deadline 0.001", "deadline must be >= 4.21", "with fedpmt (got 0.001)"),
    "deadline-predicted": ("--deadline 0.001 --dry-run", "deadline must be >= 4.21"),
    "noise-alone": ("--dp-noise 1", "dp-noise = 1 does nothing without dp-clip"),
    "delta-alone": ("--dp-delta 1e-6", "dp-delta = 1e-6 does nothing without dp-clip"),
    "resume-nothing": ("--resume", "out = 'runs/new' holds no run to continue"),
    "control": ("--method fed\x1b[31mpmt", "method = 'fed\\x1b[31mpmt'"),
    "full-seconds-inf": ("--full-seconds inf", "full-seconds = 'inf'", "finite"),
    "budget-nan": ("--time-budget nan", "time-budget = 'nan'"),
    "target": ("--target 1.5", "target must be > 0 and <= 1 for an accuracy (got 1.5)"),
    "budget": ("--budget operation", "budget = 'operation'", "did you mean 'operations'", "upload"),
    "budget-share": ("--budget operations=40", "operations=40", "'40' must be a share", "at most 1"),
    "budget-zero": ("--budget bytes=0", "bytes=0", "above 0", "MiB"),
    "budget-text": ("--budget time=fast", "time=fast", "'fast'", "s, min"),
    "budget-empty": ("--budget memory=", "budget = 'memory='", "share of the whole model"),
    "budget-unit": ("--budget operations=3MB", "operations=3MB", "'3MB' must be a share"),
    "budget-inf": ("--budget time=infs", "time=infs", "'infs'"),
    "budget-levels": ("--budget upload=0.2,0.5", "upload=0.2,0.5", "2 amounts, but there are 5 levels"),
    "budget-watts": (
        "--budget energy=5J",
        "budget = 'energy=5J'",
        "needs a fleet that states watts_computing",
    ),
    "budget-mode": ("--budget time --mode paper", "budget = 'time'", "mode = 'exact'"),
    "availability": ("--availability 0", "availability = '0'"),
    "availability-nan": ("--availability nan", "availability = 'nan'"),
    "failure": ("--failure 1", "failure = '1'"),
    "over-select": ("--over-select nan", "over-select = 'nan'"),
    "checkpoint": ("--checkpoint-seconds nan", "checkpoint-seconds = 'nan'"),
    "seed": ("--seed -1", "seed = '-1'"),
    "workers": ("--workers -1", "workers = '-1'"),
    "executor": ("--executor fast", "executor = 'fast'", "'auto' or 'plain'"),
    "schedule": ("--schedule stepp:1,2", "schedule = 'stepp:1,2'", "step:EVERY,FACTOR"),
    "schedule-nan": ("--schedule inverse:nan", "schedule = 'inverse:nan'"),
    "devices": ("--devices 1000 --samples 80", "devices = 1000", "80000 samples", "4000"),
    "devices-too-many": (
        "--devices 100000000000000000000 --data synthetic",
        "devices = 100000000000000000000",
    ),
    "cohort": ("--cohort 51", "cohort = 51", "devices = 50"),
    "depths": ("--depths 6", "depths = 6", "1 to 5 depths"),
    "depths-zero": ("--depths 0", "depths = '0'"),
    "assign": ("--assign level", "assign = 'level'", "4 depths and 5 levels"),
    "splitting": (
        "--splitting device --sampling stratified",
        "sampling = 'stratified'",
        "splitting = 'device'",
    ),
    "levels-order": ("--levels 1,1/2", "levels = '1,1/2'", "slowest first"),
    "levels-zero": ("--levels 0,1", "levels = '0'", "more than 0"),
    "levels-nan": ("--levels nan,1", "levels = 'nan'", "more than 0"),
    "levels-inf": ("--levels 1,inf", "levels = 'inf'", "more than 0"),
    "levels-count": ("--levels 1/4x3,1x4", "levels = '1/4x3,1x4'", "devices = 50"),
    "levels-count-text": ("--levels 1/4x²,1", "levels = '1/4x²,1'", "positive whole number"),
    "levels-drawn": ("--levels gauss:1", "levels = 'gauss:1'", "lognormal:SIGMA"),
    "levels-apart": ("--levels lognormal:1000", "levels = 'lognormal:1000'", "too far apart"),
    "option": ("--method feddrop --set scop=all", "scop", "did you mean 'scope'"),
    "option-of-run": ("--set splitting=device", "splitting", "weight"),
    "option-method": ("--set feddrop.scope=all", "feddrop", "allowed: fedpmt"),
    "option-no-method": ("--set feddrp.scope=all", "feddrp", "did you mean 'feddrop'"),
    "option-form": ("--set scope", "set = 'scope'", "METHOD.KEY=VALUE"),
    "option-value": ("--method feddrop --set feddrop.scope=al", "feddrop.scope = 'al'", "did you mean 'all'"),
    "option-number": ("--method feddrop --set keep=half", "feddrop.keep = 'half'", "must be a number"),
    "option-truth": ("--method feddrop --set scaling=maybe", "feddrop.scaling = 'maybe'", "true or false"),
    "option-range": ("--method feddrop --set keep=-1", "keep", "must be > 0 and <= 1 (got -1.0)"),
    "option-nan": ("--method feddrop --set keep=nan", "keep", "must be > 0 and <= 1 (got nan)"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_wrong_setting_of_run(case: str, elsewhere: Path) -> None:
    """The line names the key, the value and what is allowed; no folder is left, the parent neither."""
    flags, *words = SETTINGS[case]
    line = refused("run", "--out", "runs/new", *flags.split())
    for word in words:
        assert word in line
    assert not Path("runs/new").exists()
    assert [path for path in elsewhere.rglob("*") if path != Path("runs").resolve()] == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("rn", ("command = 'rn'", "did you mean 'run'?")),
        ("run --metod fedpmt", ("--metod", "--method")),
        ("run --rounds", ("--rounds", "requires an argument")),
        ("run fedpmt", ("unexpected", "fedpmt")),
        ("compare", ("Missing argument 'METHOD...'",)),
        ("compare fedpmt nope --out new", ("method = 'nope'",)),
        ("compare fedpmt fedpmt --out new", ("named twice",)),
        ("compare fedpmt fedavg --seeds a --out new", ("seeds = 'a'", "0-2,7")),
        ("compare fedpmt fedavg --seeds ² --out new", ("seeds = '²'",)),
        ("compare fedpmt fedavg --seeds 2-1 --out new", ("seeds = '2-1'",)),
        ("compare fedpmt fedavg --seeds 1,1 --out new", ("seeds = '1,1'",)),
        ("compare fedpmt fedavg --seeds 0-1000000000 --out new", ("seeds = '0-1000000000'", "at most 1000")),
        ("compare fedpmt fedavg --seeds 0-" + "9" * 5000, ("seeds = '0-999",)),
        ("compare fedpmt fedavg --resume --out new", ("out = 'new' holds no run to continue",)),
        ("run --resume", ("'runs' holds no run of these settings to continue",)),
        ("deploy --resume", ("out = 'deployment' holds no deployment to continue",)),
        ("deploy --dp-noise 1", ("dp-noise = 1 does nothing without dp-clip",)),
        ("compare fedpmt feddrop --set feddrop.nope=1 --out new", ("nope",)),
        ("cost --task nope", ("task = 'nope'", "cnn-mnist")),
        ("cost --mode nope", ("mode = 'nope'", "'exact' or 'paper'")),
        ("cost --depths 9", ("depths = 9",)),
        ("cost --depths x", ("depths = 'x'",)),
        ("cost --draw net.txt", ("net.txt", ".svg")),
        ("plan --task nope", ("task = 'nope'",)),
        ("plan --deadline -1", ("deadline = '-1'",)),
        ("plan --depths 9", ("depths = 9",)),
        ("plan --assign level", ("4 depths and 5 levels",)),
        ("plan --fleet none.csv", ("none.csv", "No such file")),
        ("profile --task nope", ("task = 'nope'",)),
        ("profile --repeat 0", ("--repeat", "1<=x<=1000")),
        ("profile --repeat x", ("--repeat",)),
        ("profile --depths 9 --repeat 1", ("depths = 9",)),
        ("methods --all", ("--all",)),
        ("data lst", ("No such command 'lst'",)),
        ("data get", ("Missing argument 'NAME'",)),
        ("data get minst", ("data = 'minst'", "did you mean 'mnist'")),
        ("data get embedded", ("embedded", "needs no fetching")),
        ("report", ("Missing argument 'RUN...'",)),
        ("report nowhere", ("run = 'nowhere'",)),
        ("report . --targets x", ("targets must be numbers", "'x'")),
    ],
)
def test_a_wrong_command_line(command: str, words: tuple[str, ...], elsewhere: Path) -> None:
    """Whatever the command, it is refused in one line and leaves nothing."""
    line = refused(*command.split())
    for word in words:
        assert word in line
    assert list(elsewhere.iterdir()) == []


# files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('roudns = 3\nmethod = "fedpmt"\n', ("roudns", "did you mean 'rounds'")),
        ("rounds = \n", ("cannot be read",)),
        ('method = "fedpmt\n', ("cannot be read",)),
        ("options = 3\n", ("options",)),
        ("[options]\nnope = 1\n", ("nope",)),
        ("[options]\nweight = [1, 2]\n", ("weight",)),
        ("rounds = [1]\n", ("rounds",)),
        ('method = "fed\\npmt"\n', ("method", "fed")),
        ("fleet = 3\n", ("fleet",)),
        ("lr = nan\n", ("lr",)),
        ("\x00\n", ("cannot be read",)),
        ('digest = "x"\n', ("'digest' is unknown",)),
        ("[fedprox]\nmu = 1\n", ("[fedprox] is no setting", "[options.fedprox]")),
        ("set = [1]\n", ("set is a table",)),
        ('set = ["keep"]\n', ("set = 'keep'", "METHOD.KEY=VALUE")),
        ("levels = [[1]]\n", ("levels",)),
        ("seeds = [0, 1]\n", ("seeds is for `fedpmt compare`",)),
        ("out = 3\n", ("out must be the path of a folder (got 3)",)),
    ],
)
def test_a_wrong_config_file(content: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """An unknown key is refused as on the command line, broken TOML with its place."""
    file = tmp_path / "run.toml"
    file.write_text(content)
    line = refused("run", "--config", file, "--out", "new")
    for word in words:
        assert word in line
    assert not Path("new").exists()


def test_a_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder and bytes that are no text."""
    assert "No such file" in refused("run", "--config", tmp_path / "none.toml", "--out", "new")
    assert "directory" in refused("run", "--config", tmp_path, "--out", "new")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x80")
    assert "cannot be read" in refused("run", "--config", tmp_path / "binary.toml", "--out", "new")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("name,count\nphone,1\n", ("no column 'speed'", "name, count")),
        ("speed,uplink_mpbs\n1,8\n", ("column = 'uplink_mpbs' is unknown", "did you mean 'uplink_mbps'?")),
        ("speed,name\n1,phone,8\n", ("line 2", "'8' stands in no column")),
        ("speed,speed\n1,2\n", ("column 'speed' appears twice",)),
        ("speed\n1\n0\n", ("line 3", "speed = '0'")),
        ("speed\n-1\n", ("line 2", "speed = '-1'")),
        ("speed\nnan\n", ("line 2", "speed = 'nan'")),
        ("speed\ninf\n", ("line 2", "speed = 'inf'")),
        ("speed\nfast\n", ("line 2", "speed = 'fast'")),
        ("speed,name\n,phone\n", ("line 2", "speed = ''")),
        ("speed,count\n1,0\n", ("line 2", "count = '0'")),
        ("speed,count\n1,two\n", ("line 2", "count = 'two'")),
        ("speed,count\n1,²\n", ("line 2", "count = '²'")),
        ("speed,count\n1,99999999999999999999\n", ("99999999999999999999 devices",)),
        ("speed,uplink_mbps\n1,-3\n", ("line 2", "uplink_mbps = '-3'")),
        ("speed,memory_mib\n1,much\n", ("line 2", "memory_mib = 'much'")),
        ("speed,availability\n1,1.5\n", ("availability", "at most 1")),
        ("speed\n", ("lists no device",)),
        ("", ("lists no device",)),
        ("name;speed\nphone;0,5\n", ("';' between its columns", "commas")),
        ("name\tspeed\nphone\t1\n", ("tabs between its columns", "commas")),
        ("name,speed\nphone,0,5\n", ("line 2", "'5' stands in no column (decimals have a point: 0.5)")),
        ('speed\n"0,5"\n', ("line 2", "speed = '0,5'", "(decimals have a point: 0.5)")),
        ("name,speed\n\x1b[31mphone,1\n", ("line 2", "name must not hold control characters", "\\x1b[31m")),
    ],
)
@pytest.mark.parametrize("command", [("run", "--out", "new"), ("plan",)])
def test_a_wrong_fleet_file(
    command: tuple[str, ...], content: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """The line names the file and where in it the mistake stands."""
    file = tmp_path / "fleet.csv"
    file.write_text(content)
    line = refused(*command, "--fleet", file)
    assert str(file) in line
    for word in words:
        assert word in line
    assert not Path("new").exists()


def test_a_fleet_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, bytes that are no text; and one that does not agree with --devices."""
    assert "No such file" in refused("run", "--fleet", tmp_path / "none.csv", "--out", "new")
    assert "directory" in refused("run", "--fleet", tmp_path, "--out", "new")
    (tmp_path / "fleet.csv").write_bytes(b"speed\n\xff\xfe\n")
    assert "cannot be read" in refused("run", "--fleet", tmp_path / "fleet.csv", "--out", "new")
    (tmp_path / "three.csv").write_text("speed\n1\n2\n3\n")
    line = refused(
        "run", "--fleet", tmp_path / "three.csv", "--devices", "4", "--cohort", "2", "--out", "new"
    )
    assert "lists 3 devices, but devices = 4" in line
    assert not Path("new").exists()


def write_mnist(folder: Path, count: int = 40) -> dict[str, bytes]:
    """A small MNIST in its own file format."""
    folder.mkdir(parents=True)
    images = struct.pack(">IIII", 0x0803, count, 28, 28) + bytes(index % 251 for index in range(count * 784))
    labels = struct.pack(">II", 0x0801, count) + bytes(index % 10 for index in range(count))
    contents = {
        "train-images-idx3-ubyte": images,
        "train-labels-idx1-ubyte": labels,
        "t10k-images-idx3-ubyte": images,
        "t10k-labels-idx1-ubyte": labels,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return contents


MNIST = (
    "run",
    "--data",
    "mnist",
    "--devices",
    "5",
    "--samples",
    "4",
    "--cohort",
    "2",
    "--rounds",
    "1",
    "--batch",
    "4",
)


@pytest.mark.usefixtures("small_files")
def test_whole_data_files_are_taken(tmp_path: Path) -> None:
    """The files that the next tests damage are fit for a run as they are."""
    write_mnist(tmp_path / "mnist")
    called = call(*MNIST, "--data-dir", tmp_path, "--out", "new", "--json")
    assert called.code == 0, called.err


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize(
    "name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"]
)
@pytest.mark.parametrize("damage", ["cut", "empty", "magic", "longer", "missing", "packed"])
def test_a_damaged_data_file(name: str, damage: str, tmp_path: Path) -> None:
    """The line names the file; the run's folder, which comes before the data, is gone again."""
    content = write_mnist(tmp_path / "mnist")[name]
    path = tmp_path / "mnist" / name
    path.unlink()
    if damage == "packed":
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(content)[:-20])
    elif damage != "missing":
        path.write_bytes(
            {"cut": content[:-7], "empty": b"", "magic": b"\xff" + content[1:], "longer": content + b"0"}[
                damage
            ]
        )
    line = refused(*MNIST, "--data-dir", tmp_path, "--out", "new")
    assert name in line
    assert ("lacks" if damage == "missing" else "damaged") in line
    assert not Path("new").exists()


def test_a_set_that_is_listed_as_damaged(tmp_path: Path) -> None:
    """Files that could be read, but not those of the data set: `data list` and `run` agree on them."""
    write_mnist(tmp_path / "mnist")
    states = {
        one["name"]: one["state"] for one in call("data", "list", "--data-dir", tmp_path, "--json").json
    }
    assert states["mnist"] == "damaged"
    line = refused(*MNIST, "--data-dir", tmp_path, "--out", "new")
    assert "train-images-idx3-ubyte is damaged: it holds 31376 bytes, not 47040016" in line
    assert not Path("new").exists()


def test_what_a_config_file_may_hold(tmp_path: Path) -> None:
    """A byte-order mark, lists, the folder, seeds, and options in any form, for one method or for several."""
    file = tmp_path / "all.toml"
    file.write_text(
        'levels = [0.25, "1/2", 1]\nout = "both"\nseeds = [1, 3]\nset = ["fedprox.mu=0.5"]\n'
        "devices = 6\nsamples = 10\ncohort = 3\nrounds = 1\n[options.feddrop]\nkeep = 0.5\n",
        encoding="utf-8-sig",
    )
    assert call("compare", "fedprox", "feddrop", "--config", file).code == 0
    names = [f"{method}-seed{seed}" for method in ("feddrop", "fedprox") for seed in (1, 3)]
    assert sorted(path.name for path in Path("both").iterdir()) == names
    runs = {name: read_run(Path("both") / name).settings for name in names}
    assert runs["fedprox-seed3"]["options"]["mu"] == 0.5
    assert runs["feddrop-seed1"]["options"]["keep"] == 0.5
    assert {settings["levels"] for settings in runs.values()} == {"0.25,1/2,1"}
    file.write_text(file.read_text(encoding="utf-8-sig").replace("seeds", "#"))
    assert call("run", "--method", "fedprox", "--config", file, "--out", "typed").code == 0
    assert not Path("both", "config.json").exists()
    assert read_run("typed").settings["options"]["mu"] == 0.5
    assert call("plan", "--config", file).code == 0


def test_a_file_s_seed_is_compared(tmp_path: Path) -> None:
    """Where there are no seeds."""
    (tmp_path / "seed.toml").write_text("seed = 4\nrounds = 1\n")
    called = call("compare", "fedavg", "--config", tmp_path / "seed.toml", *TINY, "--out", "new", "--json")
    assert [run["seed"] for run in called.json["runs"]] == [4]


# what is said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--budget memory=1B",
            "budget = 'memory=1B' is exceeded on all devices: the least that they can be given",
        ),
        ("--budget operations=0.1", "is exceeded on all devices"),
        ("--availability 1e-9", "no reply has counted in 2 rounds"),
        ("--failure 0.999999999", "no reply has counted in 2 rounds"),
    ],
)
def test_a_run_that_is_not_what_one_wanted_says_so(flags: str, words: str) -> None:
    """It may still be wanted, to compare."""
    called = call("run", *TINY, *flags.split(), "--out", "new")
    assert called.code == 0, called.err
    assert words in called.err


def test_a_usual_run_has_no_such_warnings() -> None:
    """Nothing is exceeded, and replies count."""
    called = call("run", *TINY, "--budget", "operations=0.5", "--failure", "0.1", "--out", "new")
    assert called.code == 0, called.err
    assert "exceeded" not in called.err
    assert "no reply" not in called.err


def test_epsilon_is_shown_wherever_a_result_is() -> None:
    """It was in the records of rounds alone."""
    private = ("--dp-clip", "1", "--dp-noise", "20", "--method", "fedavg")
    shown = call("run", *TINY, *private, "--out", "one")
    epsilon = fedpmt.read_run("one").rounds[-1].metrics["epsilon"]
    assert f"{epsilon:.4f}"[:4] in shown.out
    assert call("run", "--resume", "--out", "one", "--json").json["epsilon"] == epsilon
    compared = call("compare", "fedavg", *TINY, *private[:4], "--out", "two", "--json").json
    assert [run["epsilon"] for run in compared["runs"]] == [epsilon]
    assert call("run", *TINY, "--out", "three", "--json").json["epsilon"] is None


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_in_another_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that it lacks are question marks."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    monkeypatch.setattr("sys.stdout", stream)
    assert program(["methods"]) == 0
    shown = written.getvalue().decode(encoding)
    assert "fedpmt" in shown
    assert "?" in shown


def test_an_interrupted_comparison_says_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the folder of all runs, not of the one that was interrupted."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedpmt.simulation.runner.Journal.add", interrupt)
        called = call("compare", "fedavg", "fedpmt", *TINY, "--out", "both")
    assert called.code == 130
    advice = called.err.partition("continue with ")[2]
    assert advice.splitlines()[0] == "--resume --out both"
    again = call("compare", "fedavg", "fedpmt", *TINY, "--resume", "--out", "both")
    assert again.code == 0, again.err


def test_names_are_shown_as_they_are() -> None:
    """Brackets are no markup, and no name commands the terminal."""
    called = call("run", *TINY, "--dry-run", "--data-dir", "[/x] \x1b[31m")
    assert called.code == 0, called.err
    assert "[/x] \\x1b[31m" in called.out
    assert "\x1b" not in called.out + called.err


@pytest.mark.parametrize(("limit", "file"), [(4_000, "rounds.jsonl"), (100_000, "checkpoint.safetensors")])
def test_a_full_disk_is_named(limit: int, file: str, tmp_path: Path) -> None:
    """Files that may not grow are like a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        called = call("run", *TINY, "--rounds", "5", "--out", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert called.code == 1
    assert called.err.splitlines()[-1].endswith(f"File too large: '{tmp_path / 'run' / file}'")


# the output folder


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    """Nothing can be written there, not even by root."""
    file = tmp_path / "file"
    file.write_text("mine")
    assert f"out = '{file}/run' cannot be written" in refused("run", *TINY, "--out", file / "run")
    assert file.read_text() == "mine"


def test_a_folder_that_the_system_refuses() -> None:
    """/proc takes no folders, not even from root."""
    assert "cannot be written" in refused("run", *TINY, "--out", "/proc/fedpmt-run")


def test_a_name_that_is_too_long() -> None:
    """Longer than a file system takes."""
    assert "too long" in refused("run", *TINY, "--out", "x" * 300)


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    """A file is not written over."""
    file = tmp_path / "file"
    file.write_text("mine")
    assert "not a run folder" in refused("run", *TINY, "--out", file)
    assert "not a run folder" in refused("run", *TINY, "--out", file, "--resume")
    assert file.read_text() == "mine"


def test_a_folder_with_something_else_in_it(tmp_path: Path) -> None:
    """A folder that is not a run is left as it is, with and without --resume."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    before = tree(tmp_path)
    for more in ((), ("--resume",)):
        assert "exists and is not a run folder" in refused("run", *TINY, "--out", tmp_path / "thesis", *more)
    assert tree(tmp_path) == before


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    """A folder made beforehand is not in the way."""
    (tmp_path / "run").mkdir()
    assert call("run", *TINY, "--rounds", "1", "--out", tmp_path / "run").code == 0


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    """A picture and a page need a place as well."""
    file = tmp_path / "file"
    file.write_text("mine")
    assert "cannot be written" in refused("cost", "--draw", file / "net.svg")
    run = tmp_path / "run"
    assert call("run", *TINY, "--rounds", "1", "--out", run).code == 0
    assert "cannot be written" in refused("report", run, "--out", file / "page.html")
    assert file.read_text() == "mine"


def test_compare_does_not_write_over_runs(tmp_path: Path) -> None:
    """A folder that already holds one of the runs is named, and stays as it is."""
    out = tmp_path / "all"
    assert call("run", *TINY, "--rounds", "1", "--out", out / "fedavg-seed0").code == 0
    before = tree(tmp_path)
    line = refused("compare", "fedpmt", "fedavg", *TINY, "--out", out)
    assert "already holds runs" in line
    assert tree(tmp_path) == before
