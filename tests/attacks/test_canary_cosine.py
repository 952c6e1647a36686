"""Canaries of random direction: the law of their scores, leaks that they find, and no false alarms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from attacks import canary_cosine
from attacks.adversary.case import Case, Inapplicable, Seen, Settings, sums_of
from attacks.adversary.steps import releases, spaced
from attacks.evidence.bounds import lower_bound
from attacks.evidence.judge import independent
from secure_fed.learning.training.canary_directions import direction
from secure_fed.runs.recording import Update
from secure_fed.tensors.tensors import Layout, Tensors
from tests.attacks import canaried
from tests.cells import chosen

DELTA, LEVEL = 1e-3, 0.05
NOISED: dict[str, Any] = {**canaried.CLIENTS, "privacy.noise_multiplier": 1.0}
MUCH_NOISE: dict[str, Any] = {**canaried.CLIENTS, "privacy.noise_multiplier": 10.0}
CLIENTS, EXAMPLES = canaried.MANY_CLIENTS, canaried.MANY_EXAMPLES
EXAMPLES_NOISED: dict[str, Any] = {**canaried.EXAMPLES, "privacy.noise_multiplier": 1.0}


def bounds(scores: Any, case: Case) -> tuple[float, float]:
    """From the coins, and estimated from the law under the null."""
    members = case.assembly.audit_pool.members
    by_coins = lower_bound(scores, members, DELTA, LEVEL).epsilon
    assert by_coins is not None
    return by_coins, independent(stats.norm.sf(scores[members]), DELTA)


# What they find.


BROKEN: tuple[tuple[dict[str, Any], list[int]], ...] = (
    (MUCH_NOISE, CLIENTS),
    ({**MUCH_NOISE, "method.name": "ffa_lora"}, CLIENTS),
    ({**MUCH_NOISE, "method.name": "fra_then_ffa", "method.switch_round": 1}, CLIENTS),
    ({**canaried.EXAMPLES, "privacy.noise_multiplier": 10.0}, EXAMPLES),
    ({**canaried.EXAMPLES, "privacy.noise_multiplier": 10.0, "training.optimizer": "adamw"}, EXAMPLES),
)


@pytest.mark.parametrize(("settings", "sizes"), chosen(BROKEN, [BROKEN[0]]))
def test_without_the_noise_they_are_found_and_contradict_the_guarantee(
    settings: dict[str, Any], sizes: list[int]
) -> None:
    """For clients and examples, and with the right sign: the model moves towards a canary's direction."""
    case, epsilon = canaried.case(settings, sizes, noise=False)
    finding = canary_cosine.run(case, Settings())
    assert finding.scores is not None
    assert canaried.auc(finding.scores, case) > 0.9
    assert epsilon is not None
    assert epsilon < min(bounds(finding.scores, case))


HOLDS: tuple[tuple[dict[str, Any], list[int]], ...] = (
    (NOISED, CLIENTS),
    (MUCH_NOISE, CLIENTS),
    ({**NOISED, "method.name": "fra_lora"}, CLIENTS),
    (EXAMPLES_NOISED, EXAMPLES),
)


@pytest.mark.parametrize(("settings", "sizes"), chosen(HOLDS, [HOLDS[0]]))
def test_with_the_noise_that_is_due_they_do_not_contradict_it(settings: dict[str, Any], sizes: list[int]) -> None:
    case, epsilon = canaried.case(settings, sizes)
    finding = canary_cosine.run(case, Settings())
    assert epsilon is not None
    assert finding.scores is not None
    assert max(bounds(finding.scores, case)) <= epsilon


# The law of those who did not train.


@pytest.mark.parametrize("vantage", ["fellow_client", "outsider"])
def test_scores_of_those_held_out_are_standard_normal(vantage: str) -> None:
    """Of the held-out ones themselves, and of fresh directions, of which there can be many."""
    case, _ = canaried.case(NOISED, CLIENTS, vantage)
    finding = canary_cosine.run(case, Settings())
    assert finding.scores is not None
    held_out = finding.scores[~case.assembly.audit_pool.members]
    assert canary_cosine.null_p_value(held_out) > 1e-2
    measured = finding.measured
    assert measured["null_p_value"] > 1e-2
    assert measured["null_is_exact"]
    assert measured["null_std"] == pytest.approx(1, abs=0.2)
    assert measured["dimension"] == Layout.of(case.assembly.initial.tensors).size
    assert measured["rounds"] == (3 if vantage == "fellow_client" else 1)
    assert canary_cosine.null_p_value(2 * held_out) < 1e-2  # a score of another scale is noticed
    assert canary_cosine.null_p_value(held_out + 1) < 1e-2


def test_a_score_is_the_cosine_with_the_sum_of_unit_vectors_by_hand() -> None:
    case, _ = canaried.case(NOISED, CLIENTS)
    found = canary_cosine.run(case, Settings()).scores
    assert found is not None
    states, layout = case.seen.states, Layout.of(case.assembly.initial.tensors)
    changes = [layout.flatten(states[t + 1] - states[t], torch.float64) for t in range(3)]
    total = torch.stack([change / change.norm() for change in changes]).sum(0)
    for unit, score in zip(case.units, found, strict=True):
        u = layout.flatten(direction(unit.name, case.assembly.config.federation.seed, layout), torch.float64)
        assert score == pytest.approx(float(u @ total / total.norm()) * math.sqrt(layout.size), abs=1e-4)


@pytest.mark.nightly
def test_products_of_factors_are_scaled_to_what_fresh_directions_have() -> None:
    case, _ = canaried.case({**NOISED, "method.name": "fra_lora"}, CLIENTS)
    finding = canary_cosine.run(case, Settings())
    assert finding.scores is not None
    assert not finding.measured["null_is_exact"]
    assert canary_cosine.null_p_value(finding.scores[~case.assembly.audit_pool.members]) > 1e-2


# What each adversary has.


def test_the_sums_are_preferred_to_states_and_own_updates_to_sums() -> None:
    case, _ = canaried.case(EXAMPLES_NOISED, EXAMPLES)
    start = case.assembly.initial.tensors
    rng = torch.Generator().manual_seed(0)

    def some(round_: int, client: str, pass_name: str = "change") -> Update:
        drawn = Tensors((name, torch.randn(start[name].shape, generator=rng)) for name in start)
        return Update(round_, client, pass_name, drawn, 1.0)

    updates = [some(0, "client-0"), some(0, "client-1"), some(1, "client-1"), some(1, "client-1", "later")]
    everything = Seen("server", case.seen.final, case.seen.states, sums_of(updates), updates)
    of_server = Case(case.assembly, everything, canaried.never)
    assert [len(releases(of_server, f"client-{i}")) for i in range(3)] == [1, 2, 0]
    expected = Layout.of(start).flatten(updates[0].contribution, torch.float64).numpy()
    np.testing.assert_allclose(releases(of_server, "client-0")[0].moved, expected / np.linalg.norm(expected))
    behind = Case(case.assembly, Seen("secure_server", case.seen.final, {}, sums_of(updates)), canaried.never)
    total = Layout.of(start).flatten(updates[0].contribution + updates[1].contribution, torch.float64).numpy()
    np.testing.assert_allclose(releases(behind, "client-2")[0].moved, total / np.linalg.norm(total), atol=1e-6)
    assert len(releases(behind, "client-2")) == 2
    finding = canary_cosine.run(of_server, Settings())
    assert finding.scores is not None
    unseen = [unit.client == "client-2" for unit in case.units]
    assert (finding.scores[unseen] == 0).all()
    assert (finding.scores[~np.array(unseen)] != 0).all()


def test_the_sum_before_its_noise_tells_what_the_noised_model_does_not() -> None:
    case, _ = canaried.case(MUCH_NOISE, CLIENTS)
    seed, layout = case.assembly.config.federation.seed, Layout.of(case.assembly.initial.tensors)
    inside = [unit for unit, member in zip(case.units, case.assembly.audit_pool.members, strict=True) if member]
    sent = [Update(0, unit.name, "change", direction(unit.name, seed, layout), 1.0) for unit in inside]
    behind = Seen("secure_server", case.seen.final, case.seen.states, sums_of(sent))
    by_sum = canary_cosine.run(Case(case.assembly, behind, canaried.never), Settings()).scores
    by_state = canary_cosine.run(case, Settings()).scores
    assert by_sum is not None
    assert by_state is not None
    assert canaried.auc(by_sum, case) > 0.99
    assert canaried.auc(by_state, case) < 0.7


def test_rounds_are_looked_at_evenly() -> None:
    case, _ = canaried.case({**NOISED, "federation.rounds": 7, "federation.cohort": 12}, [2] * 24)
    found = releases(case, "")
    assert len(found) == 7
    places = [id(one) for one in found]
    assert [places.index(id(one)) for one in spaced(found, 3)] == [0, 3, 6]
    assert [places.index(id(one)) for most in (7, None) for one in spaced(found, most)] == [*range(7), *range(7)]
    assert canary_cosine.run(case, Settings(max_rounds=3)).measured["rounds"] == 3


def test_without_directions_it_does_not_apply() -> None:
    case, _ = canaried.case({"evaluation.audit_fraction": 1.0}, [5] * 3)
    with pytest.raises(Inapplicable, match=r"evaluation\.canaries = 'direction'"):
        canary_cosine.run(case, Settings())


def test_an_outsider_finds_no_direction_in_tensors_that_shrank() -> None:
    case, _ = canaried.case(NOISED, CLIENTS)
    final = case.seen.final
    name = next(name for name in final if final[name].shape == (3,))
    shrunk = Seen("outsider", final | {name: final.tensor(name)[:2]})
    with pytest.raises(Inapplicable, match="lost entries"):
        canary_cosine.run(Case(case.assembly, shrunk, canaried.never), Settings())
