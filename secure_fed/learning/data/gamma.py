"""Dirichlet draws that do not underflow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SMALLEST_CONCENTRATION = 1e-290  # below this a logarithm of a Gamma draw overflows


def log_shares(prior: NDArray[np.float64], clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of `clients` draws from Dir(alpha prior), one a row: (clients, classes).

    In logarithms, because at small `alpha` the shares themselves round to zero, and a class in which every
    client has share zero could not be dealt out. Gamma(a) is drawn as Gamma(a + 1) U^(1/a).
    """
    concentration = np.maximum(alpha * prior, _SMALLEST_CONCENTRATION)
    shape = (clients, len(prior))
    log_gamma = np.log(rng.standard_gamma(concentration + 1, size=shape))
    log_gamma += np.log1p(-rng.random(shape)) / concentration
    log_gamma -= log_gamma.max(axis=1, keepdims=True)
    return np.asarray(log_gamma - np.log(np.exp(log_gamma).sum(axis=1, keepdims=True)))
