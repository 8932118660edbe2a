"""Deal classes to devices so that it works out whenever the supply allows it.

Each device gets N different classes, with q samples of each, and one more of r of them (samples = N q + r).
First the totals are fixed: how many devices hold each class, and how many of those hold it with one sample
more. Then devices draw one after another. A draw that takes every class which all remaining devices need
can always be completed, and so can the draws after it: the totals divided by the number of remaining devices
are a fractional draw, and such a bipartite flow has a whole-numbered one beside it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


def deal(
    supply: list[int], devices: int, samples: int, classes_each: int, random: np.random.Generator
) -> np.ndarray | None:
    """Samples of each class for each device, (devices, classes); None where the supply does not suffice."""
    totals = _totals(supply, devices, samples, classes_each, random)
    if totals is None:
        return None
    holders, larger = totals
    quota, larger_each = divmod(samples, classes_each)
    hands = _Hands(
        np.array(larger), np.array(holders) - np.array(larger), larger_each, classes_each - larger_each
    )
    counts = np.zeros((devices, len(supply)), dtype=np.int64)
    for device in range(devices):
        for label, is_larger in hands.draw(devices - device, random).items():
            counts[device, label] = quota + is_larger
    return counts


def can_deal(supply: list[int], devices: int, samples: int, classes_each: int) -> bool:
    """Tell whether the supply suffices, which does not depend on how ties are drawn.

    >>> can_deal([10, 10], devices=2, samples=10, classes_each=2), can_deal([9, 11], 2, 10, 2)
    (True, False)
    """
    return _totals(supply, devices, samples, classes_each, np.random.default_rng(0)) is not None


def _totals(
    supply: list[int], devices: int, samples: int, classes_each: int, random: np.random.Generator
) -> tuple[list[int], list[int]] | None:
    """How many devices hold each class, and how many of them with one sample more."""
    quota, larger_each = divmod(samples, classes_each)
    holders = _holders(supply, devices, devices * classes_each, quota, larger_each > 0, random)
    if holders is None:
        return None
    larger = _larger(supply, holders, devices * larger_each, quota, random)
    return None if larger is None else (holders, larger)


def _room(supply: int, holders: int, quota: int) -> int:
    """How many of a class's holders could have one sample more."""
    return min(holders, supply - quota * holders)


def _holders(
    supply: list[int], devices: int, needed: int, quota: int, spare: bool, random: np.random.Generator
) -> list[int] | None:
    """How many devices hold each class, as even as the supply allows.

    Where some hold one sample more (`spare`), the sum of `_room` is made as large as possible. It is
    concave in each total, so taking the best next step is optimal; ties go to the class with fewest holders.
    """
    holders = [0] * len(supply)
    ties = random.random(len(supply)).tolist()

    def step(label: int) -> tuple[int, int, float, int] | None:
        now = holders[label]
        if now >= min(devices, supply[label] // quota):
            return None
        gain = _room(supply[label], now + 1, quota) - _room(supply[label], now, quota) if spare else 0
        return (-gain, now, ties[label], label)

    heap = [entry for label in range(len(supply)) if (entry := step(label)) is not None]
    heapq.heapify(heap)
    for _ in range(needed):
        if not heap:
            return None
        label = heap[0][-1]
        holders[label] += 1
        following = step(label)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, following)
    return holders


def _larger(
    supply: list[int], holders: list[int], needed: int, quota: int, random: np.random.Generator
) -> list[int] | None:
    """How many holders of each class get one sample more, an even share of each class's holders."""
    larger = [0] * len(supply)
    rooms = [_room(total, count, quota) for total, count in zip(supply, holders, strict=True)]
    ties = random.random(len(supply)).tolist()
    heap = [(0.0, ties[label], label) for label, room in enumerate(rooms) if room > 0]
    heapq.heapify(heap)
    for _ in range(needed):
        if not heap:
            return None
        _, tie, label = heapq.heappop(heap)
        larger[label] += 1
        if larger[label] < rooms[label]:
            heapq.heappush(heap, (larger[label] / holders[label], tie, label))
    return larger


@dataclass
class _Hands:
    """What is still to be dealt: per class the larger and the smaller shares."""

    larger: np.ndarray
    smaller: np.ndarray
    larger_each: int
    smaller_each: int

    def draw(self, remaining: int, random: np.random.Generator) -> dict[int, bool]:
        """The classes of the next device, each with whether its share is a larger one."""
        left = self.larger + self.smaller
        # Exponential clocks: a class comes first with a chance in proportion to what is left of it.
        arrival = random.exponential(size=len(left)) / np.maximum(left, 1)
        arrival[left == remaining] = -1.0
        hand: dict[int, bool] = {}
        for label in np.argsort(arrival).tolist():
            if len(hand) == self.larger_each + self.smaller_each:
                break
            if left[label]:
                self._place(label, hand, random)
        for label, is_larger in hand.items():
            (self.larger if is_larger else self.smaller)[label] -= 1
        return hand

    def _place(self, label: int, hand: dict[int, bool], random: np.random.Generator) -> None:
        """Add a class to the hand if there is a way, if need be by changing the kind of another's share."""
        offers = {True: int(self.larger[label]), False: int(self.smaller[label])}
        kinds = [kind for kind in (True, False) if offers[kind]]
        if len(kinds) == 2 and random.random() * (offers[True] + offers[False]) >= offers[True]:
            kinds.reverse()
        for kind in kinds:
            if self._has_space(kind, hand):
                hand[label] = kind
                return
        for kind in kinds:
            other_shares = self.smaller if kind else self.larger
            movable = [held for held, held_kind in hand.items() if held_kind is kind and other_shares[held]]
            if movable and self._has_space(not kind, hand):
                hand[movable[0]] = not kind
                hand[label] = kind
                return

    def _has_space(self, kind: bool, hand: dict[int, bool]) -> bool:
        taken = sum(held_kind is kind for held_kind in hand.values())
        return taken < (self.larger_each if kind else self.smaller_each)
