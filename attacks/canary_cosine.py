"""Canaries of random direction (Andrew et al. 2023, arXiv 2302.03098): the cosine of a release with a canary's direction.

Unit i pulls along a direction u_i of its own (module `canary_directions`). Let c_t be what round t released (its sum, where the
adversary sees sums; of its own client, where it sees those; else the change of the global state; all rounds together, where it
sees only the last state) and d the number of coordinates. The score is the sum over rounds of normalised cosines,

    score(u) = <u, V> sqrt(d) / |V|,   V = sum_t c_t / |c_t|.

V does not depend on the u of a unit that did not train, so the score of such a unit is sqrt(d) times a coordinate of a uniform
point on the unit sphere: N(0, 1), up to terms of order 1 / d, whatever the model, the data and the noise are. The exact law
goes with the scores (`null`), so that no held-out unit is needed to say how seldom one scores so high.

The sum over rounds is more powerful than the largest of the rounds' cosines where noise is as large as a canary or larger: over
20 rounds, each shifted by one standard deviation, it ranks with an AUC of .999 against .911, and where 3 in 10 rounds draw
the canary, with .82 against .75. The largest is better only for canaries that are seldom drawn and then stand out by two
deviations or more: .78 against .72 at one round in ten.

Of a method that sends products of factors the cosine is taken of what it would send of u, and N(0, 1) holds only about: the
scores are divided by the standard deviation over fresh directions, that no unit has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.adversary.null import Floats, Null, sphere_tails
from attacks.steps.released import Release, releases_of, unit_vector
from secure_fed.learning.audit_pool.canaries import length_beyond_clipping
from secure_fed.learning.data.dealing import places_of
from secure_fed.learning.training.canary_directions import direction, length_of_steps
from secure_fed.tensors.tensors import Layout


def run(case: Case, settings: Settings) -> Finding:
    """(units,) scores, N(0, 1) for units that did not train. measured: the `dimension` d, the `rounds` looked at, and of fresh
    directions the standard deviation of their scores (`null_std`, before it is divided by where N(0, 1) is not exact,
    `null_is_exact`) and the p-value of a Kolmogorov-Smirnov test of N(0, 1) (`null_p_value`).
    """
    if not case.assembly.audit_pool.directions:
        raise Inapplicable(
            "no unit pulled along a direction in this run; it takes phantoms, or evaluation.canaries = 'direction'"
        )
    of_client = releases_of(case, settings.max_rounds)
    added = Added()
    scores = [score(case, added.of(of_client(unit.client)), unit.name, len(unit.examples)) for unit in case.units]
    sample = [case.units[i * len(case.units) // _FRESH] for i in range(_FRESH)]
    fresh = [
        score(case, added.of(of_client(unit.client)), f"nobody {i}", len(unit.examples))
        for i, unit in enumerate(sample)
    ]
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
    return Finding(found, measured, null=Null(_tails(found, some)) if exact else None)


def _tails(scores: Floats, seen: Sequence[Release]) -> Floats:
    """By the law on the sphere; where releases are of several layouts, by N(0, 1), whose tails are heavier if anything."""
    from scipy.special import ndtr

    sizes = {release.layout.digest: release.layout.size for release in seen}
    if len(sizes) == 1:
        return sphere_tails(scores, *sizes.values())
    normal: Floats = ndtr(-scores)
    return normal


def null_p_value(scores: Floats) -> float:
    """The p-value of a Kolmogorov-Smirnov test of N(0, 1): for scores of units that did not train."""
    from scipy.stats import kstest

    return float(kstest(scores, "norm").pvalue)


@dataclass(frozen=True)
class Alike:
    """Releases of one layout, which share a direction, and the sum of their unit vectors."""

    releases: Sequence[Release]
    along: Floats

    @property
    def variance(self) -> float:
        return float(self.along @ self.along) / self.releases[0].layout.size


@dataclass
class Added:
    """The sums over the releases that were asked for last: of all units in turn, if they are no client's own."""

    _seen: Sequence[Release] = ()
    _sums: Sequence[Alike] = ()

    def of(self, seen: Sequence[Release]) -> Sequence[Alike]:
        if seen is not self._seen:
            groups = places_of(release.layout.digest for release in seen).values()
            alike = [[seen[i] for i in places] for places in groups]
            self._sums = [Alike(some, np.sum([release.moved for release in some], axis=0)) for some in alike]
            self._seen = seen
        return self._sums


def score(case: Case, seen: Sequence[Alike], unit: str, examples: int) -> float:
    """The score of the direction that a unit of this name has, over these releases."""
    total = 0.0
    for alike in seen:
        if alike.releases[0].linear:
            total += float(alike.along @ sent_of(case, alike.releases[0], unit, examples))
        else:
            total += sum(float(one.moved @ sent_of(case, one, unit, examples)) for one in alike.releases)
    variance = sum(alike.variance for alike in seen)
    return total / math.sqrt(variance) if variance else 0.0


def sent_of(case: Case, release: Release, unit: str, examples: int) -> Floats:
    """The unit vector of what a unit of this name sends, if it ends where its direction leads."""
    assembly = case.assembly
    config, method, seed = assembly.config, assembly.method, assembly.config.federation.seed
    layout = Layout.of(release.before.select(release.trained))
    far = release.lr
    if assembly.audit_pool.kind == "client":
        steps = length_of_steps(layout.size, examples, config.training, release.lr)
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
