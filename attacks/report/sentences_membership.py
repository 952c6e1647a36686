"""Sentences on membership: nothing found, a finding within the guarantee, a leak, or no conclusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attacks.report import significance
from attacks.report.audited import NO_UNIT, Audit, Cell
from attacks.report.sentences_guarantee import ONE_IN
from attacks.report.wording import at_most_hundred, between, capital, guess, hundred, sides, units, who
from secure_fed.report.formatting import counted, percent
from secure_fed.report.formatting import number as shown

Standing = Literal["void", "leak", "beyond", "within", "none_found", "unsupported"]
SERVERS = ("secure_server", "server")


def standing(audit: Audit) -> Standing:
    """The finding on membership: the first that applies, from a failed baseline to none."""
    if audit.baseline.at_chance is False:
        return "void"
    marks = {significance.mark(cell, audit) for cell in audit.of_membership}
    ordered: tuple[Standing, ...] = ("leak", "beyond", "within")
    for found in ordered:
        if found in marks:
            return found
    return "none_found" if significance.enough(audit) else "unsupported"


def found_out(audit: Audit) -> str:
    """The sentences for that finding."""
    sentences = {
        "void": _void,
        "leak": _leak,
        "beyond": _beyond,
        "within": _within,
        "none_found": _none_found,
        "unsupported": _unsupported,
    }
    return sentences[standing(audit)](audit)


def signs(audit: Audit) -> str:
    """A warning if the interval of an AUC lies above chance without being significant."""
    best = significance.strongest([cell for cell in audit.results if significance.mark(cell, audit) == "sign"])
    if best is None:
        return ""
    looks = significance.looks(audit)
    among = "" if looks < 2 else f" among {looks:,} numbers tested"
    return (
        f"There is a weak sign, no more: the 95 % interval of {audit.attack_title(best.attack)} lies above 50"
        f" ({_rate(best)}). Luck alone may cause that{among}. Repeat run and audit with another seed before you rely on it."
    )


def inverted(audit: Audit) -> str:
    """A warning if the interval of an AUC lies below chance, which is never evidence of privacy."""
    below = [cell for cell in audit.results if significance.mark(cell, audit) == "inverted"]
    if not below:
        return ""
    low = min(below, key=lambda cell: cell.auc or 0.0)
    return (
        f"The 95 % interval of {audit.attack_title(low.attack)} lies below 50 ({_rate(low)}). That is not privacy: an adversary"
        " who reverses its answers is right more often than a coin, so its sign may be inverted."
    )


def missed(audit: Audit) -> str:
    """The AUC that an audit with this number of units misses half of the time."""
    least = significance.unnoticed(audit)
    if least is None:
        return ""
    return (
        f"With this number of {units(audit)}, the audit overlooks an attack whose true rate is {hundred(least)} of 100 half of"
        " the time."
    )


def _leak(audit: Audit) -> str:
    covered = _marked(audit, "within") or _marked(audit, "beyond")
    beside = (
        f" The finding of {who(audit, covered.vantage)} is covered by the guarantee{_limit(audit, covered)}."
        if covered
        else ""
    )
    return f"A leak was found, and {uncovered(audit)}. {_found_by(audit, 'leak')}{beside}"


def _within(audit: Audit) -> str:
    """The strongest finding, because the guarantee is the same against all adversaries that it covers."""
    best = _marked(audit, "within")
    return "" if best is None else f"{_WITHIN} {capital(_found(audit, best))}{_allows(audit, best)}"


def _beyond(audit: Audit) -> str:
    best = _marked(audit, "beyond")
    found = f"{_found_by(audit, 'beyond')}{_allows(audit, best)}"
    return f"This audit cannot tell whether the guarantee holds. {found} {_MORE}"


def _none_found(audit: Audit) -> str:
    best = significance.strongest(audit.results)
    if best is None:
        return ""
    of = " of membership" if significance.named(audit) else ""
    return f"Nothing{of} was found. {capital(_found(audit, best))}"


def _marked(audit: Audit, mark: str) -> Cell | None:
    return significance.strongest([cell for cell in audit.of_membership if significance.mark(cell, audit) == mark])


def _found_by(audit: Audit, mark: str) -> str:
    """The finding of the weakest adversary with this mark, and the strongest finding."""
    held = [cell for cell in audit.of_membership if significance.mark(cell, audit) == mark]
    weakest = min((cell.vantage for cell in held), key=audit.rank)
    first = significance.strongest([cell for cell in held if cell.vantage == weakest])
    worst = significance.strongest(held)
    if first is None or worst is None:
        return ""
    sentence = capital(_found(audit, first))
    if worst.vantage != first.vantage and (worst.auc or 0.0) > (first.auc or 0.0):
        sentence += f" {capital(who(audit, worst.vantage))} is {_rate(worst)}."
    return sentence


def uncovered(audit: Audit) -> str:
    """The reason why a leak is compared with no epsilon."""
    other = audit.unit != NO_UNIT and not audit.comparable
    return "the run's guarantee cannot be compared with it" if other else "no guarantee covers it"


def tried(audit: Audit) -> str:
    """The number of attacks and of significant results; "" if the audit can draw no conclusion on membership."""
    of_membership = standing(audit)
    if of_membership in ("void", "unsupported") or not audit.results:
        return ""
    if of_membership == "none_found" or len(audit.results) < 2:
        return _tried(audit)
    held = sum(significance.holds_up(cell, audit) for cell in audit.results)
    return f"{_tried(audit)} {shown(held)} of them {'is' if held == 1 else 'are'} significant."


def _allows(audit: Audit, cell: Cell | None) -> str:
    """The AUC that the guarantee allows there, in words."""
    most = None if cell is None else significance.allows(cell, audit)
    if cell is None or most is None:
        return ""
    run = "whose noise is exactly as accounted" if most.by == "mechanism" else "with this epsilon and delta"
    above = significance.mark(cell, audit) == "within" and (cell.auc or 0.0) > most.auc
    included = ", which the interval includes" if above else ""
    return f" A run {run} allows up to {at_most_hundred(most.auc)} of 100{included}."


def _limit(audit: Audit, cell: Cell) -> str:
    most = significance.allows(cell, audit)
    return "" if most is None else f", which allows up to {at_most_hundred(most.auc)} of 100; it is {_rate(cell)}"


def _void(audit: Audit) -> str:
    rate = "" if audit.baseline.auc is None else f" (right in {hundred(audit.baseline.auc)} of 100 cases)"
    return (
        "This audit of membership is void. A classifier of texts alone, without any model, tells members from non-members"
        f"{rate}. So no AUC here, high or low, says anything about the model. Fair coins cause this by luck in"
        f" one audit in {ONE_IN}: repeat run and audit with another seed. If it happens again, the members were not chosen by"
        " fair coins."
    )


def _unsupported(audit: Audit) -> str:
    if not audit.of_membership:
        return "This audit says nothing about membership: no attack on it gave a result."
    if _largest(audit) is None:
        return "This audit cannot tell who was a member: it does not say how many units it compares."
    return (
        f"This audit cannot tell who was a member. It compares {_counts(audit)}; with fewer than"
        f" {significance.ENOUGH} members or non-members a leak cannot be distinguished from luck."
    )


def _found(audit: Audit, cell: Cell) -> str:
    """One cell in words: the adversary, its AUC, the interval, and a significant true-positive rate."""
    sentence = f"{who(audit, cell.vantage)} {guess(audit)} is right in {hundred(cell.auc)} of 100 cases; a coin is"
    sentence += " right in 50"
    if cell.interval is not None:
        low, high = cell.interval
        side = "includes 50" if low <= significance.CHANCE <= high else "does not include 50"
        sentence += f". The 95 % interval, {between(low, high)}, {side}"
    tail = next((tail for tail in cell.tails if significance.tail_holds_up(tail, cell, audit)), None)
    if tail is not None:
        sentence += (
            f". At a false-positive rate of {percent(tail.fpr)} it identifies {percent(tail.tpr)} of the members"
        )
    return f"{sentence}."


def _rate(cell: Cell) -> str:
    interval = "" if cell.interval is None else f" (interval {between(*cell.interval)})"
    return f"right in {hundred(cell.auc)} of 100 cases{interval}"


def _tried(audit: Audit) -> str:
    """The number of results. An attack with more than one distinct result over vantage points counts several times."""
    results, attacks = len(audit.results), len({cell.attack for cell in audit.results})
    if results < 2:
        return f"This compares {_counts(audit)}."
    made = (
        f"{results} attacks on membership"
        if attacks == results
        else f"{results} different results of {counted(attacks, 'attack')} on membership"
    )
    main = audit.main_cell
    named = (
        ""
        if main is None
        else f", mildly for the main attack, {audit.attack_title(main.attack)}, which was chosen before any score was computed"
    )
    return f"{made} compare {_counts(audit)}. Their significance is corrected for their number{named}."


def _counts(audit: Audit) -> str:
    members, non_members = _largest(audit) or (None, None)
    member, non_member = sides(audit)
    return f"{shown(members)} {units(audit)} {member} with {shown(non_members)} {non_member}"


def _largest(audit: Audit) -> tuple[int, int] | None:
    """Members and non-members of the cell with the most units on its smaller side."""
    sizes: Sequence[tuple[int, int]] = [
        (cell.members, cell.non_members)
        for cell in audit.of_membership
        if cell.members is not None and cell.non_members is not None
    ]
    return max(sizes, key=lambda one: (min(one), sum(one)), default=None)


_WITHIN = "The finding is within the guarantee."
_MORE = (
    "The finding is more than that, but no lower bound contradicts the guarantee, and only a lower bound can. Luck causes this"
    " in about one audit in 40: repeat run and audit with another seed and more units."
)
