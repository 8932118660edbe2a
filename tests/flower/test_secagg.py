"""Secure aggregation with unequal layer sets: the plain mean but for quantisation, and no layer of too few devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from bad_replies import EMPTY_ZIP
from deployments import NARROW, PARTS, RUN, WIDE, InProcessGrid, assert_close, deploy, model_of, nodes_of
from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord
from torch import nn

from fedpmt import api
from fedpmt.cli.main import program
from fedpmt.flower import apps, node_problem, strategy
from fedpmt.flower.deployment import read_app, summable
from fedpmt.flower.secure import sealed
from fedpmt.flower.secure.layer_vector import Cover, read_cover
from fedpmt.methods.averaging import Averaged, MeanFold, PartAveraging
from fedpmt.methods.base import Round
from fedpmt.parts.part import Whole
from fedpmt.seeds import Seeds
from fedpmt.training.messages import Client
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from flwr.app import RecordDict
    from torch import Tensor

    from fedpmt.records import RunRecord

    Tamper = Callable[[Message, Message], Message | None]

OWN_CHOICE: dict[str, Any] = {"splitting": "device", "options": {"weight": "uniform"}}
"""Option II, with weights that tell nothing."""


def device_of(question: Message) -> int:
    """Nodes have other names than devices."""
    ids = {node: config["partition-id"] for node, config in nodes_of(RUN["devices"]).items()}
    return int(ids[question.metadata.dst_node_id])


def failing(devices: Collection[int], kind: str = "train") -> Tamper:
    def tamper(question: Message, answer: Message) -> Message:
        bad = question.metadata.message_type == kind and device_of(question) in devices
        return Message(Error(2, "battery is empty"), reply_to=question) if bad else answer

    return tamper


def outcomes(run: RunRecord, number: int = 0) -> list[str]:
    return [one.outcome for one in run.rounds[number].devices]


def opened_groups(grid: InProcessGrid) -> list[list[int]]:
    """What nodes were asked to open, question by question."""
    asked: list[Any] = [
        one.question.config_records["secagg"] for one in grid.traffic if one.kind == "train.open"
    ]
    return [list(one["groups"]) for one in asked]


def layers_of() -> list[list[str]]:
    """The tensors of each layer, first layer first."""
    structure = api.paper_problem_of(api.settings_of(RUN)).model.structure
    return [list(layer.tensors) for layer in structure.layers]


def untrained(tmp_path: Path) -> dict[str, Tensor]:
    """The weights before the first round."""
    api.run(**{**RUN, "lr": 0.0}, out=tmp_path / "untrained" / "run")
    return model_of(tmp_path / "untrained")


def test_the_sum_is_the_plain_mean_of_each_layer(tmp_path: Path) -> None:
    plain, _ = deploy(tmp_path / "plain", RUN)
    secure, grid = deploy(tmp_path / "secure", RUN, secagg=True)
    assert [one.part for one in plain.rounds[0].devices] == PARTS
    assert [one.part for one in secure.rounds[0].devices] == PARTS
    assert outcomes(secure) == ["arrived"] * 4
    assert list(secure.rounds[0].layers.values()) == list(plain.rounds[0].layers.values()) == [2, 2, 4, 4, 4]
    assert secure.rounds[0].metrics["layers_held_back"] == 0
    assert_close(model_of(tmp_path / "secure"), model_of(tmp_path / "plain"))
    # Everybody sends as much as everybody else, whatever it trained: a word for each weight, and the cover.
    entries = sum(tensor.numel() for tensor in model_of(tmp_path / "plain").values())
    assert {one.bytes_up for one in secure.rounds[0].devices} == {4 * (entries + 2 * 5)}
    sent = [one.reply for one in grid.traffic if one.kind == "train"]
    assert all(set(one.array_records) == {"masked"} and not one.metric_records for one in sent)


def unequal(settings: Any) -> Any:
    """A small net of three layers; device k holds 8 + 4 k samples."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def shard(device: int) -> tuple[np.ndarray, np.ndarray]:
        mine = slice(4 * device, 8 * device + 8)
        return inputs[mine], targets[mine]

    return node_problem(settings, net, test=(inputs, targets), shard=shard)


def test_devices_of_unequal_weight_and_several_rounds(tmp_path: Path) -> None:
    given = {**RUN, "rounds": 3, "depths": 3}
    deploy(tmp_path / "plain", given, apps=apps(unequal))
    secure, _ = deploy(tmp_path / "secure", given, apps=apps(unequal), secagg=True)
    assert [one.samples for one in secure.rounds[0].devices] == [8, 12, 16, 20]
    assert all(outcomes(secure, number) == ["arrived"] * 4 for number in range(3))
    plain = model_of(tmp_path / "plain")
    for name, tensor in model_of(tmp_path / "secure").items():
        torch.testing.assert_close(tensor, plain[name], atol=1e-6, rtol=1e-5)


def test_the_same_seed_gives_the_same_bits_whatever_the_masks(tmp_path: Path) -> None:
    first, second = (deploy(tmp_path / name, RUN, secagg=True)[0].result for name in ("first", "second"))
    assert first is not None
    assert second is not None
    assert first.weights_sha256 == second.weights_sha256


@pytest.mark.parametrize("kind", ["train.keys", "train.shares", "train"])
def test_a_narrow_device_that_fails_in_the_middle(kind: str, tmp_path: Path) -> None:
    plain, _ = deploy(tmp_path / "plain", RUN, failing([NARROW[0]]))
    secure, _ = deploy(tmp_path / "secure", RUN, failing([NARROW[0]], kind), secagg=True)
    assert outcomes(secure) == outcomes(plain) == ["arrived", "failed", "arrived", "arrived"]
    assert secure.rounds[0].devices[1].reason == "error 2: battery is empty"
    assert list(secure.rounds[0].layers.values()) == [2, 2, 3, 3, 3]
    assert_close(model_of(tmp_path / "secure"), model_of(tmp_path / "plain"))


def test_a_device_that_fails_when_the_sum_is_opened_is_in_it(tmp_path: Path) -> None:
    deploy(tmp_path / "plain", RUN)
    secure, _ = deploy(tmp_path / "secure", RUN, failing([NARROW[0]], "train.open"), secagg=True)
    assert outcomes(secure) == ["arrived"] * 4
    assert_close(model_of(tmp_path / "secure"), model_of(tmp_path / "plain"))


def test_layers_of_too_few_devices_keep_their_bits_and_are_never_opened(tmp_path: Path) -> None:
    """A wide device fails: the first two layers are one device's alone."""
    deploy(tmp_path / "plain", RUN, failing([WIDE[1]]))
    secure, grid = deploy(tmp_path / "secure", RUN, failing([WIDE[1]]), secagg=True)
    assert outcomes(secure) == ["arrived", "arrived", "arrived", "failed"]
    assert list(secure.rounds[0].layers.values()) == [1, 1, 3, 3, 3]
    assert secure.rounds[0].metrics["layers_held_back"] == 2
    ours, plain, before = (
        model_of(tmp_path / "secure"),
        model_of(tmp_path / "plain"),
        untrained(tmp_path),
    )
    first, second, *others = layers_of()
    held = {*first, *second}
    assert all(torch.equal(ours[name], before[name]) for name in held)
    assert not any(torch.equal(plain[name], before[name]) for name in held)
    names = [name for tensors in others for name in tensors]
    assert_close({name: ours[name] for name in names}, {name: plain[name] for name in names})
    opened = opened_groups(grid)
    assert opened == [[0, 3, 4, 5]] * 3


def test_the_assignment_leaves_out_what_would_not_be_opened(tmp_path: Path) -> None:
    """Three devices are wanted and two are wide: these train no more than the others."""
    secure, _ = deploy(tmp_path / "secure", RUN, secagg=True, min_devices=3)
    assert [one.part for one in secure.rounds[0].devices] == [
        "depth 4 less 2 layers",
        *PARTS[1:3],
        "depth 4 less 2 layers",
    ]
    assert list(secure.rounds[0].layers.values()) == [0, 0, 4, 4, 4]
    wide, narrow = (secure.rounds[0].devices[device] for device in (WIDE[0], NARROW[0]))
    assert wide.operations == narrow.operations
    ours, before = model_of(tmp_path / "secure"), untrained(tmp_path)
    first, second, *others = layers_of()
    assert all(torch.equal(ours[name], before[name]) for name in (*first, *second))
    assert not any(torch.equal(ours[name], before[name]) for names in others for name in names)


def test_with_too_few_shares_nothing_is_opened_and_the_model_stays(tmp_path: Path) -> None:
    secure, _ = deploy(tmp_path / "secure", RUN, failing([0, 1], "train.open"), secagg=True)
    assert outcomes(secure) == ["failed"] * 4
    assert all("are left, 3 are needed" in one.reason for one in secure.rounds[0].devices)
    # Nobody knows what is in a sum that was not opened.
    assert set(secure.rounds[0].layers.values()) == {0}
    assert "layers_held_back" not in secure.rounds[0].metrics
    ours, before = model_of(tmp_path / "secure"), untrained(tmp_path)
    assert all(torch.equal(ours[name], tensor) for name, tensor in before.items())


def test_a_round_with_too_few_devices_goes_by(tmp_path: Path) -> None:
    nodes = {node: config for node, config in nodes_of(4).items() if config["partition-id"] == 2}
    secure, grid = deploy(tmp_path / "secure", RUN, nodes=nodes, secagg=True)
    (one,) = secure.rounds[0].devices
    assert (one.outcome, one.reason) == ("failed", "no sum: 1 of min-devices = 2 are there for it")
    assert {one.kind for one in grid.traffic} == {"query"}


def test_with_option_two_nobody_learns_who_trained_what(tmp_path: Path) -> None:
    given = {**RUN, **OWN_CHOICE}
    speeds = {
        node: {**config, "speed": 1.0 if config["partition-id"] in WIDE else 0.5}
        for node, config in nodes_of(4).items()
    }
    plain, _ = deploy(tmp_path / "plain", given, nodes=speeds)
    secure, grid = deploy(tmp_path / "secure", given, nodes=speeds, secagg=True)
    assert [one.part for one in plain.rounds[0].devices] == PARTS
    assert [one.part for one in secure.rounds[0].devices] == ["hidden"] * 4
    assert list(secure.rounds[0].layers.values()) == [2, 2, 4, 4, 4]
    assert_close(model_of(tmp_path / "secure"), model_of(tmp_path / "plain"))
    described = [one.reply.config_records["node"] for one in grid.traffic if one.kind == "query"]
    assert all(set(one) == {"device", "samples"} for one in described)
    replies = [one.reply for one in grid.traffic if one.kind == "train"]
    assert all(set(one.config_records["reply"]) == {"run", "round", "device", "samples"} for one in replies)
    lengths = {one.up for one in grid.traffic if one.kind == "train"}
    assert max(lengths) - min(lengths) < 50  # digits of node names; a narrow part is megabytes shorter
    # The counts first, and the layers once they are known.
    opened = opened_groups(grid)
    assert opened == [[0]] * 4 + [[0, 1, 2, 3, 4, 5]] * 4


def test_with_option_two_a_layer_of_one_device_stays_shut(tmp_path: Path) -> None:
    given = {**RUN, **OWN_CHOICE}
    speeds = {
        node: {**config, "speed": 1.0 if config["partition-id"] == WIDE[0] else 0.5}
        for node, config in nodes_of(4).items()
    }
    secure, grid = deploy(tmp_path / "secure", given, nodes=speeds, secagg=True)
    assert list(secure.rounds[0].layers.values()) == [1, 1, 4, 4, 4]
    opened = opened_groups(grid)
    assert {group for groups in opened for group in groups} == {0, 3, 4, 5}
    ours, before = model_of(tmp_path / "secure"), untrained(tmp_path)
    first, second, *_ = layers_of()
    assert all(torch.equal(ours[name], before[name]) for name in (*first, *second))


def test_with_option_two_weights_do_not_tell_who_trained_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices hold unequal counts, which the server knows; the weights of a layer that it opens are one for each."""
    opened: list[Cover] = []

    def noting(words: Any) -> Cover:
        opened.append(read_cover(words))
        return opened[-1]

    monkeypatch.setattr(sealed, "read_cover", noting)
    given = {**RUN, **OWN_CHOICE, "depths": 3}
    plainly, _ = deploy(tmp_path / "plain", given, apps=apps(unequal))
    secure, _ = deploy(tmp_path / "secure", given, apps=apps(unequal), secagg=True)
    assert [one.samples for one in secure.rounds[0].devices] == [8, 12, 16, 20]
    assert len({one.part for one in plainly.rounds[0].devices}) > 1
    assert len(opened) == 2
    assert all((cover.weights == cover.counts).all() for cover in opened)
    plain = model_of(tmp_path / "plain")
    for name, tensor in model_of(tmp_path / "secure").items():
        torch.testing.assert_close(tensor, plain[name], atol=1e-6, rtol=1e-5)


class Clock:
    """Time as the test tells it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def timed(clock: Clock, answer_seconds: float = 8.0) -> type[InProcessGrid]:
    """Nodes need a while for each answer, and whoever is silent is waited for to the end."""

    class Timed(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            asked = list(messages)
            assert timeout is not None
            if timeout < answer_seconds:
                clock.now += timeout if asked else 0.0
                return []
            replies = super().send_and_receive(asked, timeout=timeout)
            clock.now += 0.0 if not asked else answer_seconds if len(replies) == len(asked) else timeout
            return replies

    return Timed


def test_one_silent_node_does_not_cost_the_others_their_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(question: Message, answer: Message) -> Message | None:
        lost = question.metadata.message_type == "train.keys" and device_of(question) == NARROW[0]
        return None if lost else answer

    clock = Clock()
    monkeypatch.setattr(strategy, "time", clock)
    given = {**RUN, "deadline": 60.0, "full_seconds": 60.0}
    secure, _ = deploy(tmp_path, given, silent, kind=timed(clock), secagg=True)
    assert outcomes(secure) == ["arrived", "late", "arrived", "arrived"]
    assert secure.rounds[0].devices[1].reason == "no reply within 15 seconds"
    assert clock.now < 60.0 + 8.0


def test_a_round_whose_time_is_over_before_the_tasks_go_out_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def slow(question: Message, answer: Message) -> Message:
        clock.now += 20.0 if question.metadata.message_type == "train.shares" else 0.0
        return answer

    monkeypatch.setattr(strategy, "time", clock)
    given = {**RUN, "deadline": 60.0, "full_seconds": 60.0}
    secure, grid = deploy(tmp_path, given, slow, kind=timed(clock), secagg=True)
    assert outcomes(secure) == ["late"] * 4
    assert {one.reason for one in secure.rounds[0].devices} == {"no time left for training"}
    assert not [one for one in grid.traffic if one.kind == "train"]


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_other_methods_of_whole_layers(method: str, tmp_path: Path) -> None:
    deploy(tmp_path / "plain", {**RUN, "method": method})
    secure, _ = deploy(tmp_path / "secure", {**RUN, "method": method}, secagg=True)
    assert outcomes(secure) == ["arrived"] * 4
    assert_close(model_of(tmp_path / "secure"), model_of(tmp_path / "plain"))


def test_a_server_optimizer_steps_by_the_mean_and_leaves_held_back_layers_alone(tmp_path: Path) -> None:
    """In the second round a wide device fails: the first two layers have a velocity by then, and do not move by it."""

    def failing_then(question: Message, answer: Message) -> Message:
        trains = question.metadata.message_type == "train"
        second = trains and question.content.config_records["task"]["round"] == 1
        bad = second and device_of(question) == WIDE[1]
        return Message(Error(2, "battery is empty"), reply_to=question) if bad else answer

    given = {**RUN, "server_optimizer": "momentum", "server_momentum": 0.9, "server_lr": 0.3, "eval_every": 9}
    deploy(tmp_path / "plain", {**given, "rounds": 1})
    deploy(tmp_path / "one", {**given, "rounds": 1}, secagg=True)
    two, _ = deploy(tmp_path / "two", {**given, "rounds": 2}, failing_then, secagg=True)
    assert [step.metrics["layers_held_back"] for step in two.rounds] == [0, 2]
    one, after = model_of(tmp_path / "one"), model_of(tmp_path / "two")
    assert_close(one, model_of(tmp_path / "plain"))
    first, second, *others = layers_of()
    assert all(torch.equal(after[name], one[name]) for name in (*first, *second))
    assert not any(torch.equal(after[name], one[name]) for names in others for name in names)


def test_differential_privacy_goes_with_it(tmp_path: Path) -> None:
    given = {**RUN, "dp_clip": 0.1, "dp_noise": 0.01}
    secure, _ = deploy(tmp_path / "secure", given, secagg=True)
    assert outcomes(secure) == ["arrived"] * 4
    assert secure.rounds[0].metrics["epsilon"] > 0


def changed(**changes: Any) -> Callable[[RecordDict], None]:
    def change(records: RecordDict) -> None:
        records["reply"] = ConfigRecord({**records.config_records["reply"], **changes})

    return change


def other_group(found: Array | None) -> Callable[[RecordDict], None]:
    def change(records: RecordDict) -> None:
        arrays = records.array_records["masked"]
        if found is None:
            del arrays["5"]
        else:
            arrays["5"] = found

    return change


def more(records: RecordDict) -> None:
    records["metrics"] = MetricRecord({"train_loss": 1.0})


def retyped(records: RecordDict) -> None:
    arrays = records.array_records["masked"]
    arrays["5"] = Array(arrays["5"].numpy().astype(np.float32))


def archive(records: RecordDict) -> None:
    arrays = records.array_records["masked"]
    true = arrays["5"]
    arrays["5"] = Array(true.dtype, true.shape, true.stype, EMPTY_ZIP)


def truncated(records: RecordDict) -> None:
    arrays = records.array_records["masked"]
    true = arrays["5"]
    arrays["5"] = Array(true.dtype, true.shape, true.stype, Array(np.zeros(3, np.uint32)).data)


def garbage(records: RecordDict) -> None:
    arrays = records.array_records["masked"]
    true = arrays["5"]
    arrays["5"] = Array(true.dtype, true.shape, true.stype, b"\x80\x04garbage")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (changed(run="other"), "it names run 'other'"),
        (changed(round=7), "it names round '7'"),
        (changed(device=0), "it names device '0'"),
        (changed(samples=10**6), "it trained on 1000000 samples, not 20"),
        (changed(label="depth 4"), "it trained 'depth 4'"),
        (changed(note="x"), "what it says with note"),
        (more, "it says more than it was asked"),
        (other_group(None), "tensors of masked without 5"),
        (other_group(Array(np.zeros(3, np.uint32))), "masked '5' has shape (3,)"),
        (retyped, "masked '5' is of type float32, not uint32"),
        (other_group(Array(np.zeros(10**6, np.uint32))), "bytes, where"),
        (truncated, "masked '5' is not what its header says"),
        (garbage, "masked cannot be read"),
        (archive, "masked is not an array"),
    ],
)
def test_a_bad_masked_reply_is_refused_and_the_sum_is_of_the_others(
    spoil: Callable[[RecordDict], None], reason: str, tmp_path: Path
) -> None:
    def tamper(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train" and device_of(question) == NARROW[0]:
            spoil(answer.content)
        return answer

    secure, _ = deploy(tmp_path / "secure", RUN, tamper, secagg=True)
    assert outcomes(secure) == ["arrived", "refused", "arrived", "arrived"]
    assert reason in secure.rounds[0].devices[1].reason
    assert list(secure.rounds[0].layers.values()) == [2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("group", "word", "reason"),
    [
        ("0", 1, "no sum: devices have not trained the layers that they were assigned"),
        ("5", 2**30, "no sum: the mean update has norm"),
    ],
)
def test_a_sum_that_cannot_be_right_is_not_taken(group: str, word: int, reason: str, tmp_path: Path) -> None:
    """Nobody can see whose vector was wrong under its mask, but the sum shows that one was."""

    def tamper(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train" and device_of(question) == NARROW[0]:
            arrays = answer.content.array_records["masked"]
            arrays[group] = Array(arrays[group].numpy() + np.uint32(word))
        return answer

    secure, _ = deploy(tmp_path / "secure", RUN, tamper, secagg=True, update_limit=1.0)
    assert outcomes(secure) == ["failed"] * 4
    assert all(one.reason.startswith(reason) for one in secure.rounds[0].devices)


def test_a_node_sends_nothing_in_clear_where_a_sum_is_promised(tmp_path: Path) -> None:
    """A server that leaves out the letters gets no update."""
    original = sealed.Sealed.write

    def without(self: sealed.Sealed, order: Any) -> RecordDict:
        records = original(self, order)
        del records["secagg"]
        return records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed.Sealed, "write", without)
        secure, grid = deploy(tmp_path, RUN, secagg=True)
    assert outcomes(secure) == ["failed"] * 4
    assert not [one for one in grid.traffic if one.kind == "train"]


REFUSED = [
    (["--method", name], f"method = '{name}' is refused with secagg: its parts are entries of layers")
    for name in ("feddrop", "heterofl", "fedrolex", "ist", "slimfl")
]
REFUSED += [
    (["--method", name], f"method = '{name}' is refused with secagg: it needs each device's reply")
    for name in ("scaffold", "fedmp", "prunefl", "feddf", "fedgen", "fjord")
]
REFUSED += [
    (["--min-devices", "1"], "min-devices = '1' is refused: input should be greater than or equal to 2"),
    (["--min-devices", "6"], "cohort = 5 is refused with secagg: min-devices = 6"),
    (["--secagg-range", "inf"], "secagg-range = 'inf' is refused"),
    (
        ["--splitting", "device"],
        "splitting = 'device' is refused with secagg: weights by samples would show who trained which layer "
        "(set fedpmt.weight=uniform)",
    ),
    (["--budget", "upload"], "budget = 'upload' is refused with secagg: every upload is as long as"),
    (
        ["--mean", "median"],
        "mean = 'median' is refused with secagg: it compares the devices' updates, and the server sees only their sum",
    ),
    (
        ["--set", "fedpmt.normalise=steps"],
        "fedpmt.normalise must be none with secagg, where the server cannot",
    ),
]


@pytest.mark.parametrize(("flags", "reason"), REFUSED)
def test_what_does_not_go_with_it_is_refused_in_one_line(
    flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["deploy", "--write-only", "--secagg", "--out", str(tmp_path / "here"), *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert reason in said
    assert "Traceback" not in said
    assert not (tmp_path / "here").exists()


def test_plain_flwr_run_refuses_it_too(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="method = 'scaffold' is refused with secagg"):
        deploy(tmp_path, {**RUN, "method": "scaffold"}, secagg=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", summable())
def test_methods_whose_layers_add_up_train_whole_tensors(name: str) -> None:
    """What a method says of its sums is what its parts are."""
    given = api.settings_of({**RUN, "method": name})
    method, structure = api.method_of(given), api.paper_problem_of(given).model.structure
    assert isinstance(method, PartAveraging)
    free = cast("Any", None)  # nothing is priced without a budget
    round_ = Round(0, lambda part: free, Seeds(0, 0))
    assert type(method.fold(Averaged(structure, {}), round_)) is MeanFold
    assert method.rule == "overlap"
    offer = method.offer(Averaged(structure, {}), Client(0, None, None, 20, 2), round_)
    assert all(isinstance(selection, Whole) for part in offer for selection in part.trained.values())


def test_a_settings_file_and_a_resume_keep_it(tmp_path: Path) -> None:
    out, file = tmp_path / "here", tmp_path / "run.toml"
    file.write_text('secagg = true\nmin-devices = 3\nmethod = "fedavg"\n')
    begin = ["deploy", "--write-only", "--out", str(out), "--config", str(file), "--secagg-range", "2"]
    assert program(begin) == 0
    found = read_app(out / "app")
    assert (found["secagg"], found["min_devices"], found["secagg_range"]) == (True, 3, 2.0)
    api.run(**RUN, out=out / "run")
    assert program(["deploy", "--write-only", "--out", str(out), "--resume"]) == 0
    found = read_app(out / "app")
    assert (found["secagg"], found["min_devices"], found["secagg_range"]) == (True, 3, 2.0)
