"""An audit in one paragraph, for somebody who has to answer for the data and is no statistician.

Four levels, the first that applies:

    unsupported   members and non-members differ without any model, so that the audit is void
    violation     a lower bound on epsilon is above the epsilon accounted for the same unit and adversary
    leak          an attack on membership holds up although so many were tried (`attacks.evidence`), or one on the texts
                  themselves gave back more than half of them
    unsupported   there were no attacks on membership, or too few units for finding nothing to mean anything
    none_found    otherwise

A model that tells nothing of membership is called a leak in at most `significance` of audits. An interval above chance that
does not hold up is told as a weak sign; one below chance is never told as privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attacks import evidence
from attacks.reading import NO_UNIT, Audit, Cell, read
from attacks.wording import UNITS, at_least, confidence, guess, hundred, unit_one, who
from secure_fed.report.words import at_most, counted, percent
from secure_fed.report.words import number as shown

Level = Literal["leak", "none_found", "violation", "unsupported"]
LEVELS: tuple[Level, ...] = ("leak", "none_found", "violation", "unsupported")


def verdict(audit: Mapping[str, Any]) -> dict[str, str]:
    """`{"level", "text"}` of a parsed audit.json, whatever may be missing in it."""
    told = read(audit)
    level = level_of(told)
    sentences = [_TELLERS[level](told), *_common(told, level), _CLOSING[level]]
    return {"level": level, "text": " ".join(sentence for sentence in sentences if sentence)}


def level_of(audit: Audit) -> Level:
    """Which of the four an audit is."""
    if audit.baseline.at_chance is False:
        return "unsupported"
    if any(evidence.contradicts(cell, audit) for cell in audit.cells):
        return "violation"
    if any(evidence.holds_up(cell, audit) for cell in audit.cells) or any(map(evidence.recovers, audit.cells)):
        return "leak"
    return "none_found" if evidence.enough(audit) else "unsupported"


def _violation(audit: Audit) -> str:
    broken = [cell for cell in audit.cells if evidence.contradicts(cell, audit)]
    worst = max(broken, key=lambda cell: cell.lower or 0.0)
    bounds = sum(cell.lower is not None for cell in audit.results)
    return (
        f"THE GUARANTEE IS CONTRADICTED. The run claims epsilon {at_most(worst.accounted)} for {unit_one(audit.audited)}, but"
        f" {who(audit, worst.vantage)} learned so much that epsilon must be at least {at_least(worst.lower)}, with a"
        f" confidence of {confidence(audit)} ({audit.attack_title(worst.attack)}; {counted(bounds, 'such bound')} computed)."
        " Either the noise, the accounting or the program is wrong; do not rely on the claimed epsilon."
    )


def _leak(audit: Audit) -> str:
    held = [cell for cell in audit.cells if evidence.holds_up(cell, audit)]
    first = evidence.strongest([cell for cell in held if cell.vantage == _weakest(audit, held)])
    worst = evidence.strongest(held)
    if first is None or worst is None:
        return "A leak was found: texts could be read back."
    told = f"A leak was found. {_capital(_found(audit, first))}"
    if worst.auc is not None and worst.vantage != first.vantage and worst.auc > (first.auc or 0.0):
        told += f" {_capital(who(audit, worst.vantage))} is {_rate(audit, worst)}."
    results = [cell for cell in audit.results if evidence.holds_up(cell, audit)]
    return f"{told} {_tried(audit)} {shown(len(results))} of them {'holds' if len(results) == 1 else 'hold'} up after that."


def _none_found(audit: Audit) -> str:
    best = evidence.strongest(audit.results)
    if best is None:
        return ""
    return f"No leak was found. At best, {_found(audit, best)} {_tried(audit)}"


def _unsupported(audit: Audit) -> str:
    if audit.baseline.at_chance is False:
        return (
            "This audit is void. Those who were trained on and those who were not can be told apart by their texts alone,"
            f" without any model{_baseline_rate(audit)}. So nothing that an attack found can be blamed on the model, and"
            " nothing that it did not find speaks for it."
        )
    if not audit.of_membership:
        return "This audit says nothing about membership: no attack on it gave a result."
    return (
        f"This audit cannot tell. It compares {_counts(audit)}; with fewer than"
        f" {evidence.ENOUGH} on either side luck and a leak look alike."
    )


def _common(audit: Audit, level: Level) -> list[str]:
    """What is to be said beside the level: signs, wrong signs, texts, and the guarantee."""
    if audit.baseline.at_chance is False:
        return []
    return [
        "" if audit.canaries == "none" else _CANARIES.format(units=UNITS.get(audit.audited, "units")),
        "" if level in ("leak", "violation") else _signs(audit),
        _inverted(audit),
        _texts(audit),
        "" if level == "violation" else _guarantee(audit),
        _missed(audit) if level == "none_found" else "",
        _UNCHECKED if audit.baseline.at_chance is None else "",
    ]


def _found(audit: Audit, cell: Cell) -> str:
    """One cell in words: who, how often right, and whether the interval includes a coin's."""
    told = f"{who(audit, cell.vantage)} {guess(audit.audited)} is right in {hundred(cell.auc)} of 100 cases, where"
    told += " a coin is right in 50"
    if cell.interval is not None:
        low, high = cell.interval
        side = "includes 50" if low <= evidence.CHANCE <= high else "does not include 50"
        told += f"; the {confidence(audit)} interval, {hundred(low, 1)} to {hundred(high, 1)}, {side}"
    tail = next((tail for tail in cell.tails if evidence.tail_holds_up(tail, cell, audit)), None)
    if tail is not None:
        told += (
            f". Wrong about {percent(tail.fpr)} of those that were held out, the same attack names {percent(tail.tpr)} of those"
            " that trained"
        )
    return f"{told}."


def _rate(audit: Audit, cell: Cell) -> str:
    between = (
        "" if cell.interval is None else f" (interval {hundred(cell.interval[0], 1)} to {hundred(cell.interval[1], 1)})"
    )
    return f"right in {hundred(cell.auc)} of 100 cases{between}"


def _tried(audit: Audit) -> str:
    results = len(audit.results)
    if results < 2:
        return f"This compares {_counts(audit)}."
    return (
        f"{results} attacks on membership were made, which compare {_counts(audit)}. The more are made, the more look"
        " successful by luck alone; that has been allowed for."
    )


def _signs(audit: Audit) -> str:
    signs = [cell for cell in audit.results if evidence.mark(cell, audit) == "sign"]
    best = evidence.strongest(signs)
    if best is None:
        return ""
    return (
        f"There is a weak sign, no more: by itself the interval of {audit.attack_title(best.attack)} lies above 50"
        f" ({_rate(audit, best)}), which happens by luck where {counted(evidence.looks(audit), 'number is', 'numbers are')}"
        " looked at. Repeat the audit with another seed before you rely on either reading."
    )


def _inverted(audit: Audit) -> str:
    below = [cell for cell in audit.results if evidence.mark(cell, audit) == "inverted"]
    if not below:
        return ""
    low = min(below, key=lambda cell: cell.auc or 0.0)
    return (
        f"The interval of {audit.attack_title(low.attack)} lies below 50 ({_rate(audit, low)}). That is not privacy: whoever"
        " turned its answers round would be right more often than a coin, so its sign may be inverted."
    )


def _texts(audit: Audit) -> str:
    back = [cell for cell in audit.cells if evidence.recall(cell) is not None]
    if not back:
        return ""
    best = max(back, key=lambda cell: evidence.recall(cell) or 0.0)
    lead = (
        "Worse, texts can be read back" if evidence.recovers(best) else "Of the texts themselves little was read back"
    )
    return f"{lead}: {who(audit, best.vantage)} recovered {percent(evidence.recall(best))} of the words that were tried for."


def _guarantee(audit: Audit) -> str:
    if audit.unit != NO_UNIT and not audit.protected:
        return "No epsilon is accounted against which this audit could be set."
    if not audit.protected:
        return "The run promises no limit on what it gives away, so there is no guarantee to contradict."
    if not audit.comparable:
        return (
            f"The run's guarantee is for {unit_one(audit.unit)} and the audit is about {unit_one(audit.audited)}, so the two"
            " are not compared."
        )
    most = next(iter(audit.bounded), None)
    if most is None or not audit.covers(most):
        return "No lower bound on epsilon could be set against the guarantee."
    blunt = _blunt(most)
    if not most.lower:
        return f"The guarantee, epsilon {at_most(most.accounted)}, is not contradicted: what was shown at least is 0.{blunt}"
    return (
        f"The guarantee is not contradicted: it allows epsilon {at_most(most.accounted)}, and at least {at_least(most.lower)}"
        f" was shown, with a confidence of {confidence(audit)}.{blunt}"
    )


def _blunt(cell: Cell) -> str:
    """That so few units could not have contradicted the guarantee, whatever an attack found."""
    if cell.showable is None or cell.accounted is None or cell.showable > cell.accounted:
        return ""
    return f" With so few units no attack could have shown more than {at_most(cell.showable)}, so it could not be contradicted."


def _missed(audit: Audit) -> str:
    least = evidence.unnoticed(audit)
    if least is None:
        return ""
    units = UNITS.get(audit.audited, "units")
    return (
        f"With this number of {units}, an attack that is right in {hundred(least)} of 100 cases would as likely as not have"
        " gone unnoticed."
    )


def _counts(audit: Audit) -> str:
    sizes = [(cell.members, cell.non_members) for cell in audit.of_membership]
    members, non_members = max(
        ((m, n) for m, n in sizes if m is not None and n is not None), default=(audit.members, audit.non_members)
    )
    return f"{shown(members)} {UNITS.get(audit.audited, 'units')} in training with {shown(non_members)} held out"


def _baseline_rate(audit: Audit) -> str:
    return "" if audit.baseline.auc is None else f" (right in {hundred(audit.baseline.auc)} of 100 cases)"


def _weakest(audit: Audit, cells: list[Cell]) -> str:
    return min((cell.vantage for cell in cells), key=audit.rank, default="")


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


_TELLERS = {"violation": _violation, "leak": _leak, "none_found": _none_found, "unsupported": _unsupported}
_CLOSING = {
    "violation": "Treat the model as if it had no guarantee until the mistake is found.",
    "leak": "This is the least that is given away: a better attack may find more.",
    "none_found": "To find nothing is not proof of privacy: it is what these attacks, on this run, did not find.",
    "unsupported": "That no leak is reported here is not a sign of privacy.",
}
_UNCHECKED = "Whether the two sides differ by themselves, without any model, was not checked."
_CANARIES = (
    "The {units} that were audited are canaries, made conspicuous on purpose; ordinary ones were not audited here, and are"
    " expected to give away less."
)
