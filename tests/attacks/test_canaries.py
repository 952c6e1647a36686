"""Canaries: of random direction, by cosines and by the likelihood of having been drawn, and the law of those held out.

Canaries with wrong labels, and dummies: audits find leaks, flag broken noise under every kind of neighbours, and no other.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.stats import norm

from attacks import canary_cosine, canary_likelihood, loss, one_run
from attacks.adversary import steps
from attacks.adversary.case import Case, Inapplicable, Seen, Settings, Target, sums_of
from attacks.adversary.null import drawn_tails, refuted, sphere_tails
from attacks.adversary.steps import releases, spaced
from attacks.audit import audited
from attacks.canary_likelihood import likelihood
from attacks.evidence import figures
from attacks.evidence.bounds import lower_bound
from attacks.evidence.figures import independent
from privacy.entropy import SeededEntropy
from privacy.mechanisms import Gaussian
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.learning.training.canary_directions import direction
from secure_fed.runs import roc
from secure_fed.runs.membership import kept_scores, of_data
from secure_fed.runs.recording import Recorded, Update
from secure_fed.tensors.tensors import Layout, Tensors
from tests.attacks import canaried
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import toys

DELTA, LEVEL = 1e-3, 0.05
NOISED: dict[str, Any] = {**canaried.CLIENTS, "privacy.noise_multiplier": 1.0}
MUCH_NOISE: dict[str, Any] = {**canaried.CLIENTS, "privacy.noise_multiplier": 10.0}
CLIENTS, EXAMPLES = canaried.MANY_CLIENTS, canaried.MANY_EXAMPLES
EXAMPLES_NOISED: dict[str, Any] = {**canaried.EXAMPLES, "privacy.noise_multiplier": 1.0}


def bounds(scores: Any, case: Case) -> tuple[float, float]:
    """From the coins, and estimated from the law under the null."""
    members = case.assembly.audit_pool.members
    by_coins: Any = lower_bound(scores, members, DELTA, LEVEL).epsilon
    return by_coins, independent(stats.norm.sf(scores[members]), DELTA)


# What they find.


BROKEN: tuple[tuple[dict[str, Any], list[int]], ...] = (
    (MUCH_NOISE, CLIENTS),
    ({**MUCH_NOISE, "method.name": "fra_then_ffa", "method.switch_round": 1}, CLIENTS),
    ({**canaried.EXAMPLES, "privacy.noise_multiplier": 10.0, "training.optimizer": "adamw"}, EXAMPLES),
)
HOLDS: tuple[tuple[dict[str, Any], list[int]], ...] = (
    (NOISED, CLIENTS),
    ({**NOISED, "method.name": "fra_lora"}, CLIENTS),
    (EXAMPLES_NOISED, EXAMPLES),
)


@pytest.mark.parametrize(
    ("settings", "sizes", "noise"),
    chosen([*((*one, False) for one in BROKEN), *((*one, True) for one in HOLDS)], [(*HOLDS[0], True)]),
)
def test_they_contradict_the_guarantee_where_the_noise_that_is_due_is_missing(
    settings: dict[str, Any], sizes: list[int], noise: bool
) -> None:
    """For clients and examples, and with the right sign: the model moves towards a canary's direction."""
    case, epsilon = canaried.case(settings, sizes, noise=noise)
    finding: Any = canary_cosine.run(case, Settings())
    if noise:
        assert max(bounds(finding.scores, case)) <= epsilon
        assert canary_cosine.null_p_value(finding.scores[~case.assembly.audit_pool.members]) > 1e-2
    else:
        assert canaried.auc(finding.scores, case) > 0.9
        assert epsilon < min(bounds(finding.scores, case))


# The law of those who did not train.


@pytest.mark.parametrize("vantage", ["fellow_client", "outsider"])
def test_scores_of_those_held_out_are_standard_normal(vantage: str) -> None:
    """Of the held-out ones themselves, and of fresh directions, of which there can be many."""
    case, _ = canaried.case(NOISED, CLIENTS, vantage)
    finding: Any = canary_cosine.run(case, Settings())
    held_out = finding.scores[~case.assembly.audit_pool.members]
    assert canary_cosine.null_p_value(held_out) > 1e-2
    measured = finding.measured
    assert measured["null_p_value"] > 1e-2
    assert measured["null_is_exact"]
    assert measured["null_std"] == pytest.approx(1, abs=0.2)
    assert measured["dimension"] == Layout.of(case.assembly.initial.tensors).size
    assert measured["rounds"] == (3 if vantage == "fellow_client" else 1)
    found = releases(case, "")
    assert [id(one) for one in spaced(found, 2)] == [id(one) for one in (found[0], found[-1])][: len(found)]
    assert canary_cosine.run(case, Settings(max_rounds=2)).measured["rounds"] == min(len(found), 2)
    assert canary_cosine.null_p_value(2 * held_out) < 1e-2  # a score of another scale is noticed
    assert canary_cosine.null_p_value(held_out + 1) < 1e-2


def test_a_score_is_the_cosine_with_the_sum_of_unit_vectors_by_hand() -> None:
    case, _ = canaried.case(NOISED, CLIENTS)
    found: Any = canary_cosine.run(case, Settings()).scores
    states, layout = case.seen.states, Layout.of(case.assembly.initial.tensors)
    changes = [layout.flatten(states[t + 1] - states[t], torch.float64) for t in range(3)]
    total = torch.stack([change / change.norm() for change in changes]).sum(0)
    for unit, score in zip(case.units, found, strict=True):
        u = layout.flatten(direction(unit.name, case.assembly.config.federation.seed, layout), torch.float64)
        assert score == pytest.approx(float(u @ total / total.norm()) * math.sqrt(layout.size), abs=1e-4)


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
    finding: Any = canary_cosine.run(of_server, Settings())
    unseen = [unit.client == "client-2" for unit in case.units]
    assert (finding.scores[unseen] == 0).all()
    assert (finding.scores[~np.array(unseen)] != 0).all()


def test_without_directions_and_in_tensors_that_shrank_it_does_not_apply() -> None:
    without, _ = canaried.case({"evaluation.audit_fraction": 1.0}, [5] * 3)
    with refused(Inapplicable):
        canary_cosine.run(without, Settings())
    case, _ = canaried.case(NOISED, CLIENTS)
    final = case.seen.final
    name = next(name for name in final if final[name].shape == (3,))
    shrunk = Seen("outsider", final | {name: final.tensor(name)[:2]})
    with refused(Inapplicable):
        canary_cosine.run(Case(case.assembly, shrunk, canaried.never), Settings())


# By the likelihood of having been drawn.


DRAWN = {**canaried.CLIENTS, "privacy.noise_multiplier": 0.3, "federation.cohort": 24, "federation.rounds": 3}


def test_the_score_is_the_likelihood_ratio_by_hand() -> None:
    """Of whoever always takes part it is the weighed sum."""
    x, shift, rate = np.array([[0.3, -1.0], [2.5, 4.0]]), np.array([1.5, 3.0]), 0.2
    for found, row in zip(likelihood(x, shift, rate), x, strict=True):
        expected = 0.0
        for one, s in zip(row, shift, strict=True):
            mixture = (1 - rate) * norm.pdf(one) + rate * norm.pdf(one, loc=s)
            expected += math.log(mixture / norm.pdf(one))
        assert found == pytest.approx(expected)
    np.testing.assert_allclose(likelihood(x, shift, 1.0), x @ shift - np.square(shift).sum() / 2)


@pytest.mark.nightly
def test_the_shift_foretold_is_the_shift_there_is() -> None:
    everybody = {"federation.cohort": 120, "federation.rounds": 3, "federation.sampling": "fixed"}
    case, _ = canaried.case({**DRAWN, **everybody}, CLIENTS)
    of_all = canary_likelihood.run(case, Settings())
    assert of_all.measured["rate"] == 1.0
    members = case.assembly.audit_pool.members
    scores: Any = canary_cosine.run(case, Settings()).scores
    # A sum of three rounds' cosines over sqrt(3): each shifted as foretold.
    assert scores[members].mean() == pytest.approx(of_all.measured["shift"] * math.sqrt(3), rel=0.25)


def test_the_law_of_those_held_out_is_known_and_a_wrong_one_is_noticed() -> None:
    """By the held-out clients themselves; scores made with twice the dimension do not keep to the law."""
    case, _ = canaried.case(DRAWN, CLIENTS)
    found, members = canary_likelihood.run(case, Settings()), case.assembly.audit_pool.members
    assert found.null is not None
    assert found.null.rounds is not None
    assert found.null.rounds.shape == (len(case.units), 3)
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
    case, _ = canaried.case(DRAWN, CLIENTS)
    found, members = canary_likelihood.run(case, Settings()), case.assembly.audit_pool.members
    told: Any = figures.judged(found, members, delta=1e-3, significance=0.05, seed=0, releases=3)
    assert told.null == "known"
    assert found.null is not None
    rates = told.ranking.at
    assert all(at is not None and at.fpr.value == rate for rate, at in rates.items())
    assert told.ranking.auc == pytest.approx(1 - float(found.null.tails[members].mean()))
    assert [one.name for one in told.estimates] == ["independent", "sampled_gaussian"]
    refused: Any = figures.judged(replace(found, null=None), members, delta=1e-3, significance=0.05, seed=0)
    assert set(refused.ranking.at.values()) == {None}
    wrong = replace(found, null=replace(found.null, tails=np.square(found.null.tails)))
    given_up = figures.judged(wrong, members, delta=1e-3, significance=0.05, seed=0)
    assert (given_up.null, given_up.estimates, given_up.ranking) == ("refuted", (), refused.ranking)


def test_where_it_cannot_know_the_length_it_says_so() -> None:
    of_examples, _ = canaried.case(EXAMPLES_NOISED, EXAMPLES)
    once = {**NOISED, "federation.rounds": 1, "federation.cohort": 12}
    in_turn = {"federation.sampling": "schedule", "privacy.noise": "central", "privacy.correlation": "none"}
    products, _ = canaried.case({**once, "method.name": "fra_lora"}, [2] * 24)
    turns, _ = canaried.case({**once, **in_turn}, [2] * 24)
    unseen, _ = canaried.case(NOISED, CLIENTS)
    unseen = replace(unseen, seen=replace(unseen.seen, states={}, sums=(), updates=()))
    for case in (of_examples, products, unseen, turns):
        with refused(Inapplicable):
            canary_likelihood.run(case, Settings())


# The law of non-members' scores: exact on the sphere, sampled if it has no formula, and rejected if it is wrong.


Floats = NDArray[np.float64]
RATE, SHIFT = 0.3, np.array([1.5, 2.0, 1.0, 1.5])


def sphere(count: int, dimension: int, seed: int) -> Floats:
    drawn = np.random.default_rng(seed).normal(size=(count, dimension))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def score(x: Floats) -> Floats:
    return likelihood(x, SHIFT, RATE)


@every("dimension", [2, 3, 20_000])
def test_the_tail_on_the_sphere_is_that_of_its_integral(dimension: int) -> None:
    """P(u >= t) is the share of the sphere's surface at angles up to arccos t, of weight sin^(d - 2)."""
    scores = np.array([-1.0, 0.0, 0.4, 1.2])
    found = sphere_tails(scores, dimension)
    half = np.pi / 2 if dimension < 1000 else 0.1  # beyond which nothing is left of the weight
    grid = np.linspace(np.pi / 2 - half, np.pi / 2 + half, 40_001)
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


def test_drawn_tails_are_those_of_whole_directions() -> None:
    """Compared with draws of u in all its coordinates. Rounds of other coordinates have directions of their own."""
    spans, other = seen(6), sphere(2, 80, 5)
    drawn = np.sqrt(6) * sphere(15_000, 6, 2) @ spans.T
    apart = np.hstack([drawn[:, :2], np.sqrt(80) * sphere(15_000, 80, 7) @ other.T])
    for x, all_spans in ((drawn, [spans]), (apart, [spans[:2], other])):
        naive = score(x)
        at = np.quantile(naive, [0.1, 0.5, 0.9, 0.99])
        found = drawn_tails(at, all_spans, score, np.random.default_rng(3))
        np.testing.assert_allclose(found, [(naive >= one).mean() for one in at], atol=0.01, rtol=0.15)


def test_a_law_that_holds_is_kept_and_a_wrong_one_is_given_up() -> None:
    """Wrong laws: a dimension wrong by a factor, another location, and held-out units of which some trained."""
    dimension, kept = 300, 0
    for seed in range(60):
        scores = np.sqrt(dimension) * sphere(230, dimension, seed)[:, 0]
        kept += not refuted(sphere_tails(scores, dimension))
    assert kept >= 59
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
    tails = stats.norm.sf(members)
    found = figures.rank_by_law(tails, 40)
    assert found.auc == pytest.approx((members[:, None] > others[None, :2000]).mean(), abs=0.01)
    assert found.auc == pytest.approx(float(np.mean(stats.norm.cdf(members))))
    at = found.at[0.001]
    assert at is not None  # which 40 held-out units could not show
    assert at.tpr.value == pytest.approx(float(np.mean(members >= stats.norm.isf(0.001))))
    assert (at.fpr.low, at.fpr.high) == (0.001, 0.001)
    assert found.auc_interval[0] < found.auc < found.auc_interval[1]
    fpr, tpr, low, high = figures.curve_by_law(tails)
    assert all(line.tolist() == sorted(line) for line in (fpr, tpr))
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    assert ((low <= tpr) & (tpr <= high)).all()


# Audits in one run.


LEARNS: dict[str, Any] = {
    **{"evaluation.audit_fraction": 0.5, "method.rank": 8, "federation.rounds": 4},
    **{"training.lr": 0.005, "training.steps": 20, "training.batch_size": 20},
}


def run(case: Case) -> Any:
    finding: Any = one_run.run(case, Settings())
    assert finding.scores.shape == (len(case.units),)
    return finding


def test_wrong_labels_are_found_without_noise() -> None:
    """Were the confidence in the label that the data gave, who trained on a wrong one would score low."""
    case, epsilon = canaried.case({**LEARNS, "evaluation.canaries": "mislabelled"}, EXAMPLES, "outsider")
    finding = run(case)
    assert epsilon is None
    assert canaried.auc(finding.scores, case) > 0.9
    np.testing.assert_array_equal(finding.scores, case.unit_confidences(case.seen.final))
    by_name = {f"client-{c}/{i}": item for c in range(3) for i, item in enumerate(canaried.examples(c + 1, 40))}
    assert all(unit.examples[0]["labels"] != by_name[unit.name]["labels"] for unit in case.units)
    given = case.confidences(case.seen.final, [by_name[unit.name] for unit in case.units])
    assert canaried.auc(given, case) < 0.5


@pytest.mark.nightly
def test_of_ordinary_units_it_is_the_loss_threshold_and_not_made_twice() -> None:
    planted, _ = canaried.case({**LEARNS, "evaluation.canaries": "mislabelled"}, EXAMPLES, "outsider")
    ordinary, _ = canaried.case(LEARNS, EXAMPLES, "outsider")
    with refused(Inapplicable):
        one_run.run(ordinary, Settings())
    fits: Any = loss.run(ordinary, Settings()).scores
    assert canaried.auc(fits, ordinary) < canaried.auc(run(planted).scores, planted)


# The run's own figure.

DIRECTIONS: dict[str, Any] = {
    **canaried.CLIENTS,
    **{"federation.cohort": 20, "federation.rounds": 3, "method.rank": 2, "privacy.noise_multiplier": 0.5},
}
FIGURES: dict[str, dict[str, Any]] = {
    "fedlora": {"method.name": "fedlora"},
    "a personal head": {"method.name": "fedlora", "method.personal": ["classifier.weight"]},
    "ffa_lora": {"method.name": "ffa_lora"},
    "bitfit": {"method.name": "bitfit", "method.rank": RunConfig().method.rank},
    "momentum": {"method.name": "fedlora", "federation.server_optimizer": "momentum"},
    "examples": {
        **{"privacy.unit": "example", "federation.cohort": 60, "federation.rounds": 1},
        "training.optimizer": "sgd",
    },
}


def ran(settings: dict[str, Any]) -> tuple[dict[str, Any], Case]:
    """The run's own measurements on its data, and an outsider's case."""
    federation = toys.federation({**DIRECTIONS, **settings}, sizes=[3] * 80, entropy=SeededEntropy(1))
    result = federation.run()
    told: Any = of_data(federation.assembly, result.state)
    return told, Case(federation.assembly, Seen("outsider", result.state.tensors), canaried.never)


@pytest.mark.parametrize("what", chosen(FIGURES, ["a personal head"]))
def test_a_run_and_its_audit_give_one_figure(what: str) -> None:
    told, case = ran(FIGURES[what])
    scores, members = run(case).scores, case.assembly.audit_pool.members
    found = roc.to_dict(roc.rank(scores[members], scores[~members]))
    assert told["attack"] == "one_run"
    assert told["auc"] == found["auc"]
    assert told["auc_interval"] == found["auc_interval"]
    assert told["tpr_at_fpr"] == found["tpr_at_fpr"]


@pytest.mark.parametrize("method", chosen(["fra_lora", "rolora", "fra_then_ffa", "fedask", "fedpower"], ["fra_lora"]))
def test_where_a_run_could_only_give_another_figure_it_gives_none(method: str) -> None:
    """What the change of the first round's tensors says would be no score of the audit's, and go by the same name."""
    told, case = ran({"method.name": method})
    assert told["attack"] == "one_run"
    assert told["auc"] is told["auc_interval"] is told["tpr_at_fpr"] is None
    assert told["why"].startswith(f"with {method} clients do not send ")
    assert "`secure-fed audit`" in told["why"]
    assert np.isfinite(run(case).scores).all(), "the audit has one"


# Dummies.


MASKED = {
    "secure_aggregation.enabled": True,
    "secure_aggregation.bits": 64,
    "secure_aggregation.corrupt": 0.0,
    "secure_aggregation.dropout": 0.0,
}
PLACES: dict[str, dict[str, Any]] = {
    "central": {},
    "fixed": {"federation.sampling": "fixed"},
    "local": {"privacy.noise": "local", "privacy.participations": 3},
    "distributed": {"privacy.noise": "distributed", **MASKED},
    "example": {**canaried.EXAMPLES, "privacy.unit": "example"},
}


def with_dummies(
    place: str, *, noise: bool, dummies: int | None = 120, clients: int = 6, rounds: int = 3
) -> tuple[Federation, Target]:
    """A run in which every client takes part in each round, and the target for its audit."""
    usual = {**canaried.CLIENTS, "federation.cohort": clients, "privacy.noise_multiplier": 10.0, **PLACES[place]}
    settings = usual | {"evaluation.dummies": dummies, "federation.rounds": rounds}
    for name in ("evaluation.audit_fraction", "evaluation.canaries"):
        del settings[name]
    sizes = [40] * 3 if place == "example" else [2] * clients
    states = canaried.States()
    built = Federation(
        toys.config(settings),
        model=canaried.wide(),
        train=[canaried.examples(client + 1, size) for client, size in enumerate(sizes)],
        test=canaried.examples(999, 20),
        entropy=SeededEntropy(0),
        callbacks=[states],
    )
    with ExitStack() as silent:
        if not noise:
            silent.enter_context(patch.object(Gaussian, "noised", canaried._clean))
            silent.enter_context(
                patch("privacy.distributed.discrete_gaussian", lambda _, size, __: np.zeros(size, np.int64))
            )
        result = built.run()
    summary = {**result.summary, "privacy": {**result.summary["privacy"], "private": True}}  # noise came from a seed
    recorded = Recorded({0: built.assembly.initial.tensors, **states.kept}, lr=dict.fromkeys(range(rounds), 0.05))
    return built, Target(built.assembly, result.state, recorded, summary)


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_contradicts_its_guarantee_without_its_noise_alone_whoever_should_add_it(place: str, noise: bool) -> None:
    federation, target = with_dummies(place, noise=noise)
    audit = audited(target, ["canary_cosine", "one_run", "loss"], Settings(references=0))
    assert audit["audited_of"] == "dummies"
    cells = [one for one in audit["cells"] if one["applicable"] and one["epsilon_accounted"] is not None]
    assert cells
    kept = all((one["epsilon_lower"] or 0.0) <= one["epsilon_accounted"] for one in cells)
    assert kept is (target.result["membership"]["auc"] < 0.95) is noise
    pool = federation.assembly.audit_pool
    found = kept_scores(target.final, pool)
    assert noise or found[pool.members].mean() > found[~pool.members].mean()
    whys = [one["why"] for one in audit["cells"] if one["attack"] == "loss" and one["vantage"] == "fellow_client"]
    assert any("nobody's data" in why for why in whys)
    assert "no texts" in audit["baseline"]["why"]


@pytest.mark.parametrize("noise", chosen([True, False], [False]))
def test_the_audit_of_a_private_run_of_a_hundred_clients_says_something(noise: bool) -> None:
    """With the dummies that such a run has by default."""
    federation, target = with_dummies("central", noise=noise, dummies=None, clients=100, rounds=1)
    audit = audited(target, ["canary_cosine"], Settings(references=0))
    assert audit["members"] + audit["non_members"] == federation.assembly.protection.dummies.dummies == 100
    assert target.result["membership"]["auc"] is not None
    assert audit["verdict"]["level"] == ("none_found" if noise else "violation")
