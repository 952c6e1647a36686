"""Canaries of random direction (Andrew et al. 2023, arXiv 2302.03098): the cosine of a release with a canary's direction.

Unit i pulls along its own direction u_i (module `canary_directions`). Let d be the number of coordinates and c_t the release of
round t: the update of the unit's client if the adversary sees updates, else the sum if it sees sums, else the change of the
global state; or the change over all rounds if it sees only the last state. The score is the sum over rounds of normalised
cosines,

    score(u) = <u, V> sqrt(d) / |V|,   V = sum_t w_t c_t / |c_t|,

with w_t = 1, except under a public order, where everybody knows each client's rounds (`adversary.steps`).

V does not depend on the u of a unit that did not train, so the score of such a unit is sqrt(d) times a coordinate of a uniform
point on the unit sphere (Andrew et al., section 4): N(0, 1), up to terms of order 1 / d, whatever the model, the data and the
noise are. The exact law is returned with the scores (`null`), so false-positive rates need no held-out units.

The sum over rounds is more powerful than the largest cosine where the noise is at least as large as a canary. Over 20 rounds,
each shifted by one standard deviation, its AUC is .999 against .911; if 3 in 10 rounds draw the canary, .82 against .75. The
largest cosine is better only for canaries that are seldom drawn and then shift by two standard deviations or more: .78 against
.72 at one round in ten.

For a method that sends products of factors, the cosine is taken with the product that it would send for u, and N(0, 1) holds
only approximately: scores are divided by their standard deviation over fresh directions that belong to no unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.adversary.null import Floats, Null, sphere_tails
from attacks.adversary.steps import Release, public, releases_of, unit_vector, weights_of
from secure_fed.learning.audit_pool.canaries import length_beyond_clipping
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.data.rows import places_of
from secure_fed.learning.training.canary_directions import direction, length_of_steps
from secure_fed.tensors.tensors import Layout


def run(case: Case, settings: Settings) -> Finding:
    """(units,) scores, N(0, 1) for units that did not train. measured: the `dimension` d; the number of `rounds` used; whether
    N(0, 1) is exact (`null_is_exact`); and for fresh directions, the standard deviation of their scores before any division
    (`null_std`) and the p-value of a Kolmogorov-Smirnov test of N(0, 1) (`null_p_value`).
    """
    if not case.assembly.audit_pool.directions:
        raise Inapplicable(
            "the run has no units with a random direction: leave evaluation.dummies on, or set evaluation.canaries = "
            "'direction'"
        )
    of_client = releases_of(case, None if public(case) else settings.max_rounds)
    added, weights = Added(), weights_of(case)

    def scored(unit: Unit, name: str) -> float:
        seen = of_client(unit.client)
        return score(case, added.of(seen, weights(unit, seen)), name, len(unit.examples))

    scores = [scored(unit, unit.name) for unit in case.units]
    sample = [case.units[i * len(case.units) // _FRESH] for i in range(_FRESH)]
    fresh = [scored(unit, f"nobody {i}") for i, unit in enumerate(sample)]
    some = of_client(case.units[0].client)
    exact = all(release.linear for release in some)
    spread = 1.0 if exact else float(np.std(fresh))
    measured = {
        "dimension": max((release.layout.size for release in some), default=0),
        "null_is_exact": exact,
        "null_std": float(np.std(fresh)),
        "null_p_value": null_p_value(np.array(fresh) / spread),
        "rounds": len(some),
    }
    found = np.array(scores) / spread
    null = None
    if exact:
        tails = _tails(found, some)
        # Under a public order, the score of a client that trained follows one Gaussian mechanism for all its turns together.
        if public(case) and case.assembly.audit_pool.kind == "client":
            null = Null(tails, found[:, None], 1.0, together=True)
        else:
            null = Null(tails)
    return Finding(found, measured, null=null)


def _tails(scores: Floats, seen: Sequence[Release]) -> Floats:
    """Tails by the law on the sphere; for releases of several layouts by N(0, 1), whose tails are no lighter."""
    from scipy.special import ndtr

    sizes = {release.layout.digest: release.layout.size for release in seen}
    if len(sizes) == 1:
        return sphere_tails(scores, *sizes.values())
    return np.asarray(ndtr(-scores))


def null_p_value(scores: Floats) -> float:
    """The p-value of a Kolmogorov-Smirnov test of N(0, 1): for scores of units that did not train."""
    from scipy.stats import kstest

    return float(kstest(scores, "norm").pvalue)


@dataclass(frozen=True)
class Alike:
    """Releases of one layout, which share a direction, and the weighted sum of their unit vectors."""

    releases: Sequence[Release]
    weights: Floats
    along: Floats

    @property
    def variance(self) -> float:
        return float(self.along @ self.along) / self.releases[0].layout.size


@dataclass
class Added:
    """Caches the sums for the last requested releases, since releases that are not a client's own serve all units."""

    _seen: Sequence[Release] = ()
    _sums: dict[bytes, Sequence[Alike]] = field(default_factory=dict)

    def of(self, seen: Sequence[Release], weights: Floats) -> Sequence[Alike]:
        """weights: (releases,). Releases of weight 0 are left out."""
        if seen is not self._seen:
            self._seen, self._sums = seen, {}
        key = weights.tobytes()
        if key not in self._sums:
            self._sums[key] = _alike([(one, w) for one, w in zip(seen, weights, strict=True) if w])
        return self._sums[key]


def _alike(weighed: Sequence[tuple[Release, float]]) -> list[Alike]:
    groups = places_of(release.layout.digest for release, _ in weighed).values()
    found = []
    for places in groups:
        releases, weights = zip(*(weighed[i] for i in places), strict=True)
        along = np.sum([release.moved * weight for release, weight in zip(releases, weights, strict=True)], axis=0)
        found.append(Alike(releases, np.array(weights), along))
    return found


def score(case: Case, seen: Sequence[Alike], unit: str, examples: int) -> float:
    """The score over these releases of the direction of a unit with this name."""
    total = 0.0
    for alike in seen:
        if alike.releases[0].linear:
            total += float(alike.along @ sent_of(case, alike.releases[0], unit, examples))
        else:
            sent = (sent_of(case, one, unit, examples) for one in alike.releases)
            along = (float(one.moved @ vector) for one, vector in zip(alike.releases, sent, strict=True))
            total += sum(weight * value for weight, value in zip(alike.weights, along, strict=True))
    variance = sum(alike.variance for alike in seen)
    return total / math.sqrt(variance) if variance else 0.0


def sent_of(case: Case, release: Release, unit: str, examples: int) -> Floats:
    """The unit vector of the contribution that a unit of this name sends when it moves along its direction."""
    assembly = case.assembly
    config, method, seed = assembly.config, assembly.method, assembly.config.federation.seed
    layout = Layout.of(release.before.select(release.trained))
    far = release.lr
    if assembly.audit_pool.kind == "client":
        steps = length_of_steps(layout, assembly.problem.last, examples, config.training, release.lr)
        far = length_beyond_clipping(config) or steps
    pulled = direction(unit, seed, layout).select(release.sent)
    if release.linear:
        return unit_vector(pulled, release.layout)
    after = release.before.select(release.sent).dense() + pulled * far
    return unit_vector(method.contribute(release.pass_name, release.before, after, {}), release.layout)


_FRESH = 200


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("canary_cosine"))
