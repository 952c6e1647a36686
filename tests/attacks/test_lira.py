"""LiRA compared with its definition unit by unit, on laws with a known best attack, and on a federation that memorises."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from attacks import lira
from attacks.adversary.case import Settings
from secure_fed.errors import UsageError
from tests.attacks import overfitted

Floats = NDArray[np.float64]


def drawn(
    references: int, units: int, shift: float, seed: int = 0
) -> tuple[Floats, Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    """Confidences of a target and of references: N(hardness of the unit + shift if it was inside, 1); and who was."""
    rng = np.random.default_rng(seed)
    hardness = rng.normal(0, 3, units)
    inside = rng.permuted(np.tile(np.arange(references) % 2 == 0, (units, 1)), axis=1).T
    members = rng.random(units) < 0.5
    reference_phi = hardness + shift * inside + rng.normal(0, 1, (references, units))
    return hardness + shift * members + rng.normal(0, 1, units), reference_phi, inside, members


def naive_pooled(reference_phi: Floats, chosen: NDArray[np.bool_]) -> float:
    """Residual variance of a model with one mean for each unit, by a least-squares fit that knows no shortcut."""
    rows, columns = np.nonzero(chosen)
    design = (columns[:, None] == np.unique(columns)).astype(float)
    values = reference_phi[rows, columns]
    fitted, *_ = np.linalg.lstsq(design, values, rcond=None)
    residuals = values - design @ fitted
    return float(residuals @ residuals) / (len(values) - np.linalg.matrix_rank(design))


@pytest.mark.parametrize("pooled", [True, False])
def test_both_scores_are_the_definition_unit_by_unit(pooled: bool) -> None:
    phi, reference_phi, inside, _ = drawn(10, 30, 1.0)
    online = lira.online(phi, reference_phi, inside, pooled)
    offline = lira.offline(phi, reference_phi, inside, pooled)
    for unit in range(30):
        ins = reference_phi[inside[:, unit], unit]
        outs = reference_phi[~inside[:, unit], unit]
        s_in, s_out = np.std(ins, ddof=1), np.std(outs, ddof=1)
        if pooled:
            s_in = math.sqrt(naive_pooled(reference_phi, inside))
            s_out = math.sqrt(naive_pooled(reference_phi, ~inside))
        expected = stats.norm.logpdf(phi[unit], ins.mean(), s_in) - stats.norm.logpdf(phi[unit], outs.mean(), s_out)
        assert online[unit] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert offline[unit] == pytest.approx(stats.norm.logcdf(phi[unit], outs.mean(), s_out), rel=1e-9, abs=1e-9)


def test_variances_are_pooled_below_64_references() -> None:
    for references, pooled in ((62, True), (64, False)):
        phi, reference_phi, inside, _ = drawn(references, 20, 1.0)
        assert (lira.online(phi, reference_phi, inside) == lira.online(phi, reference_phi, inside, pooled)).all()
        assert (lira.online(phi, reference_phi, inside) != lira.online(phi, reference_phi, inside, not pooled)).any()


def test_a_pooled_variance_is_unbiased_whatever_the_counts() -> None:
    """With S and no degrees of freedom taken off, or one, eight references would give .75 or .86 of it."""
    rng = np.random.default_rng(0)
    reference_phi, inside = rng.normal(rng.normal(0, 9, 4000), 2.0, (8, 4000)), rng.random((8, 4000)) < 0.5
    found = lira._variances(reference_phi, inside, pooled=True)
    assert found == pytest.approx(4.0, rel=0.03)


def test_online_reaches_the_best_possible_area_with_many_references() -> None:
    """Of two normal laws one standard deviation apart the best is Phi(1 / sqrt 2); the loss goes by how hard units are."""
    phi, reference_phi, inside, members = drawn(400, 4000, 1.0)
    best = stats.norm.cdf(1 / math.sqrt(2))
    for score in (lira.online, lira.offline):
        assert overfitted.area(score(phi, reference_phi, inside), members) == pytest.approx(best, abs=0.02)
    assert overfitted.area(phi, members) < 0.62


def test_pooling_is_what_makes_few_references_work() -> None:
    phi, reference_phi, inside, members = drawn(6, 6000, 1.5)
    pooled = overfitted.area(lira.online(phi, reference_phi, inside, True), members)
    own = overfitted.area(lira.online(phi, reference_phi, inside, False), members)
    assert pooled > own + 0.03


def test_at_chance_where_membership_moves_nothing_and_under_shuffled_truth() -> None:
    phi, reference_phi, inside, members = drawn(16, 4000, 0.0)
    for score in (lira.online, partial(lira.online, shrunk=True), lira.offline):
        assert abs(overfitted.area(score(phi, reference_phi, inside), members) - 0.5) < 0.03
    phi, reference_phi, inside, members = drawn(16, 4000, 2.0)
    assert abs(overfitted.area_of_shuffled(lira.online(phi, reference_phi, inside), members) - 0.5) < 0.01


def test_far_tails_stay_finite_and_in_order() -> None:
    _, reference_phi, inside, _ = drawn(16, 5, 1.0)
    scores = [lira.offline(np.full(5, at), reference_phi, inside) for at in (-500.0, -100.0, 0.0, 5.0, 8.0)]
    assert np.isfinite(scores).all()
    for low, high in itertools.pairwise(scores):
        assert (low < high).all()


def test_a_unit_on_one_side_of_all_references_takes_the_usual_distance() -> None:
    phi, reference_phi, inside, _ = drawn(8, 40, 1.0)
    inside[:, 0], inside[:, 1] = True, False
    means_in = [reference_phi[inside[:, unit], unit].mean() for unit in range(2, 40)]
    means_out = [reference_phi[~inside[:, unit], unit].mean() for unit in range(2, 40)]
    distance = float(np.mean(np.subtract(means_in, means_out)))
    s_in, s_out = (math.sqrt(naive_pooled(reference_phi, chosen)) for chosen in (inside, ~inside))
    online = lira.online(phi, reference_phi, inside)
    for unit, mean_in in ((0, reference_phi[:, 0].mean()), (1, reference_phi[:, 1].mean() + distance)):
        log_in = stats.norm.logpdf(phi[unit], mean_in, s_in)
        assert online[unit] == pytest.approx(log_in - stats.norm.logpdf(phi[unit], mean_in - distance, s_out), abs=1e-9)


# Distances that are shrunk.


def moved_differently(
    references: int, units: int, seed: int
) -> tuple[Floats, Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    """Confidences that membership raises by .8 on average, and by a gamma law of its own for each unit."""
    rng = np.random.default_rng(seed)
    inside = rng.permuted(np.tile(np.arange(references) % 2 == 0, (units, 1)), axis=1).T
    hardness, shift, members = rng.normal(2, 2, units), rng.gamma(2, 0.4, units), rng.random(units) < 0.5
    reference_phi = hardness + shift * inside + rng.normal(0, 0.8, (references, units))
    return hardness + shift * members + rng.normal(0, 0.8, units), reference_phi, inside, members


def test_shrunk_means_are_the_likeliest_unit_by_unit() -> None:
    """Of the law that says: means with errors of normal law, distances of normal law over units. Solved by least squares."""
    rng = np.random.default_rng(3)
    inside = rng.random((7, 25)) < 0.5
    inside[0], inside[1] = True, False
    reference_phi = rng.normal(1, 2, 25) * inside + rng.normal(0, 1, (7, 25)) * np.where(inside, 1, 0.5)
    variance_in, variance_out = naive_pooled(reference_phi, inside), naive_pooled(reference_phi, ~inside)
    ins = [reference_phi[inside[:, unit], unit] for unit in range(25)]
    outs = [reference_phi[~inside[:, unit], unit] for unit in range(25)]
    distances = [one.mean() - other.mean() for one, other in zip(ins, outs, strict=True)]
    errors = [variance_in / len(one) + variance_out / len(other) for one, other in zip(ins, outs, strict=True)]
    spread = np.var(distances) - np.mean(errors)
    assert spread > 0, "or there is nothing to weigh"
    mean_in, mean_out = lira._shrunk(reference_phi, inside)
    for unit, (one, other) in enumerate(zip(ins, outs, strict=True)):
        roots = np.sqrt([variance_in / len(one), variance_out / len(other), spread])
        design = np.array([[1, 0], [0, 1], [1, -1]]) / roots[:, None]
        likeliest, *_ = np.linalg.lstsq(design, [one.mean(), other.mean(), np.mean(distances)] / roots)
        assert [mean_in[unit], mean_out[unit]] == pytest.approx(likeliest, abs=1e-9)


@pytest.mark.parametrize(("references", "gained"), [(4, 0.02), (8, 0.015), (16, 0.004), (64, -0.002)])
def test_shrinking_helps_where_references_are_few_and_harms_nowhere(references: int, gained: float) -> None:
    gains = []
    for seed in range(5):
        phi, reference_phi, inside, members = moved_differently(references, 3000, seed)
        usual = overfitted.area(lira.online(phi, reference_phi, inside), members)
        gains.append(overfitted.area(lira.online(phi, reference_phi, inside, shrunk=True), members) - usual)
    assert np.mean(gains) > gained
    assert min(gains) > -0.003


def test_with_few_references_the_shrunk_score_is_better_than_the_loss_where_the_papers_is_not() -> None:
    """Members are moved alike, and units are not hard unlike: distances are all noise."""
    rng = np.random.default_rng(0)
    units, references = 6000, 4
    inside = rng.permuted(np.tile(np.arange(references) % 2 == 0, (units, 1)), axis=1).T
    members, hardness = rng.random(units) < 0.5, rng.normal(0, 0.5, units)
    reference_phi = hardness + 0.6 * inside + rng.normal(0, 1, inside.shape)
    phi = hardness + 0.6 * members + rng.normal(0, 1, units)
    usual, shrunk = (lira.online(phi, reference_phi, inside, shrunk=shrunk) for shrunk in (False, True))
    loss = overfitted.area(phi, members)
    assert overfitted.area(usual, members) < loss - 0.02
    assert overfitted.area(shrunk, members) > overfitted.area(usual, members) + 0.02


def test_the_more_references_the_less_is_shrunk() -> None:
    moved = []
    for references in (4, 16, 64, 256, 1024):
        phi, reference_phi, inside, _ = moved_differently(references, 400, 0)
        usual, shrunk = (lira.online(phi, reference_phi, inside, True, shrunk=shrunk) for shrunk in (False, True))
        moved.append(float(np.abs(usual - shrunk).mean()))
    assert all(more > 1.5 * less for more, less in itertools.pairwise(moved))
    assert moved[-1] < 0.01


def test_distances_that_vary_by_noise_alone_become_one() -> None:
    _, reference_phi, inside, _ = drawn(4, 3000, 1.0, seed=1)
    mean_in, mean_out = lira._shrunk(reference_phi, inside)
    assert np.std(mean_in - mean_out) < 0.15 * np.std(np.subtract(*lira._completed(reference_phi, inside)))


def test_a_unit_on_one_side_of_all_references_is_none_to_shrink() -> None:
    _, reference_phi, inside, _ = drawn(8, 40, 1.0)
    inside[:, 0], inside[:, 1] = True, False
    for one, other in zip(lira._shrunk(reference_phi, inside), lira._completed(reference_phi, inside), strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=1e-12)


def test_a_single_unit_has_only_its_own_distance() -> None:
    phi, reference_phi, inside, _ = drawn(8, 1, 1.0)
    usual, shrunk = (lira.online(phi, reference_phi, inside, shrunk=shrunk) for shrunk in (False, True))
    assert shrunk == pytest.approx(usual, abs=1e-12)


def test_offline_does_not_look_at_the_references_inside() -> None:
    phi, reference_phi, inside, _ = drawn(8, 40, 1.0)
    other = np.where(inside, 1e3, reference_phi)
    assert (lira.offline(phi, reference_phi, inside) == lira.offline(phi, other, inside)).all()


def test_the_target_among_its_own_references_is_refused() -> None:
    """Otherwise each unit's own confidence would be on its true side, and the attack would detect its own input."""
    phi, reference_phi, inside, _ = drawn(8, 40, 0.0)
    reference_phi[3] = phi
    for score in (lira.online, lira.offline):
        with pytest.raises(UsageError, match="reference 3 gives every unit the target's own"):
            score(phi, reference_phi, inside)


def test_what_cannot_be_a_set_of_references_is_refused() -> None:
    phi, reference_phi, inside, _ = drawn(4, 6, 1.0)
    with pytest.raises(UsageError, match="of shape"):
        lira.online(phi, reference_phi.T, inside)
    with pytest.raises(UsageError, match="of shape"):
        lira.online(phi, reference_phi, inside[:2])
    with pytest.raises(UsageError, match="not finite"):
        lira.online(phi, np.where(inside, np.nan, reference_phi), inside)
    with pytest.raises(UsageError, match="train more"):
        lira.online(phi, reference_phi, np.zeros_like(inside))
    with pytest.raises(UsageError, match="no variance"):
        lira.online(phi, reference_phi[:2], np.array([[True] * 6, [False] * 6]))


def test_confidences_that_are_all_the_same_give_no_infinities() -> None:
    inside = np.tile([[True], [False]], (2, 3))
    for shrunk in (False, True):
        assert np.isfinite(lira.online(np.arange(3.0), np.zeros((4, 3)), inside, shrunk=shrunk)).all()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_federation_that_learns_by_heart_is_caught(tmp_path: Path) -> None:
    ran = overfitted.run(tmp_path / "run", {"federation.rounds": 8, "method.rank": 8}, clients=3, each=30)
    case, members = overfitted.case(ran, "outsider"), ran[0].assembly.audit_pool.members
    found = lira.run(case, Settings(references=8))
    assert overfitted.area(found.scores, members) > 0.7
    assert found.measured == {"references": 8}
    given = lira._confidences(case, Settings(references=8))
    np.testing.assert_array_equal(found.scores, lira.online(*given, shrunk=True))
    assert (found.scores != lira.online(*given)).any()
    assert overfitted.area(lira.run_offline(case, Settings(references=8)).scores, members) > 0.7
