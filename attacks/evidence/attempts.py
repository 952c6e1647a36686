"""Attempts to recover texts: their recall and precision, and when recovered texts are a leak.

Such an attack names words (distinct tokens) and pairs of position and word. For several texts the pairs are often wrong
although every word is right, so words are counted separately. It is a leak if more than half of the words, or of the pairs,
were recovered and more than half of the named ones are right: on average over the attacked updates, or for the most exposed
one.

    exact     from the update's row space: evidence by itself
    guessed   the nearest candidates, where that test does not apply
    matched   by optimisation, likewise

Guesses may be right because texts are alike, so their number is no evidence by itself. They count if naming equally many of the
commonest words of public texts would have recovered clearly less. Without that comparison they do not count, but are still
reported. `measured` gives every number of an attack as its readers see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attacks.record import Cell
from secure_fed.report.formatting import number as shown
from secure_fed.report.formatting import percent

Row = Mapping[str, Any]
How = Literal["exact", "guessed", "matched"]
Grade = Literal["leak", "part", "little", "wrong", "usual", "unmeasured"]

RECOVERED = 0.5  # share of the words recovered
RIGHT = 0.5  # required share of right names, so that naming every word does not count
PART = 0.2  # from this share on, a part was recovered
LARGEST = 1e12  # no figure of an audit is near it; a larger number may not fit into a float or onto a page
CLEARLY = 0.2  # required margin over the commonest words, since few texts are looked at


@dataclass(frozen=True)
class Named:
    """Recall and precision (`_right`) of words and of pairs of position and word. usual: the recall of naming equally many of
    the commonest ones in public texts.
    """

    words: float | None
    words_right: float | None
    pairs: float | None
    pairs_right: float | None
    usual_words: float | None = None
    usual_pairs: float | None = None

    @property
    def most(self) -> float | None:
        """The larger of the two shares, right or wrong."""
        return max((one for one in (self.words, self.pairs) if one is not None), default=None)

    def share(self, how: How) -> float:
        """The larger of the two shares, if it counts."""
        return max(self._counted(how))

    def by_pairs(self, how: How) -> bool:
        """Whether only the pairs count, or only they were measured."""
        of_words, of_pairs = self._counted(how)
        return self.words is None or (of_words == 0 < of_pairs)

    def _counted(self, how: How) -> tuple[float, float]:
        of_words = _counted(self.words, self.words_right, self.usual_words, how)
        return of_words, _counted(self.pairs, self.pairs_right, self.usual_pairs, how)


@dataclass(frozen=True)
class Attempt:
    """One method and its results. together: whether all updates of a client were attacked at once. looked: the number of
    updates, sums or clients in the mean; the exact test applied to `applied` of them. most: the figures of the most exposed
    one, each None where it is not stated.
    """

    how: How
    mean: Named
    most: Named
    together: bool = False
    looked: int | None = None
    applied: int | None = None

    @property
    def share(self) -> float:
        """The larger counted share, of the mean or of the most exposed one."""
        return max(self.mean.share(self.how), self.most.share(self.how))

    @property
    def raw(self) -> float:
        """The larger share, counted or not."""
        return max(self.mean.most or 0.0, self.most.most or 0.0)

    @property
    def grade(self) -> Grade:
        """The grade; if much was named and nothing counts, the reason."""
        if self.share > RECOVERED:
            return "leak"
        if self.share >= PART:
            return "part"
        if self.raw < PART:
            return "little"
        both = self.mean, self.most
        if not any(map(_mostly_right, both)):
            return "wrong"
        measured = any(one is not None for named in both for one in (named.usual_words, named.usual_pairs))
        return "usual" if measured else "unmeasured"


def attempts(cell: Cell) -> tuple[Attempt, ...]:
    """Every attempt of an attack on texts that has a number."""
    if cell.of_membership:
        return ()
    found = []
    for figures, together in ((cell.measured, False), (row(cell.measured.get("all_rounds")), True)):
        looked, applied = count(figures.get("updates")), count(figures.get("exact_applicable"))
        most, guess = exact(row(figures.get("most_exposed"))), guessed(row(figures.get("most_exposed_guess")))
        found.append(Attempt("exact", exact(figures), most, together, looked, applied))
        found.append(Attempt("guessed", guessed(figures), guess, together, looked))
    optimised = row(cell.measured.get("matching"))
    found.append(Attempt("matched", matched(optimised), matched({}), looked=count(optimised.get("updates"))))
    return tuple(one for one in found if one.mean.most is not None)


def grade(cell: Cell) -> Grade | None:
    """The grade of the best attempt to recover texts; None for an attack that is not on texts."""
    found = best(attempts(cell))
    return None if found is None else found.grade


def best(found: tuple[Attempt, ...]) -> Attempt | None:
    """The attempt with the largest share that counts; among equals the largest raw share, then the first."""
    return max(found, key=lambda one: (one.share, one.raw), default=None)


def exact(figures: Row) -> Named:
    """The figures of the exact test, from a row as an attack writes it."""
    return Named(*(_rate(figures, name) for name in ("bag_recall", "bag_precision", "recall", "precision")))


def guessed(figures: Row) -> Named:
    """The figures of guesses, beside those of naming equally many of the commonest public words."""
    names = ("guessed_bag_recall", "guessed_bag_precision", "guessed_recall", "guessed_precision")
    return Named(*(_rate(figures, name) for name in (*names, "baseline_bag_recall", "baseline_recall")))


def matched(figures: Row) -> Named:
    """The figures of recovery by optimisation, which scores words alone."""
    words, right, usual = (_rate(figures, name) for name in ("bag_recall", "bag_precision", "baseline"))
    return Named(words, right, None, None, usual)


def _rate(figures: Row, name: str) -> float | None:
    """A number from 0 to 1; any other value counts as missing."""
    found = number(figures.get(name))
    return found if found is not None and 0 <= found <= 1 else None


# An attack measures what it likes, so a value of `Cell.measured` is looked at before it is used.


def number(value: object) -> float | None:
    """A finite number of plausible size, else None, also for True and False."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)


def count(value: object) -> int | None:
    """A non-negative integer, else None."""
    found = number(value)
    return None if found is None or found < 0 or found != int(found) else int(found)


def row(value: object) -> Row:
    """A mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _counted(share: float | None, right: float | None, usual: float | None, how: How) -> float:
    """The share, or 0 if it does not count. A missing precision does not make it 0."""
    if share is None or (right is not None and right <= RIGHT):
        return 0.0
    if how != "exact" and (usual is None or share - usual < CLEARLY):
        return 0.0
    return share


def _mostly_right(named: Named) -> bool:
    """Whether at least one of the large shares comes from mostly right names."""
    pairs = ((named.words, named.words_right), (named.pairs, named.pairs_right))
    return any(share is not None and share >= PART and (right is None or right > RIGHT) for share, right in pairs)


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
    by_cohort = [
        (f"recall with position, {clients} client{'' if clients == '1' else 's'} in a sum", percent(found))
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
    return _OWN.get(name, name.replace("_", " "))
