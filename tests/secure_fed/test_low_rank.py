"""Low-rank algebra against the dense decomposition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secure_fed.tensors.low_rank import Svd, balanced, recompressed, right_orthonormal, tangent, truncated
from secure_fed.tensors.tensors import LowRank
from tests.cells import every
from tests.golden import refused

torch.set_num_threads(1)


def product(rows: int, columns: int, rank: int, seed: int) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator))


def formed(svd: Svd) -> Tensor:
    return svd.u * svd.s @ svd.vt


def best(matrix: Tensor, rank: int) -> Tensor:
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


def exactly(matrix: LowRank) -> Tensor:
    return matrix.left.double() @ matrix.right.double()


@every(("rows", "columns"), [(40, 25), (25, 40), (30, 30)])
@every("inner", [4, 12, 16, 17, 24, 40])
@every("dense", [False, True])
def test_both_paths_find_the_best_approximation(rows: int, columns: int, inner: int, dense: bool) -> None:
    matrix = product(rows, columns, inner, seed=inner)
    want = exactly(matrix)
    found = truncated(want.float() if dense else matrix, 4)
    scale = want.norm()
    assert (formed(found) - best(want, 4)).norm() < (1e-5 if dense else 1e-12) * scale
    assert torch.allclose(found.s, torch.linalg.svdvals(want)[:4], rtol=1e-5 if dense else 1e-10)


def test_the_factored_path_forms_no_matrix() -> None:
    """A 60000 x 60000 float64 matrix would need 29 GB."""
    found = truncated(product(60_000, 60_000, 6, seed=0), 4)
    assert found.u.shape == (60_000, 4)
    assert found.s[0] > found.s[3] > 0


seeds, sizes = st.integers(0, 10_000), st.integers(1, 12)


@settings(max_examples=40)
@given(sizes, sizes, st.integers(0, 12), st.integers(0, 14), st.integers(0, 12), st.booleans(), seeds)
def test_what_truncated_promises(
    rows: int, columns: int, live: int, inner: int, rank: int, dense: bool, seed: int
) -> None:
    """For any shape, any true rank including zero, and any requested rank."""
    rank, live = min(rank, rows, columns), min(live, inner, rows, columns)
    matrix = product(rows, columns, inner, seed)
    matrix = LowRank(matrix.left * (torch.arange(inner) < live), matrix.right)
    want, scale = exactly(matrix), 1 + exactly(matrix).norm()
    found = truncated(want if dense else matrix, rank)
    assert (found.u.shape, found.s.shape, found.vt.shape) == ((rows, rank), (rank,), (rank, columns))
    assert (formed(found) - best(want, rank)).norm() < 1e-5 * scale
    assert torch.allclose(found.vt @ found.vt.T, torch.eye(rank, dtype=torch.float64), atol=1e-9)
    alive = found.s > 0
    assert int(alive.sum()) <= live
    assert torch.allclose(found.u.T @ found.u, torch.diag(alive.double()), atol=1e-9)
    assert (found.s.diff() <= 0).all()
    for b, a in (balanced(found), right_orthonormal(found)):
        assert (b @ a - formed(found)).norm() < 1e-9 * scale
        assert (a.norm(dim=1) > 0).all()


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 5), seeds)
def test_tangent_is_what_a_change_of_the_factors_can_make(
    rows: int, columns: int, inner: int, live: int, seed: int
) -> None:
    """`tangent` is the least-squares fit by all X A + B Y, also if B has deficient rank.

    `reach` has one column for each entry of X and of Y.
    """
    made = product(rows, columns, inner, seed)
    made = LowRank(made.left * (torch.arange(inner) < live), made.right)
    step = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    b, a = made.left.double(), made.right.double()
    reach = torch.from_numpy(np.hstack([np.kron(np.eye(rows), a.T), np.kron(b, np.eye(columns))]))
    want = (reach @ (torch.linalg.pinv(reach, rtol=1e-8) @ step.flatten())).view(rows, columns)
    found = tangent(step, made)
    assert found.rank <= 2 * inner
    assert torch.allclose(found.dense(), want, atol=1e-6 * (1 + float(step.norm())))
    assert torch.allclose(tangent(found, made).dense(), found.dense(), atol=1e-9)


@settings(max_examples=20)
@given(st.integers(2, 10), st.integers(2, 10), seeds)
def test_signs_do_not_depend_on_the_path(rows: int, columns: int, seed: int) -> None:
    rank = min(rows, columns) // 2
    matrix = product(rows, columns, rank, seed)
    one, two = truncated(matrix, rank), truncated(exactly(matrix), rank)
    assert torch.allclose(one.u, two.u, atol=1e-5)
    assert torch.allclose(one.vt, two.vt, atol=1e-5)
    assert (one.u.gather(0, one.u.abs().argmax(0)[None]) > 0).all()


def test_of_equally_large_entries_the_first_is_positive() -> None:
    column = torch.tensor([[-1.0], [1.0], [1.0 + 1e-9], [-1.0]], dtype=torch.float64)
    found = truncated(column @ torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64), 1)
    assert found.u[0, 0] > 0
    assert torch.allclose(found.u[:, 0], torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64))
    assert found.vt[0, 0] == pytest.approx(-1.0)


def test_balanced_shares_the_size() -> None:
    b, a = balanced(truncated(product(8, 6, 3, seed=1), 3))
    assert torch.allclose(b.T @ b, a @ a.T, atol=1e-10)


def test_rounding_noise_is_not_a_direction() -> None:
    """In a float32 matrix of true rank 2, the singular values from the third on are rounding errors and count as zero."""
    noisy = product(50, 50, 2, seed=4).dense()
    assert int((truncated(noisy, 5).s > 0).sum()) == 2


def test_same_answer_twice_and_no_use_of_the_global_random_state() -> None:
    matrix = LowRank(product(9, 7, 2, seed=5).left, product(9, 7, 2, seed=6).right)
    state = torch.random.get_rng_state()
    one, two = truncated(matrix, 5), truncated(matrix, 5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_a_rank_the_matrix_cannot_have_is_refused() -> None:
    with refused(ValueError):
        truncated(torch.zeros(4, 6), 5)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 0.0])
def test_recompressed_is_the_same_matrix(scale: float) -> None:
    """Also if the rank is below the inner size, and for the zero matrix."""
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(20, 4, generator=generator), torch.randn(4, 15, generator=generator)
    product = LowRank(torch.cat([left, left], 1) * scale, torch.cat([right, 2 * right], 0))
    found = recompressed(product)
    assert (found.rank, found.dtype) == (8, torch.float32)
    want = left.double() @ right.double() * 3 * scale
    assert torch.allclose(found.dense().double(), want, rtol=1e-5, atol=1e-6 * scale)
    assert torch.equal(found.left, recompressed(product).left)


@every("inner", [20, 120, 200])
@every("dense", [False, True])
def test_large_matrices_are_not_decomposed_in_full(inner: int, dense: bool) -> None:
    """The best approximation within float32's rounding, for few factors, factors too many for a QR, and dense matrices."""
    made = product(300, 320, inner, seed=inner)
    matrix = LowRank(made.left * 0.9 ** torch.arange(inner), made.right)
    want = exactly(matrix)
    given_ = want.float() if dense else matrix

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("decomposed in full")

    with pytest.MonkeyPatch.context() as patched:
        if dense or inner > 100:
            patched.setattr("secure_fed.tensors.low_rank._decomposed", never)
        found = truncated(given_, 4)
    assert (formed(found) - best(want, 4)).norm() < 1e-6 * want.norm()
    assert (found.u.gather(0, found.u.abs().argmax(0)[None]) > 0).all()
