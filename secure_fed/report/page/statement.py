"""The statement for the record: the guarantee in the words of the result, and every term that it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fed.report.formatting import MISSING, at_most, number, rate
from secure_fed.report.page.guarantee import Guarantee, stated
from secure_fed.report.page.markup import facts, paragraph, section
from secure_fed.report.page.record import RunRecord

Rows = list[tuple[str, str]]


def statement(record: RunRecord) -> str:
    """The recorded statement, whole, and its terms as a table; empty where the run recorded none."""
    guarantee = stated(record)
    if guarantee is not None:
        return section(
            "Statement for the record",
            "" if guarantee.holds else paragraph("This is no guarantee: the run is NOT PRIVATE.", "notice"),
            paragraph(guarantee.text, "recorded"),
            facts(_terms(record, guarantee), "terms"),
        )
    recorded = (record.result or {}).get("privacy_statement")
    return section("Statement for the record", paragraph(str(recorded), "recorded") if recorded else "")


def _terms(record: RunRecord, guarantee: Guarantee) -> Rows:
    """Everything needed to check the guarantee, or to doubt it."""
    terms = guarantee.terms
    return [
        ("unit", terms["unit"]),
        ("neighbours", terms["adjacency"]),
        ("epsilon", at_most(guarantee.epsilon)),
        *_against(guarantee),
        ("delta", f"{guarantee.delta:g} (1 in {number(round(1 / guarantee.delta))})"),
        ("mechanism", terms["mechanism"]),
        ("clip norm", f"{terms['clip_norm']:g}"),
        ("noise is added", terms["noise"]),
        *_realised(terms),
        ("sampling", terms["sampling"]),
        ("accountant", terms["accountant"]),
        ("trusted", terms["trust"]),
        ("released", terms["released"]),
        *_spending(record, guarantee),
    ]


def _against(guarantee: Guarantee) -> Rows:
    """The observers that epsilon holds against, and the second epsilon where the first does not hold against participants."""
    those = guarantee.terms.get("holds_against", ("reader",))
    seen = f"{at_most(guarantee.epsilon_participants)}, against observers who see which clients take part in a round"
    held = [("epsilon holds against", ", ".join(_OBSERVERS[one] for one in those))]
    return held if "participant" in those else [*held, ("epsilon against participants", seen)]


_OBSERVERS = {
    "reader": "readers of the models",
    "participant": "observers who see when each client takes part",
    "server": "the server",
}


def _realised(terms: Mapping[str, Any]) -> Rows:
    """The noise that the surviving clients actually added, where clients add it. The guarantee does not rely on it."""
    found = terms.get("realised")
    if not found:
        return []
    smallest = (
        f"multiplier {rate(found['noise_multiplier'])} in the smallest sum, of {number(found['survivors'])} clients"
    )
    would_be = f"that would be epsilon {at_most(found['epsilon'])}, but the guarantee does not count on it"
    return [("noise as realised", f"{smallest}; {would_be}")]


def _spending(record: RunRecord, guarantee: Guarantee) -> Rows:
    """The charges and their ledger, once there is a result."""
    if record.result is None:
        return [("ledger", record.config.privacy.ledger or "in the run directory")]
    terms = guarantee.terms
    limit, limit_delta = terms["budget_epsilon"], terms["budget_delta"]
    of_limit = "without a limit" if limit is None else f"of {at_most(limit)} (delta {limit_delta:g})"
    most = terms["participations"]
    return [
        ("releases", f"{number(record.result['releases'])} charged, {number(terms['planned_releases'])} planned"),
        *([("rounds of one client", f"at most {number(most)}")] if most else []),
        ("ledger", str(terms["ledger"])),
        ("data set of the ledger", str(terms["data_set"]) or MISSING),
        (
            "spent in the ledger",
            f"epsilon {at_most(record.result['epsilon_cumulative'])} {of_limit}, when this run ended",
        ),
    ]
