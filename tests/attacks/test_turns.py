"""Under a public order an attack uses a unit's own turns, and removes correlated noise around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attacks import canary_cosine, canary_likelihood
from attacks.adversary.case import Case, Inapplicable, Settings
from attacks.adversary.null import Floats, refuted
from attacks.adversary.steps import releases, weights_of
from attacks.evidence import judge
from tests.attacks import canaried

TURNS: dict[str, Any] = {
    **canaried.CLIENTS,
    "federation.sampling": "schedule",
    "federation.cohort": 20,
    "federation.rounds": 6,
    "privacy.noise": "central",
    "privacy.correlation": "none",
    "privacy.noise_multiplier": 0.6,
}


def case_of(**settings: Any) -> Case:
    return canaried.case({**TURNS, **settings}, canaried.MANY_CLIENTS)[0]


def turns_by_hand(case: Case) -> Floats:
    """(rounds, units) of the members whom the server draws; a client that was held out has one of the turns that are left."""
    server = case.assembly.server
    drawn = [{server.names[i] for i in server.draw(round_)} for round_ in range(6)]
    return np.array([[float(unit.name in names) for unit in case.units] for names in drawn])


def test_a_unit_is_looked_for_in_its_own_turns() -> None:
    case = case_of()
    seen, weights, turns = releases(case, ""), weights_of(case), turns_by_hand(case)
    assert [release.round for release in seen] == list(range(6))
    found = np.array([weights(unit, seen) for unit in case.units])
    members = case.assembly.audit_pool.members
    np.testing.assert_array_equal(found[members], turns.T[members])
    assert not turns.T[~members].any()
    np.testing.assert_array_equal(found.sum(axis=0), np.full(6, 20.0))  # all 120 have their turn, present or not
    np.testing.assert_array_equal(found.sum(axis=1), np.ones(120))


def test_correlated_noise_is_undone_around_a_turn() -> None:
    case = case_of(**{"privacy.correlation": "banded"})
    plan = case.assembly.protection.plan
    assert plan is not None
    assert plan.correlation.band > 1
    seen, turns = releases(case, ""), turns_by_hand(case)
    column = np.pad(plan.correlation.column, (0, 6))[:6]
    c = np.array([[column[i - j] if i >= j else 0.0 for j in range(6)] for i in range(6)])
    lengths = np.array([release.length for release in seen])
    members = [number for number, there in enumerate(case.assembly.audit_pool.members) if there][:10]
    for unit, own in [(case.units[number], turns[:, number]) for number in members]:
        expected = c.T @ c @ own * lengths
        np.testing.assert_allclose(weights_of(case)(unit, seen), expected / np.abs(expected).max())


@pytest.mark.parametrize("correlation", ["none", "banded"])
def test_it_finds_more_than_all_rounds_alike_and_the_law_of_others_still_holds(
    correlation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(**{"privacy.correlation": correlation})
    members = case.assembly.audit_pool.members
    found = canary_cosine.run(case, Settings())
    assert found.scores is not None
    assert found.null is not None
    assert not refuted(found.null.tails[~members])
    monkeypatch.setattr(canary_cosine, "weights_of", lambda case: lambda unit, seen: np.ones(len(seen)))
    alike = canary_cosine.run(case, Settings()).scores
    assert alike is not None
    assert canaried.auc(found.scores, case) > canaried.auc(alike, case) + 0.03


def test_the_estimate_is_that_of_one_gaussian() -> None:
    """The shift of a score is at most 1 / z: the other clients' part of a release takes some of it."""
    case = case_of()
    found = canary_cosine.run(case, Settings())
    told = judge.judged(found, case.assembly.audit_pool.members, delta=1e-3, significance=0.05, seed=0, releases=6)
    estimate = {one.name: one for one in told.estimates}["sampled_gaussian"]
    accounted = 5.98  # of a Gaussian with z = 0.6 at delta 1e-3
    assert estimate.point is not None
    assert 0.3 * accounted < estimate.point
    assert estimate.epsilon < accounted


def test_who_never_had_a_turn_is_scored_by_all_rounds() -> None:
    case = case_of(**{"federation.rounds": 3})
    seen, weights = releases(case, ""), weights_of(case)
    found = np.array([weights(unit, seen) for unit in case.units])
    assert sorted(found.sum(axis=1)) == [1.0] * 60 + [3.0] * 60


def test_from_the_final_model_alone_no_round_is_told_from_another() -> None:
    case = case_of()
    final = replace(case, seen=replace(case.seen, states={}))
    np.testing.assert_array_equal(weights_of(final)(final.units[0], releases(final, "")), [1.0])


def test_chances_are_for_secret_coins() -> None:
    with pytest.raises(Inapplicable, match="order is public"):
        canary_likelihood.run(case_of(), Settings())
