"""Noise that clients add in shares: its distribution, the sensitivity, the shares that count, and the charge, by independent
accounting, for the least number of survivors whoever stayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.stats import kstest

from privacy import accounting, distributed
from privacy.distributed import DistributedGaussian
from privacy.entropy import SystemEntropy
from privacy.errors import PlanError
from privacy.participation import FixedSize, Poisson
from privacy.plan import Target, for_shares, for_sums
from protocols.errors import Aborted
from protocols.thresholds import colluding
from secure_fed.rounds.masked.encoding_plan import Contribution, Noised
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import private_toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    CHANCE,
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    MASKED,
    SKETCH,
    Losing,
    federation,
    listen,
    one_round,
)

TEN = [4] * 10
HALF = {"secure_aggregation.dropout": 0.3, "secure_aggregation.corrupt": 0.2}


# The distribution of the noise.


def _residues(
    settings: dict[str, Any], rounds: int, sizes: Sequence[int] = wide_toys.SIZES
) -> tuple[np.ndarray, float]:
    """Released means minus true means of clipped contributions over `rounds` rounds, and the planned standard deviation."""
    built = federation({**settings, "federation.rounds": rounds}, sizes=sizes)
    heard = listen(built)
    found = []
    for round_ in range(rounds):
        seen = one_round(built, round_)
        for name, mean in seen.means.items():
            sent = heard.replies[round_, name]
            assert all(reply.contribution.norm() <= 0.1 * (1 + 1e-6) for reply in sent.values())
            total = sum(heard.values(round_, name).values())
            found.append(mean - total / built.assembly.sampler.expected)
    dim = len(found[-1])
    return np.concatenate(found), built.assembly.protection.mean_noise_std(0.1, built.assembly.sampler.expected, dim)


@pytest.mark.parametrize(
    "settings",
    chosen([{**DISTRIBUTED, **HALF}, {**HIDDEN, **HALF, "secure_aggregation.bits": 64}], [{**DISTRIBUTED, **HALF}]),
    ids=str,
)
def test_the_released_mean_is_the_true_one_and_normal_noise_of_the_planned_deviation(settings: dict[str, Any]) -> None:
    """With n shares of which m count, the sum's noise has standard deviation sqrt(n / m) z C."""
    shares = federation({**settings, "federation.cohort": 10}, sizes=TEN).assembly.protection.shares
    assert shares is not None
    assert (shares.contributors, shares.shares) == (10, 5)
    residues, std = _residues({**settings, "federation.cohort": 10}, 5, TEN)
    assert std * 10 == pytest.approx(math.sqrt(10 / 5) * 0.1, rel=0.02)
    assert np.std(residues) == pytest.approx(std, rel=6 / math.sqrt(2 * len(residues))), "six standard deviations"
    assert len(residues) > 1000
    assert kstest(residues / std, "norm").pvalue > CHANCE
    for factor in (2 / 3, 3 / 2):
        assert kstest(residues / (factor * std), "norm").pvalue < CHANCE


def test_shares_of_noise_come_from_secret_entropy_and_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[np.ndarray] = []
    drawing = distributed.discrete_gaussian
    monkeypatch.setattr(distributed, "discrete_gaussian", lambda *given: shares.append(drawing(*given)) or shares[-1])
    built = federation(DISTRIBUTED)
    assert isinstance(built.assembly.protection.entropy, SystemEntropy)
    one_round(built, 0)
    one_round(built, 1)
    assert len(shares) == 8
    correlations = np.corrcoef(np.array(shares, dtype=float)) - np.eye(8)
    assert np.abs(correlations).max() < 6 / math.sqrt(len(shares[0])), "six standard deviations"


IN_TURN = {"federation.sampling": "schedule", "secure_aggregation.corrupt": 0.1, "secure_aggregation.dropout": 0.4}


@every(
    "settings",
    [
        {"federation.cohort": 20, "evaluation.audit_fraction": 1.0},
        {"federation.cohort": 16, "evaluation.audit_fraction": 0.5},
        {"federation.cohort": 12, "evaluation.dummies": 5},
        {"federation.sampling": "fixed", "federation.cohort": 18, "evaluation.audit_fraction": 1.0},
        {**HIDDEN, "federation.sampling": "poisson", "federation.cohort": 12, "evaluation.audit_fraction": 0.5},
    ],
)
def test_a_sum_has_as_many_honest_shares_as_the_guarantee_counts(settings: dict[str, Any]) -> None:
    """Of the fewest survivors, without colluders; also where held-out clients leave the order's places empty."""
    built = federation({**DISTRIBUTED, **IN_TURN, **settings}, sizes=[2] * 20)
    protection, masks = built.assembly.protection, built.assembly.masks
    assert protection.shares is not None
    assert masks is not None
    terms = masks.sums.terms
    honest = terms.least(masks.invited) - colluding(masks.invited, 0.1)
    assert protection.shares.shares == honest
    assert protection.shares.contributors == masks.invited <= len(built.assembly.clients)


def test_terms_with_fewer_honest_shares_than_counted_are_refused() -> None:
    masks = federation({**DISTRIBUTED, **HALF}, sizes=TEN).assembly.masks
    assert masks is not None
    protection = masks.sums.terms.protection
    assert protection.shares is not None
    more = replace(protection, shares=replace(protection.shares, shares=protection.shares.shares + 1))
    masks.sums.terms.require_feasible()
    with refused(PlanError):
        replace(masks.sums.terms, protection=more).require_feasible()


# Sensitivity.


@dataclass(frozen=True)
class Zeros:
    """A noise source that returns zeros, so that the words are rounded contributions."""

    def __call__(self, sigma: int, count: int, stream: Any) -> np.ndarray:
        return np.zeros(count, np.int64)


@pytest.mark.parametrize("way", chosen([{}, SKETCH], [SKETCH]), ids=["fedlora", "sketch"])
def test_no_client_moves_the_integer_sum_by_more_than_the_bound(way: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(distributed, "discrete_gaussian", Zeros())
    words: list[np.ndarray] = []
    carried = Noised.encode

    def noting(self: Noised, said: Contribution | None, stream: Any) -> np.ndarray:
        words.append(carried(self, said, stream))
        return words[-1]

    monkeypatch.setattr(Noised, "encode", noting)
    for clip_norm in (1e-4, 0.1, 1e3):
        words.clear()
        built = federation({**DISTRIBUTED, **way, "privacy.clip_norm": clip_norm, "training.steps": 3})
        one_round(built)
        assert len(words) == (8 if way else 4)
        longest = 0.0
        for one in words:
            integers = one.view(np.int32).astype(object)
            grid = built.assembly.protection.shares.grid(len(one))  # type: ignore[union-attr]
            moved = math.sqrt(sum(int(x) ** 2 for x in integers))
            assert moved <= grid.bound
            longest = max(longest, moved / grid.bound)
        assert clip_norm > 1 or longest > 0.7, "the bound is reached, nearly"


def test_a_contribution_that_was_not_clipped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedGaussian, "scale", lambda self, norm, clip_norm: 1.0)
    monkeypatch.setattr("privacy.mechanisms.Gaussian.scale", lambda self, norm, clip_norm: 1.0)
    with refused(Exception, hide=r"norm \S+"):
        one_round(federation({**DISTRIBUTED, "privacy.clip_norm": 1e-3}))


# The shares that the guarantee counts on.


@pytest.mark.parametrize("stage", chosen(["advertise", "share", "mask", "unmask"], ["unmask"]))
def test_the_sum_of_the_least_number_is_exact_and_of_one_less_there_is_none(stage: str) -> None:
    built = federation({**DISTRIBUTED, **HALF}, sizes=TEN)
    heard = listen(built)
    enough = Losing(built.assembly.transport, dict.fromkeys((1, 4, 9), stage))
    seen = one_round(built, transport=enough)
    survivors = 10 if stage == "unmask" else 7
    assert seen.record["masked"]["survivors"] == survivors
    values = heard.values(0, "change")
    assert len(values) == survivors
    std = built.assembly.protection.shares.std(0.1, len(seen.means["change"]), survivors) / 10  # type: ignore[union-attr]
    residue = seen.means["change"] - sum(values.values()) / 10
    assert kstest(residue / std, "norm").pvalue > CHANCE
    assert np.std(residue) == pytest.approx(std, rel=6 / math.sqrt(2 * len(residue))), "six standard deviations"
    heard.replies.clear()
    short = Losing(built.assembly.transport, dict.fromkeys((1, 2, 4, 9) if stage != "unmask" else range(1, 8), stage))
    with pytest.raises(Aborted):
        one_round(built, 1, short)


def test_a_round_with_too_few_is_charged_all_the_same(tmp_path: Any) -> None:
    built = federation({**DISTRIBUTED, **HALF}, sizes=TEN)
    whole = built.assembly.transport
    built.assembly = replace(built.assembly, transport=Losing(whole, dict.fromkeys(range(4), "mask")))
    with pytest.raises(Aborted):
        built.run(tmp_path / "run")
    assert private_toys.charged(tmp_path / "run") == 1
    built.assembly = replace(built.assembly, transport=whole)
    result = built.run(tmp_path / "run", resume=True)
    assert private_toys.charged(tmp_path / "run") == result.summary["releases"] == 4
    planned = built.assembly.protection.plan.epsilon()  # type: ignore[union-attr]
    assert result.summary["epsilon"] > planned, "the round that came to nothing is counted"


@pytest.mark.parametrize(("hidden", "passes"), chosen([(False, 1), (False, 2), (True, 1)], [(False, 2), (True, 1)]))
def test_epsilon_is_that_of_an_independent_computation(hidden: bool, passes: int) -> None:
    settings = {
        **(HIDDEN if hidden else DISTRIBUTED),
        **(SKETCH if passes == 2 else {}),
        "privacy.noise_multiplier": 3.0,
    }
    result = federation({**settings, "federation.cohort": 2 if hidden else 4}).run()
    said = result.summary
    rate = 0.5 if hidden else 1.0
    assert said["sampling_rate"] == rate or not hidden
    oracle = _rounds(rate, 3.0, 3, 1e-3, passes)
    assert said["epsilon"] == pytest.approx(oracle, rel=0.01)
    assert said["epsilon_participants"] == said["epsilon"]
    assert said["releases"] == 3 * passes
    assert said["noise_multiplier"] == 3.0


def test_a_cohort_that_is_seen_is_not_amplified() -> None:
    small, everybody = (
        federation({**DISTRIBUTED, "federation.cohort": cohort}, sizes=TEN).assembly.protection.plan
        for cohort in (4, 10)
    )
    assert small is not None
    assert everybody is not None
    assert small.epsilon() == small.epsilon_participants() == everybody.epsilon()


SIX = {**HIDDEN, "federation.cohort": 6}


@pytest.mark.parametrize("base", [DISTRIBUTED, SIX], ids=["seen", "hidden"])
def test_a_target_is_kept_to_from_below(base: dict[str, Any]) -> None:
    settings = {**base, **HALF, "privacy.noise_multiplier": None, "privacy.epsilon": 6.0}
    plan = federation(settings, sizes=TEN).assembly.protection.plan
    assert plan is not None
    assert 0.99 * 6 < plan.epsilon() <= 6
    rate = 0.6 if "privacy.hidden_cohort" in base else 1.0
    assert _rounds(rate, plan.noise_multiplier, 3, 1e-3, 1) == pytest.approx(plan.epsilon(), rel=0.01)


@pytest.mark.parametrize("base", chosen([DISTRIBUTED, SIX], [SIX]), ids=["seen", "hidden"])
def test_what_the_survivors_realised_is_told_and_refunds_nothing(base: dict[str, Any]) -> None:
    settings = {**base, **HALF, "federation.vanishing": 0.3, "federation.seed": 3}
    built = federation(settings, sizes=TEN)
    said = built.run().whole
    assert said["epsilon"] == built.assembly.protection.plan.epsilon(), "whoever vanished"  # type: ignore[union-attr]
    realised = said["privacy"]["realised"]
    survivors = said["secure_aggregation"]["survivors"]
    assert realised["survivors"] == survivors
    assert realised["noise_multiplier"] == pytest.approx(math.sqrt((survivors - 2) / 5))
    assert realised["epsilon"] <= said["epsilon"]
    assert (realised["epsilon"] == said["epsilon"]) == (survivors == 7)
    release = (
        accounting.poisson_sampled(0.6, realised["noise_multiplier"])
        if "privacy.hidden_cohort" in base
        else accounting.unamplified(realised["noise_multiplier"])
    )
    assert realised["epsilon"] == pytest.approx(accounting.epsilon(release, 3, 1e-3))


# Two sums over one secret cohort: one sampled release, and not two.

ADD = dp.NeighboringRelation.ADD_OR_REMOVE_ONE


def _pld(event: Any, count: int, delta: float, step: float = 1e-3) -> float:
    accountant = PLDAccountant(ADD, value_discretization_interval=step)
    accountant.compose(dp.SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(delta))


def _rounds(rate: float, z: float, rounds: int, delta: float, passes: int = 2) -> float:
    """Epsilon with one sampling coin for each round, and one Gaussian for each pass of a sampled client."""
    both = dp.GaussianDpEvent(z / math.sqrt(passes))
    return _pld(dp.PoissonSampledDpEvent(rate, both), rounds, delta)


def _naive(rate: float, z: float, rounds: int, delta: float, passes: int = 2) -> float:
    """Epsilon by wrong accounting: a separate coin for every pass."""
    return _pld(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), passes * rounds, delta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "z", "rounds"), chosen([(0.1, 1.0, 20), (0.01, 0.8, 100), (0.3, 1.5, 10)], [(0.1, 1.0, 20)])
)
def test_a_round_of_two_passes_is_one_sampled_release(rate: float, z: float, rounds: int) -> None:
    plan = for_sums(Target(None, z, 1e-5), Poisson(100, rate), 2 * rounds, 2)
    oracle = _rounds(rate, z, rounds, 1e-5)
    assert plan.epsilon() == pytest.approx(oracle, rel=0.005)
    assert plan.epsilon() >= oracle * (1 - 1e-3)
    assert _naive(rate, z, rounds, 1e-5) < 0.9 * oracle, "the wrong accounting promises too much"


@pytest.mark.parametrize("rate", chosen([0.02, 0.3], [0.3]))
def test_who_sees_the_cohort_sees_all_passes(rate: float) -> None:
    plan = for_sums(Target(None, 2.0, 1e-5), Poisson(100, rate), 20, 2)
    assert plan.epsilon_participants() == pytest.approx(_pld(dp.GaussianDpEvent(2.0), 20, 1e-5), rel=0.005)


@pytest.mark.nightly
@pytest.mark.parametrize("target", [1.0, 8.0])
def test_noise_is_made_to_fit_whole_rounds(target: float) -> None:
    plan = for_sums(Target(target, None, 1e-5), Poisson(100, 0.1), 20, 2)
    assert 0.99 * target < plan.epsilon() <= target
    assert _rounds(0.1, plan.noise_multiplier, 10, 1e-5) == pytest.approx(target, rel=0.015)
    single = for_sums(Target(target, None, 1e-5), Poisson(100, 0.1), 10, 1)
    assert plan.noise_multiplier == pytest.approx(math.sqrt(2) * single.noise_multiplier, rel=0.01)


@pytest.mark.nightly
def test_fixed_cohorts_and_shares_count_rounds_too() -> None:
    fixed = for_sums(Target(None, 2.0, 1e-5), FixedSize(100, 10), 20, 2)
    oracle = accounting.epsilon(accounting.sampled_without_replacement(100, 10, math.sqrt(2)), 10, 1e-5)
    assert fixed.epsilon() == pytest.approx(oracle)
    assert fixed.epsilon_participants() == pytest.approx(
        _pld(dp.GaussianDpEvent(1 / math.sqrt(2)), 10, 1e-5), rel=0.005
    )
    for hidden in (False, True):
        shares = for_shares(Target(None, 2.0, 1e-5), Poisson(100, 0.1), 20, 2, hidden=hidden)
        z = math.sqrt(2)
        release = accounting.poisson_sampled(0.1, z) if hidden else accounting.unamplified(z)
        assert shares.epsilon() == pytest.approx(accounting.epsilon(release, 10, 1e-5))


def test_a_round_that_was_begun_counts_in_full() -> None:
    plan = for_sums(Target(None, 1.0, 1e-5), Poisson(100, 0.1), 20, 2)
    assert [plan.epsilon(count) == plan.epsilon(count + 1) for count in (1, 2, 3)] == [True, False, True]
    assert plan.epsilon(1) == pytest.approx(_rounds(0.1, 1.0, 1, 1e-5), rel=0.005)
    assert plan.epsilon(0) == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("rate", "z"), [(0.01, 0.5), (0.1, 1.0), (0.5, 1.0), (0.5, 3.0)])
def test_two_halves_of_rounds_that_were_cut_short_cost_no_more_than_the_one_they_are_counted_as(
    rate: float, z: float
) -> None:
    """A round killed twice after its first pass has charged two releases, each with its own coin."""
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))
    both = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z / math.sqrt(2)))
    for delta in (1e-5, rate / 10):
        assert _pld(event, 2, delta, 1e-3) <= _pld(both, 1, delta, 1e-3) + 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("masks", chosen([{}, MASKED], [MASKED]), ids=["open", "masked"])
def test_a_run_says_what_the_plan_does(masks: dict[str, Any]) -> None:
    settings = {**CLIPPED, **SKETCH, **masks, "federation.cohort": 4, "federation.rounds": 4, "privacy.delta": 1e-3}
    said = federation(settings, sizes=[4] * 8).run().summary
    plan = for_sums(Target(None, 1.0, 1e-3), Poisson(8, 0.5), 8, 2)
    assert said["releases"] == 8
    assert said["epsilon"] == said["epsilon_cumulative"] == plan.epsilon()
    assert said["epsilon_participants"] == plan.epsilon_participants()
