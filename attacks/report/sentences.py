"""A verdict in sentences: the audit in one paragraph and in a headline, the finding, the guarantee, and recovered texts.

For people who are responsible for the data and are not statisticians. The terminal, the page, the notebook and audit.json take
their sentences from here. `verdict` decides what is said; `phrases` has the words for adversaries, units and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from attacks.catalogue import ATTACKS
from attacks.evidence.attempts import BY_COHORT, Attempt, How, Named, attempts, best
from attacks.evidence.verdict import (
    CHANCE,
    ENOUGH,
    allows,
    contradicts,
    holds_up,
    in_short,
    level_of,
    looks,
    mark,
    partly,
    standing,
    strongest,
    tail_holds_up,
    texts_named,
    unnoticed,
)
from attacks.record import Audit, Cell, Level, Verdict
from attacks.report.phrases import (
    NAMES,
    ONE_IN,
    apart,
    at_least,
    at_most_hundred,
    between,
    capital,
    confidence,
    estimates,
    guess,
    hundred,
    members,
    sides,
    unit_one,
    units,
    who,
)
from secure_fed.report.formatting import at_most, counted, listed, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.measured import WIDE

SERVERS = ("secure_server", "server")


def verdict(audit: Audit) -> Verdict:
    """The verdict in words, of an audit without one; the text begins with the summary."""
    level = level_of(audit)
    if level == "violation":
        opening = [contradicted(audit), texts(audit)]
    elif level == "leak" and standing(audit) != "leak":
        opening = ["A leak was found.", texts(audit), found_out(audit)]
    else:
        opening = [found_out(audit), texts(audit)]
    closing = "leak" if level == "none_found" and partly(audit) else level
    text = " ".join(filter(None, [*opening, blunt(audit), *_common(audit, level), _CLOSING[closing]]))
    return Verdict(level, text, " ".join(filter(None, opening)))


def _common(audit: Audit, level: Level) -> list[str]:
    """The remarks after the findings: canaries, weak signs, the guarantee, and untested claims."""
    of_membership = standing(audit)
    if of_membership == "void":
        return [_in_plain_sight(audit)]
    planted = some = missed = ""
    if audit.results and (audit.canaries != "none" or audit.dummies):  # conspicuous units
        planted = (_DUMMIES if audit.dummies else _CANARIES).format(units=units(audit))
    if audit.asked_for:
        some = (
            f"Only the requested attacks were made: {listed([audit.attack_title(name) for name in audit.asked_for])}."
        )
    if of_membership == "none_found" and level != "violation" and (least := unnoticed(audit)) is not None:
        missed = (
            f"With this number of {units(audit)}, the audit overlooks an attack whose true rate is {hundred(least)} of 100"
            " half of the time."
        )
    return [
        tried(audit) if level != "violation" else "",
        planted,
        signs(audit) if of_membership in ("none_found", "unsupported") and level != "violation" else "",
        inverted(audit),
        "" if level == "violation" else guarantee(audit),
        estimated(audit),
        missed,
        _in_plain_sight(audit),
        _UNCHECKED if audit.baseline.at_chance is None and not audit.dummies else "",
        _PERSONAL if audit.personal else "",
        some,
    ]


def _in_plain_sight(audit: Audit) -> str:
    """A remark that servers know without an attack which clients took part."""
    if audit.audited_unit != "client" or audit.dummies:
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
_DUMMIES = (
    "The audited units are {units}, which hold nobody's data and exist for the audit alone. About half of them, chosen at"
    " random, contributed a random direction whenever they were drawn, as long as one unit may. Units of the data were not"
    " audited and are expected to give away less."
)
_PERSONAL = (
    "Parts of the model stay with the clients. Whoever gets the final model, and the other clients, had only the shared part,"
    " and the rest as it was before training, so finding nothing there says little."
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


def finding(audit: Audit) -> str:
    """The finding, as a sentence without its full stop."""
    return _HEADLINES[in_short(audit)][0].format(uncovered=uncovered(audit))


def headline(audit: Audit) -> str:
    """The finding, with the number of attacks behind it if not all were made."""
    found, made = finding(audit), tried_by_name(audit)
    return (f"{made}: {found[:1].lower()}{found[1:]}" if made else found) + able(audit)


def headline_in_capitals(audit: Audit) -> str:
    """The headline of a terminal, with the number of attacks behind it if not all were made."""
    made = tried_by_name(audit)
    found = _HEADLINES[in_short(audit)][1].format(uncovered=uncovered(audit))
    return f"{f'{made}: ' if made else ''}{found}{able(audit)}"


def able(audit: Audit) -> str:
    """The number of attacks that found nothing, if not all were made: " by the 4 attacks ..."."""
    applied, total = len(_made(audit)), len(audit.attacks)
    if audit.asked_for or applied == total or in_short(audit) != "none_found":
        return ""
    these = "one attack that was" if applied == 1 else f"the {applied} attacks that were"
    return f" by {these} possible, of {total}"


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
    cell = audit.main_cell or strongest(audit.results)
    if cell is None:
        return ""
    member, non_member = sides(audit)
    meaning = (
        f"An AUC says how often an attack picks the right one of two {units(audit)}, one {member} and one {non_member}: 1 is"
        " always, 0.5 is chance. An AUC below 0.5 does not show privacy: it is chance, or the score has the wrong sign."
    )
    low, high = cell.auc_interval or (CHANCE, CHANCE)
    if not low <= CHANCE <= high or high - low <= WIDE:
        return meaning
    sizes = f"{shown(cell.members)} and {shown(cell.non_members)}"
    wide = f"Here the interval, {shown(low)} to {shown(high)}, is wide: {sizes} are too few to show whether there is a leak."
    return f"{meaning} {wide}"


def _made(audit: Audit) -> set[str]:
    return {cell.attack for cell in audit.cells if cell.applicable}


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
            f"{rate}. So no AUC here, high or low, says anything about the model. Luck causes this in"
            f" one audit in {ONE_IN}: repeat run and audit with another seed. If it happens again, the members were not chosen"
            " at random."
        )
    if found == "none_found":
        strong = strongest(audit.results)
        of = " of membership" if texts_named(audit) else ""
        return "" if strong is None else f"Nothing{of} was found. {capital(_found(audit, strong))}"
    # the strongest, because the guarantee is the same against all adversaries that it covers
    strong = _marked(audit, found)
    if found == "within":
        return "" if strong is None else f"{_WITHIN} {capital(_found(audit, strong))}{_allows(audit, strong)}"
    return (
        "This audit cannot tell whether the guarantee holds. "
        f"{_found_by(audit, 'beyond')}{_allows(audit, strong)} {_MORE}"
    )


def _leak(audit: Audit) -> str:
    covered, beside = _marked(audit, "within") or _marked(audit, "beyond"), ""
    if covered is not None and (most := allows(covered, audit)) is not None:
        beside = (
            f" The finding of {who(audit, covered.vantage)} is covered by the guarantee, which allows up to"
            f" {at_most_hundred(most.auc)} of 100; it is {_rate(covered)}."
        )
    return f"A leak was found, and {uncovered(audit)}. {_found_by(audit, 'leak')}{beside}"


def _unsupported(audit: Audit) -> str:
    if not audit.of_membership:
        return "This audit says nothing about membership: no attack on it gave a result."
    return (
        f"This audit cannot tell who was a member. It compares {_counts(audit)}; with fewer than"
        f" {ENOUGH} members or non-members a leak cannot be distinguished from luck."
    )


def uncovered(audit: Audit) -> str:
    """The reason why a leak is compared with no epsilon."""
    other = audit.guaranteed and not audit.comparable
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
    held = sum(holds_up(cell, audit) for cell in audit.results)
    return f"{said} {shown(held)} of them {'is' if held == 1 else 'are'} significant."


def signs(audit: Audit) -> str:
    """A warning if the interval of an AUC lies above chance without being significant."""
    sign = strongest([cell for cell in audit.results if mark(cell, audit) == "sign"])
    if sign is None:
        return ""
    tests = looks(audit)
    among = "" if tests < 2 else f" among {tests:,} numbers tested"
    return (
        f"There is a weak sign, no more: the 95 % interval of {audit.attack_title(sign.attack)} lies above 50"
        f" ({_rate(sign)}). Luck alone may cause that{among}. Repeat run and audit with another seed before you rely on it."
    )


def inverted(audit: Audit) -> str:
    """A warning if the interval of an AUC lies below chance, which is never evidence of privacy."""
    below = [cell for cell in audit.results if mark(cell, audit) == "inverted"]
    if not below:
        return ""
    low = min(below, key=lambda cell: cell.auc or 0.0)
    return (
        f"The 95 % interval of {audit.attack_title(low.attack)} lies below 50 ({_rate(low)}). That is not privacy: an adversary"
        " who reverses its answers is right more often than by chance, so its sign may be inverted."
    )


def _marked(audit: Audit, wanted: str) -> Cell | None:
    return strongest([cell for cell in audit.of_membership if mark(cell, audit) == wanted])


def _found_by(audit: Audit, wanted: str) -> str:
    """The finding of the weakest adversary with this mark, and the strongest finding."""
    marked = [cell for cell in audit.of_membership if mark(cell, audit) == wanted]
    held = sorted(marked, key=lambda cell: -(cell.auc or 0.0))  # the strongest first
    worst, first = held[0], min(held, key=lambda cell: audit.rank(cell.vantage))
    sentence = capital(_found(audit, first))
    if worst.vantage != first.vantage and (worst.auc or 0.0) > (first.auc or 0.0):
        sentence += f" {capital(who(audit, worst.vantage))} is {_rate(worst)}."
    return sentence


def _found(audit: Audit, cell: Cell) -> str:
    """One cell in words: the adversary, its AUC, the interval, and a significant true-positive rate."""
    guesser = f"{who(audit, cell.vantage)} {'and' if cell.vantage == 'outsider' else 'that'} {guess(audit)}"
    sentence = f"{guesser} is right in {hundred(cell.auc)} of 100 cases; a guess at random is right in 50"
    if cell.auc_interval is not None:
        low, high = cell.auc_interval
        side = "includes 50" if low <= CHANCE <= high else "does not include 50"
        sentence += f". The 95 % interval, {between(low, high)}, {side}"
    tail = next((tail for tail in cell.tails if tail_holds_up(tail, cell, audit)), None)
    if tail is not None:
        found = f"{percent(tail.tpr)} of the {members(audit)}"
        sentence += f". At a false-positive rate of {percent(tail.fpr)} it identifies {found}"
    return f"{sentence}."


def _rate(cell: Cell) -> str:
    interval = "" if cell.auc_interval is None else f" (interval {between(*cell.auc_interval)})"
    return f"right in {hundred(cell.auc)} of 100 cases{interval}"


def _allows(audit: Audit, cell: Cell | None) -> str:
    """The AUC that the guarantee allows there, in words."""
    most = None if cell is None else allows(cell, audit)
    if cell is None or most is None:
        return ""
    run = "with this noise" if most.by == "mechanism" else "with this epsilon and delta, whatever its noise,"
    above = mark(cell, audit) == "within" and (cell.auc or 0.0) > most.auc
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
    broken = [cell for cell in audit.cells if contradicts(cell, audit)]
    worst = max(broken, key=lambda cell: cell.epsilon_lower or 0.0)
    bounds, doubt = sum(cell.epsilon_lower is not None for cell in audit.results), ""
    if audit.baseline.at_chance is False:  # only a doubt, since the bound depends on fair coins alone
        doubt = (
            f" Members and non-members also differ without any model. Luck causes that in one audit in {ONE_IN}; then the"
            " contradiction stands, since it needs only that they were divided at random. If they were not, nothing is shown."
        )
    promise, lower = apart(worst.epsilon_accounted or 0.0, worst.epsilon_lower or 0.0)
    return (
        f"THE GUARANTEE IS CONTRADICTED. The run claims epsilon {promise} for {unit_one(audit.audited_unit)}, but"
        f" {who(audit, worst.vantage)} learned so much that epsilon is at least {lower}, with a"
        f" confidence of {confidence(audit)} ({audit.attack_title(worst.attack)}; {counted(bounds, 'such bound')} computed)."
        f"{doubt} Either the noise, the accounting or the program is wrong; do not rely on the claimed epsilon."
    )


def guarantee(audit: Audit) -> str:
    """The sentences on a guarantee that nothing contradicts."""
    if not audit.guaranteed:
        return "The run has no privacy guarantee, so there is nothing to contradict."
    if not audit.protected:
        promised = audit.epsilon_promised
        promise = "" if promised is None else f" of epsilon {at_most(promised)} ({audit.adjacency})"
        return f"{_COULD_NOT}{promise}: {_NO_EPSILON}"
    if not audit.comparable:
        return (
            f"{_COULD_NOT}: the guarantee is for {unit_one(audit.unit)} and the audit is about"
            f" {unit_one(audit.audited_unit)}, so the two are not compared."
        )
    covered = [cell for cell in audit.bounded if audit.covers(cell)]
    if not covered:
        return f"{_COULD_NOT}: {_BOUNDS_OF_OTHERS if audit.bounded else _NO_BOUND}"
    most, best_possible = covered[0], ""  # which tells a weak attack from a strong guarantee
    if audit.expected is not None:
        noise = "this noise" if audit.expected.by == "mechanism" else "Gaussian noise of this epsilon"
        best_possible = (
            f" The best possible attack on {noise}, with as many units that each move the model as far as one may, is expected"
            f" to show {at_least(audit.expected.epsilon_lower)}."
        )
    promise = at_most(most.epsilon_accounted)
    if not most.epsilon_lower:
        return f"The guarantee, epsilon {promise}, is not contradicted: the largest lower bound is 0.{best_possible}"
    return (
        f"The guarantee is not contradicted: it allows epsilon {promise}, and the largest lower bound is"
        f" {at_least(most.epsilon_lower)}, with a confidence of {confidence(audit)}.{best_possible}"
    )


def blunt(audit: Audit) -> str:
    """A warning if there were too few units to contradict the guarantee, whatever an attack found; else empty."""
    covered = [cell for cell in audit.bounded if audit.comparable and audit.covers(cell)]
    pairs = [(cell.epsilon_showable, cell.epsilon_accounted) for cell in covered]
    if not pairs or any(most is None or promised is None or most > promised for most, promised in pairs):
        return ""
    most = max(cell.epsilon_showable or 0.0 for cell in covered)
    few = f"With {shown(audit.members)} and {shown(audit.non_members)} {units(audit)}"
    return (
        f"{few} no attack could have contradicted the guarantee: they can show at most an epsilon of {at_most(most)}."
    )


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
_LEADS = {
    "leak": "Texts can be read back",
    "part": "Part of the texts can be read back",
    "little": "Little of the texts was read back",
    "wrong": "Texts were guessed, and most of the guesses are wrong",
    "usual": "Texts were guessed, no better or not clearly better than from public texts alone",
    "unmeasured": "Texts were guessed; it was not measured how well public texts alone do, so this is not counted as a leak",
}
_HOW = {"exact": "", "guessed": " by guesses", "matched": " by optimisation"}
_ORDER = ("leak", "part", "little", "unmeasured", "usual", "wrong")


def texts(audit: Audit) -> str:
    """A sentence for each adversary and attempt, the most recovered first; "" if no attack was on texts."""
    once: dict[tuple[str, str], Cell] = {}  # without repetitions of the same figures by stronger adversaries
    for cell in sorted(audit.cells, key=lambda cell: audit.rank(cell.vantage)):
        if attempts(cell):  # figures by cohort are not compared: they have no sentence
            figures = {name: value for name, value in cell.measured.items() if name != BY_COHORT}
            once.setdefault((cell.attack, repr(figures)), cell)
    described: list[tuple[Cell, Attempt]] = []
    for cell in once.values():
        first, *others = sorted(attempts(cell), key=lambda one: (-one.share, -one.raw))
        described.append((cell, first))
        if first.how == "exact":  # and guesses with a larger share of words than it
            described += [(cell, one) for one in others if one.how != "exact" and one.raw > first.raw][:1]
    described.sort(key=lambda one: _ORDER.index(one[1].grade))
    return " ".join(_sentence(audit, cell, attempt) for cell, attempt in described)


def _sentence(audit: Audit, cell: Cell, attempt: Attempt) -> str:
    mean, most, how = attempt.mean, attempt.most, attempt.how
    whose = "a client's texts"
    if "sums" in cell.measured:
        known = cell.measured.get("cohorts_known") is not False
        whose = "the texts of all clients of a sum" if known else "the texts of all clients that may be in a sum"
    named = _named(mean, how, f" of {whose}")
    if not (mean.by_pairs(how) or mean.pairs is None) and attempt.grade in ("leak", "part"):
        named += (
            f", and {percent(mean.pairs)} of the pairs of word and place{_aside(mean.pairs_right, mean.usual_pairs)}"
        )
    sentence = f"{_LEADS[attempt.grade]}:{_HOW[how]} {who(audit, cell.vantage)} named {named}{_looked(cell, attempt)}"
    if (most.share(how), most.most or 0.0) > (mean.share(how), mean.most or 0.0):
        sentence += f"; in the most exposed case {_named(most, how)}"
    return f"{sentence}."


def _looked(cell: Cell, attempt: Attempt) -> str:
    """The updates, sums or clients in the mean."""
    if attempt.looked is None:
        return ""
    if attempt.together:
        return f", as a mean over {counted(attempt.looked, 'client')} with all updates of each taken together"
    what = "sum" if "sums" in cell.measured else "update"
    applies = attempt.applied is None or attempt.applied == attempt.looked
    of = "" if applies else f", to {attempt.applied} of which the exact test applies"
    return f", as a mean over {counted(attempt.looked, what)}{of}"


def _named(named: Named, how: How, subject: str = "") -> str:
    """The share of words, or of pairs of position and word if only these count."""
    if named.by_pairs(how):
        return f"{percent(named.pairs)} of the words{subject} in their places{_aside(named.pairs_right, named.usual_pairs)}"
    return f"{percent(named.words)} of the words{subject}{_aside(named.words_right, named.usual_words)}"


def _aside(right: float | None, usual: float | None) -> str:
    """The precision, and the share recovered from public texts alone."""
    remarks = []
    if right is not None:
        remarks.append("all of its answers are right" if right == 1 else f"{percent(right)} of its answers are right")
    if usual is not None:
        remarks.append(f"as many answers, the commonest in public texts, give {percent(usual)}")
    return f" ({'; '.join(remarks)})" if remarks else ""


def short(cell: Cell) -> str:
    """The finding in a few words, for a table cell; "" if less than a part of the texts was recovered."""
    found = best(attempts(cell))
    if found is None or found.grade not in ("leak", "part"):
        return ""
    lead = "leak" if found.grade == "leak" else "part of the texts"
    of_mean = found.mean.share(found.how) == found.share
    shown = found.mean if of_mean else found.most
    where = [] if of_mean else ["most exposed"]
    where += [{"guessed": "guessed", "matched": "by optimisation"}[found.how]] if found.how != "exact" else []
    where += ["all rounds together"] if found.together else []
    return f"{lead}: {', '.join(where)} {percent(shown.share(found.how))}" if where else lead


def estimated(audit: Audit) -> str:
    """The sentence with all estimates, and a warning if one is above the accounted epsilon."""
    found, cell = estimates(audit), audit.main_cell
    if not found or cell is None:
        return ""
    points = ["" if one.point is None else f"; most likely {at_least(one.point)}" for one in found]
    named = [f"{at_least(one.epsilon)} ({NAMES.get(one.name, one.name)}" for one in found]
    values = listed([f"{name}{point})" for name, point in zip(named, points, strict=True)])
    high = [one for one in found if cell.epsilon_accounted is not None and one.epsilon > cell.epsilon_accounted]
    assume = "Estimates of epsilon, which assume more than a random choice of members and prove nothing"
    return f"{assume}, are {values}.{_HIGH if high else ''}"


_HIGH = " One is above the accounted epsilon. That contradicts nothing by itself, but check the noise and its code."
