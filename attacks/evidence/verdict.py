"""The verdict on an audit, decided: its level, the significance of findings, corrected for their number, and the main attack.

Its words are in `sentences`. Four verdicts, and a fifth level (unsupported) if none of them can be reached; the first that
applies:

    violation     the guarantee is contradicted: a lower bound on epsilon is above the epsilon accounted for the same unit and
                  adversary
    leak          texts were recovered (`attacks.evidence.attempts`), whatever the guarantee
    unsupported   members and non-members differ without any model, which makes findings on membership void
    leak          a finding on membership is significant (`holds_up`), by an adversary, or of a unit, that no guarantee covers
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

The main attack is chosen by public facts and by which attacks could be made, and by no score: the first of `ORDER` that could
be made on the run, at its weakest vantage, else the first of the catalogue. Whether an attack can be made depends on the run's
settings, its number of clients, its recording and the references.

    canaries of random direction, clients by secret coins,
    rounds recorded                                           canary_likelihood, the most powerful test where it applies
    canaries of random direction otherwise                    canary_cosine
    canaries of wrong labels or rare tokens                   one_run
    no canaries                                               lira if there are references, else loss

If a model reveals nothing about membership, scores are independent of the coins, and every order of members among non-members
is equally likely. Under that hypothesis, whatever the scores are,

    AUC     is the statistic of a rank-sum test: mean 1/2, variance (m + n + 1) / (12 m n), less with ties; normal,
            with a correction for continuity, from five units on either side on
    TPR     k of m members lie above the (j+1)-th largest of n non-members with the chance that among the first k + j of a
            random order at most j are non-members: Fisher's exact test, although the threshold was chosen on non-members

Where the law of a non-member's score is known (`null`), the m members are draws from it under the hypothesis: the AUC is a mean
of m uniform numbers, with variance 1 / (12 m) and lighter tails than a normal law; at a rate r, the count k of m is binomial.

A number is significant if its p-value is at most its level. The main AUC is tested at the level SHARE a, where a is the
significance, and each of the k other numbers at (1 - SHARE) a / k. If the main AUC is significant, each of the others is tested
at a / k. So the probability of any false finding is at most a, whichever numbers are null and however they depend on each
other. It is the fallback procedure of Wiens (2003) with two families, the second by Bonferroni. (Judging the main AUC at a, and
the others at another a, would allow 2 a.) Lower bounds on epsilon are a separate family, at a in the same shares without the
second step. An AUC must also have an interval, by itself, above 1/2. Only significance counts as a finding on membership.
Recovered texts are a leak by themselves, whatever the coins (`attempts.grade`).

A significant finding is a leak if no guarantee covers the unit and the adversary. If one does, the finding is within the
guarantee up to the figures that it allows (`attacks.evidence.tradeoff`), and `beyond` if its whole interval is above them.
`beyond` is not a contradiction, because an interval assumes independent units: only a lower bound contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Literal

from attacks.catalogue import ATTACKS
from attacks.evidence import tradeoff
from attacks.evidence.attempts import grade
from attacks.record import Allowed, AttackAt, Audit, Cell, Level, Tail

Standing = Literal["void", "leak", "beyond", "within", "none_found", "unsupported"]
Mark = Literal["leak", "within", "beyond", "part", "sign", "inverted", "chance", "none"]
ORDER = ("canary_likelihood", "canary_cosine", "one_run", "lira", "loss")
SHARE = 0.8
CHANCE = 0.5  # the rate at which a coin is right
FEWEST = 5  # units on either side: with fewer, no order is unlikely enough to be significant
ENOUGH = 10  # units on either side: with fewer, finding nothing means nothing
_MOST_EPSILON = 500.0  # above it, the curve equals that of no guarantee


def level_of(audit: Audit) -> Level:
    """The verdict's level."""
    if any(contradicts(cell, audit) for cell in audit.cells):
        return "violation"
    if any(grade(cell) == "leak" for cell in audit.cells):
        return "leak"
    found = standing(audit)
    return "unsupported" if found == "void" or found == "beyond" else found


def in_short(audit: Audit) -> str:
    """The verdict's level; "part" if only parts of texts were found, and "texts" if recovered texts are the only leak."""
    level = audit.verdict.level
    if level == "none_found" and partly(audit):
        return "part"
    return "texts" if level == "leak" and standing(audit) != "leak" else level


def standing(audit: Audit) -> Standing:
    """The finding on membership: the first that applies, from a failed baseline to none."""
    if audit.baseline.at_chance is False:
        return "void"
    marks = {mark(cell, audit) for cell in audit.of_membership}
    ordered: tuple[Standing, ...] = ("leak", "beyond", "within")
    for found in ordered:
        if found in marks:
            return found
    return "none_found" if enough(audit) else "unsupported"


def main_of(scored: Iterable[AttackAt], vantages: Sequence[str]) -> AttackAt | None:
    """The main attack among these, which all gave scores; None if there are none. vantages: all vantages, the weakest first."""
    names = [*ORDER, *(name for name in ATTACKS if name not in ORDER)]
    rank = {name: number for number, name in enumerate(names)}  # a user's attack comes last
    return min(
        scored, key=lambda at: (rank.get(at.attack, len(rank)), at.attack, vantages.index(at.vantage)), default=None
    )


def level(significance: float, others: int, *, main: bool, main_found: bool = False) -> float:
    """The significance of one number beside `others` more. Without others the main number gets all of it."""
    if main:
        return significance * SHARE if others else significance
    return significance * (1 if main_found else 1 - SHARE) / max(others, 1)


def levels(significance: float, scored: Sequence[AttackAt], vantages: Sequence[str]) -> dict[AttackAt, float]:
    """The significance of the lower bound of each."""
    main = main_of(scored, vantages)
    return {where: level(significance, len(scored) - 1, main=where == main) for where in scored}


def mark(cell: Cell, audit: Audit) -> Mark:
    """The mark of a cell, such as "sign" if its interval is above chance without being significant, or "part" if a part of the
    texts was recovered.
    """
    if not cell.of_membership:
        found = grade(cell)
        return found if found in ("leak", "part") else "none"
    if holds_up(cell, audit):
        return "leak" if not audit.covers(cell) else "beyond" if beyond(cell, audit) else "within"
    low, high = cell.auc_interval or (CHANCE, CHANCE)
    return "sign" if low > CHANCE else "inverted" if high < CHANCE else "chance"


def holds_up(cell: Cell, audit: Audit) -> bool:
    """Whether the cell has a significant AUC or true-positive rate."""
    return ranks_hold_up(cell, audit) or any(tail_holds_up(tail, cell, audit) for tail in cell.tails)


def ranks_hold_up(cell: Cell, audit: Audit) -> bool:
    """Whether the AUC is significant and its own interval lies above 1/2."""
    chance, main = _chance(cell), audit.main_cell
    # a stronger adversary's cell may repeat the main attack's AUC
    is_main = main is not None and (cell.attack, cell.auc, cell.tails) == (main.attack, main.auc, main.tails)
    return chance is not None and chance <= _level(audit, main=is_main)


def tail_holds_up(tail: Tail, cell: Cell, audit: Audit) -> bool:
    """Whether this true-positive rate is significant."""
    units = _units(cell)
    if not cell.of_membership or units is None or tail.tpr is None or tail.fpr is None:
        return False
    members, non_members = units
    return by_tail(tail.tpr, tail.fpr, members, None if cell.known else non_members) <= _level(audit, main=False)


def _chance(cell: Cell) -> float | None:
    """The p-value of its AUC; 1 if its interval, by itself, does not lie above 1/2."""
    units = _units(cell)
    if cell.auc is None or units is None:
        return None
    if cell.auc_interval is not None and cell.auc_interval[0] <= CHANCE:
        return 1.0
    return by_rank(cell.auc, units[0], None if cell.known else units[1])


def _level(audit: Audit, *, main: bool) -> float:
    """The level at which a number is tested; without a main attack all numbers share the"""
    first = audit.main_cell
    if first is None:
        return audit.significance / max(looks(audit), 1)
    others, chance = looks(audit) - 1, _chance(first)
    found = not main and chance is not None and chance <= level(audit.significance, others, main=True)
    return level(audit.significance, others, main=main, main_found=found)


def looks(audit: Audit) -> int:
    """The number of tests: every AUC, and every true-positive rate that was measured.

    Equal numbers of the same attack for stronger adversaries are not further tests.
    """
    return sum(1 + sum(tail.tpr is not None for tail in cell.tails) for cell in audit.results)


def by_rank(auc: float, members: int, non_members: int | None) -> float:
    """The p-value of an AUC, under scores that reveal nothing. non_members: None for a known law."""
    if non_members is None:
        return NormalDist().cdf((CHANCE - auc) * math.sqrt(12 * members))
    pairs = members * non_members
    deviation = math.sqrt((members + non_members + 1) / (12 * pairs))
    return NormalDist().cdf((CHANCE - auc + 0.5 / pairs) / deviation)


def by_tail(tpr: float, fpr: float, members: int, non_members: int | None) -> float:
    """The p-value of the number of members above the threshold; for a known law at exactly this rate."""
    from scipy.stats import binom, hypergeom

    if non_members is None:
        return float(binom.sf(round(tpr * members) - 1, members, min(max(fpr, 0.0), 1.0)))
    caught, accused = round(tpr * members), round(fpr * non_members)
    return float(hypergeom.sf(caught - 1, members + non_members, members, caught + accused))


def allows(cell: Cell, audit: Audit) -> Allowed | None:
    """The AUC and rates that the guarantee allows the cell; if the audit lacks them, by (epsilon, delta) alone."""
    if not audit.covers(cell) or cell.epsilon_accounted is None or cell.allowed is not None:
        return cell.allowed if audit.covers(cell) else None
    epsilon, delta = min(max(cell.epsilon_accounted, 0.0), _MOST_EPSILON), audit.delta or 0.0
    rates = {tail.target: tradeoff.rate(tail.target, epsilon, delta) for tail in cell.tails}
    return Allowed(tradeoff.area(epsilon, delta), rates, "epsilon")


def beyond(cell: Cell, audit: Audit) -> bool:
    """Whether the whole interval of a significant AUC, or of a significant rate if the AUC is not significant, is above the
    figure that the guarantee allows. A canary that moves a sum as far as a unit may is expected to reach that figure, so about
    one in 40 runs that keep their guarantee exactly comes out above.
    """
    most = allows(cell, audit)
    if most is None:
        return False
    if ranks_hold_up(cell, audit):
        return cell.auc_interval is not None and cell.auc_interval[0] > most.auc
    held = [tail for tail in cell.tails if tail_holds_up(tail, cell, audit) and tail.tpr_interval is not None]
    return any((tail.tpr_interval or (0.0, 0.0))[0] > most.tpr_at_fpr.get(tail.target, 1.0) for tail in held)


def contradicts(cell: Cell, audit: Audit) -> bool:
    """Whether the cell's lower bound is above the accounted epsilon for the same unit and adversary."""
    return (
        audit.covers(cell)
        and cell.epsilon_lower is not None
        and cell.epsilon_accounted is not None
        and cell.epsilon_lower > cell.epsilon_accounted
    )


def unnoticed(audit: Audit) -> float | None:
    """The AUC below which the main attack cannot be significant (without a main attack, any attack, with the most units of any
    cell); None without units.
    """
    sizes = [units for units in map(_units, audit.of_membership) if units is not None]
    if not sizes:
        return None
    quantile = NormalDist().inv_cdf(1 - _level(audit, main=True))
    first = audit.main_cell
    units = None if first is None else _units(first)
    if first is not None and units is not None and first.known:
        return min(1.0, CHANCE + quantile / math.sqrt(12 * units[0]))
    members, non_members = units or max(sizes, key=lambda units: units[0] * units[1] / sum(units))
    pairs = members * non_members
    return min(1.0, CHANCE + 0.5 / pairs + quantile * math.sqrt((members + non_members + 1) / (12 * pairs)))


def partly(audit: Audit) -> bool:
    """Whether some or all of the texts were recovered."""
    return any(grade(cell) in ("leak", "part") for cell in audit.cells)


def texts_named(audit: Audit) -> bool:
    """Whether an attack on texts named a considerable part of them, whether it counts or not."""
    return any(grade(cell) not in (None, "little") for cell in audit.cells)


def enough(audit: Audit) -> bool:
    """Whether some cell has enough units for finding nothing to mean something."""
    return any(min(units) >= ENOUGH for units in map(_units, audit.of_membership) if units is not None)


def strongest(cells: Sequence[Cell]) -> Cell | None:
    """The cell with the largest AUC; among equals, the first."""
    return max(cells, key=lambda cell: cell.auc or 0.0, default=None)


def _units(cell: Cell) -> tuple[int, int] | None:
    if cell.members is None or cell.non_members is None or min(cell.members, cell.non_members) < FEWEST:
        return None
    return cell.members, cell.non_members
