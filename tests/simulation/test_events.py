"""The clock of events: who starts and ends when, what the server folds, and what a kill in between leaves behind."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from matplotlib.patches import Rectangle
from torch import nn

import fedpmt
from fedpmt import api
from fedpmt.data.sets import embedded
from fedpmt.methods.averaging import why_rounds
from fedpmt.methods.registry import METHODS, method_class
from fedpmt.records import CHECKPOINT
from fedpmt.report.figures import busy, choose_round
from fedpmt.report.groups import group_runs
from fedpmt.simulation.assemble import assemble
from fedpmt.simulation.callbacks import scalars
from fedpmt.simulation.checkpoint import read_value
from fedpmt.testing.bench import Bench, samples
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fedpmt.records import DeviceRecord, RunRecord

SMALL: dict[str, Any] = {
    "devices": 10,
    "samples": 20,
    "cohort": 5,
    "batch": 10,
    "rounds": 6,
    "lr": 0.1,
    "eval_every": 9,
}
EVENTS: dict[str, Any] = {**SMALL, "clock": "events"}


@pytest.fixture(autouse=True, scope="module")
def _read_once() -> Iterator[None]:
    """Reading the built-in images is most of what a tiny run takes."""
    with mock.patch.object(embedded, "_table", functools.cache(embedded._table)):
        yield


def replies(run: RunRecord) -> list[DeviceRecord]:
    return [device for record in run.rounds for device in record.devices]


def weights(run: RunRecord) -> str:
    assert run.result is not None
    return run.result.weights_sha256


# Who starts and ends when


def test_two_devices_by_hand() -> None:
    """One takes 10 s and one 20 s, and the server steps at each reply.

    The fast one replies at 10 and starts again from version 1. At 20 both are ready: the slow one, which started
    first, makes version 2, and the fast one, then a step late, version 3 in the same instant.
    """
    run = fedpmt.run(
        "fedavg", fleet=[1.0, 0.5], samples=20, cohort=2, batch=10, rounds=5, clock="events", buffer=1
    )
    found = [
        (record.virtual_seconds, one.device, one.started, one.version, one.staleness)
        for record in run.rounds
        for one in record.devices
    ]
    assert found == [
        (10, 0, 0, 0, 0),
        (20, 1, 0, 0, 1),
        (20, 0, 10, 1, 1),
        (30, 0, 20, 3, 0),
        (40, 1, 20, 2, 2),
    ]
    assert [record.round_seconds for record in run.rounds] == [10, 10, 0, 10, 10]


def test_places_are_filled_at_once_and_no_device_twice() -> None:
    run = fedpmt.run("fedavg", **{**EVENTS, "rounds": 20, "buffer": 2, "concurrency": 4})
    spans = [(one.started or 0.0, (one.started or 0.0) + one.seconds, one.device) for one in replies(run)]
    assert len({one.device for one in replies(run)}) == 10
    end = run.rounds[-1].virtual_seconds
    for moment in (start for start, _, _ in spans if start < end / 2):
        busy = [device for start, stop, device in spans if start <= moment < stop]
        assert len(busy) == len(set(busy)) <= 4
    assert all(
        one.staleness == record.round - 1 - (one.version or 0)
        for record in run.rounds
        for one in record.devices
    )


def test_a_buffer_may_be_larger_than_the_devices_at_work() -> None:
    """Both reply in the same instant and start again, twice, before the server steps."""
    run = fedpmt.run("fedavg", **{**EVENTS, "rounds": 3}, buffer=4, concurrency=2, levels="1")
    assert [len(record.devices) for record in run.rounds] == [4, 4, 4]
    assert [record.round_seconds for record in run.rounds] == [20, 20, 20]


def test_levels_are_started_in_turn_where_they_are_drawn() -> None:
    run = fedpmt.run("fedavg", **{**EVENTS, "rounds": 30}, buffer=1, level_draw="round")
    started = sorted((one.started or 0.0, one.device, one.level) for one in replies(run))[:20]
    assert all(3 <= sum(level == wanted for _, _, level in started) <= 5 for wanted in range(1, 6))


def test_the_server_steps_every_interval_and_hands_out_work_only_then() -> None:
    run = fedpmt.run("fedavg", **EVENTS, step_every=25)
    assert [record.virtual_seconds for record in run.rounds] == [25 * step for step in range(1, 7)]
    assert {(one.started or 0.0) % 25 for one in replies(run)} == {0}
    assert {one.staleness for one in replies(run)} == {0, 1}  # the slowest need 50 s
    half = fedpmt.run("fedavg", **EVENTS, step_every="fastest:0.5")
    assert half.rounds[0].round_seconds == 30  # 10, 20, 30, 40 and 50 s, two devices each


def test_lost_replies_take_a_place_and_are_never_folded() -> None:
    run = fedpmt.run("fedavg", **{**EVENTS, "rounds": 12}, buffer=2, failure=0.3, deadline=45)
    outcomes = {one.outcome for one in replies(run)}
    assert outcomes == {"arrived", "failed", "late"}
    assert all(sum(one.outcome == "arrived" for one in record.devices) == 2 for record in run.rounds)
    assert all(one.staleness is None and not one.bytes_up for one in replies(run) if one.outcome != "arrived")
    # Those on the slowest level are given up after 45 of 50 s; one that fails has done all of its work.
    lost = [one for one in replies(run) if one.outcome != "arrived"]
    assert max(one.seconds for one in lost) == 50
    wasted = sum(one.operations * min(1.0, 45 / one.seconds) for one in lost)
    assert sum(record.wasted_operations for record in run.rounds) == pytest.approx(wasted)


def test_a_run_ends_though_nobody_ever_arrives() -> None:
    """With speeds that may change, nobody can know it before; otherwise the run is refused."""
    run = fedpmt.run("fedavg", **{**EVENTS, "rounds": 2}, buffer=2, deadline=1, drift="1,10")
    assert {one.outcome for one in replies(run)} == {"late"}
    assert len(run.rounds) == 2
    small = [fedpmt.Device(speed=1, memory_mib=0.001, count=10)]
    for given, reason in (
        ({"deadline": 1}, "deadline must be >= 10"),
        ({"fleet": small}, "memory_mib must be larger"),
    ):
        with pytest.raises(fedpmt.SettingError, match=reason):
            fedpmt.run("fedavg", **{**EVENTS, "rounds": 2}, buffer=2, **given)


def test_whoever_cannot_be_reached_does_not_start() -> None:
    trace = [
        {"client": str(device), "start": 100 * (device // 5), "end": 100 + 100 * (device // 5)}
        for device in range(10)
    ]
    run = fedpmt.run("fedpmt", **{**EVENTS, "rounds": 40}, buffer=2, availability_trace=trace)
    for one in replies(run):
        start = one.started or 0.0
        assert 100 * (one.device // 5) <= start < 100 + 100 * (one.device // 5)
        assert one.outcome == "failed" or start + one.seconds <= 100 + 100 * (one.device // 5) + 1e-6
    assert run.result is not None
    assert run.result.stopped == "unreachable"


# What is folded


@pytest.mark.parametrize("sampling", ["stratified", "uniform"])
@pytest.mark.parametrize("method", ["fedavg", "fedpmt", "fedbuff"])
def test_equal_speeds_and_a_buffer_as_large_as_the_cohort_are_rounds(method: str, sampling: Any) -> None:
    """To the bit: all replies of a step arrive together, none of them late. All devices have as many samples."""
    same = {**SMALL, "levels": "1", "sampling": sampling}
    asynchronous = fedpmt.run(method, **same, clock="events", buffer=5, concurrency=5)
    rounds = fedpmt.run("fedpmt" if method == "fedpmt" else "fedavg", **same)
    assert weights(asynchronous) == weights(rounds)
    assert [one.virtual_seconds for one in asynchronous.rounds] == [
        one.virtual_seconds for one in rounds.rounds
    ]
    assert {one.staleness for one in replies(asynchronous)} == {0}


def fold(method: fedpmt.Method[Any, Any], late: int, discount: float) -> tuple[dict[str, torch.Tensor], ...]:
    """The model that two devices were sent, the server's meanwhile, its next one, and the devices' differences.

    The first reply is late, the second is not.
    """
    bench = Bench(method)
    sent = dict(bench.tensors)
    stale = bench.reply(0)
    bench.state = bench.aggregate([bench.reply(2)]).state
    now, fresh = dict(bench.tensors), bench.reply(1, 1)
    stale = replace(stale, staleness=late, discount=discount, sent=sent)
    after = dict(bench.aggregate([stale, fresh], 1).state.tensors)
    return sent, now, after, dict(stale.update), dict(fresh.update)


@pytest.mark.parametrize("mean", ["plain", "clipped:1000", "median"])
def test_fedbuff_discounts_what_is_late(mean: str) -> None:
    """w + (s Δ_1 + Δ_2) / K, with s = 1 / sqrt(1 + 3): not divided by the sum of discounts; of two, the median too."""
    _, now, after, stale, fresh = fold(fedpmt.FedBuff(mean=mean), 3, 0.5)
    for name, tensor in now.items():
        torch.testing.assert_close(after[name], tensor + (0.5 * stale[name] + fresh[name]) / 2)


def test_fedasync_mixes_models_and_not_differences() -> None:
    """w + α (s (w_1 - w) + (w_2 - w)) / 2, with w_1 = w_τ + Δ_1; with one reply (1 - α s) w + α s w_1."""
    sent, now, after, stale, fresh = fold(fedpmt.FedAsync(mixing=0.8), 3, 0.5)
    for name, tensor in now.items():
        theirs = sent[name] + stale[name]
        torch.testing.assert_close(after[name], tensor + 0.8 * (0.5 * (theirs - tensor) + fresh[name]) / 2)
    bench = Bench(fedpmt.FedAsync(mixing=0.8))
    reply, before = bench.reply(0), dict(bench.tensors)
    now = {name: tensor + 1 for name, tensor in before.items()}
    bench.state = replace(bench.state, tensors=now)
    after = bench.aggregate([replace(reply, staleness=3, discount=0.5, sent=before)]).state.tensors
    for name, tensor in now.items():
        torch.testing.assert_close(after[name], 0.6 * tensor + 0.4 * (before[name] + reply.update[name]))


def test_fedasync_without_a_proximal_term_is_as_before_and_with_one_stays_nearer() -> None:
    """The term is FedProx's: two steps of a device have the same bits, and its price is the same."""
    plain, near = (Bench(fedpmt.FedAsync(mu=mu), epochs=4) for mu in (0.0, 1.0))
    moved = [
        sum(float(one.square().sum()) for one in bench.reply(0).update.values()) for bench in (plain, near)
    ]
    assert moved[1] < moved[0]
    assert type(plain.method.local) is fedpmt.LocalWork
    theirs = Bench(fedpmt.FedProx(mu=1.0, partial=False), epochs=4).reply(0).update
    assert all(torch.equal(change, theirs[name]) for name, change in near.reply(0).update.items())
    assert near.task(0).offer[0].extra.step > plain.task(0).offer[0].extra.step
    given = {**SMALL, "rounds": 4}
    sha = {mu: weights(fedpmt.run(fedpmt.FedAsync(mu=mu), **given)) for mu in (0.0, 0.5)}
    assert sha[0.0] == weights(fedpmt.run("fedasync", **given)) != sha[0.5]
    with pytest.raises(SettingError, match=r"fedasync\.mu must be < 20 at a learning rate of 0\.1"):
        fedpmt.run(fedpmt.FedAsync(mu=20.0), **given)


def test_every_width_has_statistics_that_late_replies_move_less() -> None:
    """BatchNorm's are differences too: s = 1/2 moves them half as far."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    bench = Bench(fedpmt.FjORD(sizes=2), net)
    before, reply = bench.state.statistics, bench.reply(0)
    half, whole = (bench.aggregate([replace(reply, discount=s)]).state.statistics for s in (0.5, 1.0))
    assert len(before) == 2
    for group, statistics in before.items():
        for name in ("1.running_mean", "1.running_var"):
            assert not torch.equal(whole[group][name], statistics[name])
            torch.testing.assert_close(half[group][name], (statistics[name] + whole[group][name]) / 2)


def test_a_late_net_teaches_the_next_smaller_one_less() -> None:
    """InclusiveFL's m is a mean of differences; one that counts half makes half of it."""
    torch.manual_seed(0)
    hidden = [module for _ in range(4) for module in (nn.Linear(8, 8), nn.ReLU())]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), *hidden, nn.Linear(8, 3))
    bench = Bench(fedpmt.InclusiveFL(teaching=0.2), net)
    reply = bench.reply(0)
    half, whole = (bench.aggregate([replace(reply, discount=s)]).state.momentum for s in (0.5, 1.0))
    assert whole
    for name, learnt in whole.items():
        torch.testing.assert_close(half[name], learnt / 2)


def test_two_signals_of_a_device_in_one_step_fade_by_themselves() -> None:
    """SlimFL draws a gain for each reply; the first one of a device is as with rounds."""
    method = fedpmt.SlimFL(noise=1.0)
    bench = Bench(method)
    reply, round_ = bench.reply(0), bench.round(0)
    rng = round_.rng("fading", 0)
    gains = [rng.exponential() for _ in range(6)]
    counts = [method.decoded(gain, 2) for gain in gains]
    assert len(set(counts)) > 1
    found = bench.aggregate([reply] * 6).metrics
    assert [found[f"decoded_{label}"] for label in ("0.5x", "1x")] == [
        sum(count > place for count in counts) for place in (0, 1)
    ]


def test_timelyfl_asks_for_what_fits_into_the_interval() -> None:
    """Of devices that need 10 to 50 s, in 30 s the fastest trains 3 epochs and the slowest the last layers."""
    run = fedpmt.run("timelyfl", **SMALL)
    assert run.settings["step_every"] == "fastest:0.5"
    parts = {one.level: one.part for one in replies(run)}
    assert parts == {1: "depth 2", 2: "depth 3", 3: "depth 4", 4: "depth 4", 5: "depth 4, 3 epochs"}
    assert {one.staleness for one in replies(run)} == {0}
    assert all(one.seconds <= 30 * (1 + 1e-9) for one in replies(run))
    # A run of two epochs has no more of them where there is time for one alone.
    longer = fedpmt.run("timelyfl", **{**SMALL, "rounds": 2}, epochs=2, step_every=30)
    parts = {one.level: one.part for one in replies(longer)}
    assert (parts[3], parts[5]) == ("depth 4, 1 epoch", "depth 4, 3 epochs")


def test_a_late_reply_counts_by_the_rule_that_is_set() -> None:
    found = {
        rule: weights(fedpmt.run("fedbuff", **SMALL, staleness=rule))
        for rule in ("polynomial:0.5", "constant", "hinge:10,100", "hinge:10,0")
    }
    assert found["constant"] == found["hinge:10,100"]
    assert len(set(found.values())) == 3
    assert found["polynomial:0.5"] == weights(fedpmt.run("fedbuff", **SMALL))


def test_a_target_ends_a_run_and_the_result_says_when() -> None:
    """The first step whose model reaches it is the last one."""
    run = fedpmt.run("fedpmt", **{**EVENTS, "rounds": 100, "eval_every": 1}, buffer=2, target=0.3)
    result, scores = run.result, [record.score or 0.0 for record in run.rounds]
    assert result is not None
    assert result.stopped == "target"
    assert scores[-1] >= 0.3 > max(scores[:-1])
    assert result.rounds == len(run.rounds) < 100
    assert result.virtual_seconds == run.rounds[-1].virtual_seconds > 0
    assert result.score == scores[-1]


# What a kill leaves behind


def base_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 3))


TROUBLES: dict[str, dict[str, Any]] = {
    "failures": {"failure": 0.2, "deadline": 45, "availability": 0.8},
    "levels and drift": {"level_draw": "round", "drift": "3,4"},
    "measured speeds": {"speeds": "measured", "drift": "2,5", "failure": 0.1},
    "an interval": {"buffer": None, "step_every": 22, "drift": "2,5"},
    "traces": {
        "speed_trace": [
            {"client": str(device), "time": at, "speed": 1 / (1 + (device + at) % 3)}
            for device in range(10)
            for at in (0, 40, 90)
        ]
    },
    "a frozen base": {"model": base_net},
    "models that are mixed": {"method": fedpmt.FedAsync(mu=0.1)},
    "importances of tensors": {"method": fedpmt.FedEL(balance=0.6)},
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_interrupted_and_resumed_with_the_same_devices_in_the_air(trouble: str, tmp_path: Path) -> None:
    """With one worker at first and with three afterwards; a device may start several times from one version."""
    given = {**EVENTS, "buffer": 3, "checkpoint_seconds": 1000, **TROUBLES[trouble]}
    method = given.pop("method", "fedpmt")
    if "model" in given:
        train, test = (samples(count, (1, 8, 8), seed=count) for count in (200, 40))
        arrays = {
            key: (one.inputs.numpy(), one.targets.numpy()) for key, one in (("train", train), ("test", test))
        }
        given |= {"model": given["model"](), **arrays}
    whole = fedpmt.run(method, out=tmp_path / "whole", workers=2, **given)

    def stop(record: Any) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedpmt.run(method, out=tmp_path / "parts", on_round=stop, workers=1, **given)
    flights = read_value(tmp_path / "parts" / CHECKPOINT).progress.flights
    assert flights.devices
    assert {flight.version for flight in flights.devices} == set(flights.versions)
    resumed = fedpmt.run(method, out=tmp_path / "parts", resume=True, workers=3, **given)
    assert resumed.rounds == whole.rounds
    assert weights(resumed) == weights(whole)
    later = {(one.device, one.version, one.started) for one in replies(resumed)}
    ended = [flight for flight in flights.devices if flight.ends <= whole.rounds[-2].virtual_seconds]
    assert ended
    assert {(flight.device, flight.version, flight.started) for flight in ended} <= later


def test_a_device_that_starts_twice_from_one_version_does_other_work(tmp_path: Path) -> None:
    """The fast device replies three times before the first step: other orders of its samples, other updates."""
    settings = api.settings_of(
        {
            "method": "fedavg",
            "fleet": [1.0, 0.2],
            "samples": 20,
            "cohort": 2,
            "batch": 10,
            "clock": "events",
            "buffer": 3,
        }
    )
    with assemble(settings, api.task_problem(settings), api.method_of(settings), tmp_path) as federation:
        progress, _, assignments, verdict = federation.events.open(federation.start())
        assert [(one.device.id, one.version, one.turn) for one in assignments] == [
            (0, 0, 0),
            (0, 0, 1),
            (0, 0, 2),
        ]
        found = list(federation.events.train(assignments, progress))
    assert verdict.round_seconds == 30
    sums = {float(reply.update[name].sum()) for reply in found for name in sorted(reply.update)[:1]}
    assert len(sums) == 3


@pytest.mark.parametrize(("workers", "running"), [(1, 0), (2, 3)])
def test_workers_go_on_while_the_server_steps(workers: int, running: int, tmp_path: Path) -> None:
    """Two replies a worker are under way, of which the step has taken one; a lone worker computes what is asked."""
    given = {**EVENTS, "method": "fedavg", "buffer": 1, "concurrency": 5, "workers": workers}
    settings = api.settings_of(given)
    with assemble(settings, api.task_problem(settings), api.method_of(settings), tmp_path) as federation:
        progress, _ = federation.play(federation.start())
        for _ in range(4):
            assert len(federation.events._running) == running
            progress, _ = federation.play(progress)
        for _ in range(20):
            progress, _ = federation.play(progress)
        assert not federation.events._running  # nobody waits for what comes after the last step


@pytest.mark.parametrize("given", [{}, {"optimizer": "adam", "lr": 0.002}], ids=["threads", "processes"])
def test_workers_that_are_ahead_do_not_change_the_bits(given: dict[str, Any], tmp_path: Path) -> None:
    made = {**EVENTS, "method": "fedpmt", "buffer": 2, **given}
    runs = [api.run(out=tmp_path / f"{workers}", **made, workers=workers) for workers in (1, 2, 3)]
    assert len({run.result.weights_sha256 for run in runs if run.result is not None}) == 1


def test_a_report_shows_overlaps_and_names_clocks_in_few_words() -> None:
    runs = [
        fedpmt.run("fedavg", **SMALL),
        fedpmt.run("fedbuff", **SMALL, buffer=3),
        fedpmt.run("timelyfl", **SMALL),
    ]
    assert [group.line for group in group_runs(runs)] == [
        "fedavg · clock rounds",
        "fedbuff · clock events · buffer 3",
        "timelyfl · clock events · step every fastest:0.5",
    ]
    assert [group.line for group in group_runs(runs[:2])] == [
        "fedavg · clock rounds",
        "fedbuff · clock events",
    ]
    alone, stepped, _ = choose_round(runs)
    assert alone == runs[0].rounds[-1]
    assert [one.device for one in stepped.devices] == [one.device for one in replies(runs[1])]
    assert stepped.round_seconds == runs[1].rounds[-1].virtual_seconds
    figure = busy(runs)
    shown = {round(60 * bar.get_x()) for bar in figure.axes[1].patches if isinstance(bar, Rectangle)}
    assert {round(one.started or 0.0) for one in replies(runs[1])} <= shown
    assert scalars(runs[1].rounds[-1])["staleness"] > 0
    assert "staleness" not in scalars(runs[0].rounds[-1])


# What it refuses, and what it costs

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another clock": ({"buffer": 3}, "buffer = 3 needs clock = 'events'"),
    "its rule": ({"staleness": "constant"}, "staleness = constant needs clock = 'events'"),
    "two rules": ({"clock": "events", "buffer": 3, "step_every": 5}, "the server steps by one of them"),
    "too many": ({"clock": "events", "concurrency": 11}, "concurrency = 11 is more than the fleet"),
    "over-selection": ({"clock": "events", "over_select": 1.5}, "over-select = 1.5 needs clock = 'rounds'"),
    "kept outputs": ({"clock": "events", "prefix_tolerance": 0.1}, "prefix-tolerance = 0.1 needs clock"),
    "privacy": ({"clock": "events", "dp_clip": 1.0}, "dp-clip = 1 needs clock = 'rounds'"),
    "no number": ({"clock": "events", "step_every": "soon"}, "step-every = 'soon'"),
    "no share": ({"clock": "events", "step_every": "fastest:2"}, "step-every = 'fastest:2' must be"),
    "no function": ({"clock": "events", "staleness": "linear:1"}, "staleness = 'linear:1' must be"),
    "no interval": (
        {"method": "timelyfl", "clock": "events", "buffer": 3},
        "timelyfl needs clock = 'events' and an interval (e.g. step-every = 30)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined_is_refused_in_one_line(case: str) -> None:
    given, reason = REFUSED[case]
    with pytest.raises(SettingError) as caught:
        api.make_request(
            given.get("method", "fedavg"),
            {**SMALL, **{key: one for key, one in given.items() if key != "method"}},
        )
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


ON_EVENTS = {
    "fedavg", "fedpmt", "feddrop", "heterofl", "fedrolex", "fedprox", "fedra", "fedasync", "fedbuff", "timelyfl",
    "embracingfl", "fedolf", "salf", "fedpart", "cocofl", "fedel", "fiarse", "fjord", "slimfl", "depthfl",
    "inclusivefl", "fedepth",
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_run_on_it_or_refuse_in_one_line(name: str) -> None:
    if name in ON_EVENTS:
        api.check(api.settings_of({"method": name, "clock": "events"}))
        return
    with pytest.raises(SettingError, match=f"clock = 'events' cannot be combined with {name}: .+") as caught:
        api.check(api.settings_of({"method": name, "clock": "events"}))
    assert "\n" not in str(caught.value)
    assert not method_class(name)().traits.events


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (fedpmt.DepthFL(dynamic=0.1), "its devices keep a gradient of its loss"),
        (fedpmt.InclusiveFL(teaching=0.2), ""),
        (fedpmt.FedMP(), "its bandits compare the times of a round's devices"),
        (fedpmt.FedMP(ratio=0.5), ""),
        (fedpmt.FedMP(bandit=False), ""),
        (fedpmt.PruneFL(), "its devices keep sums of squared gradients"),
        (fedpmt.FedGen(), "its server trains a generator on the classifiers of a round's devices"),
    ],
)
def test_options_decide_whether_rounds_are_needed(method: fedpmt.Method[Any, Any], reason: str) -> None:
    assert why_rounds(method) == reason


@dataclass(frozen=True)
class Silent(fedpmt.DepthFL):
    """Does not say whether its fold makes late replies count less."""

    @property
    def traits(self) -> fedpmt.Traits:
        return replace(super().traits, discounts=False)


def test_a_fold_that_may_ignore_lateness_is_refused() -> None:
    with pytest.raises(SettingError, match=r"late replies count less \(Traits\.discounts\)"):
        api.make_request(Silent(), EVENTS)


@dataclass(frozen=True)
class Choosy(fedpmt.FedAvg):
    """Asks the same two devices in every round."""

    def cohort(self, state: Any, round: Any) -> Sequence[int]:
        return [0, 1]


def test_a_method_that_chooses_its_devices_is_refused() -> None:
    with pytest.raises(SettingError, match="it chooses its devices itself"):
        api.make_request(Choosy(), EVENTS)


@pytest.mark.slow
def test_a_step_costs_what_its_replies_cost_in_a_fleet_of_a_million(tmp_path: Path) -> None:
    """Starting takes seconds; a second of one processor is worth at least 0.9 of the replies that rounds make of it."""
    fleet = {
        "devices": 1_000_000,
        "samples": 60,
        "cohort": 20,
        "partition": "iid:replace",
        "batch": 10,
        "workers": 1,
    }
    events = {"clock": "events", "buffer": 20, "concurrency": 100}
    rates: list[list[float]] = [[], []]
    with contextlib.ExitStack() as stack:
        federations, reached = [], []
        for given in ({"clock": "rounds"}, events):
            begun = time.monotonic()
            settings = api.settings_of({"method": "fedbuff", "eval_every": 1000, **fleet, **given})
            problem, method = api.task_problem(settings), api.method_of(settings)
            federations.append(stack.enter_context(assemble(settings, problem, method, tmp_path)))
            reached.append(federations[-1].play(federations[-1].start())[0])
            assert time.monotonic() - begun < 20
        # In turn, since what a second is worth changes from one to the next.
        for _ in range(10):
            for place, federation in enumerate(federations):
                first, counted = time.process_time(), 0
                for _ in range(3):
                    reached[place], record = federation.play(reached[place])
                    counted += len(record.devices)
                rates[place].append(counted / (time.process_time() - first))
    assert max(rates[1]) >= 0.9 * max(rates[0]), rates
