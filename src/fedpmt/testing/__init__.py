"""The contract of methods, for methods that live anywhere.

    from fedpmt.testing import check_method

    def test_my_method():
        check_method(MyMethod())

Needs no pytest. Each check is a function of a `Subject` and can be called alone:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_method(check):
        check(Subject(MyMethod()))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedpmt.testing.bench import Bench, FlatPrice, Subject, samples, small_net
from fedpmt.testing.checks import (
    accounts_for_bytes,
    assigns_by_round_and_device,
    declares_what_replies_carry,
    discounts_late_replies,
    ignores_arrival_order,
    is_a_frozen_picklable_value,
    keeps_server_work_within_cap,
    keeps_the_model_without_training,
    keeps_uncovered_entries,
    learns_with_default_settings,
    leaves_kept_state_alone,
    leaves_the_state_alone,
    reduces_to_fedavg,
    restores_states_from_disk,
    same_bits_after_resume,
    same_bits_for_any_number_of_workers,
    sends_differences,
    server_optimizer_skips_uncovered_entries,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fedpmt.methods.base import Method

    Check = Callable[[Subject], None]

__all__ = [
    "CHECKS",
    "ON_A_BENCH",
    "WHOLE_RUNS",
    "Bench",
    "FlatPrice",
    "Subject",
    "check_method",
    "samples",
    "small_net",
]

ON_A_BENCH: tuple[Check, ...] = (
    is_a_frozen_picklable_value,
    declares_what_replies_carry,
    leaves_the_state_alone,
    leaves_kept_state_alone,
    restores_states_from_disk,
    ignores_arrival_order,
    discounts_late_replies,
    keeps_uncovered_entries,
    server_optimizer_skips_uncovered_entries,
    keeps_the_model_without_training,
    sends_differences,
    accounts_for_bytes,
    reduces_to_fedavg,
    assigns_by_round_and_device,
)
"""Checks that drive the method by hand on a small model; together they take about a second."""

WHOLE_RUNS: tuple[Check, ...] = (
    keeps_server_work_within_cap,
    same_bits_for_any_number_of_workers,
    same_bits_after_resume,
    learns_with_default_settings,
)
"""Checks that run whole federations on the embedded data; together they take about ten seconds."""

CHECKS: tuple[Check, ...] = (*ON_A_BENCH, *WHOLE_RUNS)
"""The whole contract."""


def check_method(
    method: Method[Any, Any],
    *,
    together: Method[Any, Any] | None = None,
    early: Method[Any, Any] | None = None,
    rounds: int = 12,
    settings: Mapping[str, Any] | None = None,
    checks: Sequence[Check] = CHECKS,
) -> None:
    """Check that a method keeps the contract of methods.

    Args:
        method: The method, with the settings under which it is checked.
        together: The same method with settings under which several devices reply from the first round on; needed only
            where it does not do that anyway.
        early: The same method with settings under which it goes through all its stages within a few rounds; needed
            only where it has stages.
        rounds: Rounds after which it must be better than a guess on the embedded data.
        settings: Settings of all runs, e.g. `{"task": "cnn-mnist"}`.
        checks: What is checked: `CHECKS`, or `ON_A_BENCH` where it must be quick.

    Raises:
        AssertionError: For the first check that fails. Its text names the method, the check, and what is wrong.

    Examples:
        >>> from fedpmt import FedPMT
        >>> check_method(FedPMT(), checks=ON_A_BENCH)
    """
    subject = Subject(method, together, early, rounds, settings or {})
    for check in checks:
        try:
            check(subject)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{type(method).__name__}: {check.__name__}: {reason}") from error
