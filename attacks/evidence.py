"""Which findings of an audit hold up, given how many were looked for.

A model that tells nothing of membership gives scores that know nothing of the coins: every order of members among non-members
is then equally likely. Under that hypothesis, whatever the scores are,

    AUC     is that of a rank-sum test: mean 1/2, variance (m + n + 1) / (12 m n), less with ties; normal, with a correction for
            continuity, from five units on either side on
    TPR     k of m members lie above the (j+1)-th largest of n non-members with the chance that among the first k + j of a
            random order at most j are non-members: Fisher's exact test, although the threshold was chosen on non-members

If a model tells nothing, one of K such numbers has a chance below `significance` / K in at most `significance` of audits
(Bonferroni). A number with such a chance holds up, an AUC only if its intervals, the corrected one too where there is one, lie
above 1/2 as well. On no other ground is a leak of membership called found. Texts that were read back are a leak by themselves,
whatever the coins say (`attacks.readback`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

from attacks import readback
from attacks.reading import Audit, Cell, Tail

Mark = Literal["leak", "part", "sign", "inverted", "chance", "none"]

CHANCE = 0.5
FEWEST = 5  # on either side: below, no order of so few is unlikely enough to be told from luck
ENOUGH = 10  # on either side: below, that nothing was found means nothing


def looks(audit: Audit) -> int:
    """How many numbers could have been taken for a leak: every AUC, and every true-positive rate that was not refused.

    What stronger adversaries find with the same attack and the same numbers is no further look.
    """
    return sum(1 + sum(tail.tpr is not None for tail in cell.tails) for cell in audit.results)


def by_rank(auc: float, members: int, non_members: int) -> float:
    """The chance of such an AUC, or a larger one, where the scores tell nothing."""
    pairs = members * non_members
    deviation = math.sqrt((members + non_members + 1) / (12 * pairs))
    return NormalDist().cdf((CHANCE - auc + 0.5 / pairs) / deviation)


def by_tail(tpr: float, fpr: float, members: int, non_members: int) -> float:
    """The chance that so many of the members, or more, lie above the threshold, where the scores tell nothing."""
    from scipy.stats import hypergeom

    caught, accused = round(tpr * members), round(fpr * non_members)
    return float(hypergeom.sf(caught - 1, members + non_members, members, caught + accused))


def holds_up(cell: Cell, audit: Audit) -> bool:
    """Whether the cell shows a leak that is not explained by so many having been looked for."""
    return ranks_hold_up(cell, audit) or any(tail_holds_up(tail, cell, audit) for tail in cell.tails)


def ranks_hold_up(cell: Cell, audit: Audit) -> bool:
    """Whether the AUC does, its own intervals included."""
    units = _units(cell)
    intervals = [one for one in (cell.interval, cell.corrected) if one is not None]
    if cell.auc is None or units is None or any(low <= CHANCE for low, _ in intervals):
        return False
    return by_rank(cell.auc, *units) * looks(audit) <= audit.significance


def tail_holds_up(tail: Tail, cell: Cell, audit: Audit) -> bool:
    """Whether this true-positive rate does."""
    units = _units(cell)
    if not cell.of_membership or units is None or tail.tpr is None or tail.fpr is None:
        return False
    return by_tail(tail.tpr, tail.fpr, *units) * looks(audit) <= audit.significance


def mark(cell: Cell, audit: Audit) -> Mark:
    """What a cell is to be called: "sign" where its interval is above chance and what it shows does not hold up, "part" where
    a part of the texts was read back.
    """
    if not cell.of_membership:
        found = readback.grade(cell)
        return found if found in ("leak", "part") else "none"
    if holds_up(cell, audit):
        return "leak"
    low, high = cell.interval or (CHANCE, CHANCE)
    return "sign" if low > CHANCE else "inverted" if high < CHANCE else "chance"


def contradicts(cell: Cell, audit: Audit) -> bool:
    """Whether the cell's lower bound is above the epsilon that was accounted for the same unit and adversary."""
    return audit.covers(cell) and cell.lower is not None and cell.accounted is not None and cell.lower > cell.accounted


def unnoticed(audit: Audit) -> float | None:
    """The AUC below which an attack cannot have held up, with the most units that a cell had; None without units."""
    sizes = [units for units in map(_units, audit.of_membership) if units is not None]
    if not sizes:
        return None
    members, non_members = max(sizes, key=lambda units: units[0] * units[1] / sum(units))
    pairs = members * non_members
    quantile = NormalDist().inv_cdf(1 - audit.significance / max(looks(audit), 1))
    return min(1.0, CHANCE + 0.5 / pairs + quantile * math.sqrt((members + non_members + 1) / (12 * pairs)))


def recovers(cell: Cell) -> bool:
    """Whether an attack on the texts gave back so much that it is a leak (`attacks.readback`)."""
    return readback.grade(cell) == "leak"


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
