"""The mean of low-rank matrices from two sums that are far smaller than the mean.

This is the randomised range finder of Halko, Martinsson and Tropp, "Finding structure with randomness" (2011). Every client i
has a change D_i (m x n) in factors. Omega (n, p) is random and the same for all clients:

    first     Y = mean(D_i Omega)        (m, p)     Q: an orthonormal basis of the columns of Y
    second    W = mean(Q^T D_i)          (p, n)     mean(D_i) is about Q W = Q Q^T mean(D_i)

Both are linear in D_i, so each may be masked, clipped and noised like any sum. If mean(D_i) has rank p at most, the columns of
Y span its columns, and Q W equals it up to rounding. If its rank is higher, a few columns that Q is not computed from,
Y_t = mean(D_i Omega_t), show how much of mean(D_i) lies outside Q.

With V an orthonormal basis of the rows of mean(D_i), rounding is magnified by the inverse of the least singular value of
V^T Omega. This factor is small if p is larger than the rank; if p equals the rank, it is above 10^k in about one case of 10^k.

D_i is never formed. Products are taken in float64 and sent in float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from secure_fed.tensors.tensors import LowRank, Member

CHECKS = 4  # columns of Omega_t
_RESOLUTION = 1e-6  # below this share of the largest, a column is the rounding of float32, not information


def size(shape: tuple[int, int], columns: int) -> int:
    """The number of entries that both passes send for an (m, n) matrix."""
    m, n = shape
    return m * (columns + CHECKS) + columns * n


def most_columns(shape: tuple[int, int]) -> int:
    """The largest p with `size` below m n; 0 if there is none."""
    m, n = shape
    return max(0, (m * (n - CHECKS) - 1) // (m + n))


def directions(rows: int, columns: int, seed: int) -> Tensor:
    """[Omega, Omega_t], (n, p + CHECKS), float64: a function of its arguments, so that all parties compute the same.

    Omega is uniform over matrices with orthonormal columns, times sqrt(n / (p + CHECKS)); Omega_t is Gaussian of variance
    1 / (p + CHECKS) and independent of Omega. So E |D [Omega, Omega_t]|^2 = |D|^2 for every D: the first message has about the
    norm of the second, and one clip norm suits both.
    """
    sent, generator = columns + CHECKS, torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, sent, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(drawn[:, :columns])
    omega = q * r.diagonal().sign() * math.sqrt(rows / sent)
    return torch.cat([omega, drawn[:, columns:] / math.sqrt(sent)], 1)


def sketched(change: LowRank, columns: int, seed: int) -> Tensor:
    """A client's first message: D [Omega, Omega_t], (m, p + CHECKS)."""
    seen = directions(change.shape[1], columns, seed).to(change.right.device)
    return (change.left.double() @ (change.right.double() @ seen)).to(change.dtype)


def basis(sketch: Tensor) -> Tensor:
    """Q (m, p), float64, from the mean of the first messages: orthonormal columns with the span of Y's, or zero columns.

    Every party computes it from the same float32 numbers, on one machine to the same bits. On others it is the same up to
    rounding: once the diagonal of R is positive, the QR of independent columns is unique. A column that R shows to be a
    combination of earlier columns is dropped, since its direction would be a rounding error, different on every machine. The
    QR is repeated without it, and a dropped column that this QR does not span comes back. So Q is off by some 1e-16 / 1e-6, and
    W by that share of the longest D_i, which float32 does not resolve. Two parties disagree on whether a column is dropped only
    if its share of the largest is 1e-6 to ten digits.

    Noised Y is used unchanged. Only the span of its columns matters, which no shrinkage of singular values changes, and fewer
    columns would only span less. W, whose noise is fresh, shows which columns are noise alone.
    """
    columns = sketch[:, :-CHECKS].double()
    diagonal = torch.linalg.qr(columns).R.diagonal().abs()
    least = _RESOLUTION * diagonal.max()
    live = diagonal > least
    while True:
        q, r = torch.linalg.qr(columns[:, live])
        missed = ((columns - q @ (q.T @ columns)).norm(dim=0) > least) & ~live
        if not missed.any():
            break
        live[missed.nonzero()[0]] = True
    kept = torch.zeros_like(columns)
    kept[:, live] = q * r.diagonal().sign()
    return kept


def projected(change: LowRank, q: Tensor) -> Tensor:
    """A client's second message: Q^T D, (p, n)."""
    q = q.to(change.left.device)
    return ((q.T @ change.left.double()) @ change.right.double()).to(change.dtype)


def lifted(q: Tensor, mean: Member) -> LowRank:
    """Q W, from the mean of the second messages or an estimate of it."""
    if isinstance(mean, LowRank):
        return LowRank(q @ mean.left.to(q), mean.right.to(q))
    return LowRank(q, mean.to(q))


def residual(sketches: Iterable[Tensor]) -> float:
    """|(I - Q Q^T) Y_t| / |Y_t| over all matrices together, from the means of the first messages; 0 if all are zero.

    With D the mean change, Y_t = D Omega_t, and Q is independent of Omega_t. So the squares of numerator and denominator are,
    up to one common factor, unbiased estimates of |(I - Q Q^T) D|^2 and |D|^2: the result is the relative error of Q W,
    measured along a few directions. For noised means it includes their noise, most of which lies outside Q.
    """
    lost = whole = 0.0
    for sketch in sketches:
        q, seen = basis(sketch), sketch[:, -CHECKS:].double()
        lost += float((seen - q @ (q.T @ seen)).square().sum())
        whole += float(seen.square().sum())
    return math.sqrt(lost / whole) if whole else 0.0


def seed_of(name: str, *tensors: Tensor) -> int:
    """A seed that differs for every name and for other tensors, and is the same for all parties that have these tensors."""
    digest = hashlib.sha256(name.encode())
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
