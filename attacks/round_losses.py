"""Membership from losses under the global states of all rounds, which every client receives.

    score(u) = mean over rounds t of (phi_t(u) - mean_z phi_t(z)) / std_z phi_t(z)

combines the losses of all rounds. Each round is standardised by the population z; if it were only centred, rounds with the
widest confidences would dominate.
"""

from __future__ import annotations

import numpy as np

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.adversary.null import Floats
from attacks.adversary.steps import spaced

_POPULATION = 1000


def trajectory(phi: Floats, population_phi: Floats) -> Floats:
    """(units,) means over rounds of confidences phi (rounds, units), standardised by population_phi (rounds, population)."""
    centre = population_phi.mean(axis=1, keepdims=True)
    spread = population_phi.std(axis=1, keepdims=True)
    above = np.divide(phi - centre, spread, out=np.zeros(phi.shape), where=spread > 0)
    return np.asarray(above.mean(axis=0))


def run(case: Case, settings: Settings) -> Finding:
    """The mean standardised confidence over the states after each round."""
    states = case.seen.states
    if len(states) < 2:
        raise Inapplicable(
            "the states of rounds were not kept: set evaluation.record to 'models' before the run, or to 'updates'"
        )
    rounds = spaced([round_ for round_ in sorted(states) if round_ > 0], settings.max_rounds)
    population = case.from_population(_POPULATION)
    phi = np.stack([case.unit_confidences(states[round_]) for round_ in rounds])
    of_population = np.stack([case.confidences(states[round_], population) for round_ in rounds])
    return Finding(scores=trajectory(phi, of_population), measured={"rounds": len(rounds)})


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("round_losses"))
