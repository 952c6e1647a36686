"""Distributed noise: every client adds a share of it, in integers, and a secure sum reveals only the total.

A client scales its clipped contribution to integer units, rounds it (`rounding`), and adds its own N_Z(0, sigma^2) to every
coordinate (`discrete`). The sum is taken modulo 2^bits.

Guarantee. Let neighbours differ in one client's contribution, which is present or zero; its share of the noise is present in
both. (A client's participation itself is not hidden: secure sums are made by named clients.) If the sum contains at least
`shares` shares that the adversary does not know, then one release has Renyi divergences of at most those of a Gaussian with
noise multiplier z = 1 / eps,

    D_a <= a eps^2 / 2 for all a > 1,     eps^2 = Delta^2 / (shares sigma^2) + tau d,                                     (1)
    tau = 10 sum_{j=1}^{shares-1} exp(-2 pi^2 sigma^2 j / (j + 1)),

where Delta is the L2 norm that no rounded contribution exceeds. Further shares, the modulus, and everything computed from the
total are post-processing. If totals wrap around the modulus, the result is useless, but no less private.

Proof (the approach is that of Kairouz, Liu and Steinke, arXiv 2102.06387; the constants are ours). Write n for `shares` and
g_v for x -> exp(-x^2 / 2v).

 1. The law of n shares in one coordinate is c g_{n sigma^2}(x) r(x), where log r varies by at most tau / 2. By induction over
    the shares: if j of them have c g_{j sigma^2} r_j, one more makes the sum over integers y of g_{sigma^2}(y)
    g_{j sigma^2}(x - y) r_j(x - y), which is g_{(j+1) sigma^2}(x) times the sum of g_v(y - x / (j + 1)) r_j(x - y) with
    v = sigma^2 j / (j + 1). Without r_j, this sum is a constant times 1 +- t with t = 2 sum_{k>=1} exp(-2 pi^2 v k^2)
    (Poisson's summation formula), and with it no more than r_j varies beyond that. So every share widens the range of log r
    by log((1 + t) / (1 - t)) <= 5 exp(-2 pi^2 v), as sigma >= 1.
 2. A share X is subgaussian: E exp(b X) <= exp(b^2 sigma^2 / 2), because the sum of g_{sigma^2}(x - b sigma^2) over integers
    x is largest where b sigma^2 is an integer (the same formula: all its coefficients are positive).
 3. Shift one coordinate by an integer h: P is the law of h + X and Q that of X, X the sum of the shares. The privacy loss at
    h + X is at most (h^2 + 2 h X) / (2 n sigma^2) + tau / 2, by 1. Hence, by 2,
    (a - 1) D_a = log E_P exp((a - 1) loss) <= (a - 1) (a h^2 / (2 n sigma^2) + tau / 2).
 4. Coordinates are independent, so that over d of them D_a <= a Delta^2 / (2 n sigma^2) + tau d / 2 <= a eps^2 / 2. A
    contribution is rounded at random, by its own client's coins; divergences of mixtures are at most the largest
    divergence (quasi-convexity).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from torch import Tensor

from privacy.discrete import LARGEST_EXPONENT, discrete_gaussian
from privacy.discrete_wholes import Integers
from privacy.entropy import Floats, Stream
from privacy.errors import PlanError
from privacy.mechanisms import clip_factor
from privacy.rounding import norm_bound, rounded, squared_bound

WRAPS = 2.0**-40  # bounds the probability that any coordinate of a total wraps around


@dataclass(frozen=True)
class Grid:
    """How contributions become integers.

    unit: the clip norm in integer units. sigma: the standard deviation of one client's share of the noise, a power of two.
    bound: the L2 norm that no rounded contribution exceeds.
    """

    unit: float
    sigma: int
    bound: float


@dataclass(frozen=True)
class DistributedGaussian:
    """The mechanism of this module, with the methods that clients call on any mechanism; adds no noise to a total.

    noise_multiplier: z, the charged multiplier. contributors: the number of contributors to the sum when nobody drops out.
    shares: the number of shares that the guarantee counts: the least number of survivors, minus the colluders among them, who
    know their own shares, and minus the contributors that add none.
    """

    noise_multiplier: float
    contributors: int
    shares: int
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise PlanError(f"the noise multiplier is {self.noise_multiplier:g}; it must be positive and finite")
        if not 1 <= self.shares <= self.contributors:
            raise PlanError(
                f"the guarantee cannot count {self.shares} shares of noise from {self.contributors} contributors; "
                f"choose survivors and colluders that leave between 1 and {self.contributors} shares"
            )

    @property
    def counters(self) -> tuple[str, ...]:
        return ()

    def counted(self, norm: Callable[[], float], clip_norm: float) -> dict[str, Tensor]:
        return {}

    def adapted(self, clip_norm: float, counts: object) -> float:
        return clip_norm

    def scale(self, norm: Callable[[], float], clip_norm: float) -> float:
        return clip_factor(norm(), clip_norm)

    def grid(self, dim: int) -> Grid:
        """The finest grid for vectors of `dim` coordinates."""
        return _grid(self.noise_multiplier, self.contributors, self.shares, self.bits, dim)

    def encoded(self, values: Floats, clip_norm: float, stream: Stream) -> Integers:
        """(d,) integers that a client adds to the secure sum: its (d,) values of norm at most `clip_norm`, and its noise share.

        The bound that the guarantee needs is checked on the rounded integers. A vector that is longer than the clip norm and
        cannot be rounded to integers within the bound is refused.
        """
        grid = self.grid(len(values))
        return self.silent(values, clip_norm, stream) + discrete_gaussian(grid.sigma, len(values), stream)

    def silent(self, values: Floats, clip_norm: float, stream: Stream) -> Integers:
        """(d,) integers of a contributor that adds no noise and is not protected at all: it is nobody's data.

        It counts among `contributors`, which leave room for its values, and not among `shares`.
        """
        grid = self.grid(len(values))
        return rounded(values * (grid.unit / clip_norm), grid.unit, stream)

    def decoded(self, total: Integers, clip_norm: float, dim: int) -> Floats:
        """(d,) sum of the values, noise included, from any representatives of the residues of the total modulo 2^bits."""
        centred = total.astype(np.int32) if self.bits == 32 else total
        return centred.astype(np.float64) * (clip_norm / self.grid(dim).unit)

    def std(self, clip_norm: float, dim: int, survivors: int) -> float:
        """The standard deviation of the noise on each coordinate of the decoded total of `survivors` clients.

        Rounding is counted as if every coordinate were half way between two integers: an upper bound, small compared with the
        noise.
        """
        grid = self.grid(dim)
        return math.sqrt(survivors * (grid.sigma**2 + 0.25)) * clip_norm / grid.unit


@lru_cache(maxsize=256)
def _grid(z: float, contributors: int, shares: int, bits: int, dim: int) -> Grid:
    """The largest sigma, and with it the finest rounding, at which totals fit the modulus.

    Each contributor adds at most unit + 1 to a coordinate. The noise on it exceeds m sigma sqrt(contributors) with probability
    at most 2 exp(-m^2 / 2), since the shares are subgaussian. m is such that this probability is at most WRAPS over all
    coordinates together.
    """
    if dim < 1:
        raise PlanError(f"noise cannot be added to {dim} coordinates; encode at least one")
    margin = math.sqrt(2 * math.log(2 * dim / WRAPS)) * math.sqrt(contributors)
    for exponent in range(LARGEST_EXPONENT, _LEAST_EXPONENT - 1, -1):
        unit = _unit(z, shares, 1 << exponent, dim)
        if contributors * (unit + 1) + margin * (1 << exponent) > 2.0 ** (bits - 1) - 1:
            continue
        if (bound := norm_bound(unit, dim)) <= _MOST_INFLATION * unit:
            return Grid(unit, 1 << exponent, bound)
        break  # a smaller sigma makes the grid even coarser
    advice = "use 64 bits" if bits == 32 else "use fewer clients, fewer coordinates or less noise"
    raise PlanError(
        f"noise with multiplier {z:g} of {contributors} clients, {shares} shares of which are counted, does not fit "
        f"integers of {bits} bits over {dim} coordinates; {advice}"
    )


def _unit(z: float, shares: int, sigma: int, dim: int) -> float:
    """The largest unit at which equation (1) gives eps <= 1 / z: by bisection, since eps grows with it. 0 if there is none."""
    variance = float(shares) * sigma**2
    gap = dim * _tau(shares, sigma)
    most = (1 - 1e-12) / z**2  # slightly below, to cover float64 rounding

    low, high = 0.0, math.sqrt(variance) / z
    while low < (middle := (low + high) / 2) < high:
        fits = squared_bound(middle, dim) / variance + gap <= most
        low, high = (middle, high) if fits else (low, middle)
    return low


@lru_cache(maxsize=256)
def _tau(shares: int, sigma: int) -> float:
    """tau of equation (1); 0 where it underflows float64, which the margin in `_unit` covers."""
    if math.exp(-(math.pi**2) * sigma**2) == 0:
        return 0.0
    return 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * j / (j + 1)) for j in range(1, shares))


_LEAST_EXPONENT = 2
_MOST_INFLATION = 1.25  # of the clip norm by rounding; a larger one needs a wider modulus
