"""Audits of releases: none finds more than the accounted epsilon, and every broken mechanism is found out.

An audit is a lower bound of a mechanism's epsilon, from its releases on two neighbouring data sets. For an (epsilon,
delta)-private mechanism every test between neighbours X and X' has

    P(accept on X) <= exp(epsilon) P(accept on X') + delta                              (Kairouz, Oh and Viswanath, 2015)

so a test that accepts on X with probability at least p, and on X' with probability at most q, shows that epsilon is at least
log((p - delta) / q). The test is chosen on one half of the releases; on the other half, Clopper and Pearson's intervals bound p
and q. The result exceeds epsilon with probability at most `significance`.

A release takes the whole path: contributions are measured, scaled, summed and noised, as clients and server do. Neighbours
differ in one client. The attacker knows the contributions of all clients, this one's included, and scores a release by its
inner product with this client's contribution: no test is better against independent Gaussian noise. Seeds are fixed, so no test
fails by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from privacy import accounting
from privacy.entropy import SeededEntropy, Stream, SystemEntropy
from privacy.mechanisms import Gaussian, Mechanism
from privacy.participation import Poisson

Scores = NDArray[np.float64]

SIGNIFICANCE = 1e-4


def lower_bound(first: Scores, second: Scores, delta: float, significance: float = SIGNIFICANCE) -> float:
    """A lower bound of epsilon, from the scores of the releases on X (`first`) and on X' (`second`): a high score means X."""
    tests = (first, second), (-second, -first)  # accept X for high scores, or X' for low ones
    return max(0.0, *(_one_sided(on, off, delta, significance / 2) for on, off in tests))


def _one_sided(on: Scores, off: Scores, delta: float, significance: float) -> float:
    chosen = _best_threshold(on[::2], off[::2], delta, significance)
    return float(_bounds(np.array([chosen]), on[1::2], off[1::2], delta, significance)[0])


def _best_threshold(on: Scores, off: Scores, delta: float, significance: float) -> float:
    everything = np.concatenate([on, off])
    candidates = np.unique(np.quantile(everything, np.linspace(0, 1, 401)))
    candidates = np.concatenate([candidates, np.sort(off)[-20:]])
    midpoint = (off.max() + on.min()) / 2  # separates the scores where they do not overlap
    candidates = np.append(candidates, midpoint)
    return float(candidates[np.argmax(_bounds(candidates, on, off, delta, significance))])


def _bounds(thresholds: Scores, on: Scores, off: Scores, delta: float, significance: float) -> Scores:
    """For each threshold, log((p - delta) / q) of the test "score above the threshold"."""
    hits, misses = (len(one) - np.searchsorted(np.sort(one), thresholds, side="right") for one in (on, off))
    with np.errstate(all="ignore"):
        p = np.where(hits > 0, stats.beta.ppf(significance / 2, hits, len(on) - hits + 1), 0.0)
        q = np.where(misses < len(off), stats.beta.isf(significance / 2, misses + 1, len(off) - misses), 1.0)
        found = np.log((p - delta) / q)
    return np.where(np.isnan(found), -math.inf, found)


Named = Mapping[str, Tensor]
Clip = Callable[[Named, Mechanism], dict[str, Tensor]]

DELTA, C, Z = 1e-5, 0.5, 2.0
TARGET = {"body": torch.tensor([3.0, -4.0, 12.0]), "head": torch.tensor([40.0, 30.0])}
OTHERS = [{"body": torch.tensor([0.1, 0.0, i / 9]), "head": torch.tensor([-float(i), 1.0])} for i in range(9)]
SEEDED = SeededEntropy(0)


def norm_of(contribution: Named) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in contribution.values()))


def clipped(contribution: Named, mechanism: Mechanism) -> dict[str, Tensor]:
    factor = mechanism.scale(lambda: norm_of(contribution), C)
    return {name: tensor * factor for name, tensor in contribution.items()}


def head_not_clipped(contribution: Named, mechanism: Mechanism) -> dict[str, Tensor]:
    return clipped(contribution, mechanism) | {"head": contribution["head"]}


def fresh(trial: int) -> Stream:
    return SEEDED.stream("trial", trial)


def operating_system(trial: int) -> Stream:
    return SystemEntropy().stream("trial", trial)


def audited(
    clip: Clip = clipped, stream: Callable[[int], Stream] = fresh, replayed: Callable[[int], Stream] | None = None
) -> float:
    """The epsilon that an audit finds. replayed: the streams that the attacker assumes; it subtracts their noise."""
    mechanism = Gaussian(Z)
    sent, others = clip(TARGET, mechanism), [clip(one, mechanism) for one in OTHERS]
    with_it, without = summed([*others, sent]), summed(others)

    def score(total: Named, trial: int) -> float:
        released = mechanism.noised(total, C, stream(trial))
        guess = mechanism.noised(without, C, replayed(trial)) if replayed else without
        return float(sum(((released[name].double() - guess[name].double()) * sent[name]).sum() for name in sent))

    on = np.array([score(with_it, trial) for trial in range(300)])
    off = np.array([score(without, trial) for trial in range(300, 600)])
    return lower_bound(on, off, DELTA)


def summed(contributions: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name].double() for one in contributions]).sum(0) for name in ("body", "head")}


def accounted(z: float = Z, delta: float = DELTA) -> float:
    return accounting.epsilon(accounting.unamplified(z), 1, delta)


def test_contributions_that_are_not_clipped_as_a_whole_are_found_out() -> None:
    assert audited(head_not_clipped) > accounted() >= audited()


def test_noise_of_a_known_seed_is_found_out_and_that_of_the_operating_system_cannot_be_replayed() -> None:
    """An attacker who knows the seed draws fresh noise too. With the operating system's, the same labels give other noise."""
    assert audited(replayed=fresh) > accounted() >= audited(stream=operating_system, replayed=operating_system)


RELEASES = 400_000
LARGE_DELTA = 1e-2  # epsilon shows in events of this probability; so many releases have many: a sharp audit


def released(at: float | Scores, z: float, label: str) -> Scores:
    """(RELEASES,) releases of one coordinate, in units of C. at: the sum before noise, for all releases or one for each."""
    total = torch.as_tensor(at, dtype=torch.float64).expand(RELEASES) * C
    noised = Gaussian(z).noised({"a": total}, C, SEEDED.stream(label, str(z)))["a"]
    return noised.double().numpy() / C


def test_the_audit_is_sharp() -> None:
    """At LARGE_DELTA the audit finds nine tenths of the accounted epsilon, and notices noise that is a fifth too small."""
    z = 1.0
    one, none = released(1.0, z, "one"), released(0.0, z, "none")
    assert 0.5 * accounted(z) < lower_bound(one, none, DELTA) <= accounted(z)
    assert 0.9 * accounted(z, LARGE_DELTA) < lower_bound(one, none, LARGE_DELTA) <= accounted(z, LARGE_DELTA)
    one, none = released(1.0, 0.8 * z, "one"), released(0.0, 0.8 * z, "none")
    assert lower_bound(one, none, LARGE_DELTA) > accounted(z, LARGE_DELTA)


def test_sampled_releases_leak_no_more_than_was_accounted_for_and_unsampled_ones_do() -> None:
    """Each release belongs to a target of its own, which takes part or not by its coin: all drawn at once."""
    z, sampler = 0.5, Poisson(RELEASES, 0.05)
    taking_part = np.zeros(RELEASES)
    taking_part[sampler.draw(SEEDED.stream("coins", "0.05").uniform)] = 1.0
    promised = accounting.epsilon(sampler.release(z), 1, DELTA)
    assert promised < accounted(z)
    none = released(0.0, z, "without")
    assert 0.3 * promised < lower_bound(released(taking_part, z, "with"), none, DELTA) <= promised
    assert lower_bound(released(1.0, z, "with"), none, DELTA) > promised  # with coins that are known, or not tossed


def test_the_bound_is_one_of_probability() -> None:
    """Equal laws give almost 0; separate scores give the most that n judged releases can show, about log(n / 10)."""
    rng = np.random.default_rng(0)
    assert lower_bound(rng.normal(size=4000), rng.normal(size=4000), DELTA) < 0.1
    apart = lower_bound(np.ones(4000), np.zeros(4000), DELTA)
    exact = 1 - (1e-4 / 4) ** (1 / 2000)  # Clopper and Pearson's upper limit after 0 of 2000
    assert apart == pytest.approx(math.log((1 - exact - DELTA) / exact))
