"""The page of runs that go on, served to a browser and updated after each round.

It answers three addresses: the page, its data and its CSV. No address is ever turned into a path, so that nothing but
the runs' own records can be read through it, and it writes nothing: runs never notice that they are watched.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fedpmt import records
from fedpmt.records import RoundRecord, RunRecord
from fedpmt.report import page
from fedpmt.report.tables import csv_text
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PORT = 8723
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::", "")
FILES = (records.CONFIG, records.ROUNDS, records.RESULT, records.SESSION)
LAST_LOOK = 3.0
"""Seconds that open pages get to fetch the last round when a run has ended."""


@dataclass
class Follower:
    """One run, read again as its files grow: only lines that are new are parsed."""

    folder: Path
    _settings: tuple[int, dict[str, Any]] = (0, {})  # with the time of their file
    _rounds: tuple[RoundRecord, ...] = ()
    _length: int = 0
    _last: bytes = b""

    def read(self) -> RunRecord:
        """The run as it is now."""
        changed = (self.folder / records.CONFIG).stat().st_mtime_ns
        if self._settings[0] != changed:
            self._settings = (changed, records.read_config(self.folder) or {})
        self._follow()
        return RunRecord.model_construct(
            folder=self.folder,
            settings=self._settings[1],
            rounds=self._rounds,
            result=records.read_result(self.folder),
            session=records.read_session(self.folder),
        )

    def _follow(self) -> None:
        path = self.folder / records.ROUNDS
        content = path.read_bytes() if path.exists() else b""
        if not content[: self._length].endswith(self._last) or len(content) < self._length:
            # A resumed run has cut off what its checkpoint does not know of.
            self._rounds, self._length, self._last = (), 0, b""
        lines = [line + b"\n" for line in content[self._length :].split(b"\n")[:-1]]
        if lines:
            self._rounds += records.parse_rounds(path, lines)
            self._length += sum(map(len, lines))
            self._last = lines[-1]


@dataclass
class Watch:
    """The runs in some places, and what of them a page shows."""

    places: tuple[Path, ...]
    title: str
    fetched: dict[str, str] = field(default_factory=dict)  # the stamp that each page has got last
    _followers: dict[Path, Follower] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _answer: tuple[str, bytes] = ("", b"")

    def stamp(self) -> str:
        """A word that changes with every file of every run."""
        digest = hashlib.sha256()
        for folder in records.find_runs(self.places):
            for name in FILES:
                try:
                    found = (folder / name).stat()
                except OSError:
                    continue
                digest.update(
                    f"{folder} {name} {found.st_ino} {found.st_size} {found.st_mtime_ns}\n".encode()
                )
        return digest.hexdigest()[:16]

    def runs(self) -> list[RunRecord]:
        """The runs as they are now; those that have no settings yet are left out."""
        found = []
        for folder in records.find_runs(self.places):
            follower = self._followers.setdefault(folder, Follower(folder))
            try:
                found.append(follower.read())
            except (OSError, SettingError):
                continue  # its files are being replaced, or it is none of ours: it is looked at again
        return found

    def page(self) -> bytes:
        """The whole page."""
        with self._lock:
            stamp = self.stamp()
            return page.live_page(self.runs(), "runs.csv", stamp, self.title).encode(errors="replace")

    def data(self) -> bytes:
        """What the page's script asks for after each round."""
        with self._lock:
            stamp = self.stamp()
            if self._answer[0] != stamp:
                parts: dict[str, Any] = page.live_parts(self.runs(), "runs.csv", self.title)
                self._answer = (stamp, json.dumps({"stamp": stamp, **parts}).encode())
            return self._answer[1]

    def csv(self) -> bytes:
        """One row per run and round."""
        with self._lock:
            return csv_text(self.runs()).encode(errors="replace")


class Server(ThreadingHTTPServer):
    """Serves one watch; at most a few browsers look at it."""

    daemon_threads = True

    def __init__(self, watch: Watch, host: str, port: int) -> None:
        self.watch, self.host = watch, host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        """The address for a browser."""
        host = "localhost" if self.host in EVERYWHERE else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def is_known(self, host: str) -> bool:
        """Whether a request is for this server by name: a page of another site can't ask under its own."""
        if self.host in EVERYWHERE:
            return True
        name = urlsplit(f"//{host}").hostname or ""
        return name in (*LOOPBACK, self.host)

    def linger(self, seconds: float = LAST_LOOK) -> None:
        """Wait until the open pages have what is last, but not for long."""
        end, last = time.monotonic() + seconds, self.watch.stamp()
        while time.monotonic() < end and any(stamp != last for stamp in self.watch.fetched.values()):
            time.sleep(0.05)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""


class Handler(BaseHTTPRequestHandler):
    """Answers a browser."""

    server: Server
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, its data or its CSV, and nothing else."""
        watch = self.server.watch
        if not self.server.is_known(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        path = urlsplit(self.path).path
        if path == "/":
            self._send(watch.page(), "text/html; charset=utf-8")
        elif path == "/runs.csv":
            self._send(watch.csv(), "text/csv; charset=utf-8")
        elif path == "/data.json":
            self._send_data()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_data(self) -> None:
        watch, stamp = self.server.watch, self.server.watch.stamp()
        if self.headers.get("If-None-Match", "").strip('"') == stamp:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send(watch.data(), "application/json")
        watch.fetched[self.client_address[0]] = stamp

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Leave the terminal to the runs."""


def open_server(places: Sequence[Path], host: str, port: int | None, title: str = page.TITLE) -> Server:
    """A server that listens, but does not answer yet.

    Args:
        places: Run folders, or folders that hold some.
        host: The address to listen on.
        port: The port; None takes the usual one, or another where that is taken.
        title: The page's heading.
    """
    watch = Watch(tuple(places), title)
    refusal = ""
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            return Server(watch, host, wanted)
        except OSError as error:
            refusal = f"host = '{host}', port = {wanted} cannot be served: {error.strerror or error}"
    raise SettingError(refusal)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Answer in the background; in the end let open pages fetch what is last."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield server
        server.linger()
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    """Serve the folder that is named until standard input ends: the process that started this one has it."""
    with serving(open_server([Path(sys.argv[1])], LOOPBACK[0], None)) as server:
        print(f"watch: {server.url}", file=sys.stderr, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
