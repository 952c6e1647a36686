"""The price of publishing only the best of a random number of tries.

A number of tries K is drawn from a law that does not depend on the data. K runs are made, each independent of the others and
each with the same Renyi divergences. Only the run with the best score is published, nobody learns K or anything about the other
runs, and the score is a function of a run's releases and of public data. (Tries with different settings are also such runs, if
each draws its settings independently at random from a list that was fixed beforehand: their divergences are at most the largest
of the list.) Then, with e(a) the Renyi divergence of one try at order a, the published run has at every order a > 1 a
divergence of at most

    e(a) + (1 + eta) min_b ((1 - 1/b) e(b) + log(1/gamma) / b) + log(E K) / (a - 1)      K truncated negative binomial,
    e(a) + E K delta(log(1 + 1/(a - 1))) + log(E K) / (a - 1)                             K Poisson,

where delta(x) is such that a try is (x, delta(x))-private. These are theorems 2 and 6 of Papernot and Steinke, "Hyperparameter
Tuning with Renyi Differential Privacy" (ICLR 2022). The first law has P(K = k) proportional to (1 - gamma)^k C(k + eta - 1, k)
for k >= 1: eta = 0 is the logarithmic law, eta = 1 the geometric one. A Poisson K can be zero, and then nothing is published.

A fixed number of tries has no such bound: best-of-K alone gives an output of probability p the probability p^K, and K
e(infinity) is reached (`tests/privacy/test_selection.py`).
"""

from __future__ import annotations

import math
from typing import Literal

from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy.optimize import brentq

from privacy import composition
from privacy.composition import Divergences
from privacy.errors import PlanError

Law = Literal["logarithmic", "geometric", "poisson"]
LAWS: tuple[Law, ...] = ("logarithmic", "geometric", "poisson")
_ETA = {"logarithmic": 0, "geometric": 1}


def of_best(law: Law, mean: float, one: Divergences) -> dict[float, float]:
    """The Renyi divergences of the best of K tries, K of this law with this mean; `one`: the divergences of one try."""
    if not 1 < mean < math.inf:
        raise PlanError(f"the mean number of tries is {mean:g}: choose a number above 1")
    orders, found = list(one), list(one.values())

    def chosen(order: float) -> float:
        """The part that does not decrease with the order."""
        if law == "poisson":
            return mean * float(compute_delta(orders, found, math.log1p(1 / (order - 1)))[0])
        stop = _stop(law, mean)
        return (1 + _ETA[law]) * min((1 - 1 / b) * one[b] + stop / b for b in orders)

    return {order: one[order] + chosen(order) + math.log(mean) / (order - 1) for order in orders}


def epsilon_of_best(law: Law, mean: float, one: Divergences, delta: float) -> float:
    """An epsilon such that publishing the best of K tries is (epsilon, delta)-private; infinite if `one` is empty."""
    return composition.epsilon(of_best(law, mean, one), delta)


def _stop(law: Law, mean: float) -> float:
    """log(1/gamma) where K has this mean; of the logarithmic law, E K = (1/gamma - 1) / log(1/gamma), rounded up."""
    if law == "geometric":
        return math.log(mean)
    found = brentq(lambda stop: math.expm1(stop) / stop - mean, 1e-12, 2 + 2 * math.log(mean))
    return float(found) * (1 + 1e-9)
