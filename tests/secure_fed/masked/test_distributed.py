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
from protocols.errors import Aborted
from protocols.thresholds import colluding
from secure_fed.rounds.masked.encoding_plan import Contribution, Noised
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import private_toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import CHANCE, DISTRIBUTED, HIDDEN, SKETCH, Losing, federation, listen, one_round

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
    chosen(
        [DISTRIBUTED, {**DISTRIBUTED, "secure_aggregation.bits": 64}, {**HIDDEN, "federation.cohort": 4}], [DISTRIBUTED]
    ),
    ids=str,
)
def test_the_released_mean_is_the_true_one_and_normal_noise_of_the_planned_deviation(settings: dict[str, Any]) -> None:
    residues, std = _residues(settings, 12)
    assert len(residues) > 2500
    assert kstest(residues / std, "norm").pvalue > CHANCE
    for factor in (2 / 3, 3 / 2):
        assert kstest(residues / (factor * std), "norm").pvalue < CHANCE


def test_the_deviation_is_that_of_the_noise_multiplier_and_of_the_shares_that_count() -> None:
    """With n shares of which m count, the sum's noise has standard deviation sqrt(n / m) z C."""
    built = federation({**DISTRIBUTED, **HALF}, sizes=TEN)
    shares = built.assembly.protection.shares
    assert shares is not None
    assert (shares.contributors, shares.shares) == (10, 5)
    residues, std = _residues({**DISTRIBUTED, **HALF}, 3, TEN)
    assert std * 10 == pytest.approx(math.sqrt(10 / 5) * 0.1, rel=0.02)
    assert np.std(residues) == pytest.approx(std, rel=6 / math.sqrt(2 * len(residues))), "six standard deviations"


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


@pytest.mark.parametrize("way", [{}, SKETCH], ids=["fedlora", "sketch"])
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


@pytest.mark.parametrize("stage", chosen(["advertise", "share", "mask", "unmask"], ["share", "unmask"]))
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


def _pld(z: float, rate: float, count: int, delta: float) -> float:
    """Epsilon by dp_accounting's distributions of the privacy loss of the sampled Gaussian."""
    event: Any = dp.GaussianDpEvent(z)
    event = dp.PoissonSampledDpEvent(rate, event) if rate < 1 else event
    return float(PLDAccountant().compose(dp.SelfComposedDpEvent(event, count)).get_epsilon(delta))


@pytest.mark.parametrize(("hidden", "passes"), [(False, 1), (False, 2), (True, 1)])
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
    oracle = _pld(3.0 / math.sqrt(passes), rate, 3, 1e-3)
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


@pytest.mark.parametrize("base", [DISTRIBUTED, {**HIDDEN, "federation.cohort": 6}], ids=["seen", "hidden"])
def test_a_target_is_kept_to_from_below(base: dict[str, Any]) -> None:
    settings = {**base, **HALF, "privacy.noise_multiplier": None, "privacy.epsilon": 6.0}
    plan = federation(settings, sizes=TEN).assembly.protection.plan
    assert plan is not None
    assert 0.99 * 6 < plan.epsilon() <= 6
    rate = 0.6 if "privacy.hidden_cohort" in base else 1.0
    assert _pld(plan.noise_multiplier, rate, 3, 1e-3) == pytest.approx(plan.epsilon(), rel=0.01)


@pytest.mark.parametrize("base", [DISTRIBUTED, {**HIDDEN, "federation.cohort": 6}], ids=["seen", "hidden"])
@pytest.mark.parametrize("share", chosen([0.0, 0.3], [0.3]))
def test_what_the_survivors_realised_is_told_and_refunds_nothing(base: dict[str, Any], share: float) -> None:
    settings = {**base, **HALF, "federation.vanishing": share, "federation.seed": 3}
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
