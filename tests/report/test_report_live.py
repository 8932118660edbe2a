"""The page of runs that go on: what its server answers, and what it never does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import pytest
from report_samples import invented

from fedpmt.cli.main import program
from fedpmt.records import CONFIG, RESULT, ROUNDS
from fedpmt.report.live import Follower, open_server, serving
from fedpmt.types import SettingError
from web_pages import read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fedpmt.report.live import Server

RUN = invented("fedpmt", "iid", 0, rounds=6)
LINES = [step.model_dump_json(exclude_defaults=True).encode() + b"\n" for step in RUN.rounds]


def make(folder: Path, rounds: int, settings: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"format": 1, "settings": {**RUN.settings, **(settings or {})}}))
    (folder / ROUNDS).write_bytes(b"".join(LINES[:rounds]))
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "secret.txt").write_text("not for you")
    make(tmp_path / "runs" / "one", 2)
    with serving(open_server([tmp_path / "runs"], "127.0.0.1", 0)) as found:
        yield found


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_page_its_data_and_its_table(server: Server, tmp_path: Path) -> None:
    status, page = ask(server, "/")
    assert status == 200
    found = read(page.decode(), frozenset({"runs.csv"}), scripts=2)
    assert found.tags["figure"] == 0
    assert "round 2 of 6" in " ".join(found.words)
    first = json.loads(ask(server, "/data.json")[1])
    assert first["data"]["lists"][first["data"]["groups"][0]["curves"]["score"]["x"]["rounds"]] == [1, 2]
    assert ask(server, "/data.json", If_None_Match=f'"{first["stamp"]}"') == (304, b"")
    make(tmp_path / "runs" / "one", 3)
    status, content = ask(server, "/data.json", If_None_Match=f'"{first["stamp"]}"')
    assert status == 200
    later = json.loads(content)
    assert later["stamp"] != first["stamp"]
    assert "round 3 of 6" in later["parts"]["top"]
    assert set(first["parts"]) == set(later["parts"])
    assert ask(server, "/runs.csv")[1].count(b"\n") == 4


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/one/config.json",
        "/%2e%2e/secret.txt",
        "//etc/passwd",
        "/data.json/../../secret.txt",
        "/etc/passwd",
        "/..%5csecret.txt",
        "/runs.csv%00",
    ],
)
def test_no_path_leads_to_a_file(server: Server, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_it_only_answers_questions_to_itself(server: Server) -> None:
    """A page elsewhere may let its own name point here; and nobody can write."""
    assert ask(server, "/", Host="evil.example")[0] == 403
    assert ask(server, "/", Host=f"localhost:{server.server_address[1]}")[0] == 200
    assert ask(server, "/", "POST")[0] == 501
    assert server.server_address[0] == "127.0.0.1"


def test_a_run_that_is_broken_hides_no_other(server: Server, tmp_path: Path) -> None:
    broken = make(tmp_path / "runs" / "two", 1, {"method": "fedavg"})
    (broken / ROUNDS).write_text("no round\n")
    data = json.loads(ask(server, "/data.json")[1])["data"]
    assert [group["line"] for group in data["groups"]] == ["fedpmt"]


def test_lines_are_followed_as_they_come_and_go(tmp_path: Path) -> None:
    follower = Follower(make(tmp_path / "run", 2))
    assert [step.round for step in follower.read().rounds] == [1, 2]
    with (tmp_path / "run" / ROUNDS).open("ab") as file:
        file.write(LINES[2] + LINES[3][:50])  # the last one is not whole yet
    assert follower.read().rounds == RUN.rounds[:3]
    make(tmp_path / "run", 1)  # a resume cuts off what its checkpoint does not know
    assert follower.read().rounds == RUN.rounds[:1]
    changed = RUN.rounds[0].model_copy(update={"score": None})
    (tmp_path / "run" / ROUNDS).write_bytes(changed.model_dump_json().encode() + b"\n" + LINES[1])
    assert follower.read().rounds == (changed, RUN.rounds[1])


def test_a_taken_port_is_refused_only_if_it_was_asked_for(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingError, match=r"port = \d+ cannot be served"):
            open_server([tmp_path], "127.0.0.1", taken.getsockname()[1])
    with open_server([tmp_path], "127.0.0.1", None), open_server([tmp_path], "127.0.0.1", None) as second:
        assert second.url.startswith("http://127.0.0.1:")


def test_watch_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program(["watch", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_run_is_watched_and_does_not_notice(tmp_path: Path) -> None:
    """Its page is served from another process, which ends with it."""
    out = tmp_path / "run"
    flags = [
        "run",
        "--method",
        "fedavg",
        "--rounds",
        "2000",
        "--eval-every",
        "2000",
        "--watch",
        "--out",
        str(out),
    ]
    process = subprocess.Popen([sys.executable, "-m", "fedpmt", *flags], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("watch: "))
        port = int(line.rstrip().rstrip("/").rpartition(":")[2])
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/data.json")
        assert "stamp" in json.loads(connection.getresponse().read())
        connection.close()
        assert not (out / RESULT).exists()
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    end = time.monotonic() + 10
    while is_open(port):
        assert time.monotonic() < end
        time.sleep(0.1)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
