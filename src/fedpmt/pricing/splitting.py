"""ψ, the constant by which model splitting widens the bound of Theorem 1 (Lemma 1)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from fedpmt.types import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

Definition = Literal["lemma", "appendix"]


def splitting_constant(
    shares: Sequence[float], definition: Definition = "lemma", cohort: int | None = None
) -> float:
    """ψ = Σ_{i in I} 1 / Σ_{j >= i} p_j, with p_j the share of devices that train depth j, smallest first.

    It is |I| when every device trains the full model, and infinite when nobody does. The appendix
    writes ψ for |I| |S| times as much; `cohort` is its |S|.

    >>> splitting_constant([0, 0, 1.0])
    3.0
    >>> round(splitting_constant([0.5, 0.5]), 3)
    3.0
    >>> splitting_constant([0.5, 0.5], "appendix", cohort=10)
    60.0
    """
    total = 0.0
    for depth in range(len(shares)):
        reach = math.fsum(shares[depth:])
        total += 1 / reach if reach > 0 else math.inf
    if definition == "lemma":
        return total
    if definition != "appendix":
        raise SettingError.unknown("definition", definition, ["lemma", "appendix"])
    if cohort is None:
        raise SettingError(
            "cohort = None is refused: the appendix's ψ holds |S|, so give the devices per round"
        )
    return len(shares) * cohort * total
