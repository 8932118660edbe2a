"""Methods as they are, with no options: none ends at a guess on the embedded images."""

from __future__ import annotations

import pytest

from fedpmt import api
from fedpmt.methods.registry import general_methods

GUESS = 0.1
SLOW_STARTERS = {"comet": 100, "feddf": 100, "prunefl": 100}
"""Rounds for methods that need the default number; the others are clear of a guess after fewer."""


def accuracy(method: str, partition: str, rounds: int, seed: int = 0) -> float:
    run = api.run(method, partition=partition, rounds=rounds, eval_every=rounds, seed=seed)
    assert run.result is not None
    assert run.result.accuracy is not None
    return run.result.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["iid", "classes:2"])
@pytest.mark.parametrize("method", general_methods())
def test_no_method_ends_at_a_guess(method: str, partition: str) -> None:
    assert accuracy(method, partition, SLOW_STARTERS.get(method, 50)) > 2.5 * GUESS


def test_fedgen_does_not_diverge() -> None:
    """With latent = 10 this run is no longer finite after 13 rounds."""
    assert accuracy("fedgen", "iid", rounds=13, seed=1) > 5 * GUESS


@pytest.mark.parametrize("method", ["feddf", "comet"])
def test_two_classes_per_device_fit_what_is_left_by_held_out_data(method: str) -> None:
    """3,560 and 3,600 images are left, of no class quite a tenth: 71 and 72 for each of 50 devices are too many."""
    settings = api.settings_of({"method": method, "partition": "classes:2"})
    left, most = {"feddf": (3560, 69), "comet": (3600, 71)}[method]
    assert settings.samples == most < left // settings.devices
    data = api.paper_problem_of(settings).data
    assert {data.samples(device) for device in range(50)} == {most}
    # What the user asks for is refused where it cannot be met, and never changed.
    given = api.settings_of({"method": method, "partition": "classes:2", "samples": 72})
    assert given.samples == 72
