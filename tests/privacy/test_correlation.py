"""Correlated noise: its sensitivity against brute force, its errors against dense matrices and published figures, its epsilon
against dp_accounting, and its law."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.signal import lfilter

from privacy import accounting, correlation
from privacy.correlation import INDEPENDENT, CorrelatedRows, Correlation, best, square_root
from privacy.entropy import KeyedEntropy, SeededEntropy
from privacy.errors import PlanError
from tests.cells import every

Matrix = NDArray[np.float64]
DELTA = 1e-5
MADE = [
    INDEPENDENT,
    square_root(2),
    square_root(3, 0.9),
    square_root(6),
    square_root(8, 0.999),
    Correlation((0.6, 0.6, math.sqrt(0.28))),
]


def dense(made: Correlation, rounds: int) -> Matrix:
    """(rounds, rounds): C, entry by entry."""
    found = np.zeros((rounds, rounds))
    for row in range(rounds):
        for back in range(min(made.band, row + 1)):
            found[row, row - back] = made.column[back]
    return found


def workload(rounds: int, momentum: float) -> Matrix:
    """(rounds, rounds): A, with row t the model after round t of a server with `v = momentum v + x; model += v`."""
    found = np.zeros((rounds, rounds))
    for unit in range(rounds):
        velocity = model = 0.0
        for row in range(rounds):
            velocity = momentum * velocity + (row == unit)
            model += velocity
            found[row, unit] = model
    return found


def patterns(rounds: int, gap: int, most: int) -> list[tuple[int, ...]]:
    """All sets of up to `most` rounds that are at least `gap` apart."""
    return [
        chosen
        for count in range(1, most + 1)
        for chosen in combinations(range(rounds), count)
        if all(later - earlier >= gap for earlier, later in pairwise(chosen))
    ]


# Sensitivity.


@every("made", MADE)
@every("gap, most", [(1, 1), (1, 9), (2, 3), (3, 2), (3, 9), (4, 2), (9, 1), (20, 3)])
def test_the_exposure_is_the_largest_over_all_patterns_for_every_leading_block(
    made: Correlation, gap: int, most: int
) -> None:
    """Some bands are longer than the gap, so that the columns of a pattern overlap."""
    found = made.exposures(9, gap, most)
    for rounds in range(1, 10):
        c = dense(made, rounds)
        naive = max(np.sum(c[:, list(own)].sum(axis=1) ** 2) for own in patterns(rounds, gap, most))
        assert found[rounds] == pytest.approx(naive, rel=1e-12)
    assert found[0] == 0.0


@given(st.floats(0, 0.999), st.integers(1, 1200))
def test_columns_are_positive_never_grow_and_have_norm_one(momentum: float, band: int) -> None:
    """The proofs in `correlation` rely on these properties; `Correlation` refuses any other column."""
    column = np.array(square_root(band, momentum).column)
    assert len(column) == band
    assert (np.diff(column) <= 0).all()
    assert column[-1] > 0
    assert np.linalg.norm(column) == pytest.approx(1, abs=1e-12)


@every("momentum", [0.0, 0.5, 0.9, 0.999])
def test_it_is_the_square_root_of_the_workload(momentum: float) -> None:
    c = dense(square_root(30, momentum), 30)
    np.testing.assert_allclose(c @ c / c[0, 0] ** 2, workload(30, momentum), rtol=1e-9)


@every(
    "ask",
    [
        *(
            lambda column=column: Correlation(column)
            for column in ((), (0.6,), (0.6, 0.8), (0.8, -0.6), (1.0, 0.0), (math.nan,), (math.inf,))
        ),
        *(lambda root=root: square_root(*root) for root in ((0, 0.0), (3, 1.0), (3, -0.1))),
        *(lambda turns=turns: INDEPENDENT.exposures(5, *turns) for turns in ((0, 1), (1, 0))),
    ],
)
def test_what_is_no_correlation_and_members_without_turns_are_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        ask()


# Errors.


@every("made", MADE)
@every("momentum", [0.0, 0.9])
def test_errors_are_those_of_dense_matrices(made: Correlation, momentum: float) -> None:
    inverse = np.linalg.inv(dense(made, 12))
    expected = np.linalg.norm(workload(12, momentum) @ inverse, axis=1)
    np.testing.assert_allclose(made.errors(12, momentum), expected, rtol=1e-9)
    np.testing.assert_allclose(made.weights(12), inverse[:, 0], atol=1e-12)


@every("momentum", [0.0, 0.9])
@every("band", [3, 1100])
def test_errors_of_many_rounds_are_those_of_a_filter(momentum: float, band: int) -> None:
    rounds, made = 1300, square_root(band, momentum)
    model = lfilter([1.0], [1.0, -1.0 - momentum, momentum], np.eye(1, rounds)[0])
    expected = np.sqrt(np.cumsum(np.square(lfilter([1.0], made.column, model))))
    np.testing.assert_allclose(made.errors(rounds, momentum), expected, rtol=1e-10)


@every("rounds, gap, independent, banded", [(20, 20, 3.24, 1.86), (100, 20, 15.9, 5.8), (1000, 100, 70.8, 12.1)])
def test_the_noise_over_all_models_is_that_of_published_mechanisms(
    rounds: int, gap: int, independent: float, banded: float
) -> None:
    """The root mean square over prefix sums: of independent noise, and of the banded square root with the best band."""
    most = -(-rounds // gap)
    bands = [correlation.noise(square_root(band), rounds, gap, most) for band in (1, 4, 8, 10, 12, 16, 20, gap)]
    assert bands[0] == correlation.noise(INDEPENDENT, rounds, gap, most) == pytest.approx(independent, rel=5e-3)
    assert min(bands) == pytest.approx(banded, rel=1e-2)


@every("rounds, gap, most", [(40, 10, 4), (120, 3, 40)])
def test_the_best_band_is_the_best_of_all_for_the_final_model(rounds: int, gap: int, most: int) -> None:
    for momentum in (0.0, 0.7):
        every_band = [
            correlation.final_noise(square_root(b, momentum), rounds, gap, most, momentum) for b in range(1, rounds + 1)
        ]
        found = best(rounds, gap, most, momentum)
        assert correlation.final_noise(found, rounds, gap, most, momentum) == pytest.approx(min(every_band), rel=5e-3)


# Epsilon.


@every("made", [square_root(3), square_root(7)])
def test_a_run_is_one_gaussian_to_dp_accounting(made: Correlation) -> None:
    """Its multiplier is z / s, with s from dense matrices and all patterns; the exposure s^2 need not be a whole number."""
    c, z = dense(made, 9), 1.1
    s = math.sqrt(max(np.sum(c[:, list(own)].sum(axis=1) ** 2) for own in patterns(9, 3, 3)))
    accountant = PLDAccountant(value_discretization_interval=1e-3).compose(GaussianDpEvent(z / s))
    found = accounting.epsilon(accounting.unamplified(z), made.exposures(9, 3, 3)[-1], DELTA)
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


# The noise itself.


def released(made: Correlation, rounds: int, shape: tuple[int, ...], std: float) -> Matrix:
    """(rounds, numbers): the releases of sums that are zero, with streams of one key."""
    source = KeyedEntropy(bytes(range(32)))
    noise, rows = CorrelatedRows(made, lambda round_: source.stream("sum", round_)), []
    for round_ in range(rounds):
        noised = noise.noised({"b": torch.zeros(3), "a": torch.zeros(shape)}, std, round_)
        rows.append(torch.cat([noised["a"].flatten(), noised["b"]]).double().numpy())
    return np.array(rows)


def law(rows: Matrix, made: Correlation, std: float) -> float:
    """The p-value of the test that C times the noise is standard normal, and independent between every two rounds."""
    white = dense(made, len(rows)) @ rows / std
    pairs = np.corrcoef(white)[np.triu_indices(len(rows), 1)]
    by_pair = 2 * stats.norm.sf(np.abs(pairs).max() * math.sqrt(rows.shape[1])) * len(pairs)
    return min(float(stats.kstest(white.flatten(), "norm").pvalue), float(by_pair))


@every("made", [square_root(4, 0.5), square_root(6)])
def test_the_noise_has_the_law_of_theory(made: Correlation) -> None:
    rows = released(made, 6, (40, 50), 0.3)
    assert law(rows, made, 0.3) > 1e-4
    assert law(rows, made, 0.2) < 1e-12
    assert law(rows, made, 0.45) < 1e-12
    assert law(rows, INDEPENDENT, 0.3) < 1e-12, "independent noise is not this"
    assert law(rows, square_root(made.band - 1, 0.5), 0.3) < 1e-4, "nor that of a narrower band"


def test_every_number_is_taken_back_from_the_stream_that_it_came_from() -> None:
    made = square_root(3)
    drawn = [SeededEntropy(1).stream("sum", r) for r in range(4)]
    z = [{name: stream.normal(shape) for name, shape in (("a", (7,)), ("b", (2, 2)))} for stream in drawn]
    rows, weights = CorrelatedRows(made, lambda round_: SeededEntropy(1).stream("sum", round_)), made.weights(4)
    for round_ in (1, 3, 3, 0, 2):  # rounds may be skipped and repeated
        found = rows.noised({"b": torch.ones(2, 2), "a": torch.zeros(7)}, 2.0, round_)
        for name, start in (("a", 0.0), ("b", 1.0)):
            expected = start + 2.0 * sum(weights[back] * z[round_ - back][name] for back in range(round_ + 1))
            np.testing.assert_allclose(found[name].numpy(), expected, atol=1e-5)
