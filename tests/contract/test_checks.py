"""Each check of the contract finds the defect it is there for, and says so by its name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedpmt.methods.averaging import Composed
from fedpmt.methods.fedavg import FedAvg
from fedpmt.methods.fedpmt import FedPMT
from fedpmt.methods.fedprox import Proximal
from fedpmt.methods.heterofl import HeteroFL
from fedpmt.testing import CHECKS, ON_A_BENCH, check_method
from fedpmt.training.server import Yogi

sys.path.insert(0, str(Path(__file__).parent))
import broken_methods as broken

DEFECTS: list[tuple[str, Any, str]] = [
    ("is_a_frozen_picklable_value", broken.Changeable(), "is not frozen"),
    ("declares_what_replies_carry", broken.Chatty(), "traits.sends_more is false"),
    ("leaves_the_state_alone", broken.Overwriting(), "folding changed the state"),
    ("leaves_kept_state_alone", broken.Forgetful(), "training changed what device 0 had kept"),
    ("restores_states_from_disk", broken.Unwritable(), "TypeError: a state may not hold a set"),
    ("ignores_arrival_order", broken.Hasty(), "state.tensors"),
    ("keeps_uncovered_entries", broken.Restless(), "changed where nobody trained it"),
    ("server_optimizer_skips_uncovered_entries", broken.Uncovered(), "the moment 'mean' of"),
    ("keeps_the_model_without_training", broken.Restless(), "though nobody has learnt anything"),
    ("sends_differences", broken.Weighty(), "is not zero, though nothing was learnt"),
    ("accounts_for_bytes", broken.Chatty(), "and is priced as"),
    ("reduces_to_fedavg", broken.NotNeutral(), "is not FedAvg's after three rounds"),
    ("assigns_by_round_and_device", broken.Whimsical(), "another part"),
    ("keeps_server_work_within_cap", broken.Busy(), "above its cap"),
    ("same_bits_for_any_number_of_workers", broken.Drifting(), "other weights with other numbers of workers"),
    ("same_bits_after_resume", broken.Drifting(), "other content after a resume"),
    ("learns_with_default_settings", broken.Idle(), "after 2 rounds"),
]


@pytest.mark.parametrize(("name", "method", "reason"), DEFECTS, ids=[name for name, _, _ in DEFECTS])
def test_a_defect_is_named(name: str, method: Any, reason: str) -> None:
    (check,) = (one for one in CHECKS if one.__name__ == name)
    with pytest.raises(AssertionError) as failed:
        check_method(method, rounds=2, checks=[check])
    assert str(failed.value).startswith(f"{type(method).__name__}: {name}: ")
    assert reason in str(failed.value)


def test_every_check_has_a_defect() -> None:
    assert [name for name, _, _ in DEFECTS] == [check.__name__ for check in CHECKS]


def test_the_first_failing_check_is_told_and_a_sound_method_passes() -> None:
    with pytest.raises(AssertionError, match=r"^Chatty: declares_what_replies_carry: "):
        check_method(broken.Chatty(), checks=ON_A_BENCH)
    check_method(FedAvg(), checks=ON_A_BENCH)


@pytest.mark.parametrize(
    "method",
    [
        Composed(parts=FedPMT(), local=Proximal(0.1)),
        Composed(parts=FedPMT(), mean="fill"),
        Composed(parts=HeteroFL(masked=False)),
        FedPMT(server=Yogi()),
    ],
    ids=["parts-local", "parts-mean", "parts", "server"],
)
def test_compositions_keep_the_contract(method: Any) -> None:
    check_method(method, checks=ON_A_BENCH)
