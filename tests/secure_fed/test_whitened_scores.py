"""Scores of phantoms under correlated noise: as powerful as the guarantee allows, and never more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm

from privacy.correlation import Correlation, square_root
from secure_fed.learning.training.canary_directions import direction
from secure_fed.rounds.phantoms import SCORES, Floats, Past, whitened_evidence
from secure_fed.tensors.layout import Layout
from tests.privacy.test_correlation import dense
from tests.secure_fed import in_turn

ROUNDS, GAP, Z, CLIP, COHORT, EACH = 12, 5, 1.1, 0.7, 9.0, 20_000


def products(made: Correlation, turns: Floats, seed: int) -> Floats:
    """(rounds, 2 EACH) <e, mean> for EACH members, then EACH non-members, of releases with the noise C^-1 Z."""
    rng = np.random.default_rng(seed)
    root = np.array([[made.weights(ROUNDS)[t - j] if j <= t else 0.0 for j in range(ROUNDS)] for t in range(ROUNDS)])
    noise = CLIP * (Z * CLIP / COHORT) * root @ rng.normal(size=(ROUNDS, 2 * EACH))
    member = np.arange(2 * EACH) < EACH
    return np.asarray(noise + np.outer(turns, member) * CLIP**2 / COHORT)


def auc(scores: Floats) -> float:
    return float(mannwhitneyu(scores[:EACH], scores[EACH:]).statistic / EACH**2)


def scored(column: Floats, seen: Floats, turns: Floats, lost: frozenset[int] = frozenset()) -> Floats:
    past, total = Past.before(0, len(column), 2 * EACH), np.zeros(2 * EACH)
    for t in range(ROUNDS):
        if t not in lost:
            past = Past.of(past.kept()).then(t, seen[t], np.full(2 * EACH, turns[t]))
            total += whitened_evidence(past, column, np.full(2 * EACH, CLIP), COHORT, Z * CLIP / COHORT)
    return total


@pytest.mark.parametrize("first", [0, 1, 4])
def test_the_score_has_the_power_of_the_guarantee_and_no_more(first: int) -> None:
    made, turns = square_root(4), np.isin(np.arange(ROUNDS), range(first, ROUNDS, GAP)).astype(float)
    seen = products(made, turns, first)
    column = np.array(made.column)
    mu = math.sqrt(float(np.sum(np.convolve(column, turns)[:ROUNDS] ** 2))) / Z
    found = scored(column, seen, turns)
    assert auc(found) == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=0.005)
    allowed = math.sqrt(made.exposures(ROUNDS, GAP, -(-ROUNDS // GAP))[-1]) / Z
    assert mu <= allowed * (1 + 1e-12), "the first in the order is the one who is seen most"
    assert (first == 0) == (mu == pytest.approx(allowed))
    # The law of a log-likelihood ratio: N(-mu^2 / 2, mu^2) for non-members, N(mu^2 / 2, mu^2) for members.
    for half, sign in ((found[:EACH], 1), (found[EACH:], -1)):
        assert half.mean() == pytest.approx(sign * mu**2 / 2, abs=5 * mu / math.sqrt(EACH))
        assert half.std() == pytest.approx(mu, rel=0.03)
    assert auc(found) > auc(scored(np.array([1.0]), seen, turns)) + 0.02, "each release by itself says less"


def test_a_lost_round_is_no_turn_and_moves_the_rows_after_it() -> None:
    past = Past.before(0, 3, 1).then(0, np.array([1.0]), np.array([1.0])).then(2, np.array([5.0]), np.array([0.0]))
    assert past.products[:, 0].tolist() == [5.0, 0.0, 1.0]
    assert past.turns[:, 0].tolist() == [0.0, 0.0, 1.0]
    assert past.then(9, np.array([7.0]), np.array([1.0])).products[:, 0].tolist() == [7.0, 0.0, 0.0]
    made, turns = square_root(4), np.isin(np.arange(ROUNDS), range(0, ROUNDS, GAP)).astype(float)
    seen = products(made, turns, 3)
    assert (
        0.6
        < auc(scored(np.array(made.column), seen, turns, lost=frozenset({3})))
        < auc(scored(np.array(made.column), seen, turns))
    )


def test_a_run_scores_its_phantoms_by_the_rows_of_all_its_releases() -> None:
    """The reference multiplies all releases by C at once."""
    built = in_turn.federation({**in_turn.BANDED, "evaluation.phantoms": 12})
    _, watched = in_turn.of_zeros(built)
    found = built.run().state.memory.tensor(SCORES).numpy()
    pool, plan, server = built.assembly.pools["phantoms"], built.assembly.protection.plan, built.assembly.server
    assert plan is not None
    means = [one["change"] for one, _ in watched.seen]
    c = dense(plan.correlation, len(means))
    rows = c @ np.array([in_turn.flat(mean) for mean in means])
    towards = np.array([in_turn.flat(direction(unit.name, 0, Layout.of(means[0]))) for unit in pool.units])
    turns = c @ np.array([server.scoring.turns.rates(t) for t in range(len(means))])  # type: ignore[union-attr]
    cohort = built.assembly.sampler.expected
    std = plan.noise_multiplier * in_turn.CLIP / cohort
    y = in_turn.CLIP * rows @ towards.T
    expected = (turns * (y - turns * in_turn.CLIP**2 / (2 * cohort)) / (cohort * std**2)).sum(axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
