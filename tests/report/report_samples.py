"""Hand-made and made-up runs: small ones to compute by hand, and a fleet that looks like a real comparison."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpmt.records import DeviceRecord, ResultRecord, RoundRecord, RunRecord

if TYPE_CHECKING:
    from fedpmt.records import Outcome

LAYERS = {"fc1": 78_500, "fc2": 40_200, "fc3": 20_100, "fc4": 10_050, "fc5": 510}
SPEEDS = (0.2, 0.25, 1 / 3, 0.5, 1.0)
SETTINGS: dict[str, Any] = {
    "method": "fedpmt", "task": "fcnn-mnist", "data": "embedded", "data_dir": None,
    "partition": "iid", "partition_seed": 0,
    "devices": 50, "samples": 80, "cohort": 10, "sampling": "stratified", "levels": "1/5,1/4,1/3,1/2,1",
    "level_draw": "fixed", "availability": 1.0, "failure": 0.0, "over_select": 1.0, "assign": "deadline",
    "deadline": 26.5, "full_seconds": 10.0, "mode": "exact", "prefix": "cache", "depths": None, "splitting": "server",
    "epochs": 1, "batch": 10, "lr": 0.05, "schedule": "constant", "momentum": 0.0, "weight_decay": 0.0, "rounds": 60,
    "seed": 0, "workers": 0, "executor": "auto", "eval_every": 1, "target": None, "time_budget": None,
    "checkpoint_seconds": 10.0, "options": {},
}  # fmt: skip


def device(number: int = 1, outcome: Outcome = "arrived", **values: Any) -> DeviceRecord:
    return DeviceRecord(
        **{
            "device": number,
            "level": 1,
            "speed": 1.0,
            "part": "depth 1",
            "samples": 80,
            "seconds": 5.0,
            "outcome": outcome,
            **values,
        }
    )


def step(number: int, score: float | None, **values: Any) -> RoundRecord:
    """A round of ten seconds and a hundred bytes, for numbers that are easy to add."""
    plain: dict[str, Any] = {
        "round": number, "virtual_seconds": 10.0 * number, "round_seconds": 10.0, "bytes_up": 100, "bytes_down": 200,
        "operations": 1000.0, "layers": {"fc1": 1, "fc2": 2}, "devices": (device(1), device(2)), "score": score,
    }  # fmt: skip
    return RoundRecord(**{**plain, **values})


def run(
    scores: list[float | None],
    name: str = "run",
    finished: bool = True,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> RunRecord:
    steps = tuple(step(number, score) for number, score in enumerate(scores, 1))
    return wrap(steps, {**(SETTINGS if settings is None else settings), **changes}, name, finished)


def wrap(
    steps: tuple[RoundRecord, ...], settings: dict[str, Any], name: str, finished: bool = True
) -> RunRecord:
    known = [one for one in steps if one.score is not None]
    last = known[-1] if known else step(0, None)
    result = ResultRecord(
        method=settings.get("method", "?"), task=settings.get("task", "?"),
        seed=settings.get("seed", 0), rounds=len(steps),
        score=last.score, score_name=last.score_name, maximize=last.maximize,
        virtual_seconds=steps[-1].virtual_seconds if steps else 0.0,
        bytes_up=sum(one.bytes_up for one in steps), bytes_down=sum(one.bytes_down for one in steps),
        operations=sum(one.operations for one in steps), weights_sha256="0" * 64,
    )  # fmt: skip
    return RunRecord(
        folder=Path("runs") / name, settings=settings, rounds=steps, result=result if finished else None
    )


METHODS = {
    # method: rounds to the half of its rise, final accuracy, share of the model's operations per level
    "fedpmt": (6.0, 0.955, (0.50, 0.58, 0.72, 0.90, 1.0)),
    "fedavg": (9.0, 0.93, (1.0, 1.0, 1.0, 1.0, 1.0)),
    "feddrop": (12.0, 0.915, (0.50, 0.58, 0.72, 0.90, 1.0)),
}


def comparison(
    rounds: int = 60, seeds: int = 2, partitions: tuple[str, ...] = ("iid", "classes:2"), links: bool = True
) -> list[RunRecord]:
    """Three methods, as they might come out of one experiment; the same numbers on each call."""
    return [
        invented(method, partition, seed, rounds, links)
        for method in METHODS
        for partition in partitions
        for seed in range(seeds)
    ]


def invented(method: str, partition: str, seed: int, rounds: int = 60, links: bool = True) -> RunRecord:
    draw = random.Random(f"{method} {partition} {seed}")
    half, ceiling, shares = METHODS[method]
    if partition != "iid":
        half, ceiling = half * 1.7, ceiling - 0.06
    ceiling += draw.uniform(-0.008, 0.008)
    clock, steps = 0.0, []
    for number in range(1, rounds + 1):
        devices = tuple(_device(draw, method, position, shares, links) for position in range(10))
        arrived = [one for one in devices if one.outcome == "arrived"]
        lasted = 26.5 if len(arrived) < 10 else max(one.seconds for one in devices)
        clock += lasted
        rough = draw.gauss(0, 0.006 if partition == "iid" else 0.025) * (1 + 6 / number)
        accuracy = min(0.999, max(0.05, 0.1 + (ceiling - 0.1) * number / (number + half / 2) + rough))
        depth = [min(5, one.level) if method == "fedpmt" else 5 for one in arrived]
        steps.append(
            RoundRecord(
                round=number, virtual_seconds=clock, round_seconds=lasted,
                bytes_up=sum(one.bytes_up for one in devices),
                bytes_down=sum(one.bytes_down for one in devices), overhead_bytes=40,
                operations=sum(one.operations for one in devices),
                wasted_operations=sum(one.operations for one in devices if one.outcome != "arrived"),
                learning_rate=0.05,
                layers={name: sum(5 - place <= depth for depth in depth) for place, name in enumerate(LAYERS)},
                devices=devices, score=accuracy, loss=2.3 * (1 - accuracy),
                score_by_level={
                    str(level): accuracy - 0.03 * (5 - level) * (partition != "iid" and method != "fedpmt")
                    for level in range(1, 6)
                },
                score_by_class={str(one): min(1.0, max(0.0, accuracy + draw.gauss(0, 0.03))) for one in range(10)},
            )
        )  # fmt: skip
    settings = {**SETTINGS, "method": method, "partition": partition, "seed": seed, "rounds": rounds}
    return wrap(tuple(steps), settings, f"{method}-{partition.replace(':', '-')}-{seed}")


def _device(
    draw: random.Random, method: str, position: int, shares: tuple[float, ...], links: bool
) -> DeviceRecord:
    level = position // 2 + 1
    speed, share = SPEEDS[level - 1], shares[level - 1]
    transfer = draw.uniform(0.8, 2.2) if links else 0.0
    seconds = 10.0 * share / speed * (0.82 if links else 1.0) + transfer
    outcome: Outcome = "arrived" if seconds <= 26.5 else "late"
    if outcome == "arrived" and draw.random() < 0.03:
        outcome = "failed"
    trained = sum(list(LAYERS.values())[-level:]) if method == "fedpmt" else int(sum(LAYERS.values()) * share)
    part = {"fedpmt": f"depth {level}", "fedavg": "full", "feddrop": f"keep {share**0.5:.2f}"}[method]
    return DeviceRecord(
        device=draw.randrange(5) + 5 * position, level=level, speed=speed, part=part, samples=80, seconds=seconds,
        transfer_seconds=transfer, outcome=outcome, bytes_up=4 * trained if outcome == "arrived" else 0,
        bytes_down=4 * (sum(LAYERS.values()) if method != "feddrop" else trained),
        operations=0.0 if outcome == "late" else 80 * 3 * sum(LAYERS.values()) * share,
    )  # fmt: skip
