"""The rounds that are informative about a unit, and their weights, under a public order of participation.

Let c_t be the release of round t over its norm |c_t|, and w_t its weight in the sum V that a unit's direction is compared with
(`canary_cosine`). If secret coins draw cohorts, every round has weight one. Under a public order a round without the unit's
turn has weight zero, because it contains nothing of the unit.

If the noise is correlated over rounds, C^-1 Z, the rounds around a turn share its noise and help to remove it. Row t of C times
the releases has independent noise and contains the unit a_t times: a = C [turns]. The sum over t of a_t times row t is most
powerful if the other clients add nothing along the direction, so w = C^T a |c|. A sum before the server's noise has no such
noise, and there only turns count.

All inputs are public: the order, the settings, and the releases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from attacks.adversary.case import Case
from attacks.adversary.null import Floats
from attacks.steps.released import Release
from privacy.sampling import PublicOrder
from secure_fed.learning.audit_pool.unit import Unit
from secure_fed.rounds.turns import turns_of

Weights = Callable[[Unit, Sequence[Release]], Floats]


def public(case: Case) -> bool:
    """Whether the rounds in which a unit can have taken part are public."""
    return isinstance(case.assembly.sampler, PublicOrder)


def weights_of(case: Case) -> Weights:
    """(releases,) the weights of a unit's releases, at most one. A unit without a turn has equal weights."""
    by_rounds = len(case.seen.states) > 1 or case.seen.sums or case.seen.updates
    if not (public(case) and by_rounds):
        return lambda unit, seen: np.ones(len(seen))
    turns, rounds = _turns(case)
    column = np.zeros(rounds)
    column[: len(_column(case))] = _column(case)[:rounds]
    number = {unit.name: index for index, unit in enumerate(case.units)}

    def weights(unit: Unit, seen: Sequence[Release]) -> Floats:
        """Ones for rounds with the unit's turn; under correlated noise, C^T C of these, times the length of each release."""
        own = turns[:, number[unit.name]]
        if len(_column(case)) > 1 and not case.seen.sums:
            own = np.correlate(np.convolve(column, own)[:rounds], column, "full")[rounds - 1 :]
            found = np.array([own[release.round] * release.length for release in seen])
        else:
            found = np.array([own[release.round] for release in seen])
        most = float(np.abs(found).max(initial=0.0))
        return found / most if most else np.ones(len(seen))

    return weights


def _turns(case: Case) -> tuple[Floats, int]:
    """(rounds, units) 1 if a unit, or its client, has its turn; and the number of rounds.

    A client that was held out has a place in the order too, which stays empty.
    """
    assembly, pool = case.assembly, case.assembly.audit_pool
    of_client, order = pool.kind == "client", assembly.sampler
    phantoms = of_client and pool.of == "phantoms"
    names = assembly.server.names if phantoms else assembly.pools["data"].names
    place = {name: index for index, name in enumerate(names)}
    hosts = [place[unit.name if of_client else unit.client] for unit in case.units]
    rounds, passes = assembly.config.federation.rounds, len(assembly.method.plan(assembly.initial).passes)
    turns = turns_of(assembly.server, hosts, passes)
    if isinstance(order, PublicOrder) and not phantoms:
        turns = replace(turns, draw=lambda round_: order.places_of_round(round_).tolist())
    return np.stack([turns.rates(round_) for round_ in range(rounds)]), rounds


def _column(case: Case) -> Sequence[float]:
    plan = case.assembly.protection.plan
    return (1.0,) if plan is None else plan.correlation.column
