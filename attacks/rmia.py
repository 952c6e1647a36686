"""RMIA (Zarifzadeh, Liu and Shokri 2024, Algorithm 1) as an attack on a run.

Its formulas are in `attacks.shadow_scores`.
"""

from __future__ import annotations

import numpy as np

from attacks.adversary.case import Case, Finding, Settings
from attacks.shadow_scores import (
    CANDIDATES,
    GAMMA,
    UNTUNED_A,
    Marginal,
    offline_marginal,
    online_marginal,
    scores,
    tuned_a,
)
from secure_fed.runs.membership.measured import mean_of_units

__all__ = [
    "CANDIDATES",
    "GAMMA",
    "UNTUNED_A",
    "Marginal",
    "offline_marginal",
    "online_marginal",
    "run",
    "scores",
    "tuned_a",
]
_POPULATION = 2000  # the most examples taken from it


def run(case: Case, settings: Settings) -> Finding:
    """The online score; the same references also tune `a`."""
    references = case.references(settings.references)
    examples, owner = case.looked_at
    final, inside = case.seen.final, references.inside[:, owner]
    reference_phi = case.reference_confidences(settings.references)
    z = [case.population[i] for i in range(min(len(case.population), _POPULATION))]
    population = np.stack([case.confidences(state, z) for state in references.states])
    a = tuned_a(reference_phi, inside, population, marginal=online_marginal)
    phi, population_phi = case.confidences(final, examples), case.confidences(final, z)
    found = scores(phi, reference_phi, inside, population_phi, population, a=a)
    return Finding(
        scores=mean_of_units(found, owner, len(case.units)),
        measured={"references": len(references.states), "a": a, "gamma": GAMMA, "population": len(population_phi)},
    )


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("rmia"))
