"""Membership from the updates of single clients, FedMIA (Zhu et al. 2024): other clients' updates give the null distribution.

In every round that a unit's own client took part in, its update's cosine with the unit's -g (`attacks.adversary.steps`) is
compared with the cosines of the other clients' updates in that round, which did not train on the unit:

    score(u) = mean over rounds of P[a cosine like the others' is at most the client's own]                  (Algorithm 1)

The others' cosines are assumed to be normal. With mean and variance estimated from k of them, P is the distribution function of
Student's law with k - 1 degrees of freedom at (own - mean) / (s sqrt(1 + 1/k)), which tends to the published normal one as k
grows. For a non-member P is uniform, however few clients a round has, if clients' data are alike. If they are not, an update is
also closer to its client's non-members; this costs power but causes no false alarms, because members are ranked against these
non-members.

Deviation: the paper first leaves out clients beyond three standard deviations; here all others count.

A round of fewer than three clients has no spread and is left out. A unit without any round gets 1/2. For a whole client no
statistics are needed: the server sees which clients send.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.adversary.null import Floats
from attacks.adversary.steps import cosines, examples_of, of_clients, spaced
from secure_fed.learning.data.rows import places_of
from secure_fed.runs.recording import Update

_FEWEST = 3  # clients in a round


def one_sided(own: Floats, others: Floats) -> Floats:
    """(units,) P[a draw from the law of `others` (units, k) is at most `own` (units,)]; 1/2 if all others are equal."""
    from scipy.special import stdtr

    k = others.shape[1]
    spread = others.std(axis=1, ddof=1) * np.sqrt(1 + 1 / k)
    standing = np.divide(own - others.mean(axis=1), spread, out=np.zeros(len(own)), where=spread > 0)
    return np.asarray(stdtr(k - 1, standing))


def of_rounds(
    rounds: Sequence[tuple[Floats, Sequence[str]]], clients: Sequence[str]
) -> tuple[Floats, NDArray[np.int64]]:
    """(units,) scores, and the number of rounds in which each unit's client took part.

    rounds: for each, the (units, k) cosines with the updates of k clients, and the clients' names. clients: each unit's client.
    """
    total, count = np.zeros(len(clients)), np.zeros(len(clients), dtype=np.int64)
    whose = np.array(clients)
    for found, names in rounds:
        for column, name in enumerate(names if len(names) >= _FEWEST else ()):
            own = np.flatnonzero(whose == name)
            if len(own):
                others = np.delete(found[own], column, axis=1)
                total[own] += one_sided(found[own, column], others)
                count[own] += 1
    return np.divide(total, count, out=np.full(len(clients), 0.5), where=count > 0), count


def run(case: Case, settings: Settings) -> Finding:
    """The score above. Inapplicable to whole clients: every sender of an update takes part."""
    if not case.seen.updates:
        raise Inapplicable(
            "no updates of single clients were kept: set evaluation.record to 'updates' before a run without masks"
        )
    if case.assembly.audit_pool.kind == "client":
        raise Inapplicable(
            "the server sees which clients take part, so the membership of a whole client needs no attack"
        )
    usable = [one for one in case.seen.updates if one.weight > 0 and one.round in case.seen.states]
    places = places_of(one.round for one in usable)
    by_round = {round_: [usable[place] for place in places[round_]] for round_ in sorted(places)}
    enough = [round_ for round_, own in by_round.items() if len({one.client for one in own}) >= _FEWEST]
    if not enough:
        raise Inapplicable(f"no round has the updates of {_FEWEST} clients, so there is no update to compare with")
    rounds = [_cosines(case, round_, by_round[round_]) for round_ in spaced(enough, settings.max_rounds)]
    scores, count = of_rounds(rounds, [unit.client for unit in case.units])
    return Finding(
        scores=scores,
        measured={
            "rounds": len(rounds),
            "rounds_of_a_unit": float(count.mean()),
            "units_without": int((count == 0).sum()),
        },
    )


def _cosines(case: Case, round_: int, updates: Sequence[Update]) -> tuple[Floats, list[str]]:
    """(units, clients) cosines with each client's contributions in all passes of the round, and the clients' names; 0 for units
    whose client did not take part, where they show nothing.
    """
    sent = of_clients(case, round_, updates)
    own = np.flatnonzero(np.isin([unit.client for unit in case.units], list(sent)))
    found = np.zeros((len(case.units), len(sent)))
    if len(own):
        examples, owner = examples_of(case, own)
        before = case.seen.states[round_]
        found[own] = cosines(case.assembly, before, round_, examples, owner, list(sent.values()))
    return found, list(sent)


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("update_score"))
