"""The best approximation of a matrix by one of small rank, and how it is split into two factors.

All functions compute in float64: it takes less than twice the time of float32 (benchmarks/low_rank.py), in a small part of a
round, and rounding needs no analysis. A large matrix is never decomposed in full for its first few singular vectors:
`privacy.denoise` finds them from products with it, exact for a matrix that differs from it by float32's rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from privacy import denoise
from privacy.denoise import Triplets, leading
from secure_fed.tensors.tensors import LowRank, Member, Tensors, dense

# Singular values below this share of the largest are the rounding of float32 inputs, not information.
_RESOLUTION = 1e-6
_NEARLY_EQUAL = 1 - 1e-6
_FEW = 16


class Svd(NamedTuple):
    """U diag(S) Vt with U (m, r), S (r,) falling, Vt (r, n), for exactly the requested r.

    The rows of Vt are always orthonormal. Where the matrix has fewer than r singular values above rounding, the other
    entries of S and their columns of U are exactly zero, and their rows of Vt are some orthonormal complement, the same on
    every machine.
    """

    u: Tensor
    s: Tensor
    vt: Tensor


def truncated(matrix: Member, rank: int) -> Svd:
    """The best approximation of rank `rank` (Eckart and Young), float64.

    For a small rank of a large matrix, the best approximation of a matrix within float32's rounding of it (`privacy.denoise`).

    In each column of U the largest entry (the first of equals) is positive, so that every machine finds the same vectors;
    where singular values coincide the vectors are not unique, though the product is.
    """
    if not 0 <= rank <= min(matrix.shape):
        raise ValueError(f"a {' x '.join(map(str, matrix.shape))} matrix has no approximation of rank {rank}")
    u, s, vt = _leading(matrix, rank) or _decomposed(matrix)
    live = min(rank, int((s > _RESOLUTION * s[:1]).sum()))
    sign = _signs(u[:, :live])
    vt = sign[:, None] * vt[:live]
    missing = rank - live
    return Svd(
        pad(u[:, :live] * sign, (0, missing)), pad(s[:live], (0, missing)), torch.cat([vt, _complement(vt, missing)])
    )


def balanced(svd: Svd) -> tuple[Tensor, Tensor]:
    """B = U sqrt(S) and A = sqrt(S) Vt, so that neither factor's gradient dwarfs the other's.

    Where S is zero, B's column is zero and A's row keeps unit length, the order of a fresh LoRA row's (1/sqrt(3)): the
    product is unchanged, and B gets a gradient, which with A = B = 0 it never would.
    """
    root = svd.s.sqrt()
    return svd.u * root, torch.where(root > 0, root, 1.0)[:, None] * svd.vt


def recompressed(product: LowRank) -> LowRank:
    """The same matrix in factors of the same inner size, which depend on the matrix alone and not on its summands.

    Q is an orthonormal basis of the columns of M W, W a fixed Gaussian (n, k), so that M = Q (Q^T M) for every M of rank at
    most k.
    """
    left, right = product.left.double(), product.right.double()
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(right.shape[1], right.shape[0], dtype=torch.float64, generator=generator).to(right.device)
    q, _ = torch.linalg.qr(left @ (right @ seen))
    return LowRank(q.to(product.dtype), ((q.T @ left) @ right).to(product.dtype))


def in_own_factors(tensors: Tensors) -> Tensors:
    """The same tensors, with every low-rank member `recompressed`: the norms of its factors are those of the matrix.

    Needed before a contribution is clipped to a norm C on which a guarantee rests. In [dB, B] [A_i ; dA] the two halves may
    cancel (B_i = B R, A_i = R^-1 A is no change at all), and then the rounding of float32 is relative to the halves, not to the
    product: scaled by C over its measured norm, the product can be longer than C, by 1 % in the worst case printed by
    benchmarks/private_fra.py. With orthonormal columns on the left nothing can cancel: the product is longer than C by less
    than one part in a million, for which `privacy.mechanisms.clip_factor` leaves room.
    """
    return Tensors(
        (name, recompressed(member) if isinstance(member, LowRank) else member) for name, member in tensors.items()
    )


def denoised(noised: Member, rank: int, noise_std: float, *, shrink: bool) -> LowRank:
    """An estimate of rank at most `rank` of a matrix with noise of deviation `noise_std` on each entry (`privacy.denoise`)."""
    return LowRank(*denoise.denoised(dense(noised), rank, noise_std, shrink=shrink))


def tangent(step: Member, product: LowRank) -> LowRank:
    """The part of `step` (m, n) that small changes of B and A in `product` = B A can make: its projection on all X A + B Y.

    With orthonormal columns U and V that span the columns of B (m, k) and of A^T (n, k),

        P(D) = D V V^T + U U^T D (I - V V^T),

    the tangent space, at B A, of the matrices of B A's rank (where B and A have full rank). Its dimension is k (m + n - k)
    of m n. Of the change (B + dB) (A + dA) - B A, the projection leaves out only a part of dB dA. Float64, of rank 2 k at most.
    """
    u, v = _span(product.left), _span(product.right.T)
    turned = dense(step).to(u)
    in_rows = turned @ v  # (m, k)
    beside = u.T @ turned - (u.T @ in_rows) @ v.T  # (k, n)
    return LowRank(torch.cat([in_rows, u], 1), torch.cat([v.T, beside]))


def right_orthonormal(svd: Svd) -> tuple[Tensor, Tensor]:
    """B = U S and A = Vt: all of the size is in B, and A is ready to be frozen."""
    return svd.u * svd.s, svd.vt


def _span(columns: Tensor) -> Tensor:
    """Orthonormal columns, float64, with the same span as a matrix's columns; none for zeros."""
    u, s, _ = _svd(columns.double())
    return u[:, s > _RESOLUTION * s[:1]]


def _leading(matrix: Member, rank: int) -> Triplets | None:
    """The first singular triplets of a large matrix; None where a full decomposition is as fast, or `leading` finds none."""
    m, n = matrix.shape
    if not isinstance(matrix, LowRank):
        whole = matrix.double()
        return leading(lambda x: whole @ x, lambda x: whole.T @ x, (m, n), rank, whole.device)
    if matrix.rank <= _FEW * (rank + 1):  # two QRs are faster
        return None
    left, right = matrix.left.double(), matrix.right.double()
    times, transposed = (lambda x: left @ (right @ x)), (lambda x: right.T @ (left.T @ x))
    return leading(times, transposed, (m, n), rank, left.device)


def _decomposed(matrix: Member) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(matrix, LowRank):
        return _svd(matrix.double())
    left, right = matrix.left.double(), matrix.right.double()
    # On 768 x 768 two QRs and a k x k SVD are 9 times as fast as the dense one at k = min/4, 2.6 at 1/2, and as fast at 2/3.
    if 3 * matrix.rank > 2 * min(matrix.shape):  # benchmarks/low_rank.py
        return _svd(left @ right)
    q, a = torch.linalg.qr(left)  # (m, k) (k, k)
    p, b = torch.linalg.qr(right.T)  # (n, k) (k, k)
    u, s, vt = _svd(a @ b.T)  # left @ right = q (a b^T) p^T
    return q @ u, s, vt @ p.T


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vt


def _signs(columns: Tensor) -> Tensor:
    """+1 or -1 for each column: the sign of its first entry of largest magnitude, up to rounding."""
    size = columns.abs()
    first = (size >= _NEARLY_EQUAL * size.amax(0)).int().argmax(0)
    signs: Tensor = columns.gather(0, first[None])[0].sign()
    return signs


def _complement(rows: Tensor, count: int) -> Tensor:
    """(count, n): orthonormal rows, orthogonal to the orthonormal `rows` (k, n)."""
    k, n = rows.shape
    fixed = torch.randn(n, count, dtype=rows.dtype, generator=torch.Generator().manual_seed(0))
    q, _ = torch.linalg.qr(torch.cat([rows.T, fixed], 1))
    added: Tensor = (q * _signs(q)).T[k:]
    return added
