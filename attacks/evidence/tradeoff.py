"""The trade-off curve of a guarantee: the largest true-positive rate at every false-positive rate, and the area below it.

Three curves, from the loosest to the tightest:

    (epsilon, delta)     TPR <= min(e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR))             (Kairouz et al. 2015)
    the mechanism's own  a Gaussian of noise multiplier z over Poisson samples of rate q, T times: the most powerful test of
                         N(0, 1)^T against ((1 - q) N(0, 1) + q N(1 / z, 1))^T (Neyman and Pearson)
    Gaussian             the same without sampling, as in a public order: N(0, 1) against N(mu, 1), mu = s / z
                         if a unit moves all releases together by s clip norms

The second is the pair of laws that the accountant uses to bound such a run, so no adversary that sees its releases does better.
It is reached by an adversary that knows everything else about a canary that moves every sum by the whole clip norm. The first
allows far more: at epsilon 8 and delta 1e-5 an AUC of .9997, where a Gaussian over Poisson samples of rate .05 in 20 rounds
with this epsilon allows .66.

`allowed` gives the AUC and the true-positive rates that an exactly kept guarantee allows an attack. The curve of the run's
mechanism counts only if its epsilon at delta is within 1 % of the accounted one, or below it where the run states the mu;
otherwise the (epsilon, delta) bound gives them.

`expected` gives the lower bound on epsilon expected from the best possible attack with the audit's number of units. A lower
bound far below the accounted epsilon may come from a weak attack or from a mechanism that reveals little; this number
distinguishes the two. It is the median bound (`bounds.lower_bound`) of simulated audits: a non-member's score has a uniform
tail, and a member's a tail t with P(t <= r) = the true-positive rate that the mechanism allows at r. Scores are drawn
independently, as if units did not share noise. If the mechanism's curve is not known, it is that of the plain Gaussian
mechanism with the same epsilon and delta, which is a yardstick and no limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Bools, Floats
from attacks.evidence.bounds import gaussian_epsilon, lower_bound
from attacks.record import Allowed, Expected
from secure_fed.runs.roc import FALSE_POSITIVE_RATES

_ALIKE = 0.01
_MOST_RELEASES = 5_000  # beyond, the grid of `sampled_gaussian` is too coarse to be worth its time
SIMULATED = 25
_FALSE = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 400)])  # false-positive rates at which a curve is read


def allowed(result: Mapping[str, Any], accounted: float) -> Allowed:
    """The figures that the guarantee of a run with this result allows an attack."""
    delta = float(result.get("delta") or 0.0)
    curve = mechanism(result, accounted, delta)
    if curve is None:
        rates = {fpr: rate(fpr, accounted, delta) for fpr in FALSE_POSITIVE_RATES}
        return Allowed(area(accounted, delta), rates, "epsilon")
    return Allowed(curve.area, {fpr: curve.rate(fpr) for fpr in FALSE_POSITIVE_RATES}, "mechanism")


def mechanism(result: Mapping[str, Any], accounted: float, delta: float) -> Curve | Gaussian | None:
    """The trade-off curve of the run's mechanism; None if it is unknown."""
    terms = result.get("privacy") or {}
    mu = terms.get("gaussian_mu")
    z, sampled, releases = map(result.get, ("noise_multiplier", "sampling_rate", "releases"))
    curve: Curve | Gaussian
    if mu is not None and delta:
        curve = Gaussian(float(mu))
    elif "Gaussian" not in (terms.get("mechanism") or "Gaussian"):
        return None
    elif z and sampled and releases and 0 < sampled <= 1 and releases <= _MOST_RELEASES and delta:
        curve = sampled_gaussian(float(z), float(sampled), int(releases))
    else:
        return None
    beyond = curve.epsilon(delta) / accounted - 1 if accounted else 0.0
    return curve if -_ALIKE <= beyond <= _ALIKE or (mu is not None and beyond < 0) else None


def expected(result: Mapping[str, Any], accounted: float, members: Bools, significance: float) -> Expected:
    """The bound expected from the best possible attack, by the run's mechanism or a Gaussian of the same epsilon.

    significance: of the bound.
    """
    delta = float(result.get("delta") or 0.0)
    own = mechanism(result, accounted, delta)
    curve = own or same_epsilon(accounted, delta)
    rng = np.random.default_rng(0)
    bounds = [lower_bound(drawn(curve, members, rng), members, delta, significance).epsilon for _ in range(SIMULATED)]
    by = "mechanism" if own is not None else "Gaussian of the same epsilon"
    return Expected(float(np.median([bound or 0.0 for bound in bounds])), by)


def drawn(curve: Curve | Gaussian, members: Bools, rng: np.random.Generator) -> NDArray[np.float64]:
    """(units,) scores of the best attack in one audit: minus the tails."""
    true = np.array([curve.rate(float(fpr)) for fpr in _FALSE])
    uniform = rng.random(len(members))
    return np.asarray(-np.where(members, np.interp(uniform, true, _FALSE), uniform))


def same_epsilon(epsilon: float, delta: float) -> Gaussian:
    """The Gaussian mechanism with this epsilon at delta."""
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return Gaussian(1 / float(get_sigma_gaussian(epsilon, delta)))


def area(epsilon: float, delta: float) -> float:
    """The largest AUC of a test that (epsilon, delta) allows."""
    corner = (1 - delta) / (1 + math.exp(epsilon))
    rest = 1 - delta - corner
    return delta * corner + math.exp(epsilon) * corner**2 / 2 + rest - math.exp(-epsilon) * rest**2 / 2 + delta


def rate(fpr: float, epsilon: float, delta: float) -> float:
    """The largest true-positive rate at this false-positive rate that (epsilon, delta) allows."""
    return min(1.0, math.exp(epsilon) * fpr + delta, 1 - math.exp(-epsilon) * (1 - delta - fpr))


@dataclass(frozen=True)
class Gaussian:
    """The curve of N(0, 1) against N(mu, 1): exact for one Gaussian mechanism for a whole run."""

    mu: float

    @property
    def area(self) -> float:
        """Phi(mu / sqrt 2)"""
        from scipy.special import ndtr

        return float(ndtr(self.mu / math.sqrt(2)))

    def rate(self, fpr: float) -> float:
        """Phi(Phi^-1(fpr) + mu)"""
        from scipy.special import ndtr, ndtri

        return float(ndtr(ndtri(fpr) + self.mu))

    def epsilon(self, delta: float) -> float:
        """The least epsilon at delta."""
        return gaussian_epsilon(self.mu, delta)


@dataclass(frozen=True)
class Curve:
    """The laws of the privacy loss, the largest loss first: `inside` for a member, `outside` for a non-member."""

    losses: Floats
    inside: Floats
    outside: Floats

    @property
    def area(self) -> float:
        """P(a member's loss is above a non-member's) + P(they are equal) / 2: the AUC of the best test."""
        return float(np.sum(self.outside * (np.cumsum(self.inside) - self.inside / 2)))

    def rate(self, fpr: float) -> float:
        """The largest true-positive rate at this false-positive rate, with a coin where losses are equal."""
        return float(np.interp(fpr, *self._corners))

    @cached_property
    def _corners(self) -> tuple[Floats, Floats]:
        """False-positive and true-positive rates of the tests with a loss as the threshold."""
        return np.cumsum(self.outside), np.cumsum(self.inside)

    def epsilon(self, delta: float) -> float:
        """The least epsilon at delta, for one unit more and one unit less."""
        return max(_epsilon(self.losses, self.inside, delta), _epsilon(-self.losses[::-1], self.outside[::-1], delta))


def _epsilon(losses: Floats, law: Floats, delta: float) -> float:
    """The least epsilon >= 0 with E max(0, 1 - e^(epsilon - loss)) <= delta; losses in order, the largest first.

    Between two losses the mean is a - b e^epsilon, with a and b sums over the losses above. A search over losses finds the two
    between which the equation has its solution.
    """
    some = int(np.searchsorted(-losses, 0.0, side="left"))  # losses above 0

    def sums(last: int) -> tuple[float, float]:
        """Two sums over the losses up to index `last`: of the law, and of the law times e^(least - loss)."""
        first = slice(0, last + 1)
        return float(np.sum(law[first])), float(np.sum(law[first] * np.exp(losses[last] - losses[first])))

    if not some or float(np.sum(law[:some] * -np.expm1(-losses[:some]))) <= delta:
        return 0.0
    low, high = 0, some - 1  # search the least loss above the solution: at the next loss the mean exceeds delta
    while low < high:
        middle = (low + high) // 2
        whole, shrunk = sums(middle + 1)
        low, high = (low, middle) if whole - shrunk > delta else (middle + 1, high)
    whole, shrunk = sums(low)
    return float(losses[low] + np.log((whole - delta) / shrunk))


_POINTS = 2**19  # grid points for all rounds together
_FINEST = 1e-4
_DEVIATIONS = 9.0  # a normal law has only 1e-19 of its mass beyond


@lru_cache(maxsize=32)
def sampled_gaussian(noise_multiplier: float, sampling_rate: float, releases: int) -> Curve:
    """The curve of `releases` Gaussian releases over Poisson samples.

    The law of the sum of T losses log p / q is the T-fold convolution of one loss's law, on a grid. The grid is so fine that
    its epsilon at delta is within one per cent of the accountant's (`tests/attacks/test_estimates.py`).
    """
    from scipy.fft import irfft, next_fast_len, rfft
    from scipy.special import ndtr

    mu = 1 / noise_multiplier
    low, high = (_loss(x, mu, sampling_rate) for x in (-_DEVIATIONS, _DEVIATIONS + mu))
    width = max(_FINEST / math.sqrt(releases), (high - low) * releases / _POINTS)
    count = int((high - low) / width) + 2
    edges = np.asarray(low + width * (np.arange(count + 1) - 0.5), dtype=np.float64)
    at = _observed(edges, mu, sampling_rate)
    outside = np.diff(ndtr(at))
    inside = (1 - sampling_rate) * outside + sampling_rate * np.diff(ndtr(at - mu))
    points = releases * (count - 1) + 1
    size = next_fast_len(points, real=True)
    laws = [np.clip(irfft(rfft(one, size) ** releases, size)[:points], 0.0, None) for one in (inside, outside)]
    losses = np.asarray(releases * low + width * np.arange(points), dtype=np.float64)
    return Curve(losses[::-1], laws[0][::-1], laws[1][::-1])


def _loss(x: float, mu: float, sampling_rate: float) -> float:
    """log p / q of one release where `x` was observed."""
    drawn = math.log(sampling_rate) + mu * x - mu**2 / 2
    return drawn if sampling_rate == 1 else float(np.logaddexp(math.log1p(-sampling_rate), drawn))


def _observed(losses: Floats, mu: float, sampling_rate: float) -> Floats:
    """The observation with this loss; minus infinity below the least loss."""
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = losses + np.log1p(-(1 - sampling_rate) * np.exp(-losses)) - math.log(sampling_rate)
    return np.where(np.isnan(drawn), -np.inf, (drawn + mu**2 / 2) / mu)
