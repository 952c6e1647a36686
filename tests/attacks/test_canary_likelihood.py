"""Canary clients by the likelihood of having been drawn: checked by hand, and better with more knowledge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from attacks import canary_cosine, canary_likelihood
from attacks.adversary import steps
from attacks.adversary.case import Inapplicable, Settings
from attacks.adversary.null import refuted
from attacks.canary_likelihood import likelihood
from attacks.evidence import judge
from secure_fed.runs import roc
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


@pytest.mark.nightly
def test_seldom_drawn_canaries_are_found_better_than_by_their_cosines() -> None:
    case, epsilon = canaried.case(DRAWN, canaried.MANY_CLIENTS)
    found = canary_likelihood.run(case, Settings())
    assert found.scores is not None
    alike = canary_cosine.run(case, Settings()).scores
    assert alike is not None
    assert canaried.auc(found.scores, case) > canaried.auc(alike, case)
    assert found.measured["rate"] == pytest.approx(24 / len(canaried.MANY_CLIENTS))
    assert epsilon is not None


@pytest.mark.nightly
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
    members = case.assembly.audit_pool.members
    scores = canary_cosine.run(case, Settings()).scores
    assert scores is not None
    # A sum of three rounds' cosines over sqrt(3): each shifted as foretold.
    assert scores[members].mean() == pytest.approx(of_all.measured["shift"] * math.sqrt(3), rel=0.25)


def test_the_law_of_those_held_out_is_known_and_a_wrong_one_is_noticed() -> None:
    """By the held-out clients themselves; scores made with twice the dimension do not keep to the law."""
    case, _ = canaried.case(DRAWN, canaried.MANY_CLIENTS)
    found, members = canary_likelihood.run(case, Settings()), case.assembly.audit_pool.members
    assert found.null is not None
    assert found.null.rounds is not None
    assert found.null.rounds.shape == (len(case.units), 6)
    assert found.null.rate == pytest.approx(0.2)
    assert not refuted(found.null.tails[~members])
    assert np.median(found.null.tails[members]) < 0.3
    releases = steps.releases(case, case.units[0].client)
    shift = np.array([canary_likelihood._shift(case, one, 2) for one in releases])
    wider = likelihood(found.null.rounds * math.sqrt(2), shift, found.null.rate)
    assert refuted(canary_likelihood._tails(wider, releases, shift, found.null.rate, 0)[~members])


@pytest.mark.nightly
def test_rates_that_few_held_out_cannot_show_are_known_from_the_law() -> None:
    """Sixty or so on either side: against each other 1 % is refused; against the law it is not, and nothing leans on them."""
    case, _ = canaried.case(DRAWN, canaried.MANY_CLIENTS)
    found, members = canary_likelihood.run(case, Settings()), case.assembly.audit_pool.members
    told = judge.judged(found, members, delta=1e-3, significance=0.05, seed=0, releases=6)
    assert told.null == "known"
    assert told.ranking is not None
    assert found.null is not None
    rates = told.ranking.at
    assert all(at is not None and at.fpr.value == rate for rate, at in rates.items())
    assert told.ranking.auc == pytest.approx(1 - float(found.null.tails[members].mean()))
    assert [one.name for one in told.estimates] == ["independent", "sampled_gaussian"]
    refused = judge.judged(replace(found, null=None), members, delta=1e-3, significance=0.05, seed=0)
    assert refused.ranking is not None
    assert set(refused.ranking.at.values()) == {None}
    wrong = replace(found, null=replace(found.null, tails=np.square(found.null.tails)))
    given_up = judge.judged(wrong, members, delta=1e-3, significance=0.05, seed=0)
    assert (given_up.null, given_up.estimates, given_up.ranking) == ("refuted", (), refused.ranking)


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
