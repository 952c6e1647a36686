"""RMIA against its definition in loops, the choice of `a` without the target, and a federation that learns by heart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attacks import rmia
from attacks.adversary.case import Settings
from secure_fed.errors import UsageError
from tests.attacks import overfitted
from tests.cells import every

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
MARGINALS = (rmia.online_marginal, rmia.offline_marginal)


def drawn(
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

    def sigmoid(value: float) -> float:
        return 1 / (1 + float(np.exp(-value)))

    def without(confidences: list[float]) -> float:
        return ((1 + a) * float(np.mean([sigmoid(one) for one in confidences])) + 1 - a) / 2

    rho_z = [
        sigmoid(z[j]) / without([float(z_reference[s, j]) for s in range(len(z_reference))]) for j in range(len(z))
    ]
    found = []
    for i in range(len(phi)):
        ins = [float(reference_phi[s, i]) for s in range(len(inside)) if inside[s, i]]
        outs = [float(reference_phi[s, i]) for s in range(len(inside)) if not inside[s, i]]
        both = (np.mean([sigmoid(one) for one in ins]) + np.mean([sigmoid(one) for one in outs])) / 2
        rho_x = sigmoid(phi[i]) / (both if online else without(outs))
        found.append(sum(rho_x / one > gamma for one in rho_z) / len(rho_z))
    return found


@every("gamma", [1.0, 1.3])
@every("a", [0.0, 0.3, 1.0])
@every("marginal", MARGINALS)
def test_scores_are_the_definition_pair_by_pair(marginal: rmia.Marginal, a: float, gamma: float) -> None:
    *given, _ = drawn()
    found = rmia.scores(*given, a=a, marginal=marginal, gamma=gamma)
    assert found.tolist() == naive(*given, a=a, gamma=gamma, online=marginal is rmia.online_marginal)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_members_score_higher_and_shuffled_truth_is_at_chance(marginal: rmia.Marginal) -> None:
    *given, members = drawn(16, 2000, 500, shift=1.5)
    found = rmia.scores(*given, a=0.5, marginal=marginal)
    assert overfitted.area(found, members) > 0.75
    assert overfitted.area(found, members) > overfitted.area(given[0], members) + 0.05  # than the loss alone
    assert abs(overfitted.area_of_shuffled(found, members) - 0.5) < 0.02
    *given, members = drawn(16, 2000, 500, shift=0.0)
    assert abs(overfitted.area(rmia.scores(*given, a=0.5, marginal=marginal), members) - 0.5) < 0.04


def test_gamma_changes_no_order_but_only_where_scores_are_alike() -> None:
    *given, _ = drawn(8, 500, 2000)
    low, high = (rmia.scores(*given, a=0.5, gamma=gamma) for gamma in (1.0, 1.5))
    order = np.lexsort((high, low))
    assert (np.diff(high[order]) >= 0).all()
    *given, _ = drawn(8, 500, 2000, shift=0.02, seed=1)
    quiet = [one / 50 + 4 if one.dtype == float else one for one in given]  # a model that hardly memorises
    assert len(np.unique(rmia.scores(*quiet, a=1.0, gamma=2.0))) == 1
    assert len(np.unique(rmia.scores(*quiet, a=1.0, gamma=1.0))) > 100


def test_a_is_the_one_that_serves_references_best() -> None:
    """Each reference attacked with the others, the areas added up by hand."""
    _, reference_phi, inside, _, z_reference, _ = drawn(6, 150, 80, shift=2.0)
    areas = []
    for a in rmia.CANDIDATES:
        total = 0.0
        for target in range(6):
            rest = [s for s in range(6) if s != target]
            found = np.array(
                naive(
                    reference_phi[target],
                    reference_phi[rest],
                    inside[rest],
                    z_reference[target],
                    z_reference[rest],
                    a,
                    1.0,
                    online=False,
                )
            )
            total += overfitted.area(found, inside[target])
        areas.append(total)
    assert max(areas) > min(areas)
    assert rmia.tuned_a(reference_phi, inside, z_reference) == rmia.CANDIDATES[int(np.argmax(areas))]


def test_a_is_not_guessed_from_too_few_references() -> None:
    _, reference_phi, inside, _, z_reference, _ = drawn(3)
    assert rmia.tuned_a(reference_phi, inside, z_reference) == rmia.UNTUNED_A


def test_a_unit_on_one_side_of_all_references_has_the_mean_there_is() -> None:
    _, reference_phi, inside, *_ = drawn()
    inside[:, 0], inside[:, 1] = True, False
    p = 1 / (1 + np.exp(-reference_phi))
    online, offline = (marginal(reference_phi, inside, 0.3) for marginal in MARGINALS)
    assert online[:2] == pytest.approx(p[:, :2].mean(0))
    assert offline[0] == pytest.approx(p[:, 0].mean())
    assert offline[1] == pytest.approx((1.3 * p[:, 1].mean() + 0.7) / 2)


def test_probabilities_too_small_for_a_float_stay_in_order() -> None:
    _, reference_phi, inside, z, z_reference, _ = drawn(units=3)
    found = rmia.scores(np.array([-900.0, -800.0, 5.0]), reference_phi, inside, z, z_reference, a=1.0)
    assert np.isfinite(found).all()
    assert found[0] <= found[1] < found[2]


def test_the_target_among_its_own_references_and_a_wrong_population_are_refused() -> None:
    phi, reference_phi, inside, z, z_reference, _ = drawn()
    with pytest.raises(UsageError, match="population of 60"):
        rmia.scores(phi, reference_phi, inside, z, z_reference[:2], a=0.5)
    with pytest.raises(UsageError, match="population of 0"):
        rmia.scores(phi, reference_phi, inside, z[:0], z_reference[:, :0], a=0.5)
    with pytest.raises(UsageError, match="confidence of the population is not finite"):
        rmia.scores(phi, reference_phi, inside, np.append(z[:-1], np.nan), z_reference, a=0.5)
    reference_phi[2] = phi
    with pytest.raises(UsageError, match="the target is among its references, or no training moved"):
        rmia.scores(phi, reference_phi, inside, z, z_reference, a=0.5)


@pytest.mark.nightly
def test_a_federation_that_learns_by_heart_is_caught(tmp_path: Path) -> None:
    ran = overfitted.run(tmp_path / "run", {"federation.rounds": 15, "method.rank": 8}, clients=5, each=40)
    found = rmia.run(overfitted.case(ran, "outsider"), Settings(references=8))
    assert overfitted.area(found.scores, ran[0].assembly.audit_pool.members) > 0.75
    assert found.measured["population"] == 100
    assert found.measured["a"] in rmia.CANDIDATES


def test_a_ratio_that_only_equals_anothers_is_not_above_it() -> None:
    """Units that are the population itself, seen by references of which none was trained on the ones asked about."""
    _, _, _, z, z_reference, _ = drawn()
    phi = np.append(z, 0.3)
    reference_phi = np.column_stack([z_reference, z_reference[:, 0]])
    inside = np.zeros(reference_phi.shape, dtype=bool)
    inside[0, -1] = True  # so that they are references of something
    found = rmia.scores(phi, reference_phi, inside, z, z_reference, a=0.3, marginal=rmia.offline_marginal)
    assert sorted(found[:-1]) == [place / 60 for place in range(60)]
