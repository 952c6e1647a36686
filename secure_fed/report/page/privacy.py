"""What protects the clients of a run, for somebody who has to answer for it: first whether anything does, then what exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from secure_fed.report.formatting import MISSING, at_most, listed, number, rate
from secure_fed.report.page.guarantee import Guarantee, stated
from secure_fed.report.page.markup import bullets, facts, folded, paragraph, section, subsection
from secure_fed.report.page.masks import masked
from secure_fed.report.page.record import RunRecord
from secure_fed.report.page.server_view import sight

_WEAK = 10.0  # e^10 is above 20,000


def privacy(record: RunRecord) -> str:
    """Whether differential privacy protects the clients, what that means and what it does not."""
    guarantee = stated(record)
    if guarantee is None:
        return _unprotected(record)
    return _guaranteed(record, guarantee) if guarantee.holds else _void(record, guarantee)


def short(record: RunRecord) -> str:
    """Epsilon, as one of the few numbers that everybody asks for."""
    guarantee = stated(record)
    if guarantee is None:
        return "no guarantee"
    return at_most(guarantee.epsilon) if guarantee.holds else "void"


def void(record: RunRecord) -> bool:
    """Whether the run asked for privacy and has none."""
    guarantee = stated(record)
    return record.config.privacy.unit != "none" if guarantee is None else not guarantee.holds


def _unprotected(record: RunRecord) -> str:
    recorded = (record.result or {}).get("privacy_statement")
    asked = f"The run asked for privacy for unit {record.config.privacy.unit!r}, but its files state no guarantee."
    return section(
        "Privacy: NOT PRIVATE" if void(record) else "Privacy: this run is not protected",
        paragraph(asked, "verdict") if void(record) else "",
        paragraph(_ONLY_MASKS if masked(record) else _NOTHING, "verdict"),
        paragraph(
            "Nothing limits what the trained model reveals about one client or one text, so there is no"
            " epsilon to state. If the training texts are personal data, treat the model and the"
            " contributions as personal data too."
        ),
        sight(record, None),
        paragraph(f"Recorded with the result: “{recorded}”", "recorded") if recorded else "",
        css_class="privacy warning",
    )


def _void(record: RunRecord, guarantee: Guarantee) -> str:
    injected = (
        "Its noise or its secret coins were seeded or injected, as tests and experiments do: whoever knows them can take"
        " the noise off again. Nothing below is a guarantee; it is what would have been one with secret noise."
    )
    boundless = "Its noise is so small, next to the clip norm, that no finite epsilon can be stated."
    return section(
        "Privacy: NOT PRIVATE",
        paragraph("This run is NOT PRIVATE, although it added noise.", "verdict"),
        paragraph(boundless if guarantee.secret else injected),
        paragraph(
            "Treat the model and the contributions as you treat the training texts themselves. For a model to"
            " publish, run it again from the command line, or in Python without the argument entropy."
            if not guarantee.secret
            else "Treat the model and the contributions as you treat the training texts themselves."
        ),
        folded("What would have been guaranteed", _terms(record, guarantee)),
        css_class="privacy warning",
    )


def _guaranteed(record: RunRecord, guarantee: Guarantee) -> str:
    epsilon = f"({at_most(guarantee.epsilon)}, {guarantee.delta:g})"
    is_private = "is" if record.result else "is planned to be"
    so_far = (
        "The run is not finished. These are the numbers of its whole plan, which cover what it has released so far;"
        " rounds that were interrupted and made again are in its ledger, and in the numbers once it ends."
    )
    return section(
        f"Privacy: differentially private, epsilon {at_most(guarantee.epsilon)}",
        paragraph(f"This run {is_private} {epsilon}-differentially private for {guarantee.terms['unit']}.", "verdict"),
        "" if record.result else paragraph(so_far, "notice"),
        _weakness(guarantee),
        subsection("What that means", paragraph(_meaning(guarantee))),
        subsection("What it does not mean", paragraph(f"{_LIMITS[guarantee.unit]} {_THIS_PAGE}"), _personal(record)),
        sight(record, guarantee),
        subsection("In detail", _terms(record, guarantee)),
        folded("The statement as it was recorded", paragraph(guarantee.text, "recorded")),
        css_class="privacy",
    )


def _meaning(guarantee: Guarantee) -> str:
    hundredths = math.ceil(10_000 * guarantee.guess) / 100
    most = "the bound is above 99.99 %, so next to none" if hundredths > 99.99 else f"at most {hundredths:.2f} %"
    return (
        f"It limits what the model tells about whether {_change(guarantee)}. Somebody who has the model, knows all other"
        f" training data, and has to guess this where both are equally likely, is right in a limited share of cases:"
        f" {most}, where tossing a coin is right in 50 %. This needs no assumption on what such a person knows or computes."
    )


def _change(guarantee: Guarantee) -> str:
    if guarantee.unit == "client" and guarantee.replaced:
        return "a client held its own data or any others"
    return _CHANGES[guarantee.unit]


def _personal(record: RunRecord) -> str:
    """That the noise is on what travels, and so not on what stays with its client."""
    names = record.config.method.personal
    if not names or record.config.privacy.unit != "client":
        return ""
    return paragraph(
        f"No noise is in the personal tensors ({listed(names)}), which stay with their client: an export of one client's"
        " model, and the run directory, hold them as they were trained. Do not pass these on.",
        "notice",
    )


def _weakness(guarantee: Guarantee) -> str:
    """That an epsilon is too large to mean much, with the reason."""
    if max(guarantee.epsilon, guarantee.epsilon_participants) <= _WEAK:
        return ""
    vantage = "" if guarantee.epsilon > _WEAK else " against whoever sees who takes part"
    return paragraph(
        f"A weak guarantee{vantage}: an epsilon above {_WEAK:g} allows what is observed to be more than"
        " 20,000 times as likely with somebody's data as without, so that by itself it rules out next to nothing.",
        "notice",
    )


def _terms(record: RunRecord, guarantee: Guarantee) -> str:
    """Everything that a reader needs to check or to doubt the guarantee."""
    terms = guarantee.terms
    rows = [
        ("unit", terms["unit"]),
        ("neighbours", terms["adjacency"]),
        ("epsilon", at_most(guarantee.epsilon)),
        (
            "epsilon against participants",
            f"{at_most(guarantee.epsilon_participants)}, for whoever sees who takes part in a round",
        ),
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
    missing = bullets(terms["not_covered"])
    return facts(rows, "terms") + (subsection("Not covered", missing) if missing else "")


def _realised(terms: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the noise of those who stayed came to, where clients bring it; the guarantee stays what it is."""
    found = terms.get("realised")
    if not found:
        return []
    came_to = (
        f"multiplier {rate(found['noise_multiplier'])} in the smallest sum, of {number(found['survivors'])} clients"
    )
    would_be = f"which would be epsilon {at_most(found['epsilon'])}; the guarantee does not count on it"
    return [("noise that there was", f"{came_to}, {would_be}")]


def _spending(record: RunRecord, guarantee: Guarantee) -> list[tuple[str, str]]:
    """What was charged to which ledger, once there is a result."""
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


_CHANGES = {
    "client": "one client's data were used or not",
    "example": "one example was among the training examples of its client or not",
    "group": "all examples of one person at one client were among its training examples or not",
}
_LIMITS = {
    "client": (
        "What holds for many clients is no secret: to learn that is the purpose. A person whose data are with several"
        " clients is protected less than one client is."
    ),
    "example": (
        "What holds for many examples is no secret, and neither is what sets one client apart: the unit is one example."
        " A person with several examples is protected less than one example is; privacy.unit = 'group' protects them together."
    ),
    "group": (
        "What holds for many persons is no secret, and neither is what sets one client apart: the unit is one person."
        " A person with examples at several clients is protected less than at one."
    ),
}
_NOTHING = "No differential privacy and no secure aggregation protect this run."
_ONLY_MASKS = (
    "No differential privacy protects this run. All that secure aggregation does is hide single contributions."
)
_THIS_PAGE = (
    "And it is a guarantee of the model: this page and the run directory name the clients, which no noise covers."
)
