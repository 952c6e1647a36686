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

import numpy as np

from attacks.adversary.case import Case, Finding, Settings
from attacks.adversary.null import Bools, Floats
from secure_fed.errors import UsageError
from secure_fed.runs.membership import mean_of_units

OWN_VARIANCE = 64  # from so many references on, every unit has its own variances
_LEAST_VARIANCE = 1e-12  # for equal confidences


def run(case: Case, settings: Settings) -> Finding:
    """The online score, with shrunk distances."""
    return Finding(online(*_confidences(case, settings), shrunk=True), {"references": settings.references})


def run_offline(case: Case, settings: Settings) -> Finding:
    """The offline score, with the same references."""
    return Finding(offline(*_confidences(case, settings)), {"references": settings.references})


def _confidences(case: Case, settings: Settings) -> tuple[Floats, Floats, Bools]:
    """Confidences of the target and of the references, and the units that each reference was trained on."""
    references = case.references(settings.references)
    _, owner = case.looked_at
    each = case.reference_confidences(settings.references)
    reference_phi = np.stack([mean_of_units(phi, owner, len(case.units)) for phi in each])
    return case.unit_confidences(case.seen.final), reference_phi, references.inside


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
    mean_out = means(reference_phi, ~inside)
    if np.isnan(mean_out).any():
        mean_out = _completed(reference_phi, inside)[1]
    return np.asarray(log_ndtr((phi - mean_out) / np.sqrt(_variances(reference_phi, ~inside, pooled))))


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
            f"confidences of shape {phi.shape} need references and memberships of shape (references, {len(phi)}), "
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


def means(reference_phi: Floats, chosen: Bools) -> Floats:
    """(units,) means over the chosen references; NaN without any."""
    count = chosen.sum(axis=0)
    total = np.where(chosen, reference_phi, 0.0).sum(axis=0)
    return np.asarray(np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0))


def _completed(reference_phi: Floats, inside: Bools) -> tuple[Floats, Floats]:
    """(units,) means inside and outside, of every unit."""
    mean_in, mean_out = means(reference_phi, inside), means(reference_phi, ~inside)
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
    centred = np.where(chosen, reference_phi - np.nan_to_num(means(reference_phi, chosen)), 0.0)
    squares = np.square(centred).sum(axis=0)
    freedom = count.sum() - np.count_nonzero(count)
    if freedom < 1:
        raise UsageError(
            f"{len(chosen)} references leave no unit with two on the same side, so no variance; train more of them"
        )
    common: Floats = np.full(len(count), squares.sum() / freedom)
    if len(chosen) < OWN_VARIANCE if pooled is None else pooled:
        return common.clip(min=_LEAST_VARIANCE)
    return np.asarray(np.divide(squares, count - 1, out=common, where=count > 1).clip(min=_LEAST_VARIANCE))


def _log_normal(x: Floats, mean: Floats, variance: Floats) -> Floats:
    """log N(x; mean, variance), without the constant -log sqrt(2 pi)."""
    return np.asarray(-0.5 * np.log(variance) - np.square(x - mean) / (2 * variance))


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("lira"))
