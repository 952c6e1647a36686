"""Estimates of a low-rank matrix from its noised release; the distribution of the noise is public.

Post-processing: everything here is a function of the release, its shape and the public noise level, so it costs no privacy.

Let Y = X + s Z be m x n, Z of independent N(0, 1), M = max(m, n), beta = min(m, n) / M. Noise alone has singular values up to
s (sqrt(m) + sqrt(n)), so the best approximation of Y of some rank ("truncate") keeps directions of pure noise, at the noise's
size. Of all functions of the singular values, the function of Gavish and Donoho, "Optimal Shrinkage of Singular Values" (2017),
section III.A, has asymptotically the least Frobenius loss ("shrink"): with y = sigma / (s sqrt(M)),

    sigma  ->  s sqrt(M) sqrt((y^2 - beta - 1)^2 - 4 beta) / y     for y > 1 + sqrt(beta), else 0.

A singular value of X up to `visible(shape, s)` = s (m n)^(1/4) leaves no trace above the noise, and no method finds it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privacy.errors import PlanError
from privacy.leading import Shape, leading


def shrunk(singular_values: Tensor, shape: Shape, noise_std: float) -> Tensor:
    """The singular values of the estimate of X, from the singular values of Y (any number of them); unchanged without noise.

    The result grows with the value and never exceeds it, so the order is kept.
    """
    _require_std(noise_std)
    if noise_std == 0 or not singular_values.numel():
        return singular_values.clone()
    small, large = sorted(shape)
    low, high = 1 - math.sqrt(small / large), 1 + math.sqrt(small / large)
    y = (singular_values / (noise_std * math.sqrt(large))).clamp(min=high)
    # The formula divided by y, with its root factored: no precision is lost near the edge, nor by squaring a large y.
    kept = ((1 - (high / y).square()).clamp(min=0) * (1 - (low / y).square())).sqrt()
    return torch.where(y > high, singular_values * kept, 0.0)


def visible(shape: Shape, noise_std: float) -> float:
    """`shrunk` keeps part of X, in expectation, only where a singular value of X exceeds this: s (m n)^(1/4)."""
    _require_std(noise_std)
    return noise_std * math.sqrt(math.sqrt(shape[0] * shape[1]))


def denoised(matrix: Tensor, rank: int, noise_std: float, *, shrink: bool) -> tuple[Tensor, Tensor]:
    """Factors (m, rank) and (rank, n), float64, of an estimate of X of at most that rank.

    shrink: whether to shrink the singular values at `noise_std`; otherwise this is the best approximation (Eckart and Young).
    Directions that do not survive are zero in one of the factors.

    With V the first right singular vectors of Y (or left ones, whichever are shorter), the estimate is Y V diag(w) V^T, where
    w = shrunk(sigma) / sigma is at most 1: nothing is divided by a small number. For a large Y the vectors come from `leading`,
    exact up to float32's rounding of Y. Otherwise they are eigenvectors of Y^T Y, by LAPACK's direct solver for a range of
    eigenvalues: forming Y^T Y moves singular values by the order of 2^-26 of the largest, which is below that rounding too.
    """
    m, n = matrix.shape
    if not 0 <= rank <= min(m, n):
        raise PlanError(f"a {m} x {n} matrix has no approximation of rank {rank}; the rank goes up to {min(m, n)}")
    if m < n:
        left, right = denoised(matrix.T, rank, noise_std, shrink=shrink)
        return right.T, left.T
    y = matrix.double()
    found = leading(lambda x: y @ x, lambda x: y.T @ x, (m, n), rank, y.device)
    v = _top_eigenvectors(y.T @ y, rank) if found is None else found[2].T
    left = y @ v
    if shrink:
        sigma = torch.linalg.vector_norm(left, dim=0)
        left = left * torch.where(sigma > 0, shrunk(sigma, (m, n), noise_std) / sigma, 0.0)
    return left, v.T


def _top_eigenvectors(gram: Tensor, count: int) -> Tensor:
    """(n, count) orthonormal eigenvectors of the symmetric `gram`, largest eigenvalues first. Overwrites `gram`."""
    from scipy.linalg import eigh

    n = gram.shape[0]
    if count == 0:
        return gram.new_zeros(n, 0)
    symmetric = gram.cpu().numpy().T  # Fortran's order, without a copy
    _, vectors = eigh(symmetric, subset_by_index=(n - count, n - 1), overwrite_a=True)
    return torch.from_numpy(vectors[:, ::-1].copy()).to(gram.device)


def _require_std(noise_std: float) -> None:
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise PlanError(f"the standard deviation of the noise is {noise_std}, but it must be finite and at least 0")
