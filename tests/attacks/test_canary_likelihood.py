"""Canary clients by the likelihood of having been drawn: right by hand, and the better the more is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from attacks import canary_cosine, canary_likelihood
from attacks.canary_likelihood import likelihood
from attacks.case import Inapplicable, Settings
from secure_fed import roc
from tests.attacks import canaried

DRAWN = {**canaried.CLIENTS, "privacy.noise_multiplier": 0.3, "federation.cohort": 24, "federation.rounds": 6}


def test_the_score_is_the_likelihood_ratio_by_hand() -> None:
    x, shift, rate = np.array([[0.3, -1.0], [2.5, 4.0]]), np.array([1.5, 3.0]), 0.2
    for found, row in zip(likelihood(x, shift, rate), x, strict=True):
        expected = 0.0
        for one, s in zip(row, shift, strict=True):
            mixture = (1 - rate) * norm.pdf(one) + rate * norm.pdf(one, loc=s)
            expected += math.log(mixture / norm.pdf(one))
        assert found == pytest.approx(expected)


def test_who_always_takes_part_is_scored_by_the_weighed_sum() -> None:
    x, shift = np.random.default_rng(0).normal(size=(50, 4)), np.array([1.0, 2.0, 0.5, 1.0])
    expected = x @ shift - np.square(shift).sum() / 2
    np.testing.assert_allclose(likelihood(x, shift, 1.0), expected)


@pytest.mark.parametrize(("rate", "shift"), [(0.05, 4.0), (0.3, 1.5), (1.0, 0.5)])
def test_it_ranks_no_worse_than_sum_and_largest(rate: float, shift: float) -> None:
    rng = np.random.default_rng(1)
    outs = rng.normal(size=(4000, 20))
    ins = rng.normal(size=(4000, 20)) + shift * (rng.random((4000, 20)) < rate)
    shifts = np.full(20, shift)
    best = roc.auc(likelihood(ins, shifts, rate), likelihood(outs, shifts, rate))
    assert best >= roc.auc(ins.sum(1), outs.sum(1)) - 1e-3
    assert best >= roc.auc(ins.max(1), outs.max(1)) - 1e-3


def test_seldom_drawn_canaries_are_found_better_than_by_their_cosines() -> None:
    case, epsilon = canaried.case(DRAWN, canaried.MANY_CLIENTS)
    found = canary_likelihood.run(case, Settings())
    assert found.scores is not None
    alike = canary_cosine.run(case, Settings()).scores
    assert alike is not None
    assert canaried.auc(found.scores, case) > canaried.auc(alike, case)
    assert found.measured["rate"] == pytest.approx(24 / len(canaried.MANY_CLIENTS))
    assert epsilon is not None


def test_the_shift_foretold_is_the_shift_there_is() -> None:
    everybody: dict[str, Any] = {
        **DRAWN,
        "federation.cohort": 120,
        "federation.rounds": 3,
        "federation.sampling": "fixed",
    }
    case, _ = canaried.case(everybody, canaried.MANY_CLIENTS)
    of_all = canary_likelihood.run(case, Settings())
    assert of_all.measured["rate"] == 1.0
    members = case.federation.held.members
    scores = canary_cosine.run(case, Settings()).scores
    assert scores is not None
    # A sum of three rounds' cosines over sqrt(3): each shifted as foretold.
    assert scores[members].mean() == pytest.approx(of_all.measured["shift"] * math.sqrt(3), rel=0.25)


def test_where_it_cannot_know_the_length_it_says_so() -> None:
    of_examples = {**canaried.EXAMPLES, "privacy.noise_multiplier": 1.0}
    case, _ = canaried.case(of_examples, canaried.MANY_EXAMPLES)
    with pytest.raises(Inapplicable, match="of clients"):
        canary_likelihood.run(case, Settings())
    products, _ = canaried.case({**DRAWN, "method.name": "fra_lora"}, canaried.MANY_CLIENTS)
    with pytest.raises(Inapplicable, match="products"):
        canary_likelihood.run(products, Settings())
    nothing, _ = canaried.case(DRAWN, canaried.MANY_CLIENTS)
    final = replace(nothing.seen, states={}, sums=(), updates=())
    with pytest.raises(Inapplicable, match="no round was recorded"):
        canary_likelihood.run(replace(nothing, seen=final), Settings())
