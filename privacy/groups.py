"""A guarantee for several members together, from the guarantee for each member.

With m members changed, data sets are m neighbours apart, and the guarantee for one member applies m times in a row:

    Gaussian, mu        the group's is m mu (Dong, Roth and Su, "Gaussian Differential Privacy", 2022, theorem 2.14)
    (epsilon, delta)    (m epsilon, delta (e^(m epsilon) - 1) / (e^epsilon - 1)), which is loose (Vadhan, "The Complexity of
                        Differential Privacy", 2017, lemma 2.2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from privacy import gaussian


def group_epsilon(mu: float, members: int, delta: float) -> float:
    """Epsilon at delta for `members` members together, where one member has exactly mu."""
    return gaussian.gaussian_epsilon(1 / (members * mu), delta) if mu else 0.0


def group_epsilon_by_curve(curve: Sequence[tuple[float, float]], members: int, delta: float) -> float | None:
    """The least epsilon at delta for `members` members together that follows from one's (delta, epsilon); None if none does."""
    found = [members * epsilon for own, epsilon in curve if _log_delta(own, epsilon, members) <= math.log(delta)]
    return min(found, default=None)


def _log_delta(delta: float, epsilon: float, members: int) -> float:
    """log of delta (1 + e^epsilon + ... + e^((m - 1) epsilon))"""
    terms = [number * epsilon for number in range(members)]
    return math.log(delta) + terms[-1] + math.log(math.fsum(math.exp(term - terms[-1]) for term in terms))
