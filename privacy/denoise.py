"""Estimates of a low-rank matrix from its noised release; the distribution of the noise is public.

Post-processing: everything here is a function of the release, its shape and the public noise level, so it costs no privacy.

Let Y = X + s Z be m x n, Z of independent N(0, 1), M = max(m, n), beta = min(m, n) / M. Noise alone has singular values up to
s (sqrt(m) + sqrt(n)), so the best approximation of Y of some rank ("truncate") keeps directions of pure noise, at the noise's
size. Of all functions of the singular values, the function of Gavish and Donoho, "Optimal Shrinkage of Singular Values" (2017),
section III.A, has asymptotically the least Frobenius loss ("shrink"): with y = sigma / (s sqrt(M)),

    sigma  ->  s sqrt(M) sqrt((y^2 - beta - 1)^2 - 4 beta) / y     for y > 1 + sqrt(beta), else 0.

A singular value of X up to `visible(shape, s)` = s (m n)^(1/4) leaves no trace above the noise, and no method finds it.

The singular vectors of a large matrix come from few matrix products (`leading`), for any matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from privacy.errors import PlanError

Shape = tuple[int, int]
Product = Callable[[Tensor], Tensor]
Triplets = tuple[Tensor, Tensor, Tensor]

SMALLEST = 256  # below this side a full decomposition is as fast
_MORE = 8  # columns in a block beyond the requested ones
_GROWTH = 1.25  # of the basis between two checks of the result
_TOLERANCE = 2.0**-23  # of the guarantee
_LEAST = 1e-6  # singular values below this share of the largest are rounding errors of float32 inputs


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


def _require_std(noise_std: float) -> None:
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise PlanError(f"the standard deviation of the noise is {noise_std}, but it must be finite and at least 0")


def leading(times: Product, transposed: Product, shape: Shape, count: int, device: torch.device) -> Triplets | None:
    """U (m, count), S (count,) falling and Vt (count, n) of a matrix M given by its products; None if not found.

    times: (n, b) -> M x, transposed: (m, b) -> M^T x, both float64.

    Block Lanczos iteration (Golub and Underwood, 1977) on M^T M with full orthogonalisation, from a fixed Gaussian block with a
    few more columns than requested, in float64. After k columns it knows the best approximations of the leading vectors in

        span{G, M^T M G, (M^T M)^2 G, ...},

    and continues until they are accurate enough. A full decomposition takes O(m n min(m, n)) operations, this one O(m n k); k
    is about 60 where the leading values stand out, and 300 to 500 for a matrix of 1024 x 1024 or 4096 x 4096 of pure noise.

    Guarantee for the returned triplets (u_i, s_i, v_i), with |M| the largest singular value:

        U and V have orthonormal columns, M v_i = s_i u_i, and |M^T u_i - s_i v_i| <= 2^-23 |M|, measured on the result itself.

    So they are exact for a matrix that differs from M by the rounding of float32 numbers. That they are the *leading* ones is
    certain except for a set of start blocks of probability zero: no leading vector is orthogonal to a Gaussian block, and as
    the block has more columns than requested, equal values are all found. Where the check fails, or k would approach the size
    of the matrix, the result is None, and the caller decomposes the whole matrix.
    """
    block, most = count + _MORE, min(shape) // 2
    if not 0 < 4 * block <= most or min(shape) < SMALLEST:
        return None
    gaussian = torch.randn(shape[1], block, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(gaussian.to(device)).Q
    inner = basis.new_zeros(0, 0)  # V^T M^T M V
    looked = 3 * block
    while (k := basis.shape[1]) <= most:
        image = transposed(times(basis[:, -block:]))
        seen = basis.T @ image
        rest = image - basis @ seen
        inner = _bordered(inner, seen)
        if k >= looked:
            looked = round(k * _GROWTH)
            chosen = _good(inner, rest, count)
            if chosen is not None:
                return _checked(times, transposed, basis @ chosen)
        following = torch.linalg.qr(rest).Q
        following = torch.linalg.qr(following - basis @ (basis.T @ following)).Q  # again: `rest` may be rounding alone
        basis = torch.cat([basis, following], 1)
    return None


def _bordered(inner: Tensor, seen: Tensor) -> Tensor:
    """The next symmetric matrix (k, k), from the previous one and its new columns (k, b)."""
    k, block = seen.shape
    whole = seen.new_zeros(k, k)
    whole[: k - block, : k - block] = inner
    whole[:, k - block :] = seen
    whole[k - block :, :] = seen.T
    return whole


def _good(inner: Tensor, rest: Tensor, count: int) -> Tensor | None:
    """(k, count): the leading vectors' coordinates in the basis, if the last block's remainder shows them accurate enough.

    The residual |M^T M v - s^2 v| of a vector is `rest` times its coordinates in the last block; |M^T u - s v| is 1/s times as
    long.
    """
    squares, found = torch.linalg.eigh(inner)
    squares, found = squares[-count:], found[:, -count:]
    largest = squares[-1].clamp(min=0).sqrt()
    sizes = squares.clamp(min=0).sqrt().clamp(min=_LEAST * largest)
    off = (rest @ found[-rest.shape[1] :]).norm(dim=0)
    return found.flip(1) if bool((off <= 0.5 * _TOLERANCE * largest * sizes).all()) else None


def _checked(times: Product, transposed: Product, v: Tensor) -> Triplets | None:
    """The triplets of M in the span of `v` (n, count), if they meet the guarantee of `leading`."""
    q, r = torch.linalg.qr(times(v))
    left, s, right = torch.linalg.svd(r)
    u, vt = q @ left, right @ v.T
    off = (transposed(u) - vt.T * s).norm(dim=0)
    return (u, s, vt) if bool((off <= _TOLERANCE * s[0]).all()) else None
