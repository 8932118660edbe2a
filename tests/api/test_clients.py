"""Clients with data of their own: of any kind and size, split, weighed, priced and tested as theirs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedpmt
from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.data.clients import Reader, read_clients
from fedpmt.data.lazy import Stored
from fedpmt.report.page import page
from fedpmt.report.tables import client_scores
from fedpmt.simulation.evaluation import summarise
from fedpmt.training.batches import PerSample
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fedpmt.records import RunRecord

SIZES = {"ann": 1, "bob": 7, "eve": 24, "joe": 40}
Pair = tuple[np.ndarray, np.ndarray]


def points(count: int, seed: int = 0) -> Pair:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(count, 4)).astype(np.float32)
    return inputs, (inputs[:, 0] > inputs[:, 1]).astype(np.int64)


CLIENTS = {name: points(size, seed) for seed, (name, size) in enumerate(SIZES.items())}
TEST = points(50, 9)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def run(method: Any = "fedpmt", **given: Any) -> RunRecord:
    defaults = {"model": net(), "test": TEST, "rounds": 3, "lr": 0.2, "batch": 8, "executor": "plain"}
    return fedpmt.run(method, **{**defaults, **given})


def bits(record: RunRecord) -> str:
    assert record.result is not None
    return record.result.weights_sha256


class Items(Dataset[tuple[np.ndarray, int]]):
    """A map-style data set that remembers what was read of it."""

    def __init__(self, pair: Pair) -> None:
        self.inputs, self.labels = pair
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.read.append(index)
        return self.inputs[index], int(self.labels[index])


class Columns(dict[str, Any]):
    """As much of a Hugging Face data set as is used here: columns by name, rows by number."""

    column_names = ("x", "label")

    def __init__(self, pair: Pair) -> None:
        super().__init__(x=pair[0], label=pair[1])


def frame() -> pandas.DataFrame:
    tables = []
    for name, (inputs, targets) in CLIENTS.items():
        table = pandas.DataFrame(inputs, columns=list("abcd"))
        tables.append(table.assign(label=targets, user=name))
    return pandas.concat(tables, ignore_index=True)


def frame_of_test() -> pandas.DataFrame:
    return pandas.DataFrame(TEST[0], columns=list("abcd")).assign(label=TEST[1], user="nobody")


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "list": lambda: {"clients": list(CLIENTS.values())},
    "tensors": lambda: {
        "clients": {
            name: (torch.tensor(inputs), torch.tensor(targets)) for name, (inputs, targets) in CLIENTS.items()
        }
    },
    "dicts of arrays": lambda: {
        "clients": {name: {"x": inputs, "y": targets} for name, (inputs, targets) in CLIENTS.items()}
    },
    "data frame": lambda: {"clients": frame(), "client": "user", "test": frame_of_test()},
    "columns": lambda: {"clients": {name: Columns(pair) for name, pair in CLIENTS.items()}},
    "data sets": lambda: {"clients": {name: Items(pair) for name, pair in CLIENTS.items()}},
    "one set with a list of owners": lambda: {
        "train": Items(tuple(np.concatenate(part) for part in zip(*CLIENTS.values(), strict=True))),  # type: ignore[arg-type]
        "client": np.repeat(list(SIZES), list(SIZES.values())),
    },
}


@pytest.fixture(scope="module")
def reference() -> RunRecord:
    return run(clients=CLIENTS, prefix="recompute")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_samples_is_the_same_run(kind: str, reference: RunRecord) -> None:
    record = run(prefix="recompute", **KINDS[kind]())
    assert bits(record) == bits(reference)
    assert record.settings["partition"] == "natural"
    assert (record.settings["devices"], record.settings["samples"]) == (4, 18)


def test_devices_hold_train_and_take_what_is_theirs(reference: RunRecord) -> None:
    held = {one.device: one for one in reference.rounds[0].devices}
    assert {device: one.samples for device, one in held.items()} == dict(enumerate(SIZES.values()))
    for device, one in held.items():
        # The whole model: seconds in proportion to samples, and inversely to speed.
        if one.part == "depth 2":
            assert one.seconds == pytest.approx(10 * held[device].samples / 18 / one.speed)


def test_weights_follow_samples_unless_they_are_uniform() -> None:
    """One step on each of two clients, by hand: Σ a_k w_k with a_k = |D_k| / Σ |D_k|, or 1/2 each."""
    few, many = points(2, 1), points(6, 2)
    start = nn.Linear(4, 2)
    moved = []
    for inputs, targets in (few, many):
        layer = nn.Linear(4, 2)
        layer.load_state_dict(start.state_dict())
        nn.functional.cross_entropy(layer(torch.tensor(inputs)), torch.tensor(targets)).backward()  # type: ignore[no-untyped-call]
        assert layer.bias.grad is not None
        moved.append(layer.bias.detach() - 0.2 * layer.bias.grad)
    for weight, shares in (("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))):
        expected = sum(share * one for share, one in zip(shares, moved, strict=True))
        record = run(
            "fedavg",
            model=nn.Sequential(start),
            clients=[few, many],
            rounds=1,
            options={"weight": weight},
        )
        found = load(record)["0.bias"]
        assert torch.allclose(found, expected, atol=1e-6), weight  # type: ignore[arg-type]


def load(record: RunRecord) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(record.folder / "model.safetensors")


def test_all_methods_take_clients_of_any_size() -> None:
    for method in ("fedavg", "heterofl", "feddrop", "scaffold", "fedprox", "fedgkt", "comet", "feddf"):
        more = {"public": "holdout:0.2"} if method == "feddf" else {}
        record = run(
            method, clients={name: CLIENTS[name] for name in ("bob", "eve", "joe")}, rounds=1, **more
        )
        assert record.result is not None
        assert record.result.score is not None, method


def test_a_data_set_is_read_a_batch_at_a_time() -> None:
    items = Items(points(64, 3))
    stored = Stored(items, lambda batch: Reader(collate=None)._batch("train", batch))
    view = stored.view(np.arange(10, 40))
    assert not items.read
    batch = view.take(np.array([3, 0]))
    assert items.read == [13, 10]
    assert batch.ids.tolist() == [13, 10]
    assert np.array_equal(batch.inputs, items.inputs[[13, 10]])


def test_text_of_any_length_is_collated() -> None:
    """Rows of a frame with text in it, made into tensors batch by batch, on any number of workers."""
    rng = np.random.default_rng(0)
    words = [" ".join(rng.choice(["up", "down", "left"], rng.integers(1, 9))) for _ in range(60)]
    table = pandas.DataFrame({"text": words, "label": [text.count("up") % 2 for text in words]})
    table["user"] = rng.choice(["a", "b", "c"], 60)
    known = {"up": 1, "down": 2, "left": 3}

    def collate(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        ids = [torch.tensor([known[word] for word in row["text"].split()]) for row in rows]
        return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor([row["label"] for row in rows])

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 8, padding_idx=0), nn.Linear(8, 2)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(ids).sum(dim=1))
            return out

    torch.manual_seed(0)
    model = Bag()
    given = {"model": model, "clients": table, "client": "user", "test": table[:20], "collate": collate}
    records = [run(rounds=4, executor="auto", workers=workers, **given) for workers in (1, 2)]
    assert bits(records[0]) == bits(records[1])
    with pytest.raises(SettingError, match="column 'text' must be numbers; give collate="):
        run(clients=table, client="user", test=table)


def test_transforms_draw_the_same_for_any_number_of_workers() -> None:
    def jitter(inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)

    def one(sample: Tensor) -> Tensor:
        return sample * (1 + 0.1 * torch.randn(()))

    plain = bits(run(clients=CLIENTS, prefix="recompute"))
    assert bits(run(clients=CLIENTS, transform=lambda inputs: inputs)) == plain
    for transform in (jitter, PerSample(one)):
        found = {bits(run(clients=CLIENTS, transform=transform, executor="auto", workers=w)) for w in (1, 2)}
        assert len(found) == 1
        assert found != {plain}


def test_own_tests_are_means_over_clients() -> None:
    own = {name: points(4, 20 + seed) for seed, name in enumerate(SIZES) if name != "ann"}
    record = run("fedavg", clients=CLIENTS, test=own)
    module = net()
    module.load_state_dict(load(record))
    scores = {}
    for name, (inputs, targets) in own.items():
        with torch.no_grad():
            right = module(torch.tensor(inputs)).argmax(dim=1) == torch.tensor(targets)
        scores[name] = float(right.double().mean())
    result = record.result
    assert result is not None
    assert result.clients is not None
    assert result.score_by_client == pytest.approx(scores)
    assert result.score == pytest.approx(np.mean(list(scores.values())))  # equally many each
    assert result.clients.mean == pytest.approx(np.mean(list(scores.values())))
    assert result.clients.spread == pytest.approx(np.std(list(scores.values())))
    assert result.clients.worst_tenth == min(scores.values())
    assert record.rounds[-1].clients == result.clients
    levels = {"2": scores["bob"], "3": scores["eve"], "4": scores["joe"]}
    assert result.score_by_level == pytest.approx(levels)


def test_the_report_tells_what_clients_get(tmp_path: Path) -> None:
    runs = fedpmt.compare(
        ["fedpmt", "fedavg"],
        model=net(),
        clients=CLIENTS,
        held_out=0.25,
        rounds=1,
        out=tmp_path,
        seeds=[0, 1],
    )
    row, other = client_scores(runs)
    assert (row.count, list(row.by_client), list(row.by_level)) == (3, ["bob", "eve", "joe"], ["2", "3", "4"])
    assert row.worst_tenth is not None
    assert row.worst_tenth.mean == pytest.approx(
        np.mean([min(run.result.score_by_client.values()) for run in runs if run.result.method == "fedpmt"])  # type: ignore[union-attr]
    )
    text = page(runs, "table.csv")
    assert other.texts()["worst tenth"].split()[0] in text
    for words in ("Client by client", '<th scope="row">eve</th>', "worst tenth"):
        assert words in text
    assert "Client by client" not in page(
        [fedpmt.run("fedavg", rounds=1, devices=5, samples=10)], "table.csv"
    )


def test_the_worst_tenth_are_those_with_the_worst_score() -> None:
    scores = {device: device / 20 for device in range(20)}
    for maximize, worst in ((True, 0.025), (False, 0.925)):
        found = summarise(scores, maximize=maximize)
        assert found.worst_tenth == pytest.approx(worst)


def test_a_share_held_out_is_no_longer_trained_on() -> None:
    record = run("fedavg", clients=CLIENTS, test=None, held_out=0.25)
    assert [one.samples for one in record.rounds[0].devices] == [1, 5, 18, 30]
    assert record.result is not None
    assert record.result.score_by_client is not None
    assert list(record.result.score_by_client) == ["bob", "eve", "joe"]  # one sample is trained on
    embedded = fedpmt.run("fedavg", held_out=0.25, rounds=1, partition="dirichlet:0.5", amounts="free")
    assert embedded.result is not None
    assert embedded.result.clients is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"clients": {}}, "clients are empty"),
    ({"clients": {"a": CLIENTS["bob"], "b": (np.zeros((0, 4)), np.zeros(0))}}, "client 'b' inputs are empty"),
    ({"clients": frame(), "client": "uzer"}, "client = 'uzer' is unknown; did you mean 'user'"),
    (
        {"clients": frame(), "client": "user", "label": "lable"},
        "label = 'lable' is unknown; did you mean 'label'",
    ),
    ({"train": CLIENTS["bob"], "client": ["x"]}, "must name one owner for each"),
    (
        {"clients": {"a": CLIENTS["bob"], "b": (CLIENTS["eve"][0], CLIENTS["eve"][1] / 2)}},
        "client 'a' and client 'b' targets do not agree: int64 and float32",
    ),
    ({"clients": {"a": CLIENTS["bob"], "b": (np.zeros((3, 5)), np.zeros(3, int))}}, "inputs do not agree"),
    ({"clients": CLIENTS, "test": None}, "there is no test set"),
    (
        {"clients": CLIENTS, "test": {"ann": TEST, "bop": TEST}},
        "client = 'bop' is unknown; did you mean 'bob'",
    ),
    ({"clients": CLIENTS, "train": TEST}, "there are clients and train"),
    ({"clients": CLIENTS, "devices": 9}, "partition = 'natural' has 4 clients"),
    ({"clients": CLIENTS, "amounts": "lognormal:1"}, "cannot be combined with partition = 'natural'"),
    ({"clients": CLIENTS, "transform": torch.flip, "prefix": "cache"}, "prefix = 'cache' is refused"),
    ({"clients": [Items(points(3)), Items(points(3))], "prefix": "cache"}, "read batch by batch"),
    ({"clients": 3}, "clients must be a mapping or a sequence"),
    ({"clients": {"a": "text"}}, "client 'a'"),
    ({"model": None, "clients": CLIENTS}, "clients needs a model of your own"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_cannot_be_used_is_refused_in_one_line(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        run(**given, out=tmp_path / "run")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


MODULE = """
import numpy as np
from torch import nn

def clients():
    rng = np.random.default_rng(0)
    return {f"p{n}": (rng.normal(size=(n, 4)).astype("float32"), np.arange(n) % 2) for n in (3, 5, 8)}, clients_test()

def clients_test():
    return np.zeros((4, 4), "float32"), np.array([0, 1, 0, 1])

def net():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_clients.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("their_clients", None)


@pytest.mark.usefixtures("module")
def test_the_command_line_takes_clients_from_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    named = "--model their_clients:net --clients their_clients:clients"
    words = f"{named} --rounds 1 --json --out run".split(" ")
    assert program(["run", *words]) == 0
    assert '"partition":"natural"' in capsys.readouterr().out.replace(" ", "")
    assert program(["run", *words, "--resume", "--rounds", "1"]) == 0
    assert program(["run", "--clients", "their_clients:clients"]) == 2
    assert "clients needs a model of your own" in capsys.readouterr().err


def test_nothing_is_copied_of_arrays_that_fit() -> None:
    found = read_clients(CLIENTS, TEST, Reader())
    part = found.train.view(np.arange(1, 8))  # bob's
    assert np.shares_memory(part.inputs, CLIENTS["bob"][0])


def test_a_run_is_resumed_with_its_own_clients_only(tmp_path: Path) -> None:
    run("fedavg", clients=CLIENTS, out=tmp_path / "run")
    others = {**CLIENTS, "bob": points(7, 99)}
    with pytest.raises(SettingError, match="another configuration: its digest"):
        api.start(
            api.make_request(
                "fedavg",
                {"rounds": 3, "lr": 0.2, "batch": 8, "executor": "plain"},
                api.Own(model=net(), clients=others, test=TEST),
            ),
            tmp_path / "run",
            resume=True,
        )
