"""Dummies: audited units that are nobody's data. A private run's membership figure is made of its releases alone.

Their scores under correlated noise are as powerful as the guarantee allows, and never more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, norm

from privacy.correlation import Correlation, square_root
from privacy.entropy import SeededEntropy
from privacy.mechanisms import COUNTER
from privacy.participation import FixedSize
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.learning.audit_pool.number_of_dummies import COST, Count, Room, count
from secure_fed.learning.audit_pool.pool import AuditPool, dummies
from secure_fed.learning.training.canary_directions import direction
from secure_fed.methods.method import State
from secure_fed.rounds.cohort import dummy_sampler
from secure_fed.rounds.dummies import SCORES, Floats, Past, whitened_evidence
from secure_fed.rounds.server import Server
from secure_fed.rounds.transport import Reply, Request
from secure_fed.runs import membership
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.privacy.test_correlation import dense
from tests.secure_fed import in_turn, private_toys, toys

CLIENT = {**private_toys.CLIENT, "privacy.noise_multiplier": 1.0, "federation.cohort": 4}
MASKED = {"secure_aggregation.enabled": True}
# Where the noise is added, and whether cohorts have a fixed size: every adjacency of a client-level guarantee.
PLACES: dict[str, dict[str, Any]] = {
    "central": {},
    "masked": MASKED,
    "fixed": {"federation.sampling": "fixed"},
    "fixed and masked": {"federation.sampling": "fixed", **MASKED},
    "local": {"privacy.noise": "local"},
    "distributed": {"privacy.noise": "distributed", **MASKED},
    "hidden": {"privacy.noise": "distributed", "privacy.hidden_cohort": True, **MASKED},
}
DUMMIES: dict[str, Any] = {"evaluation.dummies": 12}
OPEN = {**DUMMIES, "evaluation.audit_unit": "client"}  # without privacy
UNITS = {
    "client": {**CLIENT, **DUMMIES},
    "example": {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0, **DUMMIES},
}


def built(settings: dict[str, Any], seed: int = 0, shift: int = 0, sizes: tuple[int, ...] = (4,) * 8) -> Federation:
    """shift: added to the seeds of the clients' data."""
    train = [toys.examples(client + 1 + shift, size) for client, size in enumerate(sizes)]
    return toys.federation(settings, train=train, entropy=SeededEntropy(seed))


def test_in_a_private_run_all_data_train_and_dummies_are_the_audit_pool() -> None:
    federation = built({**CLIENT, "evaluation.dummies": None}, sizes=(2,) * 100)  # as many as their cost allows
    assembly = federation.assembly
    assert [len(one.examples) for one in assembly.clients] == [2] * len(assembly.problem.names) == [2] * 100
    assert not assembly.pools["data"].units
    assert len(assembly.audit_pool.units) == (beside := assembly.protection.dummies.dummies) > 20
    assert {unit.examples for unit in assembly.audit_pool.units} == {()}
    found = federation.run().summary
    assert (found["clients"], found["membership"]["of"]) == (100, "dummies")
    assert found["membership"]["members"] + found["membership"]["non_members"] == beside
    assert 0 <= found["membership"]["auc"] <= 1


@pytest.mark.parametrize("unit", chosen(UNITS, ["client"]))
def test_the_figure_is_a_function_of_what_was_released(unit: str) -> None:
    """Two runs with other data, noise and secret coins but the same releases must have bit-identical figures."""

    def released(self: Server, intake: Any, state: State, pass_name: str) -> Tensors:
        layout = self.layout(state, pass_name)
        return layout.unflatten(torch.from_numpy(np.random.default_rng(state.round).normal(size=layout.size)).float())

    with patch.object(Server, "release", released):
        told = [built(UNITS[unit], seed=i, shift=100 * i).run().summary["membership"] for i in range(2)]
    assert told[0]["auc"] is not None
    assert told[0] == told[1]


@pytest.mark.parametrize("place", chosen(["none", *PLACES, "example"], ["hidden"]))
def test_dummies_that_do_not_pull_change_nothing(place: str) -> None:
    """If no dummy is a member, clients, noise and divisor are as in a run without dummies, and so is the release."""
    settings = {"none": {**OPEN, "federation.cohort": 8}, "example": UNITS["example"]}.get(place)
    settings = settings or {**UNITS["client"], **PLACES[place]}

    def nobody(*of: Any) -> AuditPool:
        pool = dummies(*of)
        return AuditPool(**{**vars(pool), "members": np.zeros(len(pool.units), dtype=bool)})

    with patch("secure_fed.runs.assembly.dummies", nobody):
        beside = built(settings).run().state.tensors
    without = built({name: value for name, value in settings.items() if name not in OPEN})
    alone = without.run().state.tensors
    far = float((beside - alone).norm())
    if place != "local":
        assert far == 0
    else:  # with local noise dummies add noise too
        assert 0 < far < 4 * float((alone - without.assembly.initial.tensors).norm())


def sent_by(place: str, **more: Any) -> dict[bool, list[Tensors]]:
    """What a dummy that is a member and one that is none contribute in all rounds, by membership."""
    federation = built({**UNITS["client"], **PLACES[place], "federation.cohort": 8, **more})
    members, found = federation.assembly.pools["dummies"].members, dict[bool, list[Tensors]]()
    for member in (True, False):
        dummy, sent = federation.assembly.dummies[int(np.flatnonzero(members == member)[0])], list[Tensors]()

        def noted(request: Request, handle: Any = dummy.handle, sent: list[Tensors] = sent) -> Reply:
            sent.append((reply := handle(request)).contribution)
            return reply

        found[member], dummy.handle = sent, noted  # type: ignore[method-assign]
    federation.run()
    return found


def test_a_member_sends_the_clip_norm_along_its_direction_and_any_other_zeros() -> None:
    found = sent_by("central")
    assert len(found[True]) == len(found[False]) == 3
    pool = built(UNITS["client"]).assembly.audit_pool
    unit = next(unit for unit, member in zip(pool.units, pool.members, strict=True) if member)
    for one in found[True]:
        assert float((one - direction(unit.name, 0, Layout.of(one)) * 0.1).norm()) < 1e-6
    assert all(float(one.norm()) == 0 for one in found[False])


def test_a_dummy_is_not_counted_by_an_adaptive_clip_norm() -> None:
    for sent in sent_by("central", **{"privacy.clip_quantile": 0.5}).values():
        assert [float(one.tensor(COUNTER)) for one in sent] == [0.0] * 3


def test_with_noise_of_the_clients_own_a_dummy_that_is_no_member_sends_noise_alone() -> None:
    for one in sent_by("local")[False]:
        assert 0.07 < float(Layout.of(one).flatten(one).std()) < 0.14  # 0.1 = noise multiplier x clip norm


@pytest.mark.parametrize("place", chosen(["masked", "fixed and masked", "distributed", "hidden"], ["distributed"]))
def test_masks_and_shares_of_noise_are_those_of_a_run_without_dummies(place: str) -> None:
    """Who runs a dummy knows what it contributes, so it hides nobody, holds no share of a key, and brings no noise."""

    def terms(dummies_: int) -> Any:
        settings = {**UNITS["client"], **PLACES[place], "evaluation.dummies": dummies_}
        masks = built(settings, sizes=(4,) * 16).assembly.masks
        assert masks is not None
        protection = replace(masks.sums.terms.protection, dummies=Count(), beside=0, plan=None)
        return replace(masks.sums.terms, run="", registry=None, protection=protection)

    assert terms(12) == terms(0)


@pytest.mark.parametrize("place", chosen(["masked", "distributed", "local"], ["distributed"]))
def test_the_released_sum_is_that_of_the_clients_and_what_the_dummies_contribute(place: str) -> None:
    """With the same noise and coins, in the sum of every round: naively, C along the direction of each drawn member."""
    runs = [built({**UNITS["client"], **PLACES[place], "evaluation.dummies": n}) for n in (12, 0)]
    means: list[list[Tensors]] = [[], []]
    for federation, found in zip(runs, means, strict=True):
        released = Server.release

        def noted(self: Server, *of: Any, into: list[Tensors] = found, inner: Any = released) -> Tensors:
            into.append(mean := inner(self, *of))
            return mean

        with patch.object(Server, "release", noted):
            federation.run()
    federation, first = runs[0], len(runs[0].assembly.clients)
    pool, layout = federation.assembly.pools["dummies"], Layout.of(means[0][0])
    drawn = [number - first for number in federation.assembly.server.draw(0) if number >= first]
    pulls = [direction(pool.units[number].name, 0, layout) * 0.1 for number in drawn if pool.members[number]]
    expected = sum((layout.flatten(one) for one in pulls), start=torch.zeros(layout.size)) / 4
    moved = layout.flatten(means[0][0] - means[1][0], torch.float32)
    if place == "local":  # each dummy adds noise of its own
        assert 0.1 * math.sqrt(len(drawn)) / 4 == pytest.approx(float((moved - expected).std()), rel=0.3)
    else:
        assert float((moved - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("place", ["central", "hidden"])
def test_dummies_are_drawn_in_secret_where_clients_are(place: str) -> None:
    draws = {tuple(built({**UNITS["client"], **PLACES[place]}, seed).assembly.server.draw(0)) for seed in range(6)}
    assert len({tuple(number for number in draw if number >= 8) for draw in draws}) > 1


@pytest.mark.parametrize("unit", chosen(UNITS, ["client"]))
def test_a_run_that_was_killed_ends_with_the_same_bits_of_the_figure(tmp_path: Path, unit: str) -> None:
    whole, killed = built(UNITS[unit]).run(), built(UNITS[unit])
    killed.callbacks = [KilledAfter(2)]
    with pytest.raises(KilledError):
        killed.run(tmp_path / "killed")
    resumed = built(UNITS[unit]).run(tmp_path / "killed", resume=True)
    pool = killed.assembly.pools["dummies"]
    np.testing.assert_array_equal(*(membership.kept_scores(one.state, pool) for one in (whole, resumed)))
    assert whole.summary["membership"] == resumed.summary["membership"]


def test_units_of_the_data_are_held_out_where_the_setting_says_so_and_told_apart() -> None:
    federation = built({**UNITS["client"], "evaluation.audit_fraction": 0.5}, sizes=(3,) * 60)
    result = federation.run()
    of_data = membership.of_data(federation.assembly, result.state)
    assert of_data is not None
    assert (of_data["of"], result.summary["membership"]["of"]) == ("data", "dummies")
    assert of_data["members"] + of_data["non_members"] == len(federation.assembly.pools["data"].units) > 10
    assert federation.assembly.audit_pool is federation.assembly.pools["data"], "an audit asks about what was asked for"
    assert membership.of_data(built(UNITS["client"]).assembly, federation.assembly.initial) is None


def test_without_privacy_dummies_are_clients_and_no_client_is_held_out() -> None:
    federation = built({**OPEN, "federation.sampling": "poisson", "federation.cohort": 6, "federation.rounds": 6})
    result = federation.run()
    assert len(federation.assembly.clients) == 8
    assert result.summary["membership"]["auc"] > 0.9
    assert all(record["train_loss"] is not None for record in result.records if record["cohort"])


def test_dummies_are_called_what_no_client_is_called_and_spread_in_proportion_to_its_examples() -> None:
    config = RunConfig.from_dict({"privacy": {"unit": "client", "epsilon": 8.0}, "evaluation": {"dummies": 3}})
    found = dummies(config, count(config, Room(5, 2.0, 10, 1.0)), ["dummy-0001", "anna"], [1, 1])
    assert [unit.name for unit in found.units] == ["dummy_-0000", "dummy_-0001", "dummy_-0002"]
    config = toys.config(UNITS["example"])
    found = dummies(config, count(config, Room(24, 4.0, 10, 1.0)), list("abcd"), [0, 4, 20, 0])
    assert [[unit.client for unit in found.units].count(name) for name in "abcd"] == [0, 2, 10, 0]
    assembly = built(UNITS["example"]).assembly
    assert sum(len(one.dummies) for one in assembly.clients) == int(assembly.audit_pool.members.sum())


def test_the_cost_alone_limits_their_number_and_there_are_none_where_too_few_fit() -> None:
    config = RunConfig.from_dict({"privacy": {"unit": "client", "epsilon": 8.0}})
    assert count(config, Room(5000, 250.0, 24_000, 0.6)).dummies == 500
    assert count(config, Room(10**6, 250.0, 24_000, 0.6)).dummies == 2000
    for clients in (100, 10, 3):
        assert count(config, Room(clients, 3.0, 24_000, 0.6)).dummies == 100
    assert count(config, Room(100, 60.0, 4 * 10**6, 0.6)).dummies == 67, "directions of millions of numbers take long"
    assert count(config, Room(100, 60.0, 10**9, 0.6)).dummies == 20
    few = count(config, Room(100, 10.0, 40, 0.6))
    assert (few.dummies, "would cost 6.9 %" in few.why) == (0, True), "they would drown the noise of forty numbers"
    assert count(config, Room(5000, 250.0, 24_000, 0.6, own_noise=True)).dummies == 49
    assert count(config, Room(100, 10.0, 24_000, 0.6, fewest=100)).dummies == 100
    assert "101 are needed" in count(config, Room(100, 10.0, 24_000, 0.6, fewest=101)).why
    asked = config.replace({("evaluation", "dummies"): 7})
    assert count(asked, Room(5, 2.0, 10, 0.01)).dummies == 7


@given(st.integers(2, 60), st.integers(1, 60), st.integers(1, 120))
def test_beside_cohorts_of_fixed_size_they_take_part_no_more_often_than_a_client(
    clients: int, size: int, dummies: int
) -> None:
    cohorts = FixedSize(clients, min(size, clients))
    beside = dummy_sampler(cohorts, dummies)
    assert beside is not None
    assert beside.rate <= cohorts.rate or dummies * cohorts.rate < 1
    assert beside.expected >= 1


def test_so_few_that_each_would_take_part_more_often_than_a_client_are_refused() -> None:
    settings = {**CLIENT, "federation.sampling": "fixed", "evaluation.dummies": 9}
    with refused(ConfigError, "evaluation.dummies"):
        built(settings, sizes=(2,) * 40)
    assert built({**settings, "evaluation.dummies": 10}, sizes=(2,) * 40).assembly.protection.beside == 1


@pytest.mark.parametrize("local", [False, True])
def test_the_cost_is_the_variance_that_dummies_add(local: bool) -> None:
    """By simulation: the variance that dummies add to one coordinate of a sum of zeros, over the noise without dummies."""
    clients, cohort, numbers, z, dummies_, rounds = 400, 100, 50, 0.3, 80, 40_000
    room, rng = Room(clients, cohort, numbers, z, local), np.random.default_rng(0)
    pulling = rng.binomial(dummies_ // 2, cohort / clients, rounds)
    sums = rng.normal(size=rounds) * np.sqrt(pulling / numbers)
    noise = z**2 * cohort if local else z**2
    beside = z**2 * dummies_ * cohort / clients if local else 0.0
    assert room.cost(dummies_) == pytest.approx((sums.var() + beside) / noise, rel=0.05)
    assert math.isinf(Room(clients, cohort, numbers, 0.0, local).cost(1))
    assert room.cost(10) > COST > 0


def test_what_dummies_cannot_be_is_refused() -> None:
    for settings in (DUMMIES, {**OPEN, "federation.weighting": "examples"}):
        with refused(ConfigError, "evaluation.dummies"):
            toys.config(settings)


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


def test_a_run_scores_its_dummies_by_the_rows_of_all_its_releases() -> None:
    """The reference multiplies all releases by C at once."""
    built = in_turn.federation({**in_turn.BANDED, "evaluation.dummies": 12})
    _, watched = in_turn.of_zeros(built)
    found = built.run().state.memory.tensor(SCORES).numpy()
    pool, plan, server = built.assembly.pools["dummies"], built.assembly.protection.plan, built.assembly.server
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
