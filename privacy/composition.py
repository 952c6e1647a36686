"""One guarantee from several: for planned runs on the same units, for the best of several tries, and for groups of members.

Renyi divergences of independent releases add up at every order, so runs that state their divergences at common orders compose
without being repeated. The order may be chosen last, because the runs, and the noise of each, were fixed before the first run.
Where a later run was chosen in view of an earlier result, only a filter that was fixed beforehand holds (`filters`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon
from scipy.optimize import brentq

from privacy import accounting
from privacy.errors import PlanError

if TYPE_CHECKING:
    from privacy.plan import Plan

Divergences = Mapping[float, float]  # by order, of all releases of a run; finite ones only
Law = Literal["logarithmic", "geometric", "poisson"]
LAWS: tuple[Law, ...] = ("logarithmic", "geometric", "poisson")

ORDERS = (
    *(1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0),
    *(32.0, 40.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0),
)


def of_plan(plan: Plan, releases: int) -> dict[float, float]:
    """The Renyi divergences of `releases` releases of a plan; empty where no accountant covers its noise.

    They grow with the order, so a smaller bound at a higher order also holds at lower orders.
    """
    try:
        found = plan.cost(releases, ORDERS).rdp or ()
    except PlanError:
        return {}
    least = [*accumulate(reversed(found), min)][::-1]
    return {order: one for order, one in zip(ORDERS, least, strict=True) if math.isfinite(one)}


def together(runs: Sequence[Divergences]) -> dict[float, float]:
    """The divergences of all runs together, at the orders that all of them state."""
    common = set.intersection(*map(set, runs)) if runs else set()
    return {order: math.fsum(run[order] for run in runs) for order in sorted(common)}


def largest(runs: Sequence[Divergences]) -> dict[float, float]:
    """Divergences that none of the runs exceeds, at the orders that all of them state."""
    common = set.intersection(*map(set, runs)) if runs else set()
    return {order: max(run[order] for run in runs) for order in sorted(common)}


def epsilon(found: Divergences, delta: float) -> float:
    """The least epsilon at this delta that follows from the divergences; infinite if there are none.

    By Canonne, Kamath and Steinke (2020), proposition 12.
    """
    return float(compute_epsilon(list(found), list(found.values()), delta)[0]) if found else math.inf


def of_best(law: Law, mean: float, one: Divergences) -> dict[float, float]:
    """The Renyi divergences of publishing only the best of a random number of tries; `one`: the divergences of one try.

    The number of tries K is drawn from `law`, with this mean; the law does not depend on the data. K runs are made, each
    independent of the others and each with the same Renyi divergences. Only the run with the best score is published, nobody
    learns K or anything about the other runs, and the score is a function of a run's releases and of public data. (Tries with
    different settings are also such runs, if each draws its settings independently at random from a list that was fixed
    beforehand: their divergences are at most the largest of the list.) Then, with e(a) the Renyi divergence of one try at order
    a, the published run has at every order a > 1 a divergence of at most

        e(a) + (1 + eta) min_b ((1 - 1/b) e(b) + log(1/gamma) / b) + log(E K) / (a - 1)      K truncated negative binomial,
        e(a) + E K delta(log(1 + 1/(a - 1))) + log(E K) / (a - 1)                             K Poisson,

    where delta(x) is such that a try is (x, delta(x))-private. These are theorems 2 and 6 of Papernot and Steinke,
    "Hyperparameter Tuning with Renyi Differential Privacy" (ICLR 2022). The first law has P(K = k) proportional to
    (1 - gamma)^k C(k + eta - 1, k) for k >= 1: eta = 0 is the logarithmic law, eta = 1 the geometric one. A Poisson K can be
    zero, and then nothing is published.

    A fixed number of tries has no such bound: best-of-K alone gives an output of probability p the probability p^K, and K
    e(infinity) is reached (`tests/privacy/test_composition.py`).
    """
    if not 1 < mean < math.inf:
        raise PlanError(f"the mean number of tries is {mean:g}: choose a number above 1")
    if not one:
        return {}
    if law == "poisson":
        orders, found = list(one), list(one.values())
        chosen = {order: mean * float(compute_delta(orders, found, math.log1p(1 / (order - 1)))[0]) for order in orders}
    else:
        eta, stop = 1, math.log(mean)  # stop: log(1/gamma) where K has this mean
        if law == "logarithmic":  # E K = (1/gamma - 1) / log(1/gamma), rounded up
            eta = 0
            stop = brentq(lambda stop: math.expm1(stop) / stop - mean, 1e-12, 2 + 2 * math.log(mean)) * (1 + 1e-9)
        chosen = dict.fromkeys(one, (1 + eta) * min((1 - 1 / b) * one[b] + stop / b for b in one))
    return {order: one[order] + chosen[order] + math.log(mean) / (order - 1) for order in one}


def group_epsilon(mu: float, members: int, delta: float) -> float:
    """Epsilon at delta for `members` members together, where one member has exactly mu of Gaussian differential privacy.

    With m members changed, data sets are m neighbours apart, and the guarantee for one member applies m times in a row. The
    group's mu is m mu (Dong, Roth and Su, "Gaussian Differential Privacy", 2022, theorem 2.14).
    """
    return accounting.gaussian_epsilon(1 / (members * mu), delta) if mu else 0.0


def group_epsilon_by_curve(curve: Sequence[tuple[float, float]], members: int, delta: float) -> float | None:
    """The least epsilon at delta for `members` members together that follows from one's (delta, epsilon); None if none does.

    The group has (m epsilon, delta (e^(m epsilon) - 1) / (e^epsilon - 1)), which is loose (Vadhan, "The Complexity of
    Differential Privacy", 2017, lemma 2.2).
    """
    found = []
    for own, epsilon in curve:
        terms = [number * epsilon for number in range(members)]
        # log of delta (1 + e^epsilon + ... + e^((m - 1) epsilon))
        log_delta = math.log(own) + terms[-1] + math.log(math.fsum(math.exp(term - terms[-1]) for term in terms))
        if log_delta <= math.log(delta):
            found.append(members * epsilon)
    return min(found, default=None)
