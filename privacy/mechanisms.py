"""What bounds a contribution and perturbs a sum.

A mechanism sees norms and totals, never models. The client asks it by what factor to scale its contribution; the server
hands it the total before any method sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

Total = TypeVar("Total")


class Mechanism(Protocol):
    """The seam between the federation and differential privacy."""

    def scale(self, norm: Callable[[], float]) -> float:
        """The factor a client multiplies its contribution by; `norm()` measures it, for those mechanisms that need to."""

    def release(self, total: Total) -> Total:
        """The total as the server may use it."""


@dataclass(frozen=True)
class NoMechanism:
    """Neither clips nor adds noise, and guarantees nothing."""

    def scale(self, norm: Callable[[], float]) -> float:
        return 1.0

    def release(self, total: Total) -> Total:
        return total
