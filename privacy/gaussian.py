"""The exact epsilon of one Gaussian release (Balle and Wang, "Improving the Gaussian Mechanism", 2018)."""

from __future__ import annotations

import numpy as np
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Epsilon at delta, where the noise has `multiplier` times the sensitivity."""
    with np.errstate(divide="ignore"):  # it takes the log of a difference, which is 0 for the largest multipliers
        return float(get_epsilon_gaussian(multiplier, delta))
