"""Deployments to test on: without Flower's processes, and with them on the loopback interface.

Without them, the real apps run over a grid that calls the nodes one after another. Every message is written to bytes
and read back on its way, so what does not survive the wire fails here too.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest import mock
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from fedpmt import api
from fedpmt.data.sets import embedded
from fedpmt.flower import paper_apps
from fedpmt.flower.deployment import Deployment, write_app, write_config
from fedpmt.flower.secure.layer_vector import Scale
from fedpmt.methods.registry import general_methods, method_class
from fedpmt.records import MODEL_FILE, ROUNDS, RunRecord, read_rounds, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from torch import Tensor

    from fedpmt.flower.loopback import Loopback


RUN_ID, SERVER = 7, 1
NOT_CARRIED = ("comet", "fedgkt")
"""Methods that are refused on Flower: their devices keep nets of their own."""
CARRIED = [
    name
    for name in general_methods()
    if name not in NOT_CARRIED
    and not method_class(name)().traits.events  # real time decides the order of replies
]
READ_ONCE = functools.cache(embedded._table)

BITS: dict[str, Any] = {
    "devices": 4,
    "samples": 20,
    "cohort": 3,
    "batch": 10,
    "rounds": 5,
    "lr": 0.1,
    "levels": "1/4,1/3,1/2,1",
    "executor": "plain",
    "eval_every": 5,
    "partition": "classes:3",
}
"""The run whose bits are compared with the simulator's, here and with real processes."""


class Exchange(NamedTuple):
    """A question and its answer, with the bytes of both."""

    kind: str
    down: int
    up: int
    question: RecordDict
    reply: RecordDict


def over_the_wire(message: Message) -> tuple[Message, int]:
    """The message as the other side reads it, and how many bytes it was."""
    contents = {key: thing.deflate() for key, thing in get_all_nested_objects(message).items()}
    read = cast("Message", inflate_object_from_contents(message.object_id, dict(contents)))
    read.metadata.__dict__["_message_id"] = message.metadata.message_id
    return read, sum(map(len, contents.values()))


class InProcessGrid(Grid):
    """Some nodes in this process. `tamper(question, answer)` may change a node's reply, or lose it."""

    def __init__(
        self,
        client: ClientApp,
        run_config: dict[str, Any],
        nodes: dict[int, dict[str, Any]],
        tamper: Callable[[Message, Message], Message | None] | None = None,
    ) -> None:
        self.client, self.run_config, self.nodes = client, run_config, nodes
        self.tamper = tamper
        self.traffic: list[Exchange] = []
        self.states = {node: RecordDict() for node in nodes}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **others: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        # Backwards: nothing may depend on the order in which nodes answer.
        for message in reversed(list(messages)):
            message.metadata.__dict__["_message_id"] = str(uuid4())
            reply = self.answer(message)
            if reply is not None:
                replies.append(reply)
        return replies

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        received, down = over_the_wire(message)
        config = {"partition-id": 0, **self.nodes[node]}
        context = Context(RUN_ID, node, config, self.states[node], self.run_config)
        try:
            reply: Message | None = self.client(received, context)
        except Exception as error:
            reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=received)
        assert reply is not None
        reply.metadata.__dict__["_src_node_id"] = node
        if self.tamper is not None:
            reply = self.tamper(received, reply)
        if reply is None:
            return None
        if reply.has_error():
            reply.metadata.__dict__["_src_node_id"] = node
            return reply
        back, up = over_the_wire(reply)
        kind = message.metadata.message_type
        self.traffic.append(Exchange(kind, down, up, received.content, back.content))
        return back


class ScrambledGrid(InProcessGrid):
    """Nodes that answer in an order of their own: whenever somebody looks, each may have finished or not.

    `dead` devices get messages and never answer; Flower says so after a while.
    """

    dead: Collection[int] = ()
    seed = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiting: dict[str, Message] = {}
        self._rng = random.Random(self.seed)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self._waiting[message.metadata.message_id] = message
            pushed.append(message.metadata.message_id)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = [one for one in message_ids if one in self._waiting and self._rng.random() < 0.3]
        self._rng.shuffle(ready)
        replies = [self._reply(self._waiting.pop(one)) for one in ready]
        return [reply for reply in replies if reply is not None]

    def _reply(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if self.nodes[node]["partition-id"] in self.dead:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
        return self.answer(message)


def nodes_of(count: int, **config: Any) -> dict[int, dict[str, Any]]:
    """Nodes with the random-looking ids that Flower gives."""
    return {
        1000 + 37 * (index * 5 % count) + index: {"partition-id": index, **config} for index in range(count)
    }


def deploy(
    folder: Path,
    given: dict[str, Any],
    tamper: Callable[[Message, Message], Message | None] | None = None,
    apps: tuple[ServerApp, ClientApp] | None = None,
    nodes: dict[int, dict[str, Any]] | None = None,
    kind: type[InProcessGrid] = InProcessGrid,
    **deployment: Any,
) -> tuple[RunRecord, InProcessGrid]:
    """A whole run over nodes in this process."""
    settings = api.settings_of(given)
    server, client = apps or paper_apps()
    own = Deployment(
        out=str(folder / "run"), state_dir=str(folder / "nodes"), wait_seconds=0.01, **deployment
    )
    config = write_config(settings, own)
    grid = kind(client, config, nodes or nodes_of(settings.devices), tamper)
    start(server, grid, config)
    return read_run(folder / "run"), grid


def start(server: ServerApp, grid: Grid, config: dict[str, Any]) -> None:
    """Run a ServerApp in this process."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, SERVER, RUN_ID
    # Reading the built-in images is most of what a tiny run takes.
    with mock.patch.object(embedded, "_table", READ_ONCE):
        server(grid, Context(RUN_ID, SERVER, {}, RecordDict(), config))


REACH, SAMPLES = 8.0, 20
RUN: dict[str, Any] = {
    "method": "fedpmt",
    "devices": 4,
    "samples": SAMPLES,
    "cohort": 4,
    "batch": 10,
    "rounds": 1,
    "lr": 0.1,
    "levels": "1/2x2,1x2",
    "deadline": 1000.0,
    "full_seconds": 1000.0,
    "executor": "plain",
}
WIDE, NARROW = (0, 3), (1, 2)
PARTS = ["depth 4", "depth 2", "depth 2", "depth 4"]
FLOAT = 2.0**-24
"""Half a step of a float below one: both results are rounded to floats, a few times each."""


def model_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "run" / MODEL_FILE)


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], rounds: int = 1) -> None:
    """Equal but for quantisation, n R / 2³² an entry and round with equal weights, and the rounding of floats.

    What one round is off by, training in the next makes more of: at these rates less than ten times as much.
    """
    bound = Scale(REACH, RUN["devices"], SAMPLES).error(1, SAMPLES) * 10 ** (rounds - 1)
    assert set(ours) == set(plain)
    for name, tensor in plain.items():
        off = (ours[name].double() - tensor.double()).abs()
        assert bool(
            (off <= bound + 8 * 10 ** (rounds - 1) * FLOAT * tensor.double().abs().clamp(min=0.1)).all()
        ), (
            name,
            off.max(),
        )


HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(api.__file__).parents[1]), str(HERE)])
"""Flower's processes are to import the package that is tested here, and the bad node's app."""

FIVE = ("fedpmt", "fedavg", "feddrop", "scaffold", "heterofl")
RUN_SECONDS = 600.0


def written(folder: Path, given: dict[str, Any], **deployment: Any) -> Path:
    """An app folder; its records go to `folder`/run."""
    own = Deployment(out=str(folder / "run"), **deployment)
    write_app(folder / "app", api.settings_of(given), own)
    return folder / "app"


def finished(federation: Loopback, run: int, folder: Path, seconds: float = RUN_SECONDS) -> RunRecord:
    """The records of a run that has completed."""
    status = federation.wait(run, seconds)
    assert status == "finished:completed", federation.log(run)[-3000:]
    return read_run(folder / "run")


def simulated(folder: Path, given: dict[str, Any]) -> str:
    """The weights that the simulator's plain executor ends with."""
    return digest(api.run(out=folder / "simulated", **given))


def digest(run: RunRecord) -> str:
    assert run.result is not None
    return run.result.weights_sha256


def until(holds: Callable[[], bool], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def rounds_done(folder: Path) -> int:
    return len(read_rounds(folder / "run" / ROUNDS))


def left_of(port: int) -> list[int]:
    """What is left of a SuperLink on this port, its nodes and all that they have started."""
    return processes(f"127.0.0.1:{port} ") + processes(f"--port {port} ")


def processes(text: str) -> list[int]:
    """The processes whose command line has this text in it, defunct ones left out."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [
        int(row[0]) for row in rows if len(row) == 3 and text in f"{row[2]} " and not row[1].startswith("Z")
    ]
