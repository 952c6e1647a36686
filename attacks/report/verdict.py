"""The verdict: an audit in one paragraph, for readers who are responsible for the data and are not statisticians.

Four verdicts, and a fifth level (unsupported) if none of them can be reached; the first that applies:

    violation     the guarantee is contradicted: a lower bound on epsilon is above the epsilon accounted for the same unit and
                  adversary
    leak          texts were recovered (`attacks.report.readback`), whatever the guarantee
    unsupported   members and non-members differ without any model, which makes findings on membership void
    leak          a finding on membership is significant (`attacks.report.significance`), by an adversary, or of a unit, that no
                  guarantee covers
    unsupported   a significant finding is covered by a guarantee and exceeds it, yet no lower bound contradicts it
    within        significant findings are covered by a guarantee and do not exceed it
    unsupported   no attacks on membership, or too few units for finding nothing to mean anything
    none_found    nothing was found: otherwise

The model-free baseline comes after the first two. The lower bound of Steinke et al. (2023) depends on the coins alone: if they
are fair, it is too high in at most `significance` of audits, including audits whose baseline fails by chance. A baseline fails
by chance in one audit in 40, and such a false alarm must not hide a broken guarantee; the doubt is stated beside it. Recovered
texts do not depend on coins. Findings on membership are withheld: readers would attribute them to the model, but if texts alone
distinguish members from non-members, they may come from the texts.

A model that reveals nothing about membership gives a finding in at most `significance` of audits. A contradiction requires a
lower bound, never an interval or an estimate, which assume more than fair coins. An interval above chance that is not
significant is a weak sign; one below chance is never called evidence of privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attacks.report import readback, significance
from attacks.report.audited import Audit
from attacks.report.reading import read
from attacks.report.sentences_estimates import estimated
from attacks.report.sentences_guarantee import contradicted, guarantee
from attacks.report.sentences_membership import SERVERS, found_out, inverted, missed, signs, standing, tried
from attacks.report.sentences_texts import texts
from attacks.report.values import words
from attacks.report.wording import units
from secure_fed.report.formatting import listed

Level = Literal["none_found", "within", "leak", "violation", "unsupported"]
LEVELS: tuple[Level, ...] = ("none_found", "within", "leak", "violation", "unsupported")


def verdict(audit: Mapping[str, Any]) -> dict[str, str]:
    """`{"level", "text", "summary"}` of a parsed audit.json, whichever fields it lacks; the text begins with the summary."""
    parsed = read(audit)
    level = level_of(parsed)
    opening = _opening(parsed, level)
    closing = "leak" if level == "none_found" and significance.partly(parsed) else level
    summary, text = map(_joined, (opening, [*opening, *_common(parsed, level), _CLOSING[closing]]))
    return {"level": level, "text": text, "summary": summary}


def recorded(audit: Mapping[str, Any]) -> tuple[str, str, str]:
    """Level, text and summary of the verdict stored in a parsed audit.json; without one, of a newly made verdict."""
    carried = read(audit).verdict
    found = carried if words(carried.get("level")) in LEVELS and words(carried.get("text")) else verdict(audit)
    return words(found.get("level")), words(found.get("text")), words(found.get("summary"))


def in_short(audit: Audit, level: str) -> str:
    """The level; "part" if only parts of texts were found, and "texts" if recovered texts are the only leak."""
    if level == "none_found" and significance.partly(audit):
        return "part"
    return "texts" if level == "leak" and standing(audit) != "leak" else level


def _joined(sentences: Sequence[str]) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def level_of(audit: Audit) -> Level:
    """The verdict's level."""
    if any(significance.contradicts(cell, audit) for cell in audit.cells):
        return "violation"
    if any(readback.grade(cell) == "leak" for cell in audit.cells):
        return "leak"
    found = standing(audit)
    return "unsupported" if found == "void" or found == "beyond" else found


def _opening(audit: Audit, level: Level) -> list[str]:
    """The findings: on the guarantee, on texts, on membership."""
    if level == "violation":
        return [contradicted(audit), texts(audit)]
    if level == "leak" and standing(audit) != "leak":
        return ["A leak was found.", texts(audit), found_out(audit)]
    return [found_out(audit), texts(audit)]


def _common(audit: Audit, level: Level) -> list[str]:
    """The remarks after the findings: canaries, weak signs, the guarantee, and untested claims."""
    of_membership = standing(audit)
    if of_membership == "void":
        return [_in_plain_sight(audit)]
    return [
        tried(audit) if level != "violation" else "",
        _planted(audit),
        signs(audit) if of_membership in ("none_found", "unsupported") and level != "violation" else "",
        inverted(audit),
        "" if level == "violation" else guarantee(audit),
        estimated(audit),
        missed(audit) if of_membership == "none_found" and level != "violation" else "",
        _in_plain_sight(audit),
        _UNCHECKED if audit.baseline.at_chance is None and not audit.phantoms else "",
        _PERSONAL if audit.personal else "",
        _some(audit),
    ]


def _planted(audit: Audit) -> str:
    """A remark if the audited units are conspicuous."""
    if not audit.results or (audit.canaries == "none" and not audit.phantoms):
        return ""
    return _PHANTOMS if audit.phantoms else _CANARIES.format(units=units(audit))


def _in_plain_sight(audit: Audit) -> str:
    """A remark that servers know without an attack which clients took part."""
    if audit.audited != "client" or audit.phantoms:
        return ""
    counted = any(cell.vantage in SERVERS for cell in audit.of_membership)
    return _PLAIN_SIGHT + ("." if counted else ", and no attack on it is counted.")


def _some(audit: Audit) -> str:
    """A remark if only requested attacks were made."""
    if not audit.asked_for:
        return ""
    return f"Only the requested attacks were made: {listed([audit.attack_title(name) for name in audit.asked_for])}."


_CLOSING = {
    "violation": "Treat the model as if it had no guarantee until the mistake is found.",
    "leak": "This is a lower bound on the leak: a better attack may find more.",
    "within": "A guarantee limits the loss of privacy; it does not rule it out.",
    "none_found": "Finding nothing is not proof of privacy: other attacks may find more.",
    "unsupported": "The lack of a verdict is not a sign of privacy.",
}
_UNCHECKED = "Whether members and non-members differ without any model was not checked."
_CANARIES = (
    "The audited {units} are canaries, made conspicuous on purpose; ordinary {units} were not audited and are expected to"
    " give away less."
)
_PHANTOMS = (
    "The audited units are phantoms, which are nobody's data. Each phantom that a coin chose contributed a random direction"
    " whenever it was drawn, as long as one unit may. Units of the data were not audited and are expected to give away less."
)
_PERSONAL = (
    "Parts of the model stay with the clients. Outsiders and other clients had only the shared part, and the rest as it was"
    " before training, so finding nothing there says little."
)
_PLAIN_SIGHT = (
    "A server, with secure aggregation or without, sees by name which clients take part, so their membership is no secret from"
    " it"
)
