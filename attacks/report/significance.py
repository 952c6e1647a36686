"""The significance of findings, corrected for their number, and which of them the guarantee covers.

A model that tells nothing of membership gives scores that know nothing of the coins: every order of members among non-members
is then equally likely. Under that hypothesis, whatever the scores are,

    AUC     is that of a rank-sum test: mean 1/2, variance (m + n + 1) / (12 m n), less with ties; normal, with a correction for
            continuity, from five units on either side on
    TPR     k of m members lie above the (j+1)-th largest of n non-members with the chance that among the first k + j of a
            random order at most j are non-members: Fisher's exact test, although the threshold was chosen on non-members

Where the law of a non-member's score is known (`null`), members that tell nothing are m draws of it: the AUC is a mean of m
uniform numbers, of variance 1 / (12 m), whose tails are lighter than a normal law's; at a rate r, k of m is binomial.

A number holds up if its chance is at most what it is judged at (`main_attack`): the AUC of the main attack at four fifths of
the significance, every other number at an equal part of the last fifth, or of all of it once the main one holds up; and
an AUC only if its interval, by itself, lies above 1/2. If a model
tells nothing, some number holds up in at most `significance` of audits; and in as many a number holds up that tells nothing
beside others that do. On no other ground is membership called found. Texts that were read back are a leak by themselves,
whatever the coins say (`attacks.report.readback`).

What holds up is a leak where no guarantee covers the unit and the adversary. Where one does, it is within the guarantee so long
as it is no more than the guarantee allows (`attacks.evidence.allowed`), and `beyond` if its interval is all above that. That
alone is no contradiction, for an interval takes units for independent: only a lower bound contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

from attacks.evidence import tradeoff
from attacks.evidence.main_attack import level
from attacks.report import readback
from attacks.report.audited import Allowed, Audit, Cell, Tail

Mark = Literal["leak", "within", "beyond", "part", "sign", "inverted", "chance", "none"]

CHANCE = 0.5
FEWEST = 5  # on either side: below, no order of so few is unlikely enough to be told from luck
ENOUGH = 10  # on either side: below, that nothing was found means nothing
_MOST_EPSILON = 500.0  # whose curve is no other than that of none


def looks(audit: Audit) -> int:
    """The number of tests: every AUC, and every true-positive rate that was not refused.

    What stronger adversaries find with the same attack and the same numbers is no further look.
    """
    return sum(1 + sum(tail.tpr is not None for tail in cell.tails) for cell in audit.results)


def by_rank(auc: float, members: int, non_members: int | None) -> float:
    """The chance of such an AUC, or a larger one, where the scores tell nothing. non_members: None of a known law."""
    if non_members is None:
        return NormalDist().cdf((CHANCE - auc) * math.sqrt(12 * members))
    pairs = members * non_members
    deviation = math.sqrt((members + non_members + 1) / (12 * pairs))
    return NormalDist().cdf((CHANCE - auc + 0.5 / pairs) / deviation)


def by_tail(tpr: float, fpr: float, members: int, non_members: int | None) -> float:
    """The chance that so many members, or more, lie above the threshold, likewise; of a known law at exactly this rate."""
    from scipy.stats import binom, hypergeom

    if non_members is None:
        return float(binom.sf(round(tpr * members) - 1, members, min(max(fpr, 0.0), 1.0)))
    caught, accused = round(tpr * members), round(fpr * non_members)
    return float(hypergeom.sf(caught - 1, members + non_members, members, caught + accused))


def holds_up(cell: Cell, audit: Audit) -> bool:
    """Whether the cell has a significant AUC or true-positive rate."""
    return ranks_hold_up(cell, audit) or any(tail_holds_up(tail, cell, audit) for tail in cell.tails)


def ranks_hold_up(cell: Cell, audit: Audit) -> bool:
    """Whether the AUC is significant and its own interval lies above 1/2."""
    chance = _chance(cell)
    return chance is not None and chance <= _level(audit, main=_is_main(cell, audit))


def tail_holds_up(tail: Tail, cell: Cell, audit: Audit) -> bool:
    """Whether this true-positive rate is significant."""
    units = _units(cell)
    if not cell.of_membership or units is None or tail.tpr is None or tail.fpr is None:
        return False
    members, non_members = units
    return by_tail(tail.tpr, tail.fpr, members, None if cell.known else non_members) <= _level(audit, main=False)


def _chance(cell: Cell) -> float | None:
    """The chance of its AUC where the scores tell nothing; 1 where its interval does not even by itself lie above 1/2."""
    units = _units(cell)
    if cell.auc is None or units is None:
        return None
    if cell.interval is not None and cell.interval[0] <= CHANCE:
        return 1.0
    return by_rank(cell.auc, units[0], None if cell.known else units[1])


def _is_main(cell: Cell, audit: Audit) -> bool:
    """Whether the cell is the main attack, or repeats its AUC for an adversary who sees more."""
    main = audit.main_cell
    return main is not None and (cell.attack, cell.auc, cell.tails) == (main.attack, main.auc, main.tails)


def _level(audit: Audit, *, main: bool) -> float:
    """The level that a number is tested at; without a main attack all share the significance."""
    first = audit.main_cell
    if first is None:
        return audit.significance / max(looks(audit), 1)
    others, chance = looks(audit) - 1, _chance(first)
    found = not main and chance is not None and chance <= level(audit.significance, others, main=True)
    return level(audit.significance, others, main=main, main_found=found)


def mark(cell: Cell, audit: Audit) -> Mark:
    """The word for a cell: "sign" where its interval is above chance and what it shows does not hold up, "part" where
    a part of the texts was read back.
    """
    if not cell.of_membership:
        found = readback.grade(cell)
        return found if found in ("leak", "part") else "none"
    if holds_up(cell, audit):
        return "leak" if not audit.covers(cell) else "beyond" if beyond(cell, audit) else "within"
    low, high = cell.interval or (CHANCE, CHANCE)
    return "sign" if low > CHANCE else "inverted" if high < CHANCE else "chance"


def allows(cell: Cell, audit: Audit) -> Allowed | None:
    """The AUC and rates that the guarantee allows there; where the audit lacks them, those of any (epsilon, delta)."""
    if not audit.covers(cell) or cell.accounted is None or cell.allowed is not None:
        return cell.allowed if audit.covers(cell) else None
    epsilon, delta = min(max(cell.accounted, 0.0), _MOST_EPSILON), audit.delta or 0.0
    rates = {tail.target: tradeoff.rate(tail.target, epsilon, delta) for tail in cell.tails}
    return Allowed(tradeoff.area(epsilon, delta), rates, "epsilon")


def beyond(cell: Cell, audit: Audit) -> bool:
    """Whether the interval of what holds up is all above what the guarantee allows: of the AUC, or of a rate where that does
    not hold up. A canary that moves a sum as far as any unit may is expected to reach what is allowed, so of runs that keep
    their guarantee exactly one in 40 or so comes out above.
    """
    most = allows(cell, audit)
    if most is None:
        return False
    if ranks_hold_up(cell, audit):
        return cell.interval is not None and cell.interval[0] > most.auc
    held = [tail for tail in cell.tails if tail_holds_up(tail, cell, audit) and tail.tpr_interval is not None]
    return any((tail.tpr_interval or (0.0, 0.0))[0] > most.rates.get(tail.target, 1.0) for tail in held)


def contradicts(cell: Cell, audit: Audit) -> bool:
    """Whether the cell's lower bound is above the epsilon that was accounted for the same unit and adversary."""
    return audit.covers(cell) and cell.lower is not None and cell.accounted is not None and cell.lower > cell.accounted


def unnoticed(audit: Audit) -> float | None:
    """The AUC below which the main attack cannot have held up (without one, any, with the most units that a cell had); None
    without units.
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
    """Whether a part of the texts was read back, or all."""
    return any(readback.grade(cell) in ("leak", "part") for cell in audit.cells)


def named(audit: Audit) -> bool:
    """Whether an attack on texts named more than a little, whether it counts or not."""
    return any(readback.grade(cell) not in (None, "little") for cell in audit.cells)


def enough(audit: Audit) -> bool:
    """Whether some cell has so many units that not to find anything there says something."""
    return any(min(units) >= ENOUGH for units in map(_units, audit.of_membership) if units is not None)


def strongest(cells: Sequence[Cell]) -> Cell | None:
    """The cell with the largest AUC, the first of equals."""
    return max(cells, key=lambda cell: cell.auc or 0.0, default=None)


def _units(cell: Cell) -> tuple[int, int] | None:
    if cell.members is None or cell.non_members is None or min(cell.members, cell.non_members) < FEWEST:
        return None
    return cell.members, cell.non_members
