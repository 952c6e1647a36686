"""Membership from the global states of rounds, which every client is given: did the steps point where this unit pulls?

    score(u) = mean over rounds t of cos(-g_u(w_t), w_(t+1) - w_t)                       `attacks.alignment`

A matched filter: if the unit trained, its own -g is a part of every step it took part in, and adds up over rounds, while the
steps of all others agree with it by chance and as far as examples of its class do. It is the direction that tells, not the
length: left undivided, <-g, d> is led by units that nobody has learned, whose gradients are long for any reason. Against the
loss it has more to go by where many steps are small; where local training goes far, a gradient at its start says less of it.

    round_losses(u) = mean over rounds t of (phi_t(u) - mean_z phi_t(z)) / std_z phi_t(z)

is what the losses of all rounds say together. Each round counts by how far above the population z a unit is; were it only
centred, rounds with the widest confidences would decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attacks import alignment
from attacks.case import Case, Finding, Inapplicable, Settings
from secure_fed.tensors import Tensors

Floats = NDArray[np.float64]


def matched(cosines: Floats) -> Floats:
    """(units,) means over rounds of (rounds, units) cosines."""
    mean: Floats = cosines.mean(axis=0)
    return mean


def trajectory(phi: Floats, population_phi: Floats) -> Floats:
    """(units,) means of (rounds, units) confidences in standard deviations above those of a (rounds, population)."""
    centre = population_phi.mean(axis=1, keepdims=True)
    spread = population_phi.std(axis=1, keepdims=True)
    above = np.divide(phi - centre, spread, out=np.zeros(phi.shape), where=spread > 0)
    mean: Floats = above.mean(axis=0)
    return mean


def spaced(rounds: Sequence[int], most: int | None) -> list[int]:
    """At most so many of the rounds, evenly spaced, the first and the last among them."""
    if most is None or len(rounds) <= most:
        return list(rounds)
    return [rounds[int(i)] for i in np.linspace(0, len(rounds) - 1, max(1, most)).round()]


def run(case: Case, settings: Settings) -> Finding:
    """The matched filter over the rounds whose states before and after were seen."""
    states = _states(case)
    rounds = spaced([round_ for round_ in sorted(states) if round_ + 1 in states], settings.max_rounds)
    if not rounds:
        raise Inapplicable("no two states of successive rounds were seen")
    examples, owner = case.looked_at
    found = []
    for round_ in rounds:
        before = states[round_]
        step = alignment.of_states(case.federation, before, states[round_ + 1], round_)
        found.append(alignment.cosines(case.federation, before, round_, examples, owner, [step])[:, 0])
    cosines = np.stack(found)
    return Finding(
        scores=matched(cosines), measured={"rounds": len(rounds), "mean_cosine": float(np.mean(cosines, dtype=float))}
    )


def run_losses(case: Case, settings: Settings) -> Finding:
    """The trajectory of confidences over the states after each round."""
    states = _states(case)
    rounds = spaced([round_ for round_ in sorted(states) if round_ > 0], settings.max_rounds)
    population = [case.population[i] for i in range(min(len(case.population), _POPULATION))]
    phi = np.stack([case.unit_confidences(states[round_]) for round_ in rounds])
    of_population = np.stack([case.confidences(states[round_], population) for round_ in rounds])
    return Finding(scores=trajectory(phi, of_population), measured={"rounds": len(rounds)})


def _states(case: Case) -> dict[int, Tensors]:
    if len(case.seen.states) < 2:
        raise Inapplicable(
            "the states of rounds were not kept: set evaluation.record to 'models' before the run, or to 'updates'"
        )
    return dict(case.seen.states)


_POPULATION = 1000

if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("round_models"))
