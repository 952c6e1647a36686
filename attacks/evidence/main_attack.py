"""The choice of the main attack, and the share of the significance that each attack is tested at.

The choice depends on public facts and on which attacks could be made, and on no score: the first of `ORDER` that could be made
on the run, at its weakest vantage, else the first of the catalogue. Whether an attack can be made depends on the run's
settings, its number of clients, its recording and the references.

    canaries of random direction, clients by secret coins,
    rounds recorded                                           canary_likelihood, the most powerful test where it applies
    canaries of random direction otherwise                    canary_cosine, and without recorded rounds one_run
    canaries of wrong labels or rare tokens                   one_run
    no canaries                                               lira if there are references, else loss

The main AUC is tested at the level SHARE a, where a is the significance, and each of the k other numbers at (1 - SHARE) a / k.
If the main AUC is significant, each of the others is tested at a / k. So the probability of any false finding is at most a,
whichever numbers are null and however they depend on each other. It is the fallback procedure of Wiens (2003) with two
families, the second by Bonferroni. (Judging the main AUC at a, and the others at another a, would allow 2 a.) Lower bounds on
epsilon are a separate family, at a in the same shares without the second step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attacks.catalogue import ATTACKS

ORDER = ("canary_likelihood", "canary_cosine", "one_run", "lira", "loss")
SHARE = 0.8

Where = tuple[str, str]


def main_of(scored: Iterable[Where], vantages: Sequence[str]) -> Where | None:
    """The main attack among these, which all gave scores; None if there are none. vantages: all vantages, the weakest first."""
    names = [*ORDER, *(name for name in ATTACKS if name not in ORDER)]
    rank = {name: number for number, name in enumerate(names)}  # a user's attack comes last
    return min(
        scored, key=lambda where: (rank.get(where[0], len(rank)), where[0], vantages.index(where[1])), default=None
    )


def level(significance: float, others: int, *, main: bool, main_found: bool = False) -> float:
    """The significance of one number beside `others` more. Without others the main number gets all of it."""
    if main:
        return significance * SHARE if others else significance
    return significance * (1 if main_found else 1 - SHARE) / max(others, 1)


def levels(significance: float, scored: Sequence[Where], vantages: Sequence[str]) -> dict[Where, float]:
    """The significance of the lower bound of each."""
    main = main_of(scored, vantages)
    return {where: level(significance, len(scored) - 1, main=where == main) for where in scored}
