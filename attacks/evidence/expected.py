"""The lower bound on epsilon expected from the best possible attack on the run's mechanism, with the audit's number of units.

A lower bound far below the accounted epsilon may come from a weak attack or from a mechanism that reveals little; this number
distinguishes the two. It is the median bound (`bounds.lower_bound`) of simulated audits: a non-member's score has a uniform
tail, and a member's a tail t with P(t <= r) = the true-positive rate that the mechanism allows at r. Scores are drawn
independently, as if units did not share noise.

The trade-off curve is the mechanism's own if it is known (`allowed`). Otherwise it is the curve of the plain Gaussian mechanism
with the same epsilon and delta, which is a yardstick and no limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.evidence import tradeoff
from attacks.evidence.allowed import mechanism
from attacks.evidence.bounds import lower_bound

SIMULATED = 25
_FALSE = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 400)])  # false-positive rates at which a curve is read


def expected(
    result: Mapping[str, Any], accounted: float, members: NDArray[np.bool_], significance: float
) -> dict[str, Any]:
    """As JSON: {"epsilon_lower", "by": "mechanism" or "Gaussian of the same epsilon"}. significance: of the bound."""
    delta = float(result.get("delta") or 0.0)
    own = mechanism(result, accounted, delta)
    curve = own or same_epsilon(accounted, delta)
    rng = np.random.default_rng(0)
    bounds = [lower_bound(drawn(curve, members, rng), members, delta, significance).epsilon for _ in range(SIMULATED)]
    by = "mechanism" if own is not None else "Gaussian of the same epsilon"
    return {"epsilon_lower": float(np.median([bound or 0.0 for bound in bounds])), "by": by}


def drawn(
    curve: tradeoff.Curve | tradeoff.Gaussian, members: NDArray[np.bool_], rng: np.random.Generator
) -> NDArray[np.float64]:
    """(units,) scores of the best attack in one audit: minus the tails."""
    true = np.array([curve.rate(float(fpr)) for fpr in _FALSE])
    uniform = rng.random(len(members))
    tails: NDArray[np.float64] = np.where(members, np.interp(uniform, true, _FALSE), uniform)
    return -tails


def same_epsilon(epsilon: float, delta: float) -> tradeoff.Gaussian:
    """The Gaussian mechanism with this epsilon at delta."""
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return tradeoff.Gaussian(1 / float(get_sigma_gaussian(epsilon, delta)))
