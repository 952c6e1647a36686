"""Exact probabilities of draws without replacement, and the bound on a cut, by which `choice` compares graphs."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def at_least(population: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """(drawn + 2,) P[H >= x] for x = 0 .. drawn + 1, to about ten digits.

    H counts the marked items among `drawn` items that are drawn without replacement from `population` items.
    """
    low, high = max(0, drawn - (population - marked)), min(marked, drawn)
    x = np.arange(low, high + 1)
    logs = _log_factorials(population)
    rest = population - marked
    terms = logs[marked] - logs[x] - logs[marked - x] + logs[rest] - logs[drawn - x] - logs[rest - drawn + x]
    terms -= logs[population] - logs[drawn] - logs[population - drawn]
    tails = np.zeros(drawn + 2)
    tails[low : high + 1] = np.minimum(np.cumsum(np.exp(terms)[::-1])[::-1], 1.0)  # small terms are added first
    tails[:low] = 1.0
    return tails


def cut(clients: int, corrupt: int, survivors: int, masked: int, honest: int) -> float:
    """An upper bound on the probability that the honest survivors can be cut in two (P[cut] in `choice`).

    All but `corrupt` of the clients are honest, and `survivors` of them all survive. Each client masks with `masked` others, at
    least `honest` of which are honest survivors.
    """
    everybody, others = clients - corrupt, clients - 1
    s = np.arange(honest + 1, everybody - honest)
    r = np.maximum(honest + 1, survivors - corrupt - s)
    s, r = s[s + r <= everybody], r[s + r <= everybody]
    logs = _log_factorials(clients)
    pairs = logs[everybody] - logs[s] - logs[r] - logs[everybody - s - r]
    with np.errstate(invalid="ignore"):
        avoided = [_log_avoiding(logs, others, some, masked) for some in (r, s)]
        terms = pairs + s * avoided[0] + r * avoided[1]
    return min(1.0, float(np.exp(np.minimum(terms, 0.0)).sum()))


def _log_avoiding(logs: NDArray[np.float64], others: int, some: NDArray[np.int64], drawn: int) -> NDArray[np.float64]:
    """log P[none of `drawn` of the `others` is in a set of size `some`]; minus infinity where that is impossible."""
    room = others - some - drawn
    ways = logs[others - some] - logs[np.maximum(room, 0)] - logs[others] + logs[others - drawn]
    return np.where(room >= 0, ways, -np.inf)


@lru_cache(maxsize=4)
def _log_factorials(most: int) -> NDArray[np.float64]:
    """(most + 1,)"""
    return np.array([math.lgamma(number + 1) for number in range(most + 1)])
