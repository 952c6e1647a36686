"""The leading singular vectors of a large matrix, from few matrix products, checked before use.

Block Lanczos iteration (Golub and Underwood, 1977) on M^T M with full orthogonalisation, from a fixed Gaussian block with a few
more columns than requested, in float64. After k columns it knows the best approximations of the leading vectors in

    span{G, M^T M G, (M^T M)^2 G, ...},

and continues until they are accurate enough. A full decomposition takes O(m n min(m, n)) operations, this one O(m n k); k is
about 60 where the leading values stand out, and 300 to 500 for a matrix of 1024 x 1024 or 4096 x 4096 of pure noise.

Guarantee for the returned triplets (u_i, s_i, v_i), with |M| the largest singular value:

    U and V have orthonormal columns, M v_i = s_i u_i, and |M^T u_i - s_i v_i| <= 2^-23 |M|, measured on the result itself.

So they are exact for a matrix that differs from M by the rounding of float32 numbers. That they are the *leading* ones is
certain except for a set of start blocks of probability zero: no leading vector is orthogonal to a Gaussian block, and as the
block has more columns than requested, equal values are all found. Where the check fails, or k would approach the size of the
matrix, the result is None, and the caller decomposes the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
Shape = tuple[int, int]
Triplets = tuple[Tensor, Tensor, Tensor]

SMALLEST = 256  # below this side a full decomposition is as fast
_MORE = 8  # columns in a block beyond the requested ones
_GROWTH = 1.25  # of the basis between two checks of the result
_TOLERANCE = 2.0**-23
_LEAST = 1e-6  # singular values below this share of the largest are rounding errors of float32 inputs


def leading(times: Product, transposed: Product, shape: Shape, count: int, device: torch.device) -> Triplets | None:
    """U (m, count), S (count,) falling and Vt (count, n) of a matrix given by its products; None if not found.

    times: (n, b) -> M x, transposed: (m, b) -> M^T x, both float64.
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
    """The triplets of M in the span of `v` (n, count), if they meet the module's guarantee."""
    q, r = torch.linalg.qr(times(v))
    left, s, right = torch.linalg.svd(r)
    u, vt = q @ left, right @ v.T
    off = (transposed(u) - vt.T * s).norm(dim=0)
    return (u, s, vt) if bool((off <= _TOLERANCE * s[0]).all()) else None
