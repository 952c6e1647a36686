"""LiRA and RMIA: their definitions unit by unit, what shrinking gains, and federations that memorise."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import expit

from attacks import lira, rmia
from attacks.adversary.case import Settings
from secure_fed.errors import UsageError
from tests.attacks import overfitted
from tests.cells import every
from tests.golden import refused

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def drawn(references: int, units: int, shift: float, seed: int = 0) -> tuple[Floats, Floats, Bools, Bools]:
    """Confidences of a target and of references: N(hardness of the unit + shift if it was inside, 1); and who was."""
    rng = np.random.default_rng(seed)
    hardness = rng.normal(0, 3, units)
    inside = rng.permuted(np.tile(np.arange(references) % 2 == 0, (units, 1)), axis=1).T
    members = rng.random(units) < 0.5
    reference_phi = hardness + shift * inside + rng.normal(0, 1, (references, units))
    return hardness + shift * members + rng.normal(0, 1, units), reference_phi, inside, members


def naive_pooled(reference_phi: Floats, chosen: Bools) -> float:
    """Residual variance of a model with one mean for each unit, by a least-squares fit that knows no shortcut."""
    rows, columns = np.nonzero(chosen)
    design = (columns[:, None] == np.unique(columns)).astype(float)
    values = reference_phi[rows, columns]
    fitted, *_ = np.linalg.lstsq(design, values, rcond=None)
    residuals = values - design @ fitted
    return float(residuals @ residuals) / (len(values) - np.linalg.matrix_rank(design))


@pytest.mark.parametrize("pooled", [True, False])
def test_both_scores_are_the_definition_unit_by_unit(pooled: bool) -> None:
    """The offline one does not look at the references inside."""
    phi, reference_phi, inside, _ = drawn(10, 30, 1.0)
    online = lira.online(phi, reference_phi, inside, pooled)
    offline = lira.offline(phi, reference_phi, inside, pooled)
    assert (lira.offline(phi, np.where(inside, 1e3, reference_phi), inside, pooled) == offline).all()
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
    """That is what makes few references work."""
    for references, pooled in ((62, True), (64, False)):
        phi, reference_phi, inside, _ = drawn(references, 20, 1.0)
        assert (lira.online(phi, reference_phi, inside) == lira.online(phi, reference_phi, inside, pooled)).all()
        assert (lira.online(phi, reference_phi, inside) != lira.online(phi, reference_phi, inside, not pooled)).any()
    phi, reference_phi, inside, members = drawn(6, 6000, 1.5)
    both = (overfitted.area(lira.online(phi, reference_phi, inside, pooled), members) for pooled in (True, False))
    assert next(both) > next(both) + 0.03


def test_far_tails_stay_finite_and_in_order() -> None:
    """Also where all confidences are the same."""
    _, reference_phi, inside, _ = drawn(16, 5, 1.0)
    scores = [lira.offline(np.full(5, at), reference_phi, inside) for at in (-500.0, -100.0, 0.0, 5.0, 8.0)]
    assert np.isfinite(scores).all()
    for low, high in itertools.pairwise(scores):
        assert (low < high).all()
    inside = np.tile([[True], [False]], (2, 3))
    for shrunk in (False, True):
        assert np.isfinite(lira.online(np.arange(3.0), np.zeros((4, 3)), inside, shrunk=shrunk)).all()


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


def moved_differently(references: int, units: int, seed: int) -> tuple[Floats, Floats, Bools, Bools]:
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


@every(("references", "gained"), [(4, 0.02), (8, 0.015), (16, 0.004), (64, -0.002)])
def test_shrinking_helps_where_references_are_few_and_harms_nowhere(references: int, gained: float) -> None:
    gains = []
    for seed in range(5):
        phi, reference_phi, inside, members = moved_differently(references, 3000, seed)
        usual = overfitted.area(lira.online(phi, reference_phi, inside), members)
        gains.append(overfitted.area(lira.online(phi, reference_phi, inside, shrunk=True), members) - usual)
    assert np.mean(gains) > gained
    assert min(gains) > -0.003


def test_the_more_references_the_less_is_shrunk() -> None:
    """Distances that vary by noise alone become one; a single unit, or one on one side of all references, keeps its own."""
    moved = []
    for references in (4, 32, 256):
        phi, reference_phi, inside, _ = moved_differently(references, 400, 0)
        usual, shrunk = (lira.online(phi, reference_phi, inside, True, shrunk=shrunk) for shrunk in (False, True))
        moved.append(float(np.abs(usual - shrunk).mean()))
    assert all(more > 2 * less for more, less in itertools.pairwise(moved))
    _, reference_phi, inside, _ = drawn(4, 3000, 1.0, seed=1)
    mean_in, mean_out = lira._shrunk(reference_phi, inside)
    assert np.std(mean_in - mean_out) < 0.15 * np.std(np.subtract(*lira._completed(reference_phi, inside)))
    inside[:, 0], inside[:, 1] = True, False
    for one, other in zip(lira._shrunk(reference_phi, inside), lira._completed(reference_phi, inside), strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=1e-12)
    phi, reference_phi, inside, _ = drawn(8, 1, 1.0)
    usual, shrunk = (lira.online(phi, reference_phi, inside, shrunk=shrunk) for shrunk in (False, True))
    assert shrunk == pytest.approx(usual, abs=1e-12)


def test_what_cannot_be_a_set_of_references_is_refused() -> None:
    """With the target among them, each unit's own confidence would be on its true side."""
    phi, reference_phi, inside, _ = drawn(4, 6, 1.0)
    own = reference_phi.copy()
    own[3] = phi
    for given, chosen in (
        (reference_phi.T, inside),
        (reference_phi, inside[:2]),
        (np.where(inside, np.nan, reference_phi), inside),
        (reference_phi, np.zeros_like(inside)),
        (reference_phi[:2], np.array([[True] * 6, [False] * 6])),
        (own, inside),
    ):
        with refused(UsageError):
            lira.online(phi, given, chosen)
    with refused(UsageError):
        lira.offline(phi, own, inside)


@pytest.mark.nightly
def test_a_federation_that_learns_by_heart_is_caught_by_both(tmp_path: Path) -> None:
    ran = overfitted.run(tmp_path / "run", {"federation.rounds": 8, "method.rank": 8}, clients=3, each=30)
    case, members = overfitted.case(ran, "outsider"), ran[0].assembly.audit_pool.members
    found = lira.run(case, Settings(references=8))
    assert overfitted.area(found.scores, members) > 0.7
    assert found.measured == {"references": 8}
    given = lira._confidences(case, Settings(references=8))
    np.testing.assert_array_equal(found.scores, lira.online(*given, shrunk=True))
    assert (found.scores != lira.online(*given)).any()
    assert overfitted.area(lira.run_offline(case, Settings(references=8)).scores, members) > 0.7
    other = rmia.run(case, Settings(references=8))
    assert overfitted.area(other.scores, members) > 0.7
    assert other.measured["population"] == 100
    assert other.measured["a"] in rmia.CANDIDATES


# RMIA.


MARGINALS = (rmia.online_marginal, rmia.offline_marginal)


def with_population(
    references: int = 8, units: int = 40, population: int = 60, shift: float = 1.0, seed: int = 0
) -> tuple[Floats, Floats, Bools, Floats, Floats, Bools]:
    """phi, reference_phi, inside, population_phi, population_reference_phi, and who was a member of the target."""
    rng = np.random.default_rng(seed)
    hard, hard_z = rng.normal(1, 2, units), rng.normal(1, 2, population)
    inside = rng.permuted(np.tile(np.arange(references) % 2 == 0, (units, 1)), axis=1).T
    members = rng.random(units) < 0.5
    reference_phi = hard + shift * inside + rng.normal(0, 1, (references, units))
    z_reference = hard_z + rng.normal(0, 1, (references, population))
    phi, z = hard + shift * members + rng.normal(0, 1, units), hard_z + rng.normal(0, 1, population)
    return phi, reference_phi, inside, z, z_reference, members


def naive(
    phi: Floats,
    reference_phi: Floats,
    inside: Bools,
    z: Floats,
    z_reference: Floats,
    a: float,
    gamma: float,
    online: bool,
) -> list[float]:
    """Every x against every z, probabilities as they are."""

    def without(confidences: Floats) -> float:
        return ((1 + a) * float(expit(confidences).mean()) + 1 - a) / 2

    rho_z = [expit(one) / without(z_reference[:, j]) for j, one in enumerate(z)]
    found = []
    for i, one in enumerate(phi):
        ins, outs = reference_phi[inside[:, i], i], reference_phi[~inside[:, i], i]
        both = (expit(ins).mean() + expit(outs).mean()) / 2
        rho_x = expit(one) / (both if online else without(outs))
        found.append(sum(rho_x / other > gamma for other in rho_z) / len(rho_z))
    return found


@every("gamma", [1.0, 1.3])
@every("a", [0.0, 0.3, 1.0])
@every("marginal", MARGINALS)
def test_scores_are_the_definition_pair_by_pair(marginal: rmia.Marginal, a: float, gamma: float) -> None:
    *given, _ = with_population()
    found = rmia.scores(*given, a=a, marginal=marginal, gamma=gamma)
    assert found.tolist() == naive(*given, a=a, gamma=gamma, online=marginal is rmia.online_marginal)


def test_a_is_the_one_that_serves_references_best() -> None:
    """Each reference attacked with the others, the areas added up by hand; of too few references it is not guessed."""
    _, reference_phi, inside, _, z_reference, _ = with_population(6, 60, 40, shift=2.0)
    areas = []
    for a in rmia.CANDIDATES:
        total = 0.0
        for target in range(6):
            rest = [s for s in range(6) if s != target]
            others = reference_phi[rest], inside[rest]
            found = naive(reference_phi[target], *others, z_reference[target], z_reference[rest], a, 1.0, online=False)
            total += overfitted.area(np.array(found), inside[target])
        areas.append(total)
    assert max(areas) > min(areas)
    assert rmia.tuned_a(reference_phi, inside, z_reference) == rmia.CANDIDATES[int(np.argmax(areas))]
    assert rmia.tuned_a(reference_phi[:3], inside[:3], z_reference[:3]) == rmia.UNTUNED_A


def test_a_unit_on_one_side_of_all_references_has_the_mean_there_is() -> None:
    _, reference_phi, inside, *_ = with_population()
    inside[:, 0], inside[:, 1] = True, False
    p = 1 / (1 + np.exp(-reference_phi))
    online, offline = (marginal(reference_phi, inside, 0.3) for marginal in MARGINALS)
    assert online[:2] == pytest.approx(p[:, :2].mean(0))
    assert offline[0] == pytest.approx(p[:, 0].mean())
    assert offline[1] == pytest.approx((1.3 * p[:, 1].mean() + 0.7) / 2)


def test_probabilities_too_small_for_a_float_stay_in_order() -> None:
    _, reference_phi, inside, z, z_reference, _ = with_population(units=3)
    found = rmia.scores(np.array([-900.0, -800.0, 5.0]), reference_phi, inside, z, z_reference, a=1.0)
    assert np.isfinite(found).all()
    assert found[0] <= found[1] < found[2]


def test_the_target_among_its_own_references_and_a_wrong_population_are_refused() -> None:
    phi, reference_phi, inside, z, z_reference, _ = with_population()
    for population in ((z, z_reference[:2]), (z[:0], z_reference[:, :0]), (np.append(z[:-1], np.nan), z_reference)):
        with refused(UsageError):
            rmia.scores(phi, reference_phi, inside, *population, a=0.5)
    reference_phi[2] = phi
    with refused(UsageError):
        rmia.scores(phi, reference_phi, inside, z, z_reference, a=0.5)


def test_a_ratio_that_only_equals_anothers_is_not_above_it() -> None:
    """Units that are the population itself, seen by references of which none was trained on the ones asked about."""
    _, _, _, z, z_reference, _ = with_population()
    phi = np.append(z, 0.3)
    reference_phi = np.column_stack([z_reference, z_reference[:, 0]])
    inside = np.zeros(reference_phi.shape, dtype=bool)
    inside[0, -1] = True  # so that they are references of something
    found = rmia.scores(phi, reference_phi, inside, z, z_reference, a=0.3, marginal=rmia.offline_marginal)
    assert sorted(found[:-1]) == [place / 60 for place in range(60)]
