"""Who is asked in a round: one function (fleet, round, generator) -> device numbers, and the devices they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fedpmt.devices.fleet import Device, Fleet
    from fedpmt.methods.base import Round
    from fedpmt.settings import Settings

Sampler: TypeAlias = "Callable[[Fleet, int, np.random.Generator], np.ndarray]"

CANDIDATES = 2
"""FedCS polls more devices than it takes; this many times the cohort."""


def stratified(count: int) -> Sampler:
    """The same number from each level, |S_i| = |S| / |I|; remainders go to the levels in turn."""

    def sample(fleet: Fleet, round_index: int, rng: np.random.Generator) -> np.ndarray:
        levels = len(fleet.members)
        chosen: list[np.ndarray] = []
        for level, members in enumerate(fleet.members):
            turn = (level - round_index * (count % levels)) % levels
            wanted = count // levels + (turn < count % levels)
            chosen.append(_available(fleet, members, wanted, rng))
        cohort = np.concatenate(chosen)
        if len(cohort) < count:
            # A level too small for its share: the others make up for it.
            others = np.setdiff1d(np.arange(len(fleet)), cohort)
            cohort = np.concatenate([cohort, _available(fleet, others, count - len(cohort), rng)])
        return np.sort(cohort)

    return sample


def uniform(count: int) -> Sampler:
    """Devices uniformly at random."""

    def sample(fleet: Fleet, round_index: int, rng: np.random.Generator) -> np.ndarray:
        return np.sort(_available(fleet, None, count, rng))

    return sample


def fastest(count: int) -> Sampler:
    """Poll some devices at random and take the fastest of them (FedCS)."""

    def sample(fleet: Fleet, round_index: int, rng: np.random.Generator) -> np.ndarray:
        polled = _available(fleet, None, min(len(fleet), CANDIDATES * count), rng)
        return np.sort(polled[np.argsort(-fleet.speeds[polled], kind="stable")[:count]])

    return sample


SAMPLERS = {"stratified": stratified, "uniform": uniform, "fastest": fastest}


def cohort(
    settings: Settings, fleet: Fleet, round_: Round, chosen: Sequence[int] | None = None
) -> list[Device]:
    """Who is asked, in device order, each on its level of this round; `chosen` where the method decides."""
    if chosen is not None:
        return [fleet.device(int(device)) for device in sorted(chosen)]
    wanted = min(len(fleet), int(np.ceil(settings.cohort * settings.over_select)))
    rng = round_.rng("cohort")
    if settings.level_draw == "fixed":
        ids = SAMPLERS[settings.sampling](wanted)(fleet, round_.index, rng)
        return [fleet.device(int(device)) for device in ids]
    ids = SAMPLERS["uniform"](wanted)(fleet, round_.index, rng)
    levels = rng.permutation(np.arange(len(ids)) % len(fleet.level_speeds)) + 1
    return [fleet.at_level(int(device), int(level)) for device, level in zip(ids, levels, strict=True)]


def _available(fleet: Fleet, members: np.ndarray | None, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to `count` devices that can be reached, without a look at the whole population."""
    population = len(fleet) if members is None else len(members)
    key = 0 if fleet.availabilities is None else int(rng.integers(2**63))
    polled = min(population, count)
    while True:
        drawn = rng.choice(population, size=polled, replace=False)
        drawn = drawn if members is None else members[drawn]
        if fleet.availabilities is None:
            return drawn
        # By device, not by poll: who cannot be reached stays so when more are polled.
        chance = [np.random.default_rng((key, int(device))).random() for device in drawn]
        reachable = drawn[chance < fleet.availabilities[drawn]]
        if len(reachable) >= count or polled == population:
            return reachable[:count]
        polled = min(population, 2 * polled + 8)
