"""Renyi divergences of releases about which only this is known: at every order they are at most a Gaussian's.

Sums of discrete noise (`distributed`) are such releases: D_a <= a rho for all a > 1, which is rho-concentrated privacy, holds
with rho = 1 / (2 z^2), as for a Gaussian of multiplier z. Their privacy loss is not a Gaussian's, so neither the exact formulas
nor the privacy loss distribution of a Gaussian may be used.

Poisson sampling at rate q. Let neighbours differ in one member, fix everybody else's coins, let Q be the law of the release
without the member and P with it, and L = P / Q. With the member's coin random, the release has the law M = (1 - q) Q + q P, and
at integer orders a,

    exp((a - 1) D_a(M | Q)) = E_Q (1 - q + q L)^a = sum_l C(a, l) (1 - q)^(a - l) q^l exp((l - 1) D_l(P | Q)),

which grows with every D_l, so it is at most its value at D_l = l rho: the Gaussian's own sum. The reverse divergence D_a(Q | M)
is no larger. The noise N is symmetric, and P is the law of s + N where Q is that of N, up to a shift of both; so the reflection
x -> s - x exchanges P and Q, and for two laws that a reflection exchanges D_a(Q | M) <= D_a(M | Q) (Mironov, Talwar and Zhang,
"Renyi Differential Privacy of the Sampled Gaussian Mechanism", 2019, theorem 5: sums take the place of integrals). Mixing over
s, where it is random, and over everybody else's coins costs nothing, by quasi-convexity.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

_NEAR_ONE = (1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.7)
EVERY_ORDER = tuple(1 + 1.05**power for power in range(-100, 280))  # from 1.008 to 816,000
WHOLE_ORDERS = (*_NEAR_ONE, *map(float, range(2, 64)), *(float(round(64 * 1.1**step)) for step in range(45)))


def concentrated_divergences(rho: float, rate: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Renyi divergences of one release, at each order; sampled, or as if everybody took part where that is smaller.

    Divergences grow with the order: between whole orders the next whole order is used as a bound.
    """
    everybody = [order * rho for order in orders]
    if rate == 1:
        return tuple(everybody)
    sampled = {whole: _sampled_divergence(rho, rate, whole) for whole in {math.ceil(order) for order in orders}}
    return tuple(min(plain, sampled[math.ceil(order)]) for plain, order in zip(everybody, orders, strict=True))


def _sampled_divergence(rho: float, rate: float, order: int) -> float:
    """The module's sum minus one, sum_{l>=2} C(a, l) (1 - q)^(a - l) q^l (exp(l (l - 1) rho) - 1): no digits cancel.

    Rounded up by more than the possible float64 error.
    """
    chosen = np.arange(2, order + 1)
    ways = gammaln(order + 1) - gammaln(chosen + 1) - gammaln(order - chosen + 1)
    weights = ways + (order - chosen) * math.log1p(-rate) + chosen * math.log(rate)
    loss = chosen * (chosen - 1.0) * rho
    excess = float(logsumexp(weights + loss + np.log(-np.expm1(-loss))))
    return float(np.logaddexp(0.0, excess)) / (order - 1) * (1 + 1e-9) + 1e-14
