"""The verdict: when a leak is called one, when a guarantee is called broken, and what is never called privacy."""

from __future__ import annotations

from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest

from attacks import evidence
from attacks.reading import read
from attacks.verdict import verdict
from tests.attacks import samples

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
    assert text.startswith("No leak was found. At best, an outsider who has the final adapter")
    assert (
        "is right in 53 of 100 cases, where a coin is right in 50; the 95 % interval, 50.0 to 56.0, includes 50" in text
    )
    assert "not proof of privacy" in text
    assert "no guarantee to contradict" in text


def test_a_leak_names_the_weakest_adversary_and_the_strongest() -> None:
    text = verdict(samples.unprotected())["text"]
    assert text.startswith("A leak was found. An outsider who has the final adapter")
    assert "is right in 77 of 100 cases" in text
    assert "A server that sees what every single client sends is right in 90 of 100 cases" in text
    assert "5 attacks on membership were made" in text  # 16 cells, of which most repeat a weaker adversary's
    assert "5 of them hold up" in text
    assert "recovered 83.0 % of the words" in text


def test_the_best_of_many_is_no_leak_where_one_alone_would_be() -> None:
    alone = cell(0.535)
    assert judged(alone)[0] == "leak"
    level, text = judged(alone, *[cell(0.5) for _ in range(30)])
    assert level == "none_found"
    assert "a weak sign, no more" in text
    assert "31 numbers are looked at" in text


def test_a_corrected_interval_that_reaches_chance_is_no_leak() -> None:
    assert judged(cell(0.56, auc_interval_corrected=[0.51, 0.61]))[0] == "leak"
    level, text = judged(cell(0.56, auc_interval_corrected=[0.49, 0.63]))
    assert level == "none_found"
    assert "weak sign" in text


def test_a_leak_among_the_first_accused_counts_although_the_auc_is_at_chance() -> None:
    tail = {"tpr": 0.08, "tpr_interval": [0.063, 0.1], "fpr": 0.01, "fpr_interval": [0.005, 0.02]}
    level, text = judged(cell(0.51, tpr_at_fpr={"0.01": tail, "0.001": None}))
    assert level == "leak"
    assert "Wrong about 1.0 % of those that were held out, the same attack names 8.0 %" in text
    assert judged(cell(0.51, tpr_at_fpr={"0.01": {**tail, "tpr": 0.012}}))[0] == "none_found"


@pytest.fixture(scope="module")
def silent() -> list[list[Audit]]:
    """Audits of eight attacks whose scores know nothing of the coins."""
    random = np.random.default_rng(0)
    draw = random.normal
    return [[samples.ranked(draw(size=120), draw(size=150), bound=False) for _ in range(8)] for _ in range(300)]


def test_a_model_that_tells_nothing_has_a_leak_in_at_most_five_of_a_hundred_audits(silent: list[list[Audit]]) -> None:
    found = sum(verdict(audit_of(*cells))["level"] == "leak" for cells in silent)
    assert found <= 24  # Bin(300, .05) exceeds 24 with a chance of 1 in 100; the seed is fixed


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
            assert evidence.by_rank(float(auc), members, others) > 0.8 * exact


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
        assert evidence.by_tail(least / members, accused / others, members, others) == pytest.approx(exact)


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
        "The run's guarantee is for one client with everything it has and the audit is about one training example"
        in text
    )
    trusted = [{"name": "outsider", "title": "Outsider", "sees": "", "epsilon_accounted": None}]
    assert judged(high, unit="example", epsilon_accounted=1.0, vantages=trusted)[0] == "leak"
    assert judged({**high, "epsilon_accounted": None}, unit="example", epsilon_accounted=1.0)[0] == "leak"
    assert judged({**high, "epsilon_accounted": 4.9}, unit="example", epsilon_accounted=9.0)[0] == "violation"


def test_a_leak_within_the_guarantee_does_not_contradict_it() -> None:
    level, text = judged(cell(0.7, epsilon_lower=0.8), unit="example", epsilon_accounted=7.961)
    assert level == "leak"
    assert "The guarantee is not contradicted: it allows epsilon 7.97, and at least 0.80 was shown" in text


def test_a_guarantee_that_cannot_be_set_against_the_audit_is_not_denied() -> None:
    text = judged(cell(0.5, epsilon_lower=0.0), unit="example", epsilon_accounted=None)[1]
    assert "promises no limit" not in text
    assert "No epsilon is accounted against which this audit could be set." in text


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
        assert level == "unsupported"
        assert text.startswith("This audit is void.")
        assert "(right in 63 of 100 cases)" in text


def test_a_baseline_that_nobody_made_is_said() -> None:
    assert "was not checked" in judged(cell(0.5), baseline={"auc": None, "at_chance": None})[1]
    assert "was not checked" not in judged(cell(0.5))[1]


def test_texts_that_were_read_back_are_a_leak_unless_every_word_was_named() -> None:
    texts = {"auc": None, "measured": {"recall": 0.9, "precision": 0.95}}
    level, text = judged(cell(0.5), texts)
    assert level == "leak"
    assert "recovered 90.0 % of the words" in text
    assert judged(cell(0.5), {"auc": None, "measured": {"recall": 1.0, "precision": 0.01}})[0] == "none_found"
    assert judged(cell(0.5), {"auc": None, "measured": {"recall": 0.1, "precision": 1.0}})[0] == "none_found"


@pytest.mark.parametrize("unit", ["example", "group", "client", "ward"])
def test_every_unit_has_words(unit: str) -> None:
    text = verdict(audit_of(cell(0.5), unit=unit, audited_unit=unit, epsilon_accounted=2.0))["text"]
    assert "guesses which of two" in text


@pytest.mark.parametrize("audit", [{}, {"cells": None}, {"cells": [None, 3, {}]}, {"cells": [{"auc": "high"}]}])
def test_an_audit_of_nothing_supports_nothing(audit: Audit) -> None:
    found = verdict(audit)
    assert found["level"] == "unsupported"
    assert "says nothing about membership" in found["text"]


def test_repetitions_for_stronger_adversaries_are_no_further_looks() -> None:
    audit = samples.protected()
    assert len(read(audit).of_membership) == 19
    assert evidence.looks(read(audit)) == 12  # six attacks, each an AUC and a rate at 1 %; at 0.1 % all are refused


def test_a_bound_that_could_not_have_contradicted_the_guarantee_is_said_to_be_blunt() -> None:
    audit = samples.protected()
    for cell in audit["cells"]:
        cell["epsilon_showable"] = 3.5
    said = verdict(audit)["text"]
    assert "could have shown more than 3.5" in said
    for cell in audit["cells"]:
        cell["epsilon_showable"] = 30.0
    assert "could have shown" not in verdict(audit)["text"]
