"""The law of non-members' scores: exact on the sphere, sampled if it has no formula, and rejected if it is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from attacks.adversary.null import drawn_tails, refuted, sphere_tails
from attacks.canary_likelihood import likelihood
from attacks.evidence import judge

Floats = NDArray[np.float64]
RATE, SHIFT = 0.3, np.array([1.5, 2.0, 1.0, 1.5])


def sphere(count: int, dimension: int, seed: int) -> Floats:
    drawn = np.random.default_rng(seed).normal(size=(count, dimension))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def score(x: Floats) -> Floats:
    return likelihood(x, SHIFT, RATE)


@pytest.mark.parametrize("dimension", [2, 3, 10, 20_000])
def test_the_tail_on_the_sphere_is_that_of_its_integral(dimension: int) -> None:
    """P(u >= t) is the share of the sphere's surface at angles up to arccos t, of weight sin^(d - 2)."""
    scores = np.array([-1.0, 0.0, 0.4, 1.2])
    found = sphere_tails(scores, dimension)
    half = np.pi / 2 if dimension < 1000 else 0.1  # beyond which nothing is left of the weight
    grid = np.linspace(np.pi / 2 - half, np.pi / 2 + half, 400_001)
    weight = np.sin(grid) ** (dimension - 2)
    for tail, at in zip(found, scores, strict=True):
        angle = np.arccos(np.clip(at / np.sqrt(dimension), -1, 1))
        expected = np.trapezoid(np.where(grid <= angle, weight, 0), grid) / np.trapezoid(weight, grid)
        assert tail == pytest.approx(expected, abs=2e-4)
    if dimension > 1000:
        np.testing.assert_allclose(found, stats.norm.sf(scores), rtol=1e-3)


def seen(dimension: int) -> Floats:
    """Four unit vectors, two of them almost equal, as in rounds with the same drift."""
    spans = sphere(4, dimension, 1)
    spans[3] = 0.9 * spans[2] + 0.4 * spans[3]
    return spans / np.linalg.norm(spans, axis=1, keepdims=True)


@pytest.mark.parametrize("dimension", [6, 150])
def test_drawn_tails_are_those_of_whole_directions(dimension: int) -> None:
    """Compared with draws of u in all its coordinates."""
    spans = seen(dimension)
    naive = score(np.sqrt(dimension) * sphere(40_000, dimension, 2) @ spans.T)
    at = np.quantile(naive, [0.1, 0.5, 0.9, 0.99])
    found = drawn_tails(at, [spans], score, np.random.default_rng(3))
    np.testing.assert_allclose(found, [(naive >= one).mean() for one in at], atol=0.01, rtol=0.15)


def test_rounds_of_other_coordinates_have_directions_of_their_own() -> None:
    one, two = sphere(2, 50, 4), sphere(2, 80, 5)
    x = np.hstack([np.sqrt(50) * sphere(40_000, 50, 6) @ one.T, np.sqrt(80) * sphere(40_000, 80, 7) @ two.T])
    at = np.quantile(score(x), [0.5, 0.95])
    np.testing.assert_allclose(
        drawn_tails(at, [one, two], score, np.random.default_rng(8)), [0.5, 0.05], atol=0.01, rtol=0.1
    )


def test_a_law_that_holds_is_kept_and_a_wrong_one_is_given_up() -> None:
    """Wrong laws: a dimension wrong by a factor, another location, and held-out units of which some trained."""
    dimension, kept = 300, 0
    for seed in range(200):
        scores = np.sqrt(dimension) * sphere(230, dimension, seed)[:, 0]
        kept += not refuted(sphere_tails(scores, dimension))
    assert kept >= 199
    scores = np.sqrt(dimension) * sphere(230, dimension, 1)[:, 0]
    assert refuted(sphere_tails(scores * np.sqrt(2), dimension))  # as if there were twice as many coordinates
    assert refuted(sphere_tails(scores / np.sqrt(2), dimension))
    assert refuted(sphere_tails(scores + 0.3, dimension))
    trained = np.where(np.arange(230) % 4 == 0, 2.0, 0.0)
    assert refuted(sphere_tails(scores + trained, dimension))
    assert not refuted(np.array([]))


def test_figures_against_the_law_are_those_against_ever_more_non_members() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.normal(0.8, 1, 150), rng.normal(size=200_000)
    found = judge.rank_by_law(stats.norm.sf(members), 40)
    assert found.auc == pytest.approx((members[:, None] > others[None, :2000]).mean(), abs=0.01)
    assert found.auc == pytest.approx(float(np.mean(stats.norm.cdf(members))))
    at = found.at[0.001]
    assert at is not None  # which 40 held-out units could not show
    assert at.tpr.value == pytest.approx(float(np.mean(members >= stats.norm.isf(0.001))))
    assert (at.fpr.low, at.fpr.high) == (0.001, 0.001)
    assert found.auc_interval[0] < found.auc < found.auc_interval[1]


def test_the_interval_against_the_law_covers_the_truth() -> None:
    rng, truth, covered = np.random.default_rng(1), float(stats.norm.cdf(0.5 / np.sqrt(2))), 0
    for seed in range(200):
        low, high = judge.rank_by_law(stats.norm.sf(rng.normal(0.5, 1, 60)), 60, seed).auc_interval
        covered += low <= truth <= high
    assert covered >= 179  # 190 are due; fewer than 179 come once in a thousand times


def test_a_curve_against_the_law_has_rates_that_rise_inside_their_band() -> None:
    lines = judge.curve_by_law(np.random.default_rng(2).random(50) ** 2)
    assert lines["fpr"] == sorted(lines["fpr"])
    assert lines["tpr"] == sorted(lines["tpr"])
    assert (lines["fpr"][0], lines["tpr"][0], lines["fpr"][-1], lines["tpr"][-1]) == (0, 0, 1, 1)
    assert all(low <= rate <= high for low, rate, high in zip(lines["low"], lines["tpr"], lines["high"], strict=True))
