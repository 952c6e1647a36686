"""Robust membership inference, RMIA (Zarifzadeh, Liu and Shokri 2024): a likelihood ratio compared with those of a population.

    rho(x) = P(x | theta) / P(x)          score(x) = share of population z with rho(x) / rho(z) > gamma    (Algorithm 1)

P(x | theta) = sigmoid(phi) is the model's probability of the right answer; for a task without probabilities, sigmoid(-loss)
replaces it. P(x) is its mean over models with and without x,

    online     (mean_in + mean_out) / 2
    offline    ((1 + a) mean_out + 1 - a) / 2        mean_in approximated by a mean_out + 1 - a    (equation 10)

The z are test examples, in no model's training set, so P(z) is the offline one in both. `a` is tuned with each reference in
turn as the target, its own coins as the truth and the others as references; the real target and its coins are not used.

gamma = 1. For one z the order of all x is that of rho(x) for every gamma, so gamma only decides where shares begin to
distinguish units. On a model that hardly memorises, every ratio is close to 1: a gamma above 1 would give all units the same
score.

A unit of several examples gets the mean of their scores. Unlike a product of ratios, this needs no population of units of the
same size, and one extreme example does not dominate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attacks.adversary.case import Case, Finding, Settings
from attacks.adversary.null import Bools, Floats
from attacks.lira import means, require_fit, require_references
from secure_fed.errors import UsageError
from secure_fed.runs import roc
from secure_fed.runs.membership import mean_of_units

Marginal = Callable[[Floats, Bools, float], Floats]
GAMMA = 1.0
UNTUNED_A = 0.5
CANDIDATES = tuple(step / 10 for step in range(11))  # of `a`
_FEWEST_TO_TUNE = 4  # references: with three others, a unit can be inside of one and outside of another
_POPULATION = 2000  # the most examples taken from it


def run(case: Case, settings: Settings) -> Finding:
    """The online score; the same references also tune `a`."""
    references = case.references(settings.references)
    examples, owner = case.looked_at
    final, inside = case.seen.final, references.inside[:, owner]
    reference_phi = case.reference_confidences(settings.references)
    z = case.from_population(_POPULATION)
    population = np.stack([case.confidences(state, z) for state in references.states])
    a = tuned_a(reference_phi, inside, population, marginal=online_marginal)
    phi, population_phi = case.confidences(final, examples), case.confidences(final, z)
    found = scores(phi, reference_phi, inside, population_phi, population, a=a)
    return Finding(
        scores=mean_of_units(found, owner, len(case.units)),
        measured={"references": len(references.states), "a": a, "gamma": GAMMA, "population": len(population_phi)},
    )


def online_marginal(reference_phi: Floats, inside: Bools, a: float) -> Floats:
    """(examples,) P(x) from both means of (S, examples); for an example with only one of them, that one."""
    mean_in, mean_out = _probabilities(reference_phi, inside)
    both = (mean_in + mean_out) / 2
    return np.where(np.isnan(both), np.where(np.isnan(mean_in), mean_out, mean_in), both)


def offline_marginal(reference_phi: Floats, inside: Bools, a: float) -> Floats:
    """(examples,) P(x) from the references without x; for an example in all of them, from their mean."""
    mean_in, mean_out = _probabilities(reference_phi, inside)
    guessed = ((1 + a) * mean_out + 1 - a) / 2
    return np.where(np.isnan(guessed), mean_in, guessed)


def scores(
    phi: Floats,
    reference_phi: Floats,
    inside: Bools,
    population_phi: Floats,
    population_reference_phi: Floats,
    *,
    a: float,
    marginal: Marginal = online_marginal,
    gamma: float = GAMMA,
    population_inside: Bools | None = None,
) -> Floats:
    """(examples,) shares of the population with rho(x) / rho(z) > gamma.

    phi (examples,) and population_phi (population,) are the target's; reference_phi (S, examples) and population_reference_phi
    (S, population) are the references'. inside: (S, examples) whether a reference trained on x. population_inside: (S,
    population) whether it trained on z, and then P(z) uses `marginal` too; None: on no z. Models that saw no x can be
    references with the offline marginal.
    """
    (require_references if inside.any() else require_fit)(phi, reference_phi, inside)
    if not len(population_phi) or population_reference_phi.shape != (len(reference_phi), len(population_phi)):
        raise UsageError(
            f"a population of {len(population_phi)} needs confidences of shape ({len(reference_phi)}, {len(population_phi)}) "
            f"from the references, and they have {population_reference_phi.shape}"
        )
    if not np.isfinite(population_phi).all() or not np.isfinite(population_reference_phi).all():
        raise UsageError("a confidence of the population is not finite; leave that example out")
    given = phi, reference_phi, inside, population_phi, population_reference_phi
    if population_inside is None:
        return _shares(given, a, marginal, gamma)
    return _shares(given, a, marginal, gamma, marginal(population_reference_phi, population_inside, a))


def _shares(
    given: tuple[Floats, Floats, Bools, Floats, Floats],
    a: float,
    marginal: Marginal,
    gamma: float,
    of_population: Floats | None = None,
) -> Floats:
    """of_population: (population,) P(z); None: the offline one, from models without any z."""
    phi, reference_phi, inside, population_phi, population_reference_phi = given
    if of_population is None:
        nobody = np.zeros(population_reference_phi.shape, dtype=bool)
        of_population = offline_marginal(population_reference_phi, nobody, a)
    of_x = _log_ratio(phi, marginal(reference_phi, inside, a)) - np.log(gamma)
    of_z = np.sort(_log_ratio(population_phi, of_population))
    return np.asarray(np.searchsorted(of_z, of_x, side="left") / len(of_z))


def tuned_a(
    reference_phi: Floats, inside: Bools, population_reference_phi: Floats, *, marginal: Marginal = offline_marginal
) -> float:
    """The candidate with the largest area under the curve, on average over the references, each attacked with all others.

    With fewer than four references tuning is impossible, and it is `UNTUNED_A`.
    """
    if len(reference_phi) < _FEWEST_TO_TUNE:
        return UNTUNED_A
    mean_areas = []
    for a in CANDIDATES:
        areas = []
        for target, truth in enumerate(inside):
            rest = np.arange(len(inside)) != target
            phi, z = reference_phi[target], population_reference_phi[target]
            others = (phi, reference_phi[rest], inside[rest], z, population_reference_phi[rest])
            found = _shares(others, a, marginal, GAMMA)
            if truth.any() and not truth.all():
                areas.append(roc.auc(found[truth], found[~truth]))
        mean_areas.append(float(np.mean(areas)) if areas else 0.0)
    return CANDIDATES[int(np.argmax(mean_areas))]


def _probabilities(reference_phi: Floats, inside: Bools) -> tuple[Floats, Floats]:
    """(examples,) mean probabilities over references with x and without; NaN without any."""
    from scipy.special import expit

    p = expit(reference_phi)
    return means(p, inside), means(p, ~inside)


def _log_ratio(phi: Floats, marginal: Floats) -> Floats:
    """log sigmoid(phi) - log P."""
    return np.asarray(-np.logaddexp(0.0, -phi) - np.log(np.maximum(marginal, np.finfo(np.float64).tiny)))


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("rmia"))
