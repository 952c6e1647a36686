"""What an audit found of membership, in sentences: nothing, something within the guarantee, a leak, or that it cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attacks.report import significance
from attacks.report.reading import NO_UNIT, Audit, Cell
from attacks.report.sentences_guarantee import ONE_IN
from attacks.report.wording import at_most_hundred, between, capital, guess, hundred, sides, units, who
from secure_fed.report.formatting import counted, percent
from secure_fed.report.formatting import number as shown

Standing = Literal["void", "leak", "beyond", "within", "none_found", "unsupported"]
SERVERS = ("secure_server", "server")


def standing(audit: Audit) -> Standing:
    """What can be said of membership."""
    if audit.baseline.at_chance is False:
        return "void"
    marks = {significance.mark(cell, audit) for cell in audit.of_membership}
    ordered: tuple[Standing, ...] = ("leak", "beyond", "within")
    for found in ordered:
        if found in marks:
            return found
    return "none_found" if significance.enough(audit) else "unsupported"


def found_out(audit: Audit) -> str:
    """The sentences of what it is."""
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
    """That an interval lies above chance, and what that is worth."""
    best = significance.strongest([cell for cell in audit.results if significance.mark(cell, audit) == "sign"])
    if best is None:
        return ""
    looks = significance.looks(audit)
    among = "" if looks < 2 else f" where {looks:,} numbers are looked at"
    return (
        f"There is a weak sign, no more: by itself the interval of {audit.attack_title(best.attack)} lies above 50"
        f" ({_rate(best)}), which luck alone may bring about{among}. Repeat run and audit with another seed before you rely on"
        " either reading."
    )


def inverted(audit: Audit) -> str:
    """That an interval lies below chance, which is never privacy."""
    below = [cell for cell in audit.results if significance.mark(cell, audit) == "inverted"]
    if not below:
        return ""
    low = min(below, key=lambda cell: cell.auc or 0.0)
    return (
        f"The interval of {audit.attack_title(low.attack)} lies below 50 ({_rate(low)}). That is not privacy: whoever turned"
        " its answers round would be right more often than a coin, so its sign may be inverted."
    )


def missed(audit: Audit) -> str:
    """How large a leak would probably not have been found."""
    least = significance.unnoticed(audit)
    if least is None:
        return ""
    return (
        f"With this number of {units(audit)}, an attack that is right in {hundred(least)} of 100 cases would as likely as not"
        " have gone unnoticed."
    )


def _leak(audit: Audit) -> str:
    covered = _marked(audit, "within") or _marked(audit, "beyond")
    beside = (
        f" What {who(audit, covered.vantage)} found is covered by the guarantee{_limit(audit, covered)}."
        if covered
        else ""
    )
    return f"A leak was found, and {uncovered(audit)}. {_found_by(audit, 'leak')}{beside}"


def _within(audit: Audit) -> str:
    """By the one who found most, since the guarantee is the same against all whom it covers."""
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
    return f"Nothing{of} was found. At best, {_found(audit, best)}"


def _marked(audit: Audit, mark: str) -> Cell | None:
    return significance.strongest([cell for cell in audit.of_membership if significance.mark(cell, audit) == mark])


def _found_by(audit: Audit, mark: str) -> str:
    """What the weakest adversary of that mark found, and the one who found most."""
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
    """Why a leak is held against no epsilon."""
    other = audit.unit != NO_UNIT and not audit.comparable
    return "the run's guarantee is not one that it can be set against" if other else "no guarantee covers it"


def tried(audit: Audit) -> str:
    """How many attacks were made, and how many of them hold up; nothing where nothing can be said of membership."""
    of_membership = standing(audit)
    if of_membership in ("void", "unsupported") or not audit.results:
        return ""
    if of_membership == "none_found" or len(audit.results) < 2:
        return _tried(audit)
    held = sum(significance.holds_up(cell, audit) for cell in audit.results)
    return f"{_tried(audit)} {shown(held)} of them {'holds' if held == 1 else 'hold'} up after that."


def _allows(audit: Audit, cell: Cell | None) -> str:
    """What the guarantee lets an attack find there."""
    most = None if cell is None else significance.allows(cell, audit)
    if cell is None or most is None:
        return ""
    run = "whose noise is exactly as accounted" if most.by == "mechanism" else "with this epsilon and delta"
    above = significance.mark(cell, audit) == "within" and (cell.auc or 0.0) > most.auc
    included = ", which the interval includes" if above else ""
    return f" A run {run} may show up to {at_most_hundred(most.auc)}{included}."


def _limit(audit: Audit, cell: Cell) -> str:
    most = significance.allows(cell, audit)
    return "" if most is None else f", which allows up to {at_most_hundred(most.auc)}; it is {_rate(cell)}"


def _void(audit: Audit) -> str:
    return (
        "This audit of membership is void. Those who were trained on and those who were not can be told apart by their texts"
        f" alone, without any model{_baseline_rate(audit)}. So nothing that an attack found of membership can be blamed on the"
        f" model, and nothing that it did not find speaks for it. Fair coins cause this by luck in one audit in {ONE_IN}:"
        " repeat run and audit with another seed. If it comes again, something else than fair coins has chosen the members."
    )


def _unsupported(audit: Audit) -> str:
    if not audit.of_membership:
        return "This audit says nothing about membership: no attack on it gave a result."
    if _largest(audit) is None:
        return "This audit cannot tell of membership: it does not say how many units it compares."
    return (
        f"This audit cannot tell who was a member. It compares {_counts(audit)}; with fewer than"
        f" {significance.ENOUGH} on one side or both luck and a leak look alike."
    )


def _found(audit: Audit, cell: Cell) -> str:
    """One cell in words: who, how often right, and whether the interval includes a coin's."""
    sentence = f"{who(audit, cell.vantage)} {guess(audit.audited)} is right in {hundred(cell.auc)} of 100 cases, where"
    sentence += " a coin is right in 50"
    if cell.interval is not None:
        low, high = cell.interval
        side = "includes 50" if low <= significance.CHANCE <= high else "does not include 50"
        sentence += f"; the 95 % interval, {between(low, high)}, {side}"
    tail = next((tail for tail in cell.tails if significance.tail_holds_up(tail, cell, audit)), None)
    if tail is not None:
        sentence += (
            f". Wrong about {percent(tail.fpr)} of those that were held out, the same attack names {percent(tail.tpr)} of those"
            " that trained"
        )
    return f"{sentence}."


def _rate(cell: Cell) -> str:
    interval = "" if cell.interval is None else f" (interval {between(*cell.interval)})"
    return f"right in {hundred(cell.auc)} of 100 cases{interval}"


def _tried(audit: Audit) -> str:
    """How many numbers there were to choose from; an attack that finds more from a better place has several."""
    results, attacks = len(audit.results), len({cell.attack for cell in audit.results})
    if results < 2:
        return f"This compares {_counts(audit)}."
    made = (
        f"{results} attacks on membership were made, which"
        if attacks == results
        else f"{counted(attacks, 'attack')} on membership gave {results} different results, which"
    )
    luck = "The more there are, the more look successful by luck alone; that has been allowed for"
    main = audit.main_cell
    named = (
        "" if main is None else f", least for the main one, {audit.attack_title(main.attack)}, which no score decided"
    )
    return f"{made} compare {_counts(audit)}. {luck}{named}."


def _counts(audit: Audit) -> str:
    members, non_members = _largest(audit) or (None, None)
    member, non_member = sides(audit)
    return f"{shown(members)} {units(audit)} {member} with {shown(non_members)} {non_member}"


def _largest(audit: Audit) -> tuple[int, int] | None:
    """The sizes of the cell that can tell most: the one with most units on its smaller side."""
    sizes: Sequence[tuple[int, int]] = [
        (cell.members, cell.non_members)
        for cell in audit.of_membership
        if cell.members is not None and cell.non_members is not None
    ]
    return max(sizes, key=lambda one: (min(one), sum(one)), default=None)


def _baseline_rate(audit: Audit) -> str:
    return "" if audit.baseline.auc is None else f" (right in {hundred(audit.baseline.auc)} of 100 cases)"


_WITHIN = "What was found is within the guarantee."
_MORE = (
    "What was found is more than that, and yet no lower bound contradicts the guarantee, which alone can. Luck does this in one"
    " audit in 40 or so: repeat run and audit with another seed, and with more units."
)
