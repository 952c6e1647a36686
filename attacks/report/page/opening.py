"""The first sections of the page: the verdict, and the key figures."""

from __future__ import annotations

from attacks.report import significance
from attacks.report.reading import NO_UNIT, Audit
from attacks.report.sentences_estimates import NAMES, estimates
from attacks.report.sentences_membership import standing, uncovered
from attacks.report.values import words
from attacks.report.verdict import LEVELS
from attacks.report.wording import at_least, confidence, promised, sides, unit_one, units
from secure_fed.report.formatting import at_most, number, percent
from secure_fed.report.page.markup import facts, paragraph, section, text

_HEADLINES = {
    "none_found": "Nothing was found",
    "within": "What was found is within the guarantee",
    "leak": "A leak was found, and {uncovered}",
    "violation": "The privacy guarantee is contradicted",
    "unsupported": "This audit cannot tell",
}
_TEXTS = "A leak was found: texts were read back"
_PART = "Nothing of membership was found, and part of the texts was read back"
_WARNS = ("leak", "violation", "unsupported")


def name(audit: Audit) -> str:
    """The run's own name, without the folders that it lies in."""
    return audit.run.replace("\\", "/").rstrip("/").rpartition("/")[2] or "a run without a name"


def recorded(audit: Audit) -> tuple[str, str, str] | None:
    """Level, text and summary of the verdict that the audit carries; None where it carries none."""
    level, body, summary = (words(audit.verdict.get(name)) for name in ("level", "text", "summary"))
    return (level, body, summary) if level in LEVELS and body else None


def heading(audit: Audit, level: str) -> str:
    """The run's name and the verdict as a label."""
    part = level == "none_found" and significance.partly(audit)
    texts = level == "leak" and standing(audit) != "leak"
    headline = _PART if part else _TEXTS if texts else _HEADLINES[level].format(uncovered=uncovered(audit))
    chip = paragraph(headline, "state open" if part or level in _WARNS else "state")
    return f'<header>\n<p class="kind">Privacy audit</p>\n<h1>{text(name(audit))}</h1>\n{chip}</header>\n'


def verdict(level: str, body: str, summary: str = "") -> str:
    """The summary as a lead paragraph, and the rest of the verdict behind it."""
    warns = " warning" if level in _WARNS else ""
    if not summary or not body.startswith(summary):
        summary = body
    rest = body[len(summary) :].strip()
    more = paragraph(rest) if rest else ""
    return section("The verdict in words", paragraph(summary, "lead"), more, css_class=f"privacy{warns}")


def numbers(audit: Audit) -> str:
    """The key figures: members and non-members, accuracy, main AUC, and both bounds on epsilon."""
    member, non_member = sides(audit)
    rows = (
        (f"{units(audit)} {member}", number(audit.members)),
        (f"{units(audit)} {non_member}", number(audit.non_members)),
        ("accuracy of the model", percent(audit.accuracy)),
        *_main(audit),
        ("epsilon accounted", promised(audit)),
        *((f"epsilon estimated, {NAMES.get(one.name, one.name)}", at_least(one.epsilon)) for one in estimates(audit)),
        ("epsilon, lower bound", at_least(_lower(audit))),
    )
    return section("In numbers", facts(rows, "key"), paragraph(_ends(audit), "after"))


def _main(audit: Audit) -> list[tuple[str, str]]:
    """The main attack's AUC, and what a run with exactly this guarantee may show."""
    cell = audit.main_cell
    if cell is None:
        return []
    between = "" if cell.interval is None else f" ({number(cell.interval[0])} to {number(cell.interval[1])})"
    most = significance.allows(cell, audit)
    rows = [(f"AUC of {audit.attack_title(cell.attack)}", f"{number(cell.auc)}{between}")]
    return rows if most is None else [*rows, ("AUC that the guarantee allows", number(most.auc))]


def _lower(audit: Audit) -> float | None:
    """The largest lower bound, among adversaries that the guarantee covers if there are any."""
    return next((cell.lower for cell in audit.bounded), None)


def _untested(audit: Audit) -> str:
    """The epsilon of a guarantee for other neighbouring data sets than an audit's, in words."""
    if audit.promised is None:
        return ""
    return f", epsilon {at_most(audit.promised)} for neighbours that differ by {audit.adjacency or 'something else'}"


def _ends(audit: Audit) -> str:
    lower = _lower(audit)
    promise = (
        f"The run promises at most epsilon {at_most(audit.epsilon)} for {unit_one(audit.unit)}"
        f"{'' if audit.delta is None else f', at delta {audit.delta:g}'}."
        if audit.protected
        else "The run promises no epsilon."
        if audit.unit == NO_UNIT
        else f"The run's guarantee is for {unit_one(audit.unit)}{_untested(audit)}; it has no epsilon that coins can test."
    )
    shown = (
        f"The audit shows that epsilon is at least {at_least(lower)} for {unit_one(audit.audited)}, with a confidence of"
        f" {confidence(audit)}."
        if lower
        else "The audit shows no lower bound above 0."
        if lower is not None
        else "The audit gave no lower bound on it."
    )
    method = f" The method is {audit.method}." if audit.method else ""
    return f"{promise} {shown} Epsilon limits what can be learned: 0 is nothing.{method}"
