"""The likelihood ratio of a canary client: drawn at the public rate against never drawn.

In round t a canary client is drawn with the public probability q. If drawn, it moves the mean by l w along its direction u,
where l is its length after clipping (without clipping, the length of its steps) and w its weight in the mean. With the round's
release c_t, the number x_t = sqrt(d) <u, c_t> / |c_t| is N(0, 1) if it was not drawn, and about N(s_t, 1) with s_t = sqrt(d) l
w / |c_t| if it was. So the score of a unit is

    sum over t of log(1 - q + q exp(s_t x_t - s_t^2 / 2))

which no sum or maximum of the cosines beats where this holds (Neyman and Pearson). The score's law for a client that did not
train needs none of this: it follows from the x_t of a random direction (`null`) and is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.adversary.null import Floats, Null, drawn_tails
from attacks.adversary.steps import Release, public, releases_of
from attacks.canary_cosine import sent_of
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.training.canary_directions import length_of_steps


def likelihood(x: Floats, shift: Floats, rate: float) -> Floats:
    """(units,) log-likelihood ratios of being drawn at that rate against never, from x (units, rounds) and shift (rounds,)."""
    with np.errstate(divide="ignore"):
        drawn = math.log(rate) + shift * x - np.square(shift) / 2
        return np.asarray(np.logaddexp(np.log1p(-rate), drawn).sum(axis=1))


def run(case: Case, settings: Settings) -> Finding:
    """measured: the median shift of a drawn canary, in standard deviations of an undrawn one, and the rate of being drawn."""
    assembly = case.assembly
    if not assembly.audit_pool.directions or assembly.audit_pool.kind != "client":
        raise Inapplicable(
            "no clients pulled along directions in this run; it takes dummy clients (evaluation.dummies), or "
            "evaluation.canaries = 'direction', of clients"
        )
    if not (case.seen.states or case.seen.sums):
        raise Inapplicable("no round was recorded, and this attack needs rounds; set evaluation.record = 'models'")
    if public(case):
        raise Inapplicable("the order is public, so the rounds of each client are known: canary_cosine uses them")
    units = case.units
    found = releases_of(case, settings.max_rounds)(units[0].client)
    _require_linear(case, found)
    shift = np.array([_shift(case, release, len(units[0].examples)) for release in found])
    scale = np.sqrt([release.layout.size for release in found])
    x = scale * np.array([_along(case, found, unit) for unit in units])
    rate = assembly.sampler.rate
    measured = {"shift": float(np.median(shift)), "rate": rate, "rounds": len(found)}
    scores = likelihood(x, shift, rate)
    tails = _tails(scores, found, shift, rate, settings.seed)
    return Finding(scores, measured, null=Null(tails, x, rate))


def _along(case: Case, found: Sequence[Release], unit: Unit) -> list[float]:
    """<u, c_t> / |c_t| for all rounds. Rounds of one layout share the unit's contribution, because it is linear."""
    first = {release.layout.digest: release for release in reversed(found)}
    sent = {layout: sent_of(case, release, unit.name, len(unit.examples)) for layout, release in first.items()}
    return [float(release.moved @ sent[release.layout.digest]) for release in found]


def _tails(scores: Floats, found: list[Release], shift: Floats, rate: float, seed: int) -> Floats:
    """Tails from draws of a non-member's numbers x_t (`null`)."""
    layouts = dict.fromkeys(release.layout.digest for release in found)
    order = [[i for i, release in enumerate(found) if release.layout.digest == layout] for layout in layouts]
    spans = [np.stack([found[i].moved for i in rounds]) for rounds in order]
    shifts = np.concatenate([shift[rounds] for rounds in order])
    return drawn_tails(scores, spans, lambda x: likelihood(x, shifts, rate), np.random.default_rng(seed))


def _require_linear(case: Case, found: list[Release]) -> None:
    optimizer = case.assembly.config.federation.optimizer
    if optimizer == "adam" and not case.seen.sums:
        raise Inapplicable(
            "the server's Adam changes lengths, from which this attack knows how far a canary moves a round"
        )
    if not found or not all(release.linear for release in found):
        raise Inapplicable(
            f"{case.assembly.method.card.name} sends products, in which a canary's part is no known share; canary_cosine does"
        )


def _shift(case: Case, release: Release, examples: int) -> float:
    """s_t, which a drawn canary adds to x_t."""
    config, sampler = case.assembly.config, case.assembly.sampler
    size = release.layout.size
    last = case.assembly.problem.last
    length = length_of_steps(release.layout, last, examples, config.training, release.lr)
    if config.privacy.unit == "client":
        length = config.privacy.clip
    # With a guarantee the divisor is the planned cohort; without one, the drawn clients.
    planned = case.assembly.protection.placement.expected_divisor
    divisor = sampler.expected if planned else len(case.assembly.clients) * sampler.rate
    weight = 1.0 if case.seen.sums else config.federation.server_rate / divisor
    return math.sqrt(size) * length * weight / release.length


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("canary_likelihood"))
