"""What everybody reads: the verdict, and a few numbers."""

from __future__ import annotations

from attacks import evidence
from attacks.reading import NO_UNIT, Audit
from attacks.values import words
from attacks.verdict import LEVELS
from attacks.wording import UNITS, at_least, confidence, promised, unit_one
from secure_fed.report.markup import facts, paragraph, section, text
from secure_fed.report.words import at_most, number, percent

_HEADLINES = {
    "leak": "A leak was found",
    "none_found": "No leak was found",
    "violation": "The privacy guarantee is contradicted",
    "unsupported": "This audit cannot tell",
}
_PART = "No leak of membership was found, and part of the texts was read back"
_WARNS = ("leak", "violation", "unsupported")


def name(audit: Audit) -> str:
    """The run's own name, without the folders that it lies in."""
    return audit.run.replace("\\", "/").rstrip("/").rpartition("/")[2] or "a run without a name"


def recorded(audit: Audit) -> tuple[str, str] | None:
    """Level and text of the verdict that the audit carries; None where it carries none."""
    level, told = words(audit.verdict.get("level")), words(audit.verdict.get("text"))
    return (level, told) if level in LEVELS and told else None


def heading(audit: Audit, level: str) -> str:
    """Whose audit it is, and the verdict as a label."""
    part = level == "none_found" and evidence.partly(audit)
    chip = paragraph(_PART if part else _HEADLINES[level], "state open" if part or level in _WARNS else "state")
    return f'<header>\n<p class="kind">Privacy audit</p>\n<h1>{text(name(audit))}</h1>\n{chip}</header>\n'


def verdict(level: str, told: str) -> str:
    """The paragraph that somebody reads who reads nothing else."""
    warns = " warning" if level in _WARNS else ""
    return section("The verdict in words", paragraph(told, "lead"), css_class=f"privacy{warns}")


def numbers(audit: Audit) -> str:
    """How many were tried for, how good the model is, and the two ends between which the truth about epsilon lies."""
    rows = (
        (f"{UNITS.get(audit.audited, 'units')} in training", number(audit.members)),
        (f"{UNITS.get(audit.audited, 'units')} held out", number(audit.non_members)),
        ("accuracy of the model", percent(audit.accuracy)),
        ("epsilon promised", promised(audit)),
        ("epsilon shown, at least", at_least(_lower(audit))),
    )
    return section("In numbers", facts(rows, "key"), paragraph(_ends(audit), "after"))


def _lower(audit: Audit) -> float | None:
    """The largest lower bound, of the adversaries against whom something is promised if there are any."""
    return next((cell.lower for cell in audit.bounded), None)


def _untested(audit: Audit) -> str:
    """What is promised all the same, of other neighbours."""
    if audit.promised is None:
        return ""
    return f", epsilon {at_most(audit.promised)} of neighbours that differ by {audit.adjacency or 'something else'}"


def _ends(audit: Audit) -> str:
    lower = _lower(audit)
    told = (
        f"The run promises at most epsilon {at_most(audit.epsilon)} for {unit_one(audit.unit)}"
        f"{'' if audit.delta is None else f', at delta {audit.delta:g}'}."
        if audit.protected
        else "The run promises no epsilon."
        if audit.unit == NO_UNIT
        else f"The run's guarantee is for {unit_one(audit.unit)}{_untested(audit)}; it has no epsilon that coins can test."
    )
    shown = (
        f"The audit shows that it is at least {at_least(lower)} for {unit_one(audit.audited)}, with a confidence of"
        f" {confidence(audit)}."
        if lower
        else "The audit shows no lower bound above 0."
        if lower is not None
        else "The audit gave no lower bound on it."
    )
    method = f" The method is {audit.method}." if audit.method else ""
    return f"{told} {shown} Epsilon limits what can be learned: 0 is nothing.{method}"
