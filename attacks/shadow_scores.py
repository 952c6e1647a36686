"""Likelihood ratios, LiRA (Carlini et al. 2022): a confidence compared with those of models trained with and without the unit.

Each of S reference models trained on about half of the audit pool. For a unit with confidence phi under the target model, let
mu_in and s_in be the mean and standard deviation of its confidences under the references that trained on it, and mu_out and
s_out under the others. Then

    online    log N(phi; mu_in, s_in^2) - log N(phi; mu_out, s_out^2)         (Algorithm 1)
    offline   log Phi((phi - mu_out) / s_out)                                 (equation 4)

The offline score needs no model trained on the unit: an adversary can train references before it knows the units to attack.

With fewer than 64 references a unit's own variance is mostly noise, so variances are pooled over units (after section VI-B):
the sum of squared residuals from each unit's own mean, over all confidences inside (or outside), divided by their number minus
the number of means.

A unit's own distance d = mu_in - mu_out is also noisy. The attack shrinks it (empirical Bayes; the paper does not) to

    m + (d - m) t^2 / (t^2 + e),   e = e_in + e_out,

where m is the mean distance of the units with references on both sides, e_in and e_out are the variances of the two means (the
pooled variance divided by the number inside or outside), and t^2 is the variance of the distances over units beyond the mean of
e. The reduction of d is split between the two means in the ratio of e_in to e_out, so the less certain mean moves more. Only
references enter this. With many references e vanishes and the formula above remains. Shrinking helps with few references and
never harms (`tests/attacks/test_lira.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Floats
from secure_fed.errors import UsageError
from secure_fed.runs.membership import roc

Bools = NDArray[np.bool_]

OWN_VARIANCE = 64  # from so many references on, every unit has its own variances
_LEAST_VARIANCE = 1e-12  # for equal confidences


def online(
    phi: Floats, reference_phi: Floats, inside: Bools, pooled: bool | None = None, *, shrunk: bool = False
) -> Floats:
    """(units,) log-likelihood ratios of `phi` (units,), given (S, units) confidences of references and `inside`.

    For a unit that is inside of none (or of all) references, the missing mean is the other one plus or minus the mean distance
    over all other units. pooled: whether variances are pooled; None: by the number of references. shrunk: whether distances of
    means are shrunk; the paper's Algorithm 1 does neither.
    """
    require_references(phi, reference_phi, inside)
    mean_in, mean_out = _shrunk(reference_phi, inside) if shrunk else _completed(reference_phi, inside)
    variance_in = _variances(reference_phi, inside, pooled)
    variance_out = _variances(reference_phi, ~inside, pooled)
    return _log_normal(phi, mean_in, variance_in) - _log_normal(phi, mean_out, variance_out)


def offline(phi: Floats, reference_phi: Floats, inside: Bools, pooled: bool | None = None) -> Floats:
    """(units,) log-probabilities that a model without the unit is at most as confident as `phi`. It uses no confidences inside,
    except for a unit that is outside of no reference, as in `online`. References may be models that saw none of the units.
    """
    from scipy.special import log_ndtr

    (require_references if inside.any() else require_fit)(phi, reference_phi, inside)
    mean_out = _means(reference_phi, ~inside)
    if np.isnan(mean_out).any():
        mean_out = _completed(reference_phi, inside)[1]
    scores: Floats = log_ndtr((phi - mean_out) / np.sqrt(_variances(reference_phi, ~inside, pooled)))
    return scores


def require_references(phi: Floats, reference_phi: Floats, inside: Bools) -> None:
    """Refuse arrays that do not fit, and references without any unit that is inside of one and outside of another."""
    require_fit(phi, reference_phi, inside)
    both = inside.any(axis=0) & ~inside.all(axis=0)
    if not both.any():
        raise UsageError(
            f"no unit is inside of one and outside of another of the {len(inside)} references; train more of them"
        )


def require_fit(phi: Floats, reference_phi: Floats, inside: Bools) -> None:
    """Refuse shapes that do not fit, values that are not numbers, and the target itself as a reference."""
    if phi.ndim != 1 or reference_phi.shape != (len(reference_phi), len(phi)) or inside.shape != reference_phi.shape:
        raise UsageError(
            f"confidences of shape {phi.shape} need references and coins of shape (references, {len(phi)}), "
            f"and these have {reference_phi.shape} and {inside.shape}"
        )
    if not np.isfinite(phi).all() or not np.isfinite(reference_phi).all():
        raise UsageError("a confidence is not finite; leave out the references that diverged")
    itself = np.flatnonzero((reference_phi == phi).all(axis=1))
    if len(itself):
        raise UsageError(
            f"reference {itself[0]} gives every unit the target's own confidence: the target is among its references, or no "
            "training moved either of them"
        )


def _means(reference_phi: Floats, chosen: Bools) -> Floats:
    """(units,) means over the chosen references; NaN without any."""
    count = chosen.sum(axis=0)
    total = np.where(chosen, reference_phi, 0.0).sum(axis=0)
    mean: Floats = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return mean


def _completed(reference_phi: Floats, inside: Bools) -> tuple[Floats, Floats]:
    """(units,) means inside and outside, of every unit."""
    mean_in, mean_out = _means(reference_phi, inside), _means(reference_phi, ~inside)
    distance = float(np.nanmean(mean_in - mean_out))
    return (
        np.where(np.isnan(mean_in), mean_out + distance, mean_in),
        np.where(np.isnan(mean_out), mean_in - distance, mean_out),
    )


def _shrunk(reference_phi: Floats, inside: Bools) -> tuple[Floats, Floats]:
    """(units,) means inside and outside, with each unit's distance shrunk towards the mean distance of all units."""
    mean_in, mean_out = _completed(reference_phi, inside)
    error_in, error_out = (
        _variances(reference_phi, chosen, pooled=True) / chosen.sum(axis=0).clip(min=1) for chosen in (inside, ~inside)
    )
    distance, error = mean_in - mean_out, error_in + error_out
    both = inside.any(axis=0) & ~inside.all(axis=0)
    spread = max(0.0, float(distance[both].var() - error[both].mean()))
    lost = (distance - distance[both].mean()) * error / (spread + error)
    return mean_in - lost * error_in / error, mean_out + lost * error_out / error


def _variances(reference_phi: Floats, chosen: Bools, pooled: bool | None) -> Floats:
    """(units,) variances over the chosen references: one for all units, or, with two or more references, each unit's own."""
    count = chosen.sum(axis=0)
    centred = np.where(chosen, reference_phi - np.nan_to_num(_means(reference_phi, chosen)), 0.0)
    squares = np.square(centred).sum(axis=0)
    freedom = count.sum() - np.count_nonzero(count)
    if freedom < 1:
        raise UsageError(
            f"{len(chosen)} references leave no unit with two on the same side, so no variance; train more of them"
        )
    common: Floats = np.full(len(count), squares.sum() / freedom)
    if len(chosen) < OWN_VARIANCE if pooled is None else pooled:
        return common.clip(min=_LEAST_VARIANCE)
    own: Floats = np.divide(squares, count - 1, out=common, where=count > 1)
    return own.clip(min=_LEAST_VARIANCE)


def _log_normal(x: Floats, mean: Floats, variance: Floats) -> Floats:
    """log N(x; mean, variance), without the constant -log sqrt(2 pi)."""
    log_density: Floats = -0.5 * np.log(variance) - np.square(x - mean) / (2 * variance)
    return log_density


# from attacks.shadow_scores
# Robust membership inference, RMIA (Zarifzadeh, Liu and Shokri 2024): a likelihood ratio compared with those of a population.
#
#     rho(x) = P(x | theta) / P(x)          score(x) = share of population z with rho(x) / rho(z) > gamma    (Algorithm 1)
#
# P(x | theta) = sigmoid(phi) is the model's probability of the right answer; for a task without probabilities, sigmoid(-loss)
# replaces it. P(x) is its mean over models with and without x,
#
#     online     (mean_in + mean_out) / 2
#     offline    ((1 + a) mean_out + 1 - a) / 2        mean_in approximated by a mean_out + 1 - a    (equation 10)
#
# The z are test examples, in no model's training set, so P(z) is the offline one in both. `a` is tuned with each reference in
# turn as the target, its own coins as the truth and the others as references; the real target and its coins are not used.
#
# gamma = 1. For one z the order of all x is that of rho(x) for every gamma, so gamma only decides where shares begin to
# distinguish units. On a model that hardly memorises, every ratio is close to 1: a gamma above 1 would give all units the same
# score.
#
# A unit of several examples gets the mean of their scores. Unlike a product of ratios, this needs no population of units of the
# same size, and one extreme example does not dominate.
#


Marginal = Callable[[Floats, Bools, float], Floats]

GAMMA = 1.0
UNTUNED_A = 0.5
CANDIDATES = tuple(step / 10 for step in range(11))  # of `a`
_FEWEST_TO_TUNE = 4  # references: with three others, a unit can be inside of one and outside of another


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
    shares: Floats = np.searchsorted(of_z, of_x, side="left") / len(of_z)
    return shares


def tuned_a(
    reference_phi: Floats,
    inside: Bools,
    population_reference_phi: Floats,
    *,
    marginal: Marginal = offline_marginal,
    gamma: float = GAMMA,
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
            found = _shares(others, a, marginal, gamma)
            if truth.any() and not truth.all():
                areas.append(roc.auc(found[truth], found[~truth]))
        mean_areas.append(float(np.mean(areas)) if areas else 0.0)
    return CANDIDATES[int(np.argmax(mean_areas))]


def _probabilities(reference_phi: Floats, inside: Bools) -> tuple[Floats, Floats]:
    """(examples,) mean probabilities over references with x and without; NaN without any."""
    from scipy.special import expit

    p = expit(reference_phi)
    counts = inside.sum(axis=0), (~inside).sum(axis=0)
    totals = np.where(inside, p, 0.0).sum(axis=0), np.where(inside, 0.0, p).sum(axis=0)
    mean_in, mean_out = (
        np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
        for total, count in zip(totals, counts, strict=True)
    )
    return mean_in, mean_out


def _log_ratio(phi: Floats, marginal: Floats) -> Floats:
    """log sigmoid(phi) - log P."""
    ratio: Floats = -np.logaddexp(0.0, -phi) - np.log(np.maximum(marginal, np.finfo(np.float64).tiny))
    return ratio
