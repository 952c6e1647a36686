"""The choice of the main attack, and the share of the significance that each attack is tested at.

Which it is follows from what is public and from what was made, and from no score: the first of `ORDER` that could be made on
the run, at the weakest vantage at which it was, else the first of the catalogue. Whether an attack can be made depends on the
method, the canaries, the unit and the recording alone.

    canaries of random direction, clients by secret coins,
    rounds recorded                                           canary_likelihood, the most powerful test where it applies
    canaries of random direction otherwise                    canary_cosine, and without recorded rounds one_run
    canaries of wrong labels or rare tokens                   one_run
    no canaries                                               lira where there are references, else loss

The main AUC is judged at `SHARE` of the significance a, and all other numbers at equal parts of the rest; once the main one
holds up, the others share all of a. That keeps the chance that any number is called found although it is not at a, whichever of
them are not and however they depend on each other: it is the fallback procedure of Wiens (2003), of two families, the second by
Bonferroni. (To judge the main one at all of a, and the others at another a, would make it 2 a.) Lower bounds on epsilon are a
family of their own, at a in the same shares without the second step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attacks.catalogue import ATTACKS

ORDER = ("canary_likelihood", "canary_cosine", "one_run", "lira", "loss")
SHARE = 0.8

Where = tuple[str, str]


def main_of(scored: Iterable[Where], vantages: Sequence[str]) -> Where | None:
    """The main one of these, of which each gave scores; None of none. vantages: all there are, the weakest first."""
    names = [*ORDER, *(name for name in ATTACKS if name not in ORDER)]
    rank = {name: number for number, name in enumerate(names)}  # an attack of the user's own comes last
    return min(
        scored, key=lambda where: (rank.get(where[0], len(rank)), where[0], vantages.index(where[1])), default=None
    )


def level(significance: float, others: int, *, main: bool, main_found: bool = False) -> float:
    """The significance of one number, beside so many others; 0 others leave all of it to the main one."""
    if main:
        return significance * SHARE if others else significance
    return significance * (1 if main_found else 1 - SHARE) / max(others, 1)


def levels(significance: float, scored: Sequence[Where], vantages: Sequence[str]) -> dict[Where, float]:
    """The significance of the lower bound of each."""
    main = main_of(scored, vantages)
    return {where: level(significance, len(scored) - 1, main=where == main) for where in scored}
