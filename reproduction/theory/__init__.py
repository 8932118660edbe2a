"""What the paper proves, and what it can be held against: ψ, the bound of Theorem 1, convex test problems."""

from __future__ import annotations

from fedpmt.pricing.plan import splitting_constant
from reproduction.theory.bound import Constants, least_offset, loss_bound

__all__ = ["Constants", "least_offset", "loss_bound", "splitting_constant"]
