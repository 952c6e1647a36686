"""The verdict: an audit in one paragraph, for readers who are responsible for the data and are not statisticians.

Four verdicts, and a fifth level (unsupported) if none of them can be reached; the first that applies:

    violation     the guarantee is contradicted: a lower bound on epsilon is above the epsilon accounted for the same unit and
                  adversary
    leak          texts were recovered (`attacks.evidence.attempts`), whatever the guarantee
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

Every sentence and mark of a verdict stands here, for the terminal, the page, the notebook and audit.json alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attacks.catalogue import ATTACKS
from attacks.evidence.baseline import SHUFFLES
from attacks.report import significance
from attacks.report.reading import NO_UNIT, Audit, Cell, read, words
from attacks.report.wording import (
    apart,
    at_least,
    at_most_hundred,
    between,
    capital,
    confidence,
    estimated,
    guess,
    hundred,
    sides,
    texts,
    unit_one,
    units,
    who,
)
from secure_fed.report.formatting import at_most, counted, listed, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.measured import WIDE

Level = Literal["none_found", "within", "leak", "violation", "unsupported"]
LEVELS: tuple[Level, ...] = ("none_found", "within", "leak", "violation", "unsupported")
Standing = Literal["void", "leak", "beyond", "within", "none_found", "unsupported"]
SERVERS = ("secure_server", "server")
ONE_IN = SHUFFLES + 1  # one in so many audits with fair coins has a baseline that fails by chance


def verdict(audit: Mapping[str, Any]) -> dict[str, str]:
    """`{"level", "text", "summary"}` of a parsed audit.json, whichever fields it lacks; the text begins with the summary."""
    parsed = read(audit)
    level = level_of(parsed)
    opening = _opening(parsed, level)
    closing = "leak" if level == "none_found" and significance.partly(parsed) else level
    summary = " ".join(filter(None, opening))
    text = " ".join(filter(None, [*opening, *_common(parsed, level), _CLOSING[closing]]))
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


def level_of(audit: Audit) -> Level:
    """The verdict's level."""
    if any(significance.contradicts(cell, audit) for cell in audit.cells):
        return "violation"
    if any(cell.grade == "leak" for cell in audit.cells):
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
    planted = some = ""
    if audit.results and (audit.canaries != "none" or audit.phantoms):  # conspicuous units
        planted = _PHANTOMS if audit.phantoms else _CANARIES.format(units=units(audit))
    if audit.asked_for:
        some = (
            f"Only the requested attacks were made: {listed([audit.attack_title(name) for name in audit.asked_for])}."
        )
    return [
        tried(audit) if level != "violation" else "",
        planted,
        signs(audit) if of_membership in ("none_found", "unsupported") and level != "violation" else "",
        inverted(audit),
        "" if level == "violation" else guarantee(audit),
        estimated(audit),
        missed(audit) if of_membership == "none_found" and level != "violation" else "",
        _in_plain_sight(audit),
        _UNCHECKED if audit.baseline.at_chance is None and not audit.phantoms else "",
        _PERSONAL if audit.personal else "",
        some,
    ]


def _in_plain_sight(audit: Audit) -> str:
    """A remark that servers know without an attack which clients took part."""
    if audit.audited != "client" or audit.phantoms:
        return ""
    is_counted = any(cell.vantage in SERVERS for cell in audit.of_membership)
    return _PLAIN_SIGHT + ("." if is_counted else ", and no attack on it is counted.")


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
# Of each level in short (`in_short`): the headline of a page, and that of a terminal.
_HEADLINES = {
    "none_found": ("Nothing was found", "nothing found"),
    "within": ("The finding is within the guarantee", "within the guarantee"),
    "leak": ("A leak was found, and {uncovered}", "LEAK, {uncovered}"),
    "violation": ("The privacy guarantee is contradicted", "GUARANTEE CONTRADICTED"),
    "unsupported": ("This audit cannot tell", "cannot tell"),
    "texts": ("A leak was found: texts were read back", "LEAK (texts)"),
    "part": (
        "Nothing of membership was found, and part of the texts was read back",
        "nothing of membership found; part of the texts read back",
    ),
}
# Of each mark of a cell (`significance.mark`): its name on a terminal, and on a page, where texts have their own words.
MARKS = {
    "leak": ("LEAK", "leak"),
    "within": ("as guaranteed", "within the guarantee"),
    "beyond": ("MORE THAN ALLOWED", "more than the guarantee allows"),
    "part": ("in part", ""),
    "sign": ("weak sign", "weak sign"),
    "inverted": ("below .5", "below chance"),
    "chance": ("", "not above chance"),
    "none": ("", ""),
}


def finding(audit: Audit, level: str) -> str:
    """The finding, as a sentence without its full stop."""
    return _HEADLINES[in_short(audit, level)][0].format(uncovered=uncovered(audit))


def headline(audit: Audit, level: str) -> str:
    """The finding, with the number of attacks behind it if not all were made."""
    found, made = finding(audit, level), tried_by_name(audit)
    if audit.asked_for:
        return f"{made}: {found[:1].lower()}{found[1:]}" if made else found
    return found + (able(audit) if in_short(audit, level) == "none_found" else "")


def headline_in_capitals(audit: Audit, level: str) -> str:
    """The headline of a terminal, with the number of attacks behind it if not all were made."""
    short, made = in_short(audit, level), tried_by_name(audit)
    found = _HEADLINES[short][1].format(uncovered=uncovered(audit))
    return f"{f'{made}: ' if made else ''}{found}{able(audit) if short == 'none_found' else ''}"


def able(audit: Audit) -> str:
    """The number of attacks that found nothing, if not all were made: " by 4 of 13 attacks ..."."""
    applied, total = len(_made(audit)), len(audit.attacks)
    if audit.asked_for or applied == total:
        return ""
    these = f"one attack of {total}" if applied == 1 else f"{applied} of {total} attacks"
    return f" by {these} that {'was' if applied == 1 else 'were'} possible"


def tried_by_name(audit: Audit) -> str:
    """The number of attacks made, if only some were requested: "1 of 13 attacks tried"."""
    made = _made(audit)
    own = sum(name not in ATTACKS for name in made)
    if not audit.asked_for or len(made) - own == len(ATTACKS):
        return ""
    beside = f" and {own} of your own" if own else ""
    return f"{len(made) - own} of {len(ATTACKS)} attacks{beside} tried"


def untried(audit: Audit) -> str:
    """The attacks that were not requested, in a sentence; empty if all were."""
    left = [one.title for name, one in ATTACKS.items() if name not in audit.asked_for]
    return f"Not tried: {'; '.join(left)}." if audit.asked_for and left else ""


def how_to_read(audit: Audit) -> str:
    """The meaning of an AUC, and a note if the main one is below 1/2 or too uncertain."""
    cell = audit.main_cell or significance.strongest(audit.results)
    if cell is None:
        return ""
    member, non_member = sides(audit)
    meaning = (
        f"An AUC says how often an attack picks the right one of two {units(audit)}, one {member} and one {non_member}: 1 is"
        " always, 0.5 is a coin. An AUC below 0.5 does not show privacy: it is chance, or the score has the wrong sign."
    )
    if cell.interval is None or not cell.interval[0] <= significance.CHANCE <= cell.interval[1]:
        return meaning
    low, high = cell.interval
    sizes = f"{shown(cell.members)} and {shown(cell.non_members)}"
    wide = f" Here the interval, {shown(low)} to {shown(high)}, is wide: {sizes} are too few to show whether there is a leak."
    return meaning + (wide if high - low > WIDE else "")


def _made(audit: Audit) -> set[str]:
    return {cell.attack for cell in audit.cells if cell.applicable}


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
    found = standing(audit)
    if found == "leak":
        return _leak(audit)
    if found == "unsupported":
        return _unsupported(audit)
    if found == "void":
        rate = "" if audit.baseline.auc is None else f" (right in {hundred(audit.baseline.auc)} of 100 cases)"
        return (
            "This audit of membership is void. A classifier of texts alone, without any model, tells members from non-members"
            f"{rate}. So no AUC here, high or low, says anything about the model. Fair coins cause this by luck in"
            f" one audit in {ONE_IN}: repeat run and audit with another seed. If it happens again, the members were not chosen"
            " by fair coins."
        )
    if found == "none_found":
        best = significance.strongest(audit.results)
        of = " of membership" if significance.named(audit) else ""
        return "" if best is None else f"Nothing{of} was found. {capital(_found(audit, best))}"
    best = _marked(
        audit, found
    )  # the strongest, because the guarantee is the same against all adversaries that it covers
    if found == "within":
        return "" if best is None else f"{_WITHIN} {capital(_found(audit, best))}{_allows(audit, best)}"
    return (
        "This audit cannot tell whether the guarantee holds. "
        f"{_found_by(audit, 'beyond')}{_allows(audit, best)} {_MORE}"
    )


def _leak(audit: Audit) -> str:
    covered = _marked(audit, "within") or _marked(audit, "beyond")
    most = None if covered is None else significance.allows(covered, audit)
    limit = ""
    if covered is not None and most is not None:
        limit = f", which allows up to {at_most_hundred(most.auc)} of 100; it is {_rate(covered)}"
    beside = f" The finding of {who(audit, covered.vantage)} is covered by the guarantee{limit}." if covered else ""
    return f"A leak was found, and {uncovered(audit)}. {_found_by(audit, 'leak')}{beside}"


def _unsupported(audit: Audit) -> str:
    if not audit.of_membership:
        return "This audit says nothing about membership: no attack on it gave a result."
    if _largest(audit) is None:
        return "This audit cannot tell who was a member: it does not say how many units it compares."
    return (
        f"This audit cannot tell who was a member. It compares {_counts(audit)}; with fewer than"
        f" {significance.ENOUGH} members or non-members a leak cannot be distinguished from luck."
    )


def uncovered(audit: Audit) -> str:
    """The reason why a leak is compared with no epsilon."""
    other = audit.unit != NO_UNIT and not audit.comparable
    return "the run's guarantee cannot be compared with it" if other else "no guarantee covers it"


def tried(audit: Audit) -> str:
    """The number of attacks and of significant results; "" if the audit can draw no conclusion on membership.

    An attack with more than one distinct result over vantage points counts several times.
    """
    of_membership = standing(audit)
    if of_membership in ("void", "unsupported") or not audit.results:
        return ""
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
    said = f"{made} compare {_counts(audit)}. Their significance is corrected for their number{named}."
    if of_membership == "none_found":
        return said
    held = sum(significance.holds_up(cell, audit) for cell in audit.results)
    return f"{said} {shown(held)} of them {'is' if held == 1 else 'are'} significant."


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


def _allows(audit: Audit, cell: Cell | None) -> str:
    """The AUC that the guarantee allows there, in words."""
    most = None if cell is None else significance.allows(cell, audit)
    if cell is None or most is None:
        return ""
    run = "whose noise is exactly as accounted" if most.by == "mechanism" else "with this epsilon and delta"
    above = significance.mark(cell, audit) == "within" and (cell.auc or 0.0) > most.auc
    included = ", which the interval includes" if above else ""
    return f" A run {run} allows up to {at_most_hundred(most.auc)} of 100{included}."


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


def contradicted(audit: Audit) -> str:
    """The largest lower bound above the accounted epsilon, and the doubt about it, if any."""
    broken = [cell for cell in audit.cells if significance.contradicts(cell, audit)]
    worst = max(broken, key=lambda cell: cell.lower or 0.0)
    bounds, doubt = sum(cell.lower is not None for cell in audit.results), ""
    if audit.baseline.at_chance is False:  # only a doubt, since the bound depends on fair coins alone
        doubt = (
            f" Members and non-members also differ without any model. Fair coins cause that in one audit in {ONE_IN}; then the"
            " contradiction stands, since it rests on the coins alone. If they were not divided by fair coins, nothing is"
            " shown."
        )
    promise, lower = apart(worst.accounted or 0.0, worst.lower or 0.0)
    return (
        f"THE GUARANTEE IS CONTRADICTED. The run claims epsilon {promise} for {unit_one(audit.audited)}, but"
        f" {who(audit, worst.vantage)} learned so much that epsilon is at least {lower}, with a"
        f" confidence of {confidence(audit)} ({audit.attack_title(worst.attack)}; {counted(bounds, 'such bound')} computed)."
        f"{doubt} Either the noise, the accounting or the program is wrong; do not rely on the claimed epsilon."
    )


def guarantee(audit: Audit) -> str:
    """The sentences on a guarantee that nothing contradicts."""
    if audit.unit == NO_UNIT:
        return "The run has no privacy guarantee, so there is nothing to contradict."
    if not audit.protected:
        promise = "" if audit.promised is None else f" of epsilon {at_most(audit.promised)} ({audit.adjacency})"
        return f"{_COULD_NOT}{promise}: {_NO_EPSILON}"
    if not audit.comparable:
        return (
            f"{_COULD_NOT}: the guarantee is for {unit_one(audit.unit)} and the audit is about {unit_one(audit.audited)}, so"
            " the two are not compared."
        )
    covered = [cell for cell in audit.bounded if audit.covers(cell)]
    if not covered:
        return f"{_COULD_NOT}: {_BOUNDS_OF_OTHERS if audit.bounded else _NO_BOUND}"
    most, limit = covered[0], f"{best_possible(audit)}{blunt(audit)}"
    if not most.lower:
        return f"The guarantee, epsilon {at_most(most.accounted)}, is not contradicted: the largest lower bound is 0.{limit}"
    return (
        f"The guarantee is not contradicted: it allows epsilon {at_most(most.accounted)}, and the largest lower bound is"
        f" {at_least(most.lower)}, with a confidence of {confidence(audit)}.{limit}"
    )


def best_possible(audit: Audit) -> str:
    """The lower bound expected from the best possible attack, which distinguishes a weak attack from a strong guarantee."""
    if audit.expected is None:
        return ""
    return (
        f" The best possible attack on a mechanism of this epsilon, with as many units that each move the model as far as one "
        f"may, is expected to show {at_least(audit.expected)}."
    )


def blunt(audit: Audit) -> str:
    """A warning if there were too few units to contradict the guarantee, whatever an attack found."""
    covered = [cell for cell in audit.bounded if audit.comparable and audit.covers(cell)]
    pairs = [(cell.showable, cell.accounted) for cell in covered]
    if not pairs or any(most is None or promised is None or most > promised for most, promised in pairs):
        return ""
    most = max(cell.showable or 0.0 for cell in covered)
    return f" No attack on so few units could have shown more than {at_most(most)} or contradicted the guarantee."


_COULD_NOT = "This audit could not have contradicted the run's guarantee"
_NO_EPSILON = (
    "an audit leaves units out altogether, and no epsilon is accounted for that. There is none if every client adds a share"
    " of the noise and stays to send it, if the guarantee is about replacing a unit by another, or if the noise was seeded,"
    " which voids the guarantee. So this audit neither supports nor contradicts the guarantee."
)
_BOUNDS_OF_OTHERS = (
    "the only lower bounds are for adversaries that the guarantee does not cover, such as a server that adds the noise"
    " itself."
)
_NO_BOUND = (
    "no attack gave a lower bound on epsilon, because no attack on membership gave a result, or because delta is too large for"
    " the number of units."
)
