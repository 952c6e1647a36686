"""Lower bounds of epsilon: golden numbers, naive sums, a linear programme, and mechanisms whose epsilon is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import linprog

from attacks.evidence import bounds
from attacks.evidence.bounds import Bound, Guesses, gaussian_rejected, lower_bound, one_run_p
from tests.cells import chosen, every

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
    ],
)
def test_golden_numbers_of_one_run(m: int, r: int, v: int, delta: float, epsilon: float) -> None:
    assert bounds.one_run_epsilon(m, r, v, delta, 0.05) == pytest.approx(epsilon, abs=5e-4)


def test_the_published_example_of_one_run() -> None:
    """Steinke, Nasr and Jagielski, appendix D: 75 of 100 guesses about 1000 units are right."""
    assert bounds.one_run_epsilon(1000, 100, 75, 1e-4, 0.05) == pytest.approx(0.673, abs=5e-4)


def test_golden_numbers_of_the_gaussian_one_run() -> None:
    mu, epsilon = bounds.one_run_fdp(1000, 200, 190, 1e-5, 0.05)
    assert (mu, epsilon) == (pytest.approx(0.908, abs=5e-4), pytest.approx(3.916, abs=5e-4))


@every(("tp", "fp", "n", "epsilon"), [(500, 0, 500, 4.906), (100, 0, 500, 3.116), (5000, 0, 5000, 7.21)])
def test_golden_numbers_of_clopper_and_pearson(tp: int, fp: int, n: int, epsilon: float) -> None:
    assert bounds.clopper_pearson_epsilon(tp, n, fp, n, 0.0, 0.05) == pytest.approx(epsilon, abs=2e-3)


def mass(r: int, k: int, q: float) -> float:
    return math.comb(r, k) * q**k * (1 - q) ** (r - k)


def naive_p(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The published formula, sum by sum."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    beta = sum(mass(r, k, q) for k in range(v, r + 1))
    alphas = [sum(mass(r, k, q) for k in range(max(0, v - i), v)) / i for i in range(1, v + 1)]
    return min(1.0, beta + 2 * m * delta * max(alphas, default=0.0))


@every(("m", "r", "v"), [(30, 20, 17), (30, 30, 30), (50, 7, 7), (50, 40, 25), (5, 0, 0), (5, 3, 0)])
@every("delta", [0.0, 1e-5, 1e-3, 0.5])
@every("epsilon", [0.0, 0.3, 2.0, 6.0])
def test_the_limit_of_right_guesses_is_its_formula(m: int, r: int, v: int, delta: float, epsilon: float) -> None:
    assert one_run_p(m, r, v, epsilon, delta) == pytest.approx(naive_p(m, r, v, epsilon, delta), rel=1e-10, abs=1e-14)


@every(("m", "r", "v", "delta"), [(30, 20, 17, 0.0), (100, 100, 80, 1e-4), (1000, 50, 49, 1e-5)])
def test_the_bound_is_where_the_limit_meets_the_significance(m: int, r: int, v: int, delta: float) -> None:
    found = bounds.one_run_epsilon(m, r, v, delta, 0.05)
    assert naive_p(m, r, v, found - 1e-6, delta) < 0.05 < naive_p(m, r, v, found + 1e-6, delta)


@pytest.mark.parametrize("delta", [0.0, 1e-5])
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


@pytest.mark.parametrize(
    ("m", "r", "v"),
    chosen(
        [(10, 10, 9), (10, 10, 10), (40, 12, 11), (200, 8, 8), (20, 20, 16)], [(10, 10, 9), (10, 10, 10), (200, 8, 8)]
    ),
)
def test_the_gaussian_bound_is_where_the_most_likely_law_meets_the_significance(m: int, r: int, v: int) -> None:
    mu, _ = bounds.one_run_fdp(m, r, v, 1e-5, 0.05)
    assert mu > 0.05
    assert most_likely(m, r, v, mu) == pytest.approx(0.05, rel=0.02)
    assert most_likely(m, r, v, 1.2 * mu) > 0.055


def test_gaussian_curves_are_rejected_from_the_smallest_on() -> None:
    rejected = gaussian_rejected(500, 60, 52, np.linspace(0, 8, 400), 0.05)
    assert rejected[0]
    assert not rejected[-1]
    assert (np.diff(rejected.astype(int)) <= 0).all()


@every("mu", [0.05, 0.5, 1.0, 3.0, 12.0])
@every("delta", [1e-9, 1e-5, 1e-2])
def test_the_epsilon_of_a_gaussian_mechanism_is_the_accountants(mu: float, delta: float) -> None:
    assert bounds.gaussian_epsilon(mu, delta) == pytest.approx(get_epsilon_gaussian(1 / mu, delta), rel=1e-6, abs=1e-9)


def test_the_epsilon_of_a_gaussian_mechanism_at_its_ends() -> None:
    assert bounds.gaussian_epsilon(0.0, 1e-5) == 0.0
    assert bounds.gaussian_epsilon(1.0, 0.0) == math.inf
    assert bounds.gaussian_epsilon(1e-7, 1e-5) == 0.0  # its delta is below that at epsilon 0
    with pytest.raises(ValueError, match="mu -1"):
        bounds.gaussian_epsilon(-1.0, 1e-5)


def naive_upper(count: int, n: int, tail: float) -> float:
    """The largest p under which so few are not too unlikely, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(mass(n, k, p) for k in range(count + 1)) >= tail else (low, p)
    return low


@every(("tp", "ins", "fp", "outs"), [(30, 40, 3, 50), (40, 40, 0, 20), (5, 40, 0, 60)])
@every("delta", [0.0, 1e-2])
def test_clopper_and_pearsons_bounds_are_their_formulas(tp: int, ins: int, fp: int, outs: int, delta: float) -> None:
    fnr, fpr = naive_upper(ins - tp, ins, 0.025), naive_upper(fp, outs, 0.025)
    found = bounds.clopper_pearson_epsilon(tp, ins, fp, outs, delta, 0.05)
    assert found == pytest.approx(max(0.0, math.log((1 - delta - fnr) / fpr)))


def test_an_inverted_sign_is_no_leak() -> None:
    """The absolute value is not used: members that score lower show nothing, however clearly."""
    members = np.arange(200) < 100
    assert bounds.clopper_pearson_epsilon(0, 100, 100, 100, 0.0, 0.05) == 0.0
    found = lower_bound(-members.astype(float), members, 1e-5, 0.05)
    assert (found.epsilon, found.mu) == (0.0, 0.0)


def responses(m: int, epsilon: float, rng: np.random.Generator, delta: float = 0.0) -> tuple[Floats, Bools]:
    """Randomised response, (epsilon, delta)-DP and as accurate as that can be: one in 1 / delta tells the truth in print."""
    members = rng.random(m) < 0.5
    told = np.where(rng.random(m) < math.exp(epsilon) / (1 + math.exp(epsilon)), members, ~members)
    printed = rng.random(m) < delta
    return np.where(printed, np.where(members, 2.0, -1.0), told.astype(float)), members


@pytest.mark.parametrize(
    ("epsilon", "delta", "m"),
    chosen(
        [(0.0, 0.0, 200), (1.0, 0.0, 60), (2.0, 1e-3, 60), (4.0, 0.0, 100)],
        [(1.0, 0.0, 60)],
    ),
)
def test_no_more_than_a_mechanisms_epsilon_is_found(epsilon: float, delta: float, m: int) -> None:
    rng, runs = np.random.default_rng(0), 100
    found = [lower_bound(*responses(m, epsilon, rng, delta), delta, 0.05, seed).epsilon for seed in range(runs)]
    bounded = [one for one in found if one is not None]
    assert bounded, "so many units can show something"
    assert sum(one > epsilon for one in bounded) <= within(0.05, runs)


@pytest.mark.parametrize("epsilon", chosen([0.5, 1.0, 3.0], [1.0]))
def test_the_bound_is_near_for_many_units(epsilon: float) -> None:
    found = lower_bound(*responses(10_000, epsilon, np.random.default_rng(1)), 0.0, 0.05)
    assert found.epsilon is not None
    assert 0.85 * epsilon < found.epsilon <= epsilon
    assert found.guesses >= 500


def test_the_gaussian_estimate_is_no_bound_of_other_mechanisms() -> None:
    """Why it makes no violation: randomised response keeps its epsilon, the Gaussian curve fitted to it has a larger one."""
    found = lower_bound(*responses(6_000, 1.0, np.random.default_rng(1)), 1e-5, 0.05)
    assert found.gaussian_epsilon is not None
    assert found.gaussian_epsilon > 1.2
    assert found.epsilon is not None
    assert found.epsilon <= 1.0


@pytest.mark.nightly
@pytest.mark.parametrize(("mu", "m"), [(1.0, 60), (0.3, 150), (3.0, 150)])
def test_no_more_than_a_gaussian_mechanisms_mu_is_found(mu: float, m: int) -> None:
    rng, runs, exceeded = np.random.default_rng(3), 50, 0
    epsilon = bounds.gaussian_epsilon(mu, 1e-5)
    for seed in range(runs):
        members = rng.random(m) < 0.5
        found = lower_bound(rng.normal(size=m) + mu * members, members, 1e-5, 0.05, seed)
        assert found.mu is not None
        exceeded += found.mu > mu or (found.epsilon or 0.0) > epsilon
    assert exceeded <= within(0.05, runs)


def test_a_mechanism_without_noise_violates_what_it_promises() -> None:
    members = np.random.default_rng(0).random(1000) < 0.5
    found = lower_bound(members.astype(float), members, 1e-5, 0.05)
    assert found.epsilon is not None
    assert 4.0 < found.epsilon < 8.0  # no more than so few units can show
    assert found.epsilon == bounds.one_run_epsilon(
        1000, 300, 300, 1e-5, 0.05 / 6
    )  # of all 1000 some are beyond the half
    assert found.right == found.guesses == 300
    assert f"{found.right} of {found.guesses} were right" in found.how
    assert found.significance == 0.05


def test_units_that_share_a_coin_are_no_units() -> None:
    """Each coin twelve times over: the mechanism tells no more of a coin than before, and the bound is wrong far too often."""
    rng, runs = np.random.default_rng(0), 40
    exceeded = 0
    for seed in range(runs):
        scores, members = responses(20, 1.0, rng)
        exceeded += (lower_bound(np.repeat(scores, 12), np.repeat(members, 12), 0.0, 0.05, seed).epsilon or 0.0) > 1.0
    assert exceeded > within(0.05, runs)


Choice = Callable[[Floats, Bools, int], float]


def null_rate(choice: Choice, m: int, runs: int) -> float:
    """The rate at which a choice reports a leak for uninformative scores."""
    rng = np.random.default_rng(0)
    return sum(choice(rng.normal(size=m), rng.random(m) < 0.5, seed) > 0 for seed in range(runs)) / runs


GRID = [Guesses(i / 40, j / 40) for i in range(21) for j in range(21) if i + j]


def uncorrected(scores: Floats, members: Bools, seed: int) -> float:
    return max(way(scores, members, 0.05) for way in GRID)


@pytest.mark.nightly
def test_the_best_of_many_guess_counts_without_correction_is_chances_work() -> None:
    """440 ways to guess 400 units, each wrong one time in twenty, are wrong together in nearly half of all runs."""
    assert 0.35 < null_rate(uncorrected, 400, 300) < 0.55


def test_without_correction_some_ways_to_guess_are_wrong_far_too_often() -> None:
    """The test below detects this."""

    def audits(scores: Floats, members: Bools, seed: int) -> float:
        return max(Guesses(*way)(scores, members, 0.05) for way in bounds.WAYS)

    assert null_rate(audits, 400, 120) > within(0.05, 120) / 120


@pytest.mark.parametrize("runs", chosen([120, 500], [120]))
def test_the_bound_of_an_audit_is_as_often_wrong_as_said(runs: int) -> None:
    def audits(scores: Floats, members: Bools, seed: int) -> float:
        return lower_bound(scores, members, 0.0, 0.05, seed).epsilon or 0.0

    assert null_rate(audits, 400, runs) <= within(0.05, runs) / runs


def test_equal_scores_are_guessed_in_an_order_that_knows_no_members() -> None:
    """Units are sorted by membership here; a constant score must still reveal nothing."""
    members = np.arange(1000) < 500
    for seed in range(10):
        assert (lower_bound(np.zeros(1000), members, 0.0, 0.05, seed).epsilon or 0.0) < 0.2
    assert lower_bound(np.zeros(1000), members, 0.0, 1e-6, 0).epsilon == 0.0


def test_equal_arguments_give_equal_bounds() -> None:
    scores, members = responses(200, 2.0, np.random.default_rng(0))
    assert lower_bound(scores, members, 1e-5, 0.05, 7) == lower_bound(scores, members, 1e-5, 0.05, 7)


def test_infinite_scores_are_ranked() -> None:
    members = np.arange(100) < 50
    found = lower_bound(np.where(members, math.inf, -math.inf), members, 0.0, 0.05)
    assert found.epsilon == lower_bound(members * 1.0, members, 0.0, 0.05).epsilon
    assert found.gaussian_epsilon is None  # infinite at a delta of 0


@pytest.mark.parametrize("m", [0, 1, 7])
def test_so_few_units_are_told_to_show_nothing(m: int) -> None:
    found = lower_bound(np.arange(float(m)), np.ones(m, dtype=bool), 0.0, 0.05)
    assert found == Bound(None, f"{m} units cannot show anything at delta 0, however right every guess", 0.05)


@every("m", [8, 9, 20, 21])
def test_few_units_show_little_but_something(m: int) -> None:
    members = np.arange(m) % 2 == 0
    found = lower_bound(members * 1.0, members, 0.0, 0.05)
    assert found.epsilon is not None
    assert 0 < found.epsilon <= bounds.one_run_epsilon(m, m, m, 0.0, 0.05)


def test_what_is_no_audit_is_refused() -> None:
    members = np.arange(20) % 2 == 0
    with pytest.raises(ValueError, match="1 of 20 scores are NaN"):
        lower_bound(np.r_[np.zeros(19), math.nan], members, 0.0, 0.05)
    with pytest.raises(ValueError, match="do not fit"):
        lower_bound(np.zeros(19), members, 0.0, 0.05)
    with pytest.raises(ValueError, match="significance of 0 "):
        lower_bound(np.zeros(20), members, 0.0, 0.0)
    with pytest.raises(ValueError, match="delta 1 "):
        lower_bound(np.zeros(20), members, 1.0, 0.05)
    with pytest.raises(ValueError, match="5 right of 4 guesses"):
        bounds.one_run_epsilon(10, 4, 5, 0.0, 0.05)
    with pytest.raises(ValueError, match="-1 of 4"):
        bounds.clopper_pearson_epsilon(5, 4, 0, 4, 0.0, 0.05)


def test_where_delta_is_large_for_so_many_units_nothing_can_be_shown_and_that_is_said() -> None:
    members = np.random.default_rng(0).random(1000) < 0.5
    blunt = lower_bound(members * 1.0, members, 1e-3, 0.005)
    assert blunt.epsilon is None
    assert "delta 0.001" in blunt.how
    assert lower_bound(members * 1.0, members, 1e-5, 0.05).epsilon


@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_a_bound_says_what_it_could_have_shown_at_most(delta: float) -> None:
    members = np.random.default_rng(1).random(1000) < 0.5
    perfect = lower_bound(members * 1.0, members, delta, 0.05)
    nothing = lower_bound(np.zeros(1000), members, delta, 0.05)
    assert perfect.most == nothing.most
    assert perfect.epsilon is not None
    # With as many members as not no way to guess is right about all; the most is what one way would show.
    assert perfect.epsilon <= perfect.most < 6


@pytest.mark.parametrize(("delta", "most"), [(0.0, 5.5), (1e-5, 4.2), (1e-4, 3.4)])
def test_what_the_largest_pools_show_at_most_among_ten_attacks(delta: float, most: float) -> None:
    members = np.arange(1800) % 2 == 0
    assert lower_bound(np.zeros(1800), members, delta, 0.05 / 10).most == pytest.approx(most, abs=0.05)
