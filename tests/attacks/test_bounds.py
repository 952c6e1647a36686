"""Lower bounds of epsilon: golden numbers, naive sums, a linear programme, and mechanisms whose epsilon is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import linprog

from attacks.evidence import bounds
from attacks.evidence.bounds import Bound, Guesses, gaussian_rejected, lower_bound, one_run_p
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
