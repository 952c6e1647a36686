"""The adversaries, units, rates, recovered texts and estimates of an audit in words, for readers without a background in
audits.

The terminal, the page, the notebook and the verdict take their words from here and from `verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attacks.evidence import attempts
from attacks.evidence.attempts import Attempt, How, Named
from attacks.report.reading import NO_UNIT, Audit, Cell, Estimated, Interval, Row, count, number, row, words
from attacks.report.significance import CHANCE
from secure_fed.report.formatting import MISSING, at_most, counted, listed, percent
from secure_fed.report.formatting import number as shown

UNITS = {"client": "clients", "group": "groups", "example": "examples"}
_ALMOST = 0.99
_WHO = {
    "outsider": "an outsider who has the final adapter",
    "fellow_client": "another client, who sees the shared model of every round",
    "secure_server": "a server that sees only sums over clients",
    "server": "a server that sees every single update",
}
_ONE = {
    "client": "one client with everything it has",
    "example": "one training example",
    "group": "one person's examples at a client",
}
_GUESS = {
    "client": "and guesses which of two clients took part in the training",
    "example": "and guesses which of two texts was trained on",
    "group": "and guesses which of two persons' texts were trained on",
}


def who(audit: Audit, vantage: str) -> str:
    """The adversary at a vantage point, in lower case for the middle of a sentence."""
    if vantage in _WHO:
        return _WHO[vantage]
    sees = next((known.about for known in audit.vantages if known.name == vantage), "")
    return f"somebody who sees {sees}" if sees else f"somebody at the vantage point {audit.vantage_title(vantage)}"


def capital(sentence: str) -> str:
    """The sentence with its first letter capital."""
    return sentence[:1].upper() + sentence[1:]


def unit_one(unit: str) -> str:
    """A single unit: "one training example"."""
    return _ONE.get(unit, f"one {unit}")


def units(audit: Audit) -> str:
    """The audited units: "clients", "phantoms"."""
    return "phantoms" if audit.phantoms else UNITS.get(audit.audited, "units")


def sides(audit: Audit) -> tuple[str, str]:
    """The words for members and for non-members: "in training" and "held out"."""
    return ("that contributed", "that did not") if audit.phantoms else ("in training", "held out")


def guess(audit: Audit) -> str:
    """The guess whose rate of right answers is the AUC."""
    if audit.phantoms:
        return "and guesses which of two phantoms contributed"
    return _GUESS.get(audit.audited, _GUESS["example"])


def hundred(share: float | None, digits: int = 0) -> str:
    """`0.531` -> "53": of 100 cases."""
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def at_most_hundred(share: float) -> str:
    """Rounded up, so that a limit stays one: `0.6521` -> "66", `0.99966` -> "99.97"; of 100 cases."""
    digits = 0 if share <= _ALMOST else 2
    return f"{math.ceil(round(10**digits * 100 * share, 6)) / 10**digits:.{digits}f}"


def between(low: float, high: float) -> str:
    """`(0.531, 0.562)` -> "53.1 to 56.2" of 100 cases, with enough digits that neither end looks like a coin's 50."""
    digits = next(
        (n for n in (1, 2, 3) if all(end == CHANCE or hundred(end, n) != hundred(CHANCE, n) for end in (low, high))), 4
    )
    return f"{hundred(low, digits)} to {hundred(high, digits)}"


def ends(interval: Interval | None, written: Callable[[float], str] = shown) -> str:
    """An interval behind its number: " (0.53 to 0.56)"; empty without one."""
    return "" if interval is None else f" ({written(interval[0])} to {written(interval[1])})"


def promised(audit: Audit) -> str:
    """The accounted epsilon; or that there is none, or that an audit by coins cannot test it."""
    if audit.protected:
        return at_most(audit.epsilon)
    if audit.unit == NO_UNIT:
        return "no guarantee"
    return (
        "none that coins can test" if audit.promised is None else f"{at_most(audit.promised)}, which coins cannot test"
    )


def at_least(value: float | None) -> str:
    """Rounded down, so that a lower bound stays one: `2.019` -> "2.01"."""
    return MISSING if value is None else f"{math.floor(100 * value) / 100:.2f}"


def apart(promised: float, shown: float) -> tuple[str, str]:
    """A guaranteed epsilon, rounded up, and a lower bound above it, rounded down, with enough digits to show which is larger:
    "0.993", "0.996".
    """
    if math.floor(100 * shown) / 100 > float(at_most(promised).replace(",", "")):
        return at_most(promised), at_least(shown)
    digits = next((n for n in range(3, 12) if math.floor(10**n * shown) > math.ceil(10**n * promised)), 12)
    return (
        f"{math.ceil(10**digits * promised) / 10**digits:.{digits}f}",
        f"{math.floor(10**digits * shown) / 10**digits:.{digits}f}",
    )


def confidence(audit: Audit) -> str:
    """`0.05` -> "95 %"."""
    return f"{100 * (1 - audit.significance):.4g} %"


_OWN = {  # shown first, in this order
    "bag_recall": "word recall",
    "bag_precision": "word precision",
    "recall": "recall with position",
    "precision": "precision with position",
    "guessed_bag_recall": "guessed word recall",
    "guessed_bag_precision": "guessed word precision",
    "guessed_recall": "guessed recall with position",
    "guessed_precision": "guessed precision with position",
    "baseline_bag_recall": "word recall of common words",
    "baseline_recall": "recall with position of common words",
}
_INSIDE = ("most_exposed", "most_exposed_guess", "all_rounds", "matching")
BY_COHORT = "by_cohort"  # recall by the number of clients in a sum


def measured(cell: Cell) -> list[tuple[str, str]]:
    """The attack-specific numbers: shares of recovered words first, then numbers for single cases."""
    inside = [
        (f"{_title(name)}: {own}", value)
        for name in _INSIDE
        for own, value in _numbers_in(row(cell.measured.get(name)))
    ]
    noun = {"1": "client"}
    by_cohort = [
        (f"recall with position, {clients} {noun.get(clients, 'clients')} in a sum", percent(found))
        for clients, value in row(cell.measured.get(BY_COHORT)).items()
        if (found := number(value)) is not None
    ]
    return [*_numbers_in(cell.measured), *inside, *by_cohort]


def _numbers_in(figures: Row) -> list[tuple[str, str]]:
    order, found = list(_OWN), []
    for name, value in figures.items():
        figure = number(value)
        if figure is not None:
            is_share = name.endswith(("recall", "precision", "baseline"))
            written = percent(figure) if is_share else shown(count(value)) if isinstance(value, int) else shown(figure)
            found.append((name, written))
    found.sort(key=lambda entry: order.index(entry[0]) if entry[0] in order else len(order))
    return [(_title(name), written) for name, written in found]


def _title(name: str) -> str:
    return _OWN.get(name, words(name).replace("_", " "))


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
        if cell.attempts:  # figures by cohort are not compared: they have no sentence
            figures = {name: value for name, value in cell.measured.items() if name != BY_COHORT}
            once.setdefault((cell.attack, repr(figures)), cell)
    described: list[tuple[Cell, Attempt]] = []
    for cell in once.values():
        best = attempts.best(cell.attempts)
        if best is None:
            continue
        described.append((cell, best))
        if best.how == "exact":  # and guesses with a larger share of words than it
            guesses = tuple(one for one in cell.attempts if one.how != "exact" and one.raw > best.raw)
            other = attempts.best(guesses)
            if other is not None:
                described.append((cell, other))
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
    if most is not None and (most.share(how), most.most or 0.0) > (mean.share(how), mean.most or 0.0):
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
    best = attempts.best(cell.attempts)
    if best is None or best.grade not in ("leak", "part"):
        return ""
    lead = "leak" if best.grade == "leak" else "part of the texts"
    of_mean = best.mean.share(best.how) == best.share
    named = best.mean if of_mean or best.most is None else best.most
    where = [] if of_mean else ["most exposed"]
    where += [{"guessed": "guessed", "matched": "by optimisation"}[best.how]] if best.how != "exact" else []
    where += ["all rounds together"] if best.together else []
    return f"{lead}: {', '.join(where)} {percent(named.share(best.how))}" if where else lead


NAMES = {"independent": "if canaries are independent", "sampled_gaussian": "if the mechanism is Gaussian too"}
SUPPOSES = {
    "independent": "the exact distribution of non-members' scores, and canaries that are independent of each other",
    "sampled_gaussian": "the same, and a Gaussian mechanism with the run's sampling rate and number of releases",
}


def estimates(audit: Audit) -> tuple[Estimated, ...]:
    """The main attack's estimates, if there is a guarantee to compare them with."""
    cell = audit.main_cell
    return cell.estimates if cell is not None and audit.covers(cell) else ()


def estimated(audit: Audit) -> str:
    """The sentence with all estimates, and a warning if one is above the accounted epsilon."""
    found, cell = estimates(audit), audit.main_cell
    if not found or cell is None:
        return ""
    points = ("" if one.point is None else f"; most likely {at_least(one.point)}" for one in found)
    named = ((at_least(one.epsilon), NAMES.get(one.name, one.name)) for one in found)
    values = listed([f"{value} ({name}{point})" for (value, name), point in zip(named, points, strict=True)])
    high = [one for one in found if cell.accounted is not None and one.epsilon > cell.accounted]
    return f"Estimates of epsilon, which assume more than fair coins and prove nothing, are {values}.{_HIGH if high else ''}"


_HIGH = " One is above the accounted epsilon. That contradicts nothing by itself, but check the noise and its code."
