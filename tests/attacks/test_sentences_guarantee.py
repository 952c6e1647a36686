"""The sentences on a guarantee: contradicted, not contradicted, or not testable by the audit."""

from __future__ import annotations

from attacks.report.verdict import verdict
from tests.attacks import samples
from tests.attacks.test_verdict import audit_of, cell, judged


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
    trusted = [{"name": "outsider", "title": "Outsider", "sees": "", "epsilon_accounted": None}]
    level, text = judged(high, unit="example", epsilon_accounted=1.0, vantages=trusted)
    assert level == "leak"
    assert (
        "could not have contradicted the run's guarantee: the only lower bounds are for adversaries that the guarantee"
        in text
    )
    assert judged({**high, "epsilon_accounted": None}, unit="example", epsilon_accounted=1.0)[0] == "leak"
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
