"""The AUC and the true-positive rates that an exactly kept guarantee allows an attack.

If the guarantee is one Gaussian mechanism for the whole run (without sampling, as in a public order), its exact curve gives
them; if it is a Gaussian over Poisson samples, that mechanism's trade-off curve does. Either curve counts only if its epsilon
at delta is within 1 % of the accounted one. Otherwise the (epsilon, delta) bound gives them, which allows far more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from attacks.evidence import tradeoff
from secure_fed.runs.membership.roc import FALSE_POSITIVE_RATES

_Any = TypeVar("_Any", tradeoff.Curve, tradeoff.Gaussian)
_ALIKE = 0.01
_MOST_RELEASES = 5_000  # beyond, the grid of `tradeoff` is too coarse to be worth its time


def allowed(result: Mapping[str, Any], accounted: float) -> dict[str, Any]:
    """As JSON: {"auc", "tpr_at_fpr": {"0.01", ..}, "by": "mechanism" or "epsilon"}, for a run with this result."""
    delta = float(result.get("delta") or 0.0)
    curve = mechanism(result, accounted, delta)
    if curve is None:
        rates = {f"{fpr:g}": tradeoff.rate(fpr, accounted, delta) for fpr in FALSE_POSITIVE_RATES}
        return {"auc": tradeoff.area(accounted, delta), "tpr_at_fpr": rates, "by": "epsilon"}
    rates = {f"{fpr:g}": curve.rate(fpr) for fpr in FALSE_POSITIVE_RATES}
    return {"auc": curve.area, "tpr_at_fpr": rates, "by": "mechanism"}


def mechanism(result: Mapping[str, Any], accounted: float, delta: float) -> tradeoff.Curve | tradeoff.Gaussian | None:
    """The trade-off curve of the run's mechanism; None if it is unknown."""
    mu = (result.get("privacy") or {}).get("gaussian_mu")
    if mu is not None and delta:
        return _own(tradeoff.Gaussian(float(mu)), accounted, delta)
    z, sampled, releases = (result.get(name) for name in ("noise_multiplier", "sampling_rate", "releases"))
    if "Gaussian" not in ((result.get("privacy") or {}).get("mechanism") or "Gaussian"):
        return None
    if not (z and sampled and releases and 0 < sampled <= 1 and releases <= _MOST_RELEASES and delta):
        return None
    return _own(tradeoff.sampled_gaussian(float(z), float(sampled), int(releases)), accounted, delta)


def _own(curve: _Any, accounted: float, delta: float) -> _Any | None:
    """The curve, if its epsilon is the accounted one; else None."""
    return curve if abs(curve.epsilon(delta) - accounted) <= _ALIKE * accounted else None
