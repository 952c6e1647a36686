"""The verdict: when it reports a leak or a broken guarantee, which results are never evidence of privacy, and its headline.

The sentences on a guarantee: contradicted, not contradicted, or not testable by the audit. The headline: the number of attacks
made, the attacks not made, and how to read an AUC.
"""

from __future__ import annotations

import re
from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest

from attacks.adversary.case import VANTAGES
from attacks.catalogue import ATTACKS
from attacks.evidence import judge
from attacks.record import AttackAt
from attacks.report import verdict as decided
from attacks.report.display import Audited, show
from attacks.report.page import page
from attacks.report.verdict import level, main_of
from attacks.report.words import headline, how_to_read, untried
from secure_fed.report import markup
from secure_fed.runs import roc
from tests.attacks import samples
from tests.attacks.samples import verdict
from tests.cells import every

Audit = dict[str, Any]


def audit_of(*cells: Audit, **changes: Any) -> Audit:
    """An audit of examples without a guarantee whose cells are these, all of the outsider."""
    named = [
        {"attack": f"attack-{i}", "vantage": "outsider", "applicable": True, **cell} for i, cell in enumerate(cells)
    ]
    baseline = {"auc": 0.5, "auc_interval": [0.47, 0.53], "at_chance": True}
    told = {"unit": "none", "audited_unit": "example", "significance": 0.05, "baseline": baseline, "cells": named}
    return {**told, **changes}


def cell(auc: float, *, half: float = 0.03, units: int = 900, **more: Any) -> Audit:
    return {"auc": auc, "auc_interval": [auc - half, auc + half], "members": units, "non_members": units, **more}


def judged(*cells: Audit, **changes: Any) -> tuple[str, str]:
    found = verdict(audit_of(*cells, **changes))
    return found["level"], found["text"]


def test_the_three_samples_are_what_they_are() -> None:
    levels = [verdict(make())["level"] for make in (samples.protected, samples.unprotected, samples.violation)]
    assert levels == ["none_found", "leak", "violation"]


def test_nothing_found_is_said_with_its_interval_and_is_no_proof() -> None:
    level, text = judged(cell(0.53))
    assert level == "none_found"
    assert text.startswith("Nothing was found. An outsider who has the final adapter")
    assert "is right in 53 of 100 cases; a coin is right in 50. The 95 % interval, 50.0 to 56.0, includes 50" in text
    assert "not proof of privacy" in text
    assert "nothing to contradict" in text


def test_a_leak_names_the_weakest_adversary_and_the_strongest() -> None:
    text = verdict(samples.unprotected())["text"]
    assert text.startswith("A leak was found, and no guarantee covers it. An outsider who has the final adapter")
    assert "is right in 77 of 100 cases" in text
    assert "A server that sees every single update is right in 90 of 100 cases" in text
    assert "5 attacks on membership compare" in text  # 16 cells, of which most repeat a weaker adversary's
    assert "5 of them are significant" in text
    assert "Texts can be read back: a server that sees only sums over clients named 83.0 % of the words" in text


def test_one_attack_is_not_told_as_several() -> None:
    text = judged(cell(0.7))[1]
    assert "This compares 900 examples in training with 900 held out." in text
    assert "of them" not in text.split("held out.")[1]


def test_an_attack_that_finds_more_from_a_better_place_is_one_attack_with_two_results() -> None:
    twice = [{**cell(auc), "attack": "loss", "vantage": at} for auc, at in ((0.5, "outsider"), (0.51, "server"))]
    assert "2 different results of 1 attack on membership" in judged(*twice)[1]


def test_the_best_of_many_is_no_leak_where_one_alone_would_be() -> None:
    alone = cell(0.535)
    assert judged(alone)[0] == "leak"
    level, text = judged(alone, *[cell(0.5) for _ in range(30)])
    assert level == "none_found"
    assert "a weak sign, no more" in text
    assert "among 31 numbers tested" in text


def test_a_leak_among_the_first_accused_counts_although_the_auc_is_at_chance() -> None:
    tail = {"tpr": 0.08, "tpr_interval": [0.063, 0.1], "fpr": 0.01, "fpr_interval": [0.005, 0.02]}
    level, text = judged(cell(0.51, tpr_at_fpr={"0.01": tail, "0.001": None}))
    assert level == "leak"
    assert "At a false-positive rate of 1.0 % it identifies 8.0 % of the members" in text
    assert judged(cell(0.51, tpr_at_fpr={"0.01": {**tail, "tpr": 0.012}}))[0] == "none_found"


@pytest.fixture(scope="module")
def silent() -> list[list[Audit]]:
    """Audits of eight attacks whose scores are independent of the coins."""
    random = np.random.default_rng(0)
    draw = random.normal
    return [[samples.ranked(draw(size=120), draw(size=150), bound=False) for _ in range(8)] for _ in range(300)]


def test_a_model_that_tells_nothing_has_a_leak_in_at_most_five_of_a_hundred_audits(silent: list[list[Audit]]) -> None:
    found = sum(verdict(audit_of(*cells))["level"] == "leak" for cells in silent)
    assert found <= 24  # Bin(300, .05) exceeds 24 with a chance of 1 in 100; the seed is fixed


def with_a_main(cells: list[Audit]) -> Audit:
    return audit_of(*cells, main={"attack": "attack-0", "vantage": "outsider"})


@pytest.mark.nightly
def test_with_a_main_attack_it_has_one_as_seldom(silent: list[list[Audit]]) -> None:
    found = sum(verdict(with_a_main(cells))["level"] == "leak" for cells in silent)
    assert found <= 24


def test_the_main_attack_at_all_and_the_others_at_as_much_again_would_fail(silent: list[list[Audit]]) -> None:
    """Twice the family-wise error: what four fifths and one fifth are for."""

    def found(cells: list[Audit], share: float) -> bool:
        chances = [decided.by_rank(one["auc"], one["members"], one["non_members"]) for one in cells]
        return chances[0] <= 0.05 * share or min(chances[1:]) <= 0.05 / 7

    naive, split = (sum(found(cells, share) for cells in silent) for share in (1.0, 0.0))
    assert naive > split + 5  # the main one's own share comes on top of a whole family


@pytest.mark.nightly
def test_others_that_tell_nothing_are_called_found_beside_a_main_one_that_does_as_seldom() -> None:
    """Once the main one holds up, the others share all of the significance: strong control, not only where all tell nothing."""
    random, wrong = np.random.default_rng(1), 0
    for _ in range(300):
        leaking = samples.ranked(random.normal(1, 1, 120), random.normal(size=150), bound=False)
        others = [samples.ranked(random.normal(size=120), random.normal(size=150), bound=False) for _ in range(7)]
        told = samples.audit(with_a_main([leaking, *others]))
        assert decided.holds_up(told.cells[0], told)
        wrong += any(decided.holds_up(one, told) for one in told.cells[1:])
    assert wrong <= 27  # Bin(300, .05) exceeds 27 once in a thousand times; the seed is fixed


def test_the_main_attack_has_most_of_the_significance() -> None:
    """An AUC that holds up as the main one and not among the others; with one attack alone all of it is the main one's."""
    cells = [cell(0.527, half=0.026), *[cell(0.5) for _ in range(12)]]
    assert judged(*cells, main={"attack": "attack-0", "vantage": "outsider"})[0] == "leak"
    assert judged(*cells, main={"attack": "attack-1", "vantage": "outsider"})[0] == "none_found"
    assert judged(*cells)[0] == "none_found"
    assert level(0.05, 0, main=True) == 0.05
    assert level(0.05, 4, main=True) + 4 * level(0.05, 4, main=False) == pytest.approx(0.05)
    assert 4 * level(0.05, 4, main=False, main_found=True) == pytest.approx(0.05)


def test_which_attack_is_the_main_one_follows_from_what_was_made() -> None:
    vantages = list(VANTAGES)
    made = [
        AttackAt(*one.split())
        for one in ("loss outsider", "lira outsider", "regression server", "regression fellow_client")
    ]
    assert main_of(made, vantages) == AttackAt("lira", "outsider")
    assert main_of(made[2:], vantages) == AttackAt("regression", "fellow_client")
    names = ("canary_cosine", "canary_likelihood")
    canaries = [AttackAt("one_run", "outsider"), *(AttackAt(name, "fellow_client") for name in names)]
    assert main_of(canaries, vantages) == AttackAt("canary_likelihood", "fellow_client")
    assert main_of(canaries[:2], vantages) == AttackAt("canary_cosine", "fellow_client")
    assert main_of([], vantages) is None


@pytest.mark.nightly
def test_against_a_known_law_few_members_suffice_and_a_silent_model_is_called_found_as_seldom() -> None:
    random, found = np.random.default_rng(2), 0
    for _ in range(300):
        ranking = roc.to_dict(judge.rank_by_law(random.random(40), 30))
        found += judged({**ranking, "null": "known"})[0] != "none_found"
    assert found <= 24
    tail = {"tpr": 0.1, "tpr_interval": [0.04, 0.2], "fpr": 0.001, "fpr_interval": [0.001, 0.001]}
    found_by_tail = {**cell(0.51, units=40), "tpr_at_fpr": {"0.001": tail}}
    assert judged({**found_by_tail, "null": "known"})[0] == "leak"


ALLOWED = {"auc": 0.66, "tpr_at_fpr": {"0.01": 0.088, "0.001": 0.026}, "by": "mechanism"}
COVERED: Audit = {"unit": "example", "epsilon_accounted": 7.97}


def test_the_four_verdicts() -> None:
    """Nothing; as much as a run that keeps its guarantee shows; the same without a guarantee; a bound above the guarantee."""
    found = cell(0.65, epsilon_lower=0.4, allowed=ALLOWED)
    assert judged(cell(0.51, epsilon_lower=0.0, allowed=ALLOWED), **COVERED)[0] == "none_found"
    grade, text = judged(found, **COVERED)
    assert grade == "within"
    assert text.startswith("The finding is within the guarantee. An outsider who has the final adapter")
    assert "A run whose noise is exactly as accounted allows up to 66 of 100." in text
    assert "leak" not in text
    assert judged(found)[0] == "leak"
    assert judged({**found, "epsilon_accounted": None}, **COVERED)[0] == "leak"
    assert judged({**found, "epsilon_lower": 8.1}, **COVERED)[0] == "violation"


def test_a_leak_that_nothing_covers_comes_before_what_is_within() -> None:
    within = cell(0.65, epsilon_lower=0.4, allowed=ALLOWED)
    server = {**cell(0.9, epsilon_lower=2.0), "vantage": "server", "epsilon_accounted": None}
    level, text = judged(within, server, **COVERED)
    assert level == "leak"
    assert text.startswith("A leak was found, and no guarantee covers it. A server that sees every single update")
    assert "is covered by the guarantee, which allows up to 66 of 100; it is right in 65 of 100" in text


def test_more_than_the_guarantee_allows_is_neither_within_nor_a_contradiction() -> None:
    """An interval supposes more than fair coins, so that it contradicts nothing; nor may it be called within."""
    level, text = judged(cell(0.75, epsilon_lower=0.4, allowed=ALLOWED), **COVERED)
    assert level == "unsupported"
    assert "This audit cannot tell whether the guarantee holds." in text
    assert "The finding is more than that, but no lower bound contradicts the guarantee" in text


def test_no_estimate_makes_a_contradiction() -> None:
    high = [
        {"name": "independent", "epsilon": 9.0, "point": None},
        {"name": "sampled_gaussian", "epsilon": 20.0, "point": 30.0},
    ]
    main = {"attack": "attack-0", "vantage": "outsider"}
    level, text = judged(cell(0.65, epsilon_lower=0.4, allowed=ALLOWED, estimates=high), main=main, **COVERED)
    assert level == "within"
    assert (
        "are 9.00 (if canaries are independent) and 20.00 (if the mechanism is Gaussian too; most likely 30.00)" in text
    )
    assert "One is above the accounted epsilon. That contradicts nothing by itself" in text
    low = [{**one, "epsilon": 3.0} for one in high]
    text = judged(cell(0.65, epsilon_lower=0.4, allowed=ALLOWED, estimates=low), main=main, **COVERED)[1]
    assert "One is above" not in text


def test_without_the_correction_that_test_would_fail(silent: list[list[Audit]]) -> None:
    assert sum(any(one["auc_interval"][0] > 0.5 for one in cells) for cells in silent) > 24


@pytest.mark.parametrize(("members", "others"), [(5, 5), (5, 9), (7, 6)])
def test_the_chance_of_an_auc_is_not_below_the_exact_one_by_more_than_a_hair(members: int, others: int) -> None:
    """Against counting every order, where a corrected test decides: small chances."""
    orders = np.array([bits for bits in product((0, 1), repeat=members + others) if sum(bits) == members])
    below = np.cumsum(1 - orders, axis=1)
    aucs = (below * orders).sum(axis=1) / (members * others)
    for auc in np.unique(aucs):
        exact = float((aucs >= auc - 1e-12).mean())
        if exact < 0.05:
            assert decided.by_rank(float(auc), members, others) > 0.8 * exact


def test_the_chance_of_a_rate_is_that_of_counting_orders() -> None:
    members, others, accused = 6, 5, 1
    orders = [
        bits for bits in product((0, 1), repeat=members + others) if sum(bits) == members
    ]  # the largest score first
    caught = []
    for order in orders:
        threshold = [i for i, bit in enumerate(order) if not bit][accused]  # the second largest non-member
        caught.append(sum(order[:threshold]))
    for least in range(members + 1):
        exact = sum(k >= least for k in caught) / comb(members + others, members)
        assert decided.by_tail(least / members, accused / others, members, others) == pytest.approx(exact)


def test_below_chance_is_never_privacy() -> None:
    level, text = judged(cell(0.42))
    assert level == "none_found"
    assert "lies below 50 (right in 42 of 100 cases (interval 39.0 to 45.0)). That is not privacy" in text
    assert "sign may be inverted" in text


def test_too_few_units_find_nothing_out() -> None:
    level, text = judged(cell(0.6, half=0.3, units=8))
    assert level == "unsupported"
    assert "8 examples in training with 8 held out" in text
    assert "not a sign of privacy" in text
    assert judged(cell(1.0, half=0.0, units=8))[0] == "leak"  # every one of them right is no luck, even of so few
    assert judged(cell(1.0, half=0.0, units=4))[0] == "unsupported"


def test_members_that_differ_without_a_model_make_an_audit_void() -> None:
    broken = {"auc": 0.63, "auc_interval": [0.6, 0.66], "at_chance": False}
    for unit in ("none", "example"):
        level, text = judged(cell(0.9, epsilon_lower=3.0), baseline=broken, unit=unit, epsilon_accounted=1.0)
        assert level == ("violation" if unit == "example" else "unsupported")
        assert ("This audit of membership is void." in text) == (unit == "none")
        if unit == "none":
            assert "(right in 63 of 100 cases)" in text
            assert "Fair coins cause this by luck in one audit in 40: repeat run and audit with another seed." in text


def test_that_servers_see_which_clients_take_part_is_said_of_clients_alone() -> None:
    plain = "A server, with secure aggregation or without, sees by name which clients take part"
    text = judged(cell(0.5), audited_unit="client")[1]
    assert f"{plain}, so their membership is no secret from it, and no attack on it is counted." in text
    assert plain not in judged(cell(0.5))[1]
    void = {"auc": 0.6, "at_chance": False}
    assert plain in judged(cell(0.5), audited_unit="client", baseline=void)[1]
    counted = judged({**cell(0.5), "vantage": "secure_server"}, audited_unit="client")[1]
    assert plain in counted
    assert "no attack on it is counted" not in counted


def test_canaries_are_told_where_membership_was_tried() -> None:
    assert "are canaries" in judged(cell(0.5), canaries="direction")[1]
    assert "are canaries" not in verdict(audit_of(canaries="direction"))["text"]


def test_phantoms_are_not_told_as_clients_who_trained() -> None:
    unchecked = {"auc": None, "auc_interval": None, "at_chance": None, "why": "phantoms have no texts"}
    about = {"audited_unit": "client", "audited_of": "phantoms", "canaries": "direction", "baseline": unchecked}
    text = judged(cell(0.5), **about)[1]
    assert "nobody's data" in text
    assert "phantoms that contributed" in text
    for wrong in ("in training", "held out", "are canaries", "not checked", "take part"):
        assert wrong not in text
    shown = page(samples.audit(audit_of(cell(0.5), **about)))
    assert "900 in training" not in shown
    assert "It was not checked" not in shown


def test_an_interval_that_begins_just_above_chance_does_not_read_as_if_it_began_there() -> None:
    text = judged(cell(0.9, auc_interval=[0.5004, 0.95]))[1]
    assert "interval, 50.04 to 95.00, does not include 50" in text


def test_the_units_that_are_told_are_those_of_the_cell_that_can_tell_most() -> None:
    lopsided = {**cell(0.5), "members": 950, "non_members": 5}
    assert "900 examples in training with 900 held out" in judged(cell(0.5), lopsided)[1]


def test_units_that_nobody_counted_are_no_numbers() -> None:
    text = judged(cell(0.5, units=None))[1]  # type: ignore[arg-type]
    assert "it does not say how many units it compares" in text


def test_a_baseline_that_nobody_made_is_said() -> None:
    assert "was not checked" in judged(cell(0.5), baseline={"auc": None, "at_chance": None})[1]
    assert "was not checked" not in judged(cell(0.5))[1]


@every("unit", ["example", "group", "client", "ward"])
def test_every_unit_has_words(unit: str) -> None:
    text = verdict(audit_of(cell(0.5), unit=unit, audited_unit=unit, epsilon_accounted=2.0))["text"]
    assert "guesses which of two" in text


def test_an_audit_of_nothing_supports_nothing() -> None:
    found = verdict({})
    assert found["level"] == "unsupported"
    assert "says nothing about membership" in found["text"]


def test_repetitions_for_stronger_adversaries_are_no_further_looks() -> None:
    audit = samples.protected()
    assert len(samples.audit(audit).of_membership) == 19
    assert (
        decided.looks(samples.audit(audit)) == 12
    )  # six attacks, each an AUC and a rate at 1 %; at 0.1 % all are refused


def test_a_broken_guarantee_is_said_loudly_with_its_confidence() -> None:
    level, text = judged(cell(0.8, epsilon_lower=1.2), unit="example", epsilon_accounted=0.99)
    assert level == "violation"
    assert text.startswith("THE GUARANTEE IS CONTRADICTED. The run claims epsilon 0.99 for one training example")
    assert "at least 1.20, with a confidence of 95 %" in text


def test_bounds_of_another_unit_or_against_a_trusted_server_contradict_nothing() -> None:
    high = cell(0.8, epsilon_lower=5.0)
    level, text = judged(high, unit="client", audited_unit="example", epsilon_accounted=1.0)
    assert level == "leak"
    assert (
        "could not have contradicted the run's guarantee: the guarantee is for one client with everything it has and the"
        " audit is about one training example" in text
    )
    level, text = judged({**high, "epsilon_accounted": None}, unit="example", epsilon_accounted=1.0)
    assert level == "leak"
    assert (
        "could not have contradicted the run's guarantee: the only lower bounds are for adversaries that the guarantee"
        in text
    )
    assert judged({**high, "epsilon_accounted": 4.9}, unit="example", epsilon_accounted=9.0)[0] == "violation"


def test_what_is_found_within_the_guarantee_is_no_leak() -> None:
    level, text = judged(cell(0.7, epsilon_lower=0.8), unit="example", epsilon_accounted=7.961)
    assert level == "within"
    assert text.startswith("The finding is within the guarantee.")
    assert "A run with this epsilon and delta allows up to 99.97 of 100." in text
    assert "The guarantee is not contradicted: it allows epsilon 7.97, and the largest lower bound is 0.80" in text


def test_a_guarantee_that_cannot_be_set_against_the_audit_is_not_denied() -> None:
    text = judged(cell(0.5, epsilon_lower=0.0), unit="example", epsilon_accounted=None)[1]
    assert "no privacy guarantee" not in text
    assert (
        "This audit could not have contradicted the run's guarantee: an audit leaves units out altogether, and no epsilon"
        " is accounted" in text
    )
    assert "if every client adds a share of the noise" in text
    assert "this audit neither supports nor contradicts the guarantee" in text


def test_without_any_bound_the_guarantee_could_not_have_been_contradicted() -> None:
    text = judged(cell(0.5), unit="example", epsilon_accounted=1.0)[1]
    assert "could not have contradicted the run's guarantee: no attack gave a lower bound" in text
    text = verdict(audit_of(unit="example", epsilon_accounted=1.0))["text"]
    assert "could not have contradicted the run's guarantee: no attack gave a lower bound" in text


def test_a_bound_and_a_promise_that_round_to_the_same_are_told_apart() -> None:
    level, text = judged(cell(0.8, epsilon_lower=0.9964), unit="example", epsilon_accounted=0.9931)
    assert level == "violation"
    assert "The run claims epsilon 0.994 for" in text
    assert "at least 0.996, with" in text


def test_a_false_alarm_of_the_baseline_does_not_hide_a_violation() -> None:
    """A bound depends on the coins alone."""
    broken = {"auc": 0.6, "auc_interval": [0.56, 0.64], "at_chance": False}
    seen = cell(0.99, half=0.01, epsilon_lower=4.0)
    level, text = judged(seen, baseline=broken, unit="example", epsilon_accounted=1.0)
    assert level == "violation"
    assert text.startswith("THE GUARANTEE IS CONTRADICTED.")
    assert "Members and non-members also differ without any model. Fair coins cause that in one audit in 40" in text
    assert "also differ" not in judged(seen, unit="example", epsilon_accounted=1.0)[1]
    assert judged(seen, baseline=broken, unit="example", epsilon_accounted=9.0)[0] == "unsupported"


def test_a_bound_that_could_not_have_contradicted_the_guarantee_is_said_to_be_blunt() -> None:
    audit = samples.protected()
    for one in audit["cells"]:
        one["epsilon_showable"] = 3.5
    said = verdict(audit)["text"]
    assert "could have shown more than 3.5" in said
    covered = [one for one in audit["cells"] if one["epsilon_lower"] is not None]
    min(covered, key=lambda one: float(one["epsilon_lower"]))["epsilon_showable"] = 30.0  # by this one it could
    assert "could have shown" not in verdict(audit)["text"]
    for one in audit["cells"]:
        one["epsilon_showable"] = 30.0
    assert "could have shown" not in verdict(audit)["text"]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without drawings."""
    monkeypatch.setattr(markup, "drawing", lambda title, draw, inches=(): "<svg></svg>")


def only(audit: dict[str, Any], *names: str) -> dict[str, Any]:
    """The audit with these attacks alone, as if requested by name."""
    cells = [cell for cell in audit["cells"] if cell["attack"] in names]
    attacks = [one for one in audit["attacks"] if one["name"] in names]
    few = samples.copied(audit, asked_for=list(names), cells=cells, attacks=attacks)
    return few | {"verdict": verdict(few)}


def at(audit: dict[str, Any], auc: float, interval: list[float]) -> dict[str, Any]:
    """The audit with this AUC in the cells of its one attack."""
    cells = [cell | ({"auc": auc, "auc_interval": interval} if cell["applicable"] else {}) for cell in audit["cells"]]
    return samples.copied(audit, cells=cells)


def title(html: str) -> str:
    """The first heading of a page below its name."""
    (first, *_) = re.findall(r"<h2>(.*?)</h2>", html)
    return str(first)


def test_one_attack_that_found_nothing_says_how_many_there_are(
    protected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    audit = only(protected, "loss")
    assert audit["verdict"]["level"] == "none_found"
    html = page(samples.audit(audit))
    assert title(html) == f"1 of {len(ATTACKS)} attacks tried: nothing was found"
    assert "No attack that was tried proves an epsilon above 0" in html
    others = untried(samples.audit(audit))
    assert others.startswith("Not tried: ")
    assert all((one.title in others) == (name != "loss") for name, one in ATTACKS.items())
    assert others in html
    show(samples.audit(audit))
    assert f"verdict: 1 of {len(ATTACKS)} attacks tried: nothing found" in capsys.readouterr().out


def test_a_leak_found_by_one_attack_is_still_a_leak(unprotected: dict[str, Any]) -> None:
    assert title(page(samples.audit(only(unprotected, "lira")))).startswith(
        f"1 of {len(ATTACKS)} attacks tried: a leak was found"
    )


def test_attacks_of_ones_own_are_counted_beside(protected: dict[str, Any]) -> None:
    audit = only(protected, "loss")
    own = [cell | {"attack": "mine"} for cell in audit["cells"]]
    both = samples.copied(audit, asked_for=["loss", "mine"], cells=[*audit["cells"], *own])
    assert headline(samples.audit(both)).startswith(f"1 of {len(ATTACKS)} attacks and 1 of your own tried: ")


def test_an_audit_of_all_attacks_says_how_many_could_be_made(protected: dict[str, Any]) -> None:
    assert headline(samples.audit(protected)) == "Nothing was found"
    assert untried(samples.audit(protected)) == ""
    cells = [cell | ({"applicable": False} if cell["attack"] == "lira" else {}) for cell in protected["cells"]]
    fewer = samples.copied(protected, cells=cells)
    of = len(samples.ATTACKS)
    said = f"Nothing was found by {of - 1} of {of} attacks that were possible"
    assert headline(samples.audit(fewer)) == said


@pytest.mark.parametrize(
    ("auc", "interval", "wide"),
    [(0.47, [0.38, 0.56], True), (0.51, [0.49, 0.53], False), (0.62, [0.54, 0.7], False)],
)
def test_an_auc_is_explained_where_it_is_shown(
    protected: dict[str, Any], auc: float, interval: list[float], wide: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = at(only(protected, "loss"), auc, interval)
    said = how_to_read(samples.audit(audit))
    assert "An AUC below 0.5 does not show privacy" in said
    assert ("are too few to show whether there is a leak" in said) == wide
    assert said in page(samples.audit(audit))
    show(samples.audit(audit))
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in Audited(samples.audit(audit))._repr_html_()


def test_an_audit_in_a_notebook_is_small_and_escaped(protected: dict[str, Any]) -> None:
    named = samples.copied(protected, attacks=[{"name": "loss", "title": "<script>x</script>"}])
    html = Audited(samples.audit(named))._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;x&lt;/script&gt;" in html
    assert "Nothing was found" in html
    assert len(html) < 10_000
