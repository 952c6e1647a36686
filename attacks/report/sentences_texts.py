"""Sentences on recovered texts: the shares of words recovered, by each adversary, on average and in the most exposed case."""

from __future__ import annotations

from collections.abc import Iterable

from attacks.evidence import attempts
from attacks.evidence.attempts import Attempt, How, Named
from attacks.report import readback
from attacks.report.audited import Audit, Cell
from attacks.report.measured import BY_COHORT
from attacks.report.wording import who
from secure_fed.report.formatting import counted, percent

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
    described = [one for cell in _once(audit) for one in _worth_a_sentence(cell)]
    described.sort(key=lambda one: _ORDER.index(one[1].grade))
    return " ".join(_sentence(audit, cell, attempt) for cell, attempt in described)


def short(cell: Cell) -> str:
    """The finding in a few words, for a table cell; "" if less than a part of the texts was recovered."""
    best = attempts.best(readback.attempts(cell))
    if best is None or best.grade not in ("leak", "part"):
        return ""
    lead = "leak" if best.grade == "leak" else "part of the texts"
    of_mean = best.mean.share(best.how) == best.share
    named = best.mean if of_mean or best.most is None else best.most
    where = [] if of_mean else ["most exposed"]
    where += [{"guessed": "guessed", "matched": "by optimisation"}[best.how]] if best.how != "exact" else []
    where += ["all rounds together"] if best.together else []
    return f"{lead}: {', '.join(where)} {percent(named.share(best.how))}" if where else lead


def _once(audit: Audit) -> list[Cell]:
    """The cells of attacks on texts, without repetitions of the same figures by stronger adversaries. Figures by cohort are not
    compared: they have no sentence.
    """
    found: dict[tuple[str, str], Cell] = {}
    for cell in sorted(audit.cells, key=lambda cell: audit.rank(cell.vantage)):
        if readback.attempts(cell):
            figures = {name: value for name, value in cell.measured.items() if name != BY_COHORT}
            found.setdefault((cell.attack, repr(figures)), cell)
    return list(found.values())


def _worth_a_sentence(cell: Cell) -> Iterable[tuple[Cell, Attempt]]:
    """The best attempt, and guesses with a larger share of words than it."""
    found = readback.attempts(cell)
    best = attempts.best(found)
    if best is None:
        return
    yield cell, best
    if best.how == "exact":
        guesses = tuple(one for one in found if one.how != "exact" and one.raw > best.raw)
        other = attempts.best(guesses)
        if other is not None:
            yield cell, other


def _sentence(audit: Audit, cell: Cell, attempt: Attempt) -> str:
    mean, most, how = attempt.mean, attempt.most, attempt.how
    named = f"{_named(mean, how, f' of {_subject(cell)}')}{_places(attempt)}{_looked(cell, attempt)}"
    sentence = f"{_LEADS[attempt.grade]}:{_HOW[how]} {who(audit, cell.vantage)} named {named}"
    if most is not None and (most.share(how), most.most or 0.0) > (mean.share(how), mean.most or 0.0):
        sentence += f"; in the most exposed case {_named(most, how)}"
    return f"{sentence}."


def _subject(cell: Cell) -> str:
    if "sums" not in cell.measured:
        return "a client's texts"
    known = cell.measured.get("cohorts_known") is not False
    return "the texts of all clients of a sum" if known else "the texts of all clients that may be in a sum"


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


def _places(attempt: Attempt) -> str:
    """The share of pairs of position and word, if the attempt counts."""
    mean = attempt.mean
    if mean.by_pairs(attempt.how) or mean.pairs is None or attempt.grade not in ("leak", "part"):
        return ""
    return f", and {percent(mean.pairs)} of the pairs of word and place{_aside(mean.pairs_right, mean.usual_pairs)}"


def _aside(right: float | None, usual: float | None) -> str:
    """The precision, and the share recovered from public texts alone."""
    remarks = []
    if right is not None:
        remarks.append("all of its answers are right" if right == 1 else f"{percent(right)} of its answers are right")
    if usual is not None:
        remarks.append(f"as many answers, the commonest in public texts, give {percent(usual)}")
    return f" ({'; '.join(remarks)})" if remarks else ""
