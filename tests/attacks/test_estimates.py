"""What scores show of epsilon. Lower bounds: golden numbers, naive sums, a linear programme, and mechanisms of known epsilon.

Estimates from canaries, and what a guarantee allows: right for such mechanisms, sharp, and high where the noise is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import linprog

from attacks.adversary.null import Null
from attacks.evidence import bounds, tradeoff
from attacks.evidence.bounds import Bound, Guesses, gaussian_rejected, lower_bound, one_run_p
from attacks.evidence.figures import SHARES, estimates, independent, log_likelihood, shift_of
from attacks.evidence.tradeoff import Gaussian, allowed, area, expected, rate, same_epsilon, sampled_gaussian
from privacy import accounting
from tests.cells import chosen, every
from tests.golden import refused

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def within(nominal: float, runs: int) -> int:
    """The number of failures that a test of this level exceeds in `runs` runs with a probability of 1/1000."""
    return int(stats.binom.isf(1e-3, runs, nominal))


@every(
    ("m", "r", "v", "delta", "epsilon"),
    [
        (1000, 1000, 1000, 0.0, 5.809),
        (1000, 1000, 1000, 1e-5, 5.782),
        (1000, 200, 190, 0.0, 2.398),
        (1000, 200, 190, 1e-5, 2.394),
        (100, 100, 100, 0.0, 3.493),
        (100, 100, 100, 1e-5, 3.490),
        (1000, 100, 75, 1e-4, 0.673),  # Steinke, Nasr and Jagielski, appendix D
    ],
)
def test_golden_numbers_of_one_run(m: int, r: int, v: int, delta: float, epsilon: float) -> None:
    assert bounds.one_run_epsilon(m, r, v, delta, 0.05) == pytest.approx(epsilon, abs=5e-4)


def test_a_golden_number_of_the_gaussian_curve() -> None:
    mu, epsilon = bounds.one_run_fdp(1000, 200, 190, 1e-5, 0.05)
    assert (mu, epsilon) == (pytest.approx(0.908, abs=5e-4), pytest.approx(3.916, abs=5e-4))


def naive_p(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The published formula, sum by sum."""
    mass = stats.binom(r, math.exp(epsilon) / (1 + math.exp(epsilon))).pmf(np.arange(r + 1))
    alphas = [mass[max(0, v - i) : v].sum() / i for i in range(1, v + 1)]
    return min(1.0, mass[v:].sum() + 2 * m * delta * max(alphas, default=0.0))


@every(("m", "r", "v"), [(30, 20, 17), (30, 30, 30), (50, 7, 7), (50, 40, 25), (5, 0, 0), (5, 3, 0)])
@every("delta", [0.0, 1e-5, 1e-3, 0.5])
@every("epsilon", [0.0, 0.3, 2.0, 6.0])
def test_the_limit_of_right_guesses_is_its_formula(m: int, r: int, v: int, delta: float, epsilon: float) -> None:
    """And the bound is where the limit meets the significance."""
    assert one_run_p(m, r, v, epsilon, delta) == pytest.approx(naive_p(m, r, v, epsilon, delta), rel=1e-10, abs=1e-14)
    found = bounds.one_run_epsilon(m, r, v, delta, 0.05)
    assert not found or naive_p(m, r, v, found - 1e-6, delta) < 0.05 < naive_p(m, r, v, found + 1e-6, delta)


@every("delta", [0.0, 1e-5])
def test_guesses_that_chance_explains_show_nothing(delta: float) -> None:
    for m, r, v in ((100, 0, 0), (100, 4, 4), (100, 100, 50), (100, 100, 0), (100, 50, 30)):
        assert bounds.one_run_epsilon(m, r, v, delta, 0.05) == 0.0
        assert bounds.one_run_fdp(m, r, v, delta, 0.05) == (0.0, 0.0)


def most_likely(m: int, r: int, v: int, mu: float) -> float:
    """The largest P(at least v right) of any law that keeps the inequality at all T = {i .. r}, as a linear programme.

    fbar is concave, so it is the least of its tangents; with finitely many of them the maximum is too large, if anything.
    """
    z = np.linspace(-7, 7, 400)
    at, value = stats.norm.cdf(z), stats.norm.cdf(z + mu)
    slope = np.exp(-mu * z - mu * mu / 2)
    right, wrong = np.arange(r + 1) / m, (r - np.arange(r + 1)) / m
    rows, limits = [], []
    for i in range(1, r + 1):
        for x, y, steep in zip(at, value, slope, strict=True):
            row = np.zeros(r + 1)
            row[i:] += right[i:]
            row[i - 1 : r] -= steep * wrong[i - 1 : r]
            rows.append(row)
            limits.append(y - steep * x)
    goal = -(np.arange(r + 1) >= v).astype(float)
    done = linprog(goal, np.array(rows), limits, np.ones((1, r + 1)), [1.0], bounds=(0, 1))
    assert done.success
    return -float(done.fun)


@every(("m", "r", "v"), [(10, 10, 9), (200, 8, 8)])
def test_the_gaussian_bound_is_where_the_most_likely_law_meets_the_significance(m: int, r: int, v: int) -> None:
    mu, _ = bounds.one_run_fdp(m, r, v, 1e-5, 0.05)
    assert mu > 0.05
    assert most_likely(m, r, v, mu) == pytest.approx(0.05, rel=0.02)
    assert most_likely(m, r, v, 1.2 * mu) > 0.055
    rejected = gaussian_rejected(m, r, v, np.linspace(0, 8, 400), 0.05)
    assert rejected[0] > rejected[-1]
    assert (np.diff(rejected.astype(int)) <= 0).all(), "from the smallest on"


@every("mu", [0.05, 0.5, 1.0, 3.0, 12.0])
@every("delta", [1e-9, 1e-5, 1e-2])
def test_the_epsilon_of_a_gaussian_mechanism_is_the_accountants(mu: float, delta: float) -> None:
    epsilon = bounds.gaussian_epsilon(mu, delta)
    above = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))
    assert above == pytest.approx(delta, rel=1e-6) if epsilon else above < delta
    assert bounds.gaussian_epsilon(0.0, delta) == 0.0
    assert bounds.gaussian_epsilon(1e-10, delta) == 0.0  # its delta is below that at epsilon 0
    assert bounds.gaussian_epsilon(mu, 0.0) == math.inf


def naive_upper(count: int, n: int, tail: float) -> float:
    """The largest p under which so few are not too unlikely, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if stats.binom.cdf(count, n, p) >= tail else (low, p)
    return low


@every(("tp", "ins", "fp", "outs"), [(30, 40, 3, 50), (40, 40, 0, 20), (5, 40, 0, 60)])
@every("delta", [0.0, 1e-2])
def test_clopper_and_pearsons_bounds_are_their_formulas(tp: int, ins: int, fp: int, outs: int, delta: float) -> None:
    fnr, fpr = naive_upper(ins - tp, ins, 0.025), naive_upper(fp, outs, 0.025)
    found = bounds.clopper_pearson_epsilon(tp, ins, fp, outs, delta, 0.05)
    assert found == pytest.approx(max(0.0, math.log((1 - delta - fnr) / fpr)))


def responses(m: int, epsilon: float, rng: np.random.Generator, delta: float = 0.0) -> tuple[Floats, Bools]:
    """Randomised response, (epsilon, delta)-DP and as accurate as that can be: one in 1 / delta tells the truth in print."""
    members = rng.random(m) < 0.5
    told = np.where(rng.random(m) < math.exp(epsilon) / (1 + math.exp(epsilon)), members, ~members)
    printed = rng.random(m) < delta
    return np.where(printed, np.where(members, 2.0, -1.0), told.astype(float)), members


@pytest.mark.parametrize(("epsilon", "delta", "m"), chosen([(1.0, 0.0, 60), (2.0, 1e-3, 60)], [(1.0, 0.0, 60)]))
def test_no_more_than_a_mechanisms_epsilon_is_found(epsilon: float, delta: float, m: int) -> None:
    rng, runs = np.random.default_rng(0), 100
    found = [lower_bound(*responses(m, epsilon, rng, delta), delta, 0.05, seed).epsilon for seed in range(runs)]
    bounded = [one for one in found if one is not None]
    assert bounded, "so many units can show something"
    assert sum(one > epsilon for one in bounded) <= within(0.05, runs)


def test_a_mechanism_without_noise_violates_what_it_promises() -> None:
    members = np.random.default_rng(0).random(1000) < 0.5
    found = lower_bound(members.astype(float), members, 1e-5, 0.05, 7)
    assert found == lower_bound(members.astype(float), members, 1e-5, 0.05, 7)
    assert found.epsilon == lower_bound(np.where(members, math.inf, -math.inf), members, 1e-5, 0.05).epsilon
    # No more than so few units can show: of all 1000 some are beyond the half.
    assert found.epsilon == bounds.one_run_epsilon(1000, 300, 300, 1e-5, 0.05 / 6)
    assert found.right == found.guesses == 300
    assert f"{found.right} of {found.guesses} were right" in found.how
    assert found.significance == 0.05


def null_rate(choice: Callable[[Floats, Bools, int], float], m: int, runs: int) -> float:
    """The rate at which a choice reports a leak for uninformative scores."""
    rng = np.random.default_rng(0)
    return sum(choice(rng.normal(size=m), rng.random(m) < 0.5, seed) > 0 for seed in range(runs)) / runs


def some_way(scores: Floats, members: Bools, seed: int) -> float:
    return max(Guesses(*way)(scores, members, 0.05) for way in bounds.WAYS)


def in_an_audit(scores: Floats, members: Bools, seed: int) -> float:
    return lower_bound(scores, members, 0.0, 0.05, seed).epsilon or 0.0


@pytest.mark.parametrize("runs", chosen([100, 500], [100]))
def test_the_bound_of_an_audit_is_as_often_wrong_as_said(runs: int) -> None:
    """Without the correction some way to guess is wrong far too often."""
    assert null_rate(in_an_audit, 400, runs) <= within(0.05, runs) / runs < null_rate(some_way, 400, runs)


def test_equal_scores_are_guessed_in_an_order_that_knows_no_members() -> None:
    """Units are sorted by membership here; a constant score must still reveal nothing. Nor does an inverted one: the absolute
    value is not used.
    """
    members = np.arange(1000) < 500
    for seed in range(10):
        assert (lower_bound(np.zeros(1000), members, 0.0, 0.05, seed).epsilon or 0.0) < 0.2
    assert lower_bound(np.zeros(1000), members, 0.0, 1e-6, 0).epsilon == 0.0
    inverted = lower_bound(-members.astype(float), members, 1e-5, 0.05)
    assert (inverted.epsilon, inverted.mu) == (0.0, 0.0)
    assert bounds.clopper_pearson_epsilon(0, 100, 100, 100, 0.0, 0.05) == 0.0


def test_where_nothing_can_be_shown_that_is_said() -> None:
    """Of so few units, and where delta is large for so many. From eight units on something is."""
    for m in (8, 9, 20, 21):
        of_few: Any = lower_bound(np.arange(m) % 2 * 1.0, np.arange(m) % 2 == 1, 0.0, 0.05)
        assert 0 < of_few.epsilon <= bounds.one_run_epsilon(m, m, m, 0.0, 0.05)
    for m in (0, 1, 7):
        found = lower_bound(np.arange(float(m)), np.ones(m, dtype=bool), 0.0, 0.05)
        assert found == Bound(None, f"{m} units cannot show anything at delta 0, however right every guess", 0.05)
    members = np.random.default_rng(0).random(1000) < 0.5
    blunt = lower_bound(members * 1.0, members, 1e-3, 0.005)
    assert blunt.epsilon is None
    assert "delta 0.001" in blunt.how


def test_what_is_no_audit_is_refused() -> None:
    members = np.arange(20) % 2 == 0
    for scores, delta, significance in (
        (np.r_[np.zeros(19), math.nan], 0.0, 0.05),
        (np.zeros(19), 0.0, 0.05),
        (np.zeros(20), 0.0, 0.0),
        (np.zeros(20), 1.0, 0.05),
    ):
        with refused(ValueError):
            lower_bound(scores, members, delta, significance)
    with refused(ValueError):
        bounds.one_run_epsilon(10, 4, 5, 0.0, 0.05)
    with refused(ValueError):
        bounds.clopper_pearson_epsilon(5, 4, 0, 4, 0.0, 0.05)
    with refused(ValueError):
        bounds.gaussian_epsilon(-1.0, 1e-5)


@every(("delta", "most"), [(0.0, 5.5), (1e-5, 4.2), (1e-4, 3.4)])
def test_a_bound_says_what_it_could_have_shown_at_most(delta: float, most: float) -> None:
    """Among the largest pools and ten attacks, and of a perfect attack."""
    of_many = lower_bound(np.zeros(1800), np.arange(1800) % 2 == 0, delta, 0.05 / 10)
    assert of_many.most == pytest.approx(most, abs=0.05)
    members = np.random.default_rng(1).random(1000) < 0.5
    perfect: Any = lower_bound(members * 1.0, members, delta, 0.05)
    assert perfect.most == lower_bound(np.zeros(1000), members, delta, 0.05).most
    # With as many members as not no way to guess is right about all; the most is what one way would show.
    assert perfect.epsilon <= perfect.most < 6


# Estimates.


DEMO = (0.5583, 0.05, 20)  # noise multiplier, rate, releases: epsilon 7.97 at 1e-5


def drawn(z: float, rate: float, releases: int, members: int, seed: int) -> Floats:
    """What canaries of a Gaussian mechanism leave, each release N(1 / z, 1) where a member was drawn."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(members, releases)) + (rng.random((members, releases)) < rate) / z


def test_the_parametric_estimate_is_below_the_truth() -> None:
    """Epsilon rises with mu, so that one end is below the other as the shifts are."""
    z, rate, releases, members = 1.5, 0.3, 20, 60
    ends = [shift_of(drawn(z, rate, releases, members, seed), rate) for seed in range(100)]
    assert sum(low > 1 / z for low, _ in ends) <= within(0.05, len(ends))
    assert all(low <= likeliest for low, likeliest in ends)
    assert np.median([likeliest for _, likeliest in ends]) == pytest.approx(1 / z, rel=0.1)


def test_the_most_likely_shift_is_that_of_a_grid() -> None:
    z, rate, releases = DEMO
    x = drawn(z, rate, releases, 100, 3)
    low, likeliest = shift_of(x, rate)
    grid = np.linspace(0.01, 5, 2000)
    heights = np.array([log_likelihood(x, mu, rate) for mu in grid])
    assert likeliest == pytest.approx(grid[heights.argmax()], abs=0.005)
    kept = grid[2 * (heights.max() - heights) <= stats.chi2.ppf(0.9, 1)]
    assert low == pytest.approx(kept[0], abs=0.005)


def test_of_the_null_nothing_is_estimated() -> None:
    ends = [shift_of(drawn(math.inf, 0.05, 20, 100, seed), 0.05)[0] for seed in range(50)]
    assert sum(low > 0 for low in ends) <= within(0.05, 50)
    wrong = sum(independent(np.random.default_rng(seed).random(250), 0.0) > 0 for seed in range(200))
    assert wrong <= within(0.05, 200)


def likelihood_tails(x: Floats, rate: float, mu: float, seed: int) -> Floats:
    def score(x: Floats) -> Floats:
        return np.log(1 - rate + rate * np.exp(mu * x - mu**2 / 2)).sum(1)

    null = np.sort(score(np.random.default_rng(seed).normal(size=(20_000, x.shape[1]))))
    found: Floats = (len(null) - np.searchsorted(null, score(x)) + 1) / (len(null) + 1)
    return found


def test_the_estimate_of_independent_canaries_stays_below_the_truth() -> None:
    """It is Clopper's and Pearson's at fixed thresholds, by hand."""
    z, rate, releases = DEMO
    truth = sampled_gaussian(*DEMO).epsilon(1e-5)
    x = drawn(z, rate, releases, 250 * 60, 5)
    found = [independent(tails, 1e-5) for tails in likelihood_tails(x, rate, 1 / z, 6).reshape(60, 250)]
    assert sum(one > truth for one in found) <= within(0.05, 60)
    assert 1.5 < np.median(found) < 3  # far more than the bound that supposes nothing, and far less than the truth
    tails = np.concatenate([np.full(30, 5e-4), np.full(170, 0.6)])
    expected = [
        math.log((stats.beta.ppf(0.05 * share, 30, 171) - 1e-5) / fpr) for fpr, share in SHARES.items() if fpr >= 1e-3
    ]
    assert independent(tails, 1e-5) == pytest.approx(max(expected))
    assert sum(SHARES.values()) == pytest.approx(1)


def test_broken_noise_is_estimated_above_what_is_accounted_and_noise_that_holds_is_not() -> None:
    """A third of the noise that is due."""
    z, rate, releases = DEMO
    accounted = sampled_gaussian(*DEMO).epsilon(1e-5)
    members = np.ones(250, dtype=bool)
    for noise, broken in ((z, False), (z / 3, True)):
        x = drawn(noise, rate, releases, 250, 8)
        found = estimates(Null(likelihood_tails(x, rate, 1 / z, 9), x, rate), members, 1e-5)
        assert [one.name for one in found] == ["independent", "sampled_gaussian"]
        assert (found[1].epsilon > accounted) is broken
        assert found[1].point is not None
        assert found[1].point >= found[1].epsilon >= found[0].epsilon


def test_without_delta_or_members_nothing_is_estimated() -> None:
    x = drawn(*DEMO, 10, 0)
    null = Null(np.full(10, 0.5), x, 0.05)
    assert estimates(null, np.ones(10, dtype=bool), 0.0) == []
    assert estimates(null, np.zeros(10, dtype=bool), 1e-5) == []
    assert [one.name for one in estimates(Null(np.full(10, 0.5)), np.ones(10, dtype=bool), 1e-5)] == ["independent"]


# The figures that a guarantee allows, and the bound expected from the best attack.


SAMPLED = {"noise_multiplier": 0.5583, "sampling_rate": 0.05, "releases": 20, "delta": 1e-5}


@every(("z", "q", "count"), [(0.5583, 0.05, 20), (1.0, 1.0, 5), (2.0, 0.3, 40)])
def test_its_epsilon_is_the_accountants(z: float, q: float, count: int) -> None:
    expected = accounting.epsilon(accounting.poisson_sampled(q, z), count, 1e-5, discretization=accounting.COARSE)
    assert sampled_gaussian(z, q, count).epsilon(1e-5) == pytest.approx(expected, rel=1e-2)
    assert same_epsilon(expected, 1e-5).epsilon(1e-5) == pytest.approx(expected, abs=1e-3)


@every(("z", "delta"), [(0.5583, 1e-5), (0.05, 1e-9), (2.0, 0.1), (0.5583, 0.9)])
def test_its_epsilon_is_where_the_mean_falls_to_delta(z: float, delta: float) -> None:
    curve = sampled_gaussian(z, 0.05, 2)

    def excess(epsilon: float) -> float:
        both = ((curve.losses, curve.inside), (-curve.losses, curve.outside))
        return max(float(np.sum(law * np.maximum(0, -np.expm1(np.minimum(epsilon - x, 0))))) for x, law in both)

    found = curve.epsilon(delta)
    assert excess(found) <= delta * (1 + 1e-9)
    assert found == 0 or excess(found * (1 - 1e-6)) > delta


def test_the_sampled_curve_is_that_of_draws() -> None:
    rng, mu, q = np.random.default_rng(0), 1.5, 0.2

    def losses(x: np.ndarray) -> np.ndarray:
        return np.log(1 - q + q * np.exp(mu * x - mu**2 / 2)).sum(1)

    outs = losses(rng.normal(size=(40_000, 6)))
    ins = losses(rng.normal(size=(40_000, 6)) + mu * (rng.random((40_000, 6)) < q))
    curve = sampled_gaussian(1 / mu, q, 6)
    assert curve.area == pytest.approx(stats.mannwhitneyu(ins, outs).statistic / 40_000**2, abs=0.006)
    assert curve.rate(0.05) == pytest.approx((ins > np.quantile(outs, 0.95)).mean(), abs=0.01)


@every(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.1), (7.97, 1e-5)])
def test_the_area_of_epsilon_and_delta_is_the_integral_of_its_rates(epsilon: float, delta: float) -> None:
    fpr = np.linspace(0, 1, 40_001)
    assert area(epsilon, delta) == pytest.approx(
        np.trapezoid([rate(one, epsilon, delta) for one in fpr], fpr), abs=1e-4
    )
    if not delta:
        assert area(epsilon, 0.0) == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)))  # randomised response


def test_the_mechanisms_curve_is_taken_only_if_the_accounted_epsilon_is_its_own() -> None:
    """In the example of docs/audit.md."""
    curve, own = sampled_gaussian(0.5583, 0.05, 20), allowed(SAMPLED, 7.966)
    assert curve.epsilon(1e-5) == pytest.approx(7.97, abs=0.01)
    assert own.by == "mechanism"
    assert own.auc == curve.area == pytest.approx(0.66, abs=0.005)
    assert own.tpr_at_fpr[0.01] == pytest.approx(0.088, abs=0.001)
    for other in (allowed(SAMPLED, 5.0), allowed({**SAMPLED, "noise_multiplier": None}, 7.966)):
        assert other.by == "epsilon"
    assert allowed(SAMPLED, 65.0).auc == pytest.approx(1.0)


def test_one_gaussian_for_the_whole_run_allows_what_its_mu_says_and_not_what_coins_would() -> None:
    """A run in a public order: its sampling rate and number of rounds would be those of coins, at an epsilon of their own."""
    mu, said = 1 / 0.6, {**SAMPLED, "noise_multiplier": 0.6, "privacy": {"gaussian_mu": 1 / 0.6}}
    epsilon = accounting.epsilon(accounting.unamplified(0.6), 1, 1e-5)
    assert Gaussian(mu).epsilon(1e-5) == pytest.approx(epsilon)
    own = allowed(said, epsilon)
    assert own.by == "mechanism"
    assert own.auc == pytest.approx(stats.norm.cdf(mu / math.sqrt(2)))
    assert own.tpr_at_fpr[0.01] == pytest.approx(stats.norm.sf(stats.norm.isf(0.01) - mu))
    assert own.auc == pytest.approx(sampled_gaussian(0.6, 1.0, 1).area, abs=1e-3)
    assert allowed(said, 5.0).by == "epsilon"
    loose = allowed(said, 1.1 * epsilon)  # accounted by divergences, as noise shares are
    assert (loose.by, loose.auc) == ("mechanism", own.auc)


MEMBERS = np.arange(500) < 250


def by_hand(mu: float, delta: float) -> float:
    """The median over audits where members score N(mu, 1) and others N(0, 1)."""
    rng = np.random.default_rng(1)
    found = [lower_bound(rng.normal(size=500) + mu * MEMBERS, MEMBERS, delta, 0.05).epsilon or 0.0 for _ in range(20)]
    return float(np.median(found))


def test_it_is_what_the_best_attack_shows_of_a_gaussian() -> None:
    mu = 2.5
    accounted = Gaussian(mu).epsilon(1e-5)
    for result in (
        {"delta": 1e-5, "privacy": {"gaussian_mu": mu}},
        {"delta": 1e-5, "privacy": {"mechanism": "shares"}},
    ):
        found = expected(result, accounted, MEMBERS, 0.05)
        assert found.epsilon_lower == pytest.approx(by_hand(mu, 1e-5), abs=0.25)
        assert found.by == ("mechanism" if "gaussian_mu" in result["privacy"] else "Gaussian of the same epsilon")


def test_members_have_the_rates_that_the_curve_allows() -> None:
    rng, many = np.random.default_rng(0), np.arange(40_000) < 20_000
    for curve in (Gaussian(1.5), sampled_gaussian(0.6, 0.05, 20)):
        tails = -tradeoff.drawn(curve, many, rng)
        for fpr in (0.001, 0.01, 0.1, 0.5):
            assert np.mean(tails[~many] <= fpr) == pytest.approx(fpr, abs=4 * (fpr / 20_000) ** 0.5)
            caught = curve.rate(fpr)
            assert np.mean(tails[many] <= fpr) == pytest.approx(caught, abs=4 * (caught / 20_000) ** 0.5)
