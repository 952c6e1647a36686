"""Lengths and directions of weights, in float64.

`of_columns` is FeDeRA's variation (Yan et al., arXiv 2404.18848, equations 19 to 22): for W (d, k) with columns w^1 ... w^k,

    magnitude(V, W) = mean_j | |v^j| - |w^j| |,    direction(V, W) = mean_j (1 - cos(v^j, w^j)).

`of_wholes` is FedARA's discrepancy (equations 5 and 6) for one client: |V - W| in the Frobenius norm, and cos(V, W), with all
matrices as one long vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def of_columns(before: Tensor, after: Tensor) -> tuple[float, float]:
    """(magnitude, direction) of two matrices (d, k); a vector is one column; with more axes the first is d.

    A column of zeros has no direction: its variation is 1 against any other column, and 0 against zeros.
    """
    v, w = _columns(before), _columns(after)
    lengths_v, lengths_w = v.norm(dim=0), w.norm(dim=0)
    longest = lengths_v * lengths_w
    cosine = (v * w).sum(dim=0) / torch.where(longest > 0, longest, 1.0)
    direction = torch.where((lengths_v == 0) & (lengths_w == 0), 0.0, 1 - cosine.clamp(-1, 1))
    return float((lengths_v - lengths_w).abs().mean()), float(direction.mean())


def of_wholes(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """(|V - W|, cos(V, W)) over all matrices of (V, W); the cosine is NaN where one of the two is zero."""
    apart = both = square_v = square_w = 0.0
    for before, after in pairs:
        v, w = before.double().reshape(-1), after.double().reshape(-1)
        apart += float((v - w).square().sum())
        both, square_v, square_w = both + float(v @ w), square_v + float(v @ v), square_w + float(w @ w)
    longest = math.sqrt(square_v * square_w)
    return math.sqrt(apart), max(-1.0, min(1.0, both / longest)) if longest else math.nan


def _columns(weights: Tensor) -> Tensor:
    """(d, k), float64."""
    return weights.double().reshape(weights.shape[0] if weights.ndim > 1 else -1, -1 if weights.ndim > 1 else 1)
