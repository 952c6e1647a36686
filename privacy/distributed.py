"""Distributed noise: every client adds a share of it, in integers, and a secure sum reveals only the total.

A client scales its clipped contribution to integer units, rounds it (`rounded`), and adds its own N_Z(0, sigma^2) to every
coordinate (`discrete_gaussian`). The sum is taken modulo 2^bits. `DistributedGaussian` has the guarantee and its proof. The
norm of a rounded contribution is checked in exact integers, and the noise has exactly its law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from privacy.entropy import Floats, Stream, Words
from privacy.errors import PlanError
from privacy.mechanisms import clip_factor

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

WRAPS = 2.0**-40  # bounds the probability that any coordinate of a total wraps around
LARGEST_EXPONENT = 40  # sigma is a power of two, at most 2^40, and at least 2^2 in a grid
_LEAST_EXPONENT = 2
_MOST_INFLATION = 1.25  # of the clip norm by rounding; a larger one needs a wider modulus

BETA = math.exp(-0.5)  # the probability with which a rounded vector is drawn again is at most this
_TOO_LARGE = 2.0**62
_MOST_DRAWS = 1000
_LIMB_BITS, _LIMB = 21, (1 << 21) - 1
_SUMMED_AT_ONCE = 1 << 20  # products of two limbs are below 2^42, and the sum of this many of them below 2^62

_PROPOSALS_AT_ONCE = 1 << 16  # proposals made in one go: bounds the memory, and stays within a processor's cache
_WORD_BITS = 64
_GUARD = 30  # decimal places beyond the requested ones


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
    """Noise in shares, with the methods that clients call on any mechanism; adds no noise to a total.

    noise_multiplier: z, the charged multiplier. contributors: the number of contributors to the sum when nobody drops out.
    shares: the number of shares that the guarantee counts: the least number of survivors, minus the colluders among them, who
    know their own shares, and minus the contributors that add none.

    Guarantee. Let neighbours differ in one client's contribution, which is present or zero; its share of the noise is present
    in both. (A client's participation itself is not hidden: secure sums are made by named clients.) If the sums contain at
    least `shares` shares that the adversary does not know, then whatever an adversary computes from releases, it can compute
    from sums of the rounded contributions with continuous Gaussian noise of z times Delta instead, up to a factor of 1 + 2^-50
    on every probability (for at most 2^60 coordinates in all releases together, and 10^15 shares). So a bound of epsilon and
    delta for Gaussian noise of multiplier z, with or without Poisson sampling by hidden coins, holds for these releases as
    epsilon + 2^-49 and (1 + 2^-50) delta, which is less than an accountant's float64 rounds. It needs

        Delta^2 <= (shares sigma^2 - 4) / z^2,     sigma >= 4,                                                            (1)

    where Delta is the L2 norm that no rounded contribution exceeds. Further shares, the modulus, and everything computed from
    the total are post-processing. If totals wrap around the modulus, the result is useless, but no less private.

    Proof (the law of several shares is as in Kairouz, Liu and Steinke, arXiv 2102.06387; the rest is ours). Write n for
    `shares`, v for n sigma^2 and g_u for x -> exp(-x^2 / 2u).

     1. The law of n shares in one coordinate is c g_v(x) r(x), where log r varies by less than 10^-50. By induction over the
        shares: if j of them have c g_{j sigma^2} r_j, one more makes the sum over integers y of g_{sigma^2}(y) g_{j sigma^2}(x
        - y) r_j(x - y), which is g_{(j+1) sigma^2}(x) times the sum of g_u(y - x / (j + 1)) r_j(x - y) with u = sigma^2 j /
        (j + 1) >= 8. Without r_j, this sum is a constant times 1 +- t with t = 2 sum_{k>=1} exp(-2 pi^2 u k^2) (Poisson's
        summation formula), and with it no more than r_j varies beyond that. So every share widens the range of log r by
        log((1 + t) / (1 - t)) <= 5 exp(-16 pi^2) < 10^-67.
     2. Let a be an integer, and K the channel that turns a real y into the integer x with probability proportional to the
        density of N(0, 4) at x - y. The probabilities before normalisation add up to 1 +- t with t <= 1.1 10^-34 for every y
        (the same formula), so K turns N(a, v - 4) into a law on the integers that is g_v(x - a) times a constant, up to factors
        of 1 +- t. By 1. the law of a plus the shares is that too. Two laws with the same sum have no ratio beyond the variation
        of their factors, so the two agree up to a factor of 1 +- 3 10^-34. K acts on each coordinate of a vector a, and one K
        serves all a: both neighbours, and every value of the coins.
     3. Fix everybody's coins of rounding, those of the other clients' sampling, and what the other clients send, each given the
        releases before it: their laws are the same in both neighbours. Then a release is K of N(a + b, (v - 4) I) in one
        neighbour, where a is the client's rounded contribution, and of N(b, (v - 4) I) in the other, b being the others' sum,
        a shift that both share. If the client tosses a coin, the first is a mixture of the two; all passes of a round share the
        coin, and are one such release of the vectors side by side. By (1) |a| <= sqrt(v - 4) / z. A shorter a is dominated by
        the longest: scaling both laws down and adding noise leads from one to the other. So N(0, z^2) and N(1, z^2), sampled by
        the coin, dominate each release, and dominating pairs compose, each given the earlier releases (Zhu, Dong and Wang,
        2022). Averaging over the coins costs nothing, since hockey-stick divergences are jointly convex.
     4. A share X is subgaussian: E exp(b X) <= exp(b^2 sigma^2 / 2), because the sum of g_{sigma^2}(x - b sigma^2) over
        integers x is largest where b sigma^2 is an integer (the same formula: all its coefficients are positive). By this the
        grid bounds how often totals wrap around.
    """

    noise_multiplier: float
    contributors: int
    shares: int
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        if not 1e-100 <= self.noise_multiplier <= 1e100:  # its square is a float64
            raise PlanError(f"the noise multiplier is {self.noise_multiplier:g}; it must be from 1e-100 to 1e+100")
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
        integers = rounded(values * (grid.unit / clip_norm), grid.unit, stream)
        return integers + discrete_gaussian(grid.sigma, len(values), stream)

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
    """The largest unit that satisfies equation (1) of `DistributedGaussian`, by bisection; 0 if there is none."""
    most = (float(shares) * sigma**2 - 4) / z**2 * (1 - 1e-12)  # slightly below, to cover float64 rounding

    low, high = 0.0, math.sqrt(most)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if squared_bound(middle, dim) <= most else (low, middle)
    return low


def rounded(values: Floats, unit: float, stream: Stream, beta: float = BETA) -> Integers:
    """(d,) integers of squared norm at most `squared_bound`, from (d,) float64 of norm at most `unit`.

    Random rounding that barely lengthens a vector (Kairouz, Liu and Steinke, arXiv 2102.06387, 2021). Every coordinate is
    rounded up with probability its fractional part, and down otherwise, so its mean is unchanged. The squared norm of the
    result has a mean of at most unit^2 + d / 4, but may be as large as (unit + sqrt(d))^2. The whole result is therefore
    redrawn until its squared norm is at most

        min{ (unit + sqrt(d))^2,   unit^2 + d / 4 + sqrt(2 log(1 / beta)) (unit + sqrt(d) / 2) },      beta = exp(-1/2),

    which is the guarantee, for any vector: it is checked in exact integers, and nothing is clipped afterwards. A vector of norm
    at most `unit` meets it with probability at least 1 - beta = 0.39 at the first draw (their bound of the tail). Only this
    condition biases the result: it rejects draws that are longer than most.

    Each draw is refused with probability at most beta. If beta is exp(-1/2), the number of refusals in a row that raises an
    error has a probability below 1e-200, so they never happen by chance; they mean a vector that is longer than `unit`.
    """
    if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) >= _TOO_LARGE:
        raise PlanError(
            f"values to round must be finite and below {_TOO_LARGE:g}; clip them to the norm {unit:g} first"
        )
    limit = squared_bound(unit, len(values), beta)
    down = np.floor(values)
    share = values - down
    for _ in range(_MOST_DRAWS):
        drawn: Integers = (down + (stream.uniform(len(values)) < share)).astype(np.int64)
        if squared_norm(drawn) <= limit:
            return drawn
    raise PlanError(
        f"a vector of norm {float(np.linalg.norm(values)):g} cannot be rounded to one of norm {math.sqrt(limit):g}; "
        f"clip it to the norm {unit:g} first"
    )


def norm_bound(unit: float, dim: int, beta: float = BETA) -> float:
    """The L2 norm that no rounded vector exceeds: a float64 that is no smaller than the root of `squared_bound`."""
    squared = squared_bound(unit, dim, beta)
    bound = math.sqrt(squared)
    while Fraction(bound) ** 2 < squared:
        bound = math.nextafter(bound, math.inf)
    return bound


def squared_bound(unit: float, dim: int, beta: float = BETA) -> int:
    """The largest squared norm of a rounded vector: an integer, as all squared norms of integer vectors are."""
    always = (unit + math.sqrt(dim)) ** 2
    mostly = unit**2 + dim / 4 + math.sqrt(-2 * math.log(beta)) * (unit + math.sqrt(dim) / 2)
    return math.floor(min(always, mostly))


def squared_norm(vector: Integers) -> int:
    """The exact squared L2 norm of integers below 2^62 in absolute value: by limbs of 21 bits, whose products int64 can add."""
    total = 0
    for start in range(0, len(vector), _SUMMED_AT_ONCE):
        rest = np.abs(vector[start : start + _SUMMED_AT_ONCE])
        limbs: list[NDArray[np.int64]] = []
        while rest.any():
            limbs.append(rest & _LIMB)
            rest >>= _LIMB_BITS
        total += sum(int(a @ b) << _LIMB_BITS * (i + j) for i, a in enumerate(limbs) for j, b in enumerate(limbs))
    return total


def discrete_gaussian(sigma: int, count: int, stream: Stream) -> Integers:
    """(count,) independent samples of N_Z(0, sigma^2), exactly: P(x) is proportional to exp(-x^2 / (2 sigma^2)) on integers.

    sigma is a power of two 2^m up to 2^40. Then Karney's rejection ("Sampling exactly from the normal distribution", 2016)
    needs only fair bits and comparisons of integers; no number of the sampler is ever rounded. With x a multiple of 2^-m in
    [0, 1), the value s (k + x) sigma is proposed with weight exp(-k^2 / 2) (`wholes`), every x and both signs s alike, and
    accepted with probability

        exp(-k x) exp(-x^2 / 2),       which leaves it the weight       exp(-(k + x)^2 / 2).

    Zero would be proposed with both signs; one of them is refused.

    Proposals are independent of each other and are taken in order, so the first `count` accepted samples have exactly this law.
    As in any rejection sampler, the number of words drawn depends on the samples, which an observer who measures time can use.
    """
    exponent = sigma.bit_length() - 1
    if sigma < 1 or sigma != 1 << exponent or exponent > LARGEST_EXPONENT:
        raise PlanError(
            f"discrete noise of standard deviation {sigma} cannot be drawn; sigma must be a power of two up to "
            f"2^{LARGEST_EXPONENT}"
        )
    out = np.empty(count, np.int64)
    filled = 0
    while filled < count:
        wanted = count - filled
        # 0.715 of the proposals are accepted
        found = _accepted(exponent, min(_PROPOSALS_AT_ONCE, wanted + 7 * wanted // 16 + 64), stream)[:wanted]
        out[filled : filled + len(found)] = found
        filled += len(found)
    return out


def _accepted(exponent: int, proposals: int, stream: Stream) -> Integers:
    """The accepted samples among `proposals` proposals."""
    whole = wholes(proposals, stream)
    bits = stream.words(proposals)
    x = bits & _top(exponent)  # the first bits of a word are x, as a fraction of 2^64; its last bit is the sign
    negative = (bits & np.uint64(1)).astype(np.bool_)
    kept = np.flatnonzero((whole > 0) | (x > 0) | ~negative)
    kept = kept[_survives(x[kept], 2, 2, stream)]
    kept = kept[_survives_each(x[kept], whole[kept], stream)]
    magnitude = (whole[kept] << exponent) + (x[kept] >> np.uint64(63 - exponent) >> np.uint64(1)).astype(np.int64)
    return np.where(negative[kept], -magnitude, magnitude)


def _survives_each(x: Words, times: Integers, stream: Stream) -> Flags:
    """(n,) coins of probability exp(-times x): as many coins of probability exp(-x), none of which may fail."""
    owner = np.repeat(np.arange(len(x)), times)
    survives = np.ones(len(x), np.bool_)
    survives[owner[~_survives(x[owner], 1, 1, stream)]] = False
    return survives


def _survives(x: Words, power: int, divisor: int, stream: Stream) -> Flags:
    """(n,) independent coins of probability exp(-x^power / divisor), x in units of 2^-64.

    A coin of probability exp(-g), 0 <= g <= 1, is von Neumann's alternating series: let N count the successes, before the first
    failure, of coins of probability g / 1, g / 2, g / 3, ... Then P(N >= n) = g^n / n!, and N is even with probability
    1 - g + g^2 / 2! - ... = exp(-g). All g here are x^p / c of whole c, and such a coin of probability g / n is p coins of
    probability x and one of probability 1 / (c n), all of them exact: a word of 64 uniform bits is below the 64-bit fraction x
    with probability x, and a half word is uniform below the largest multiple of c n once those beyond it are redrawn.
    """
    even = np.ones(len(x), np.bool_)
    going = np.arange(len(x))
    step = 1
    while len(going):
        if divisor * step > 1:
            going = going[_one_in(divisor * step, len(going), stream)]
        for _ in range(power):
            going = going[stream.words(len(going)) < x[going]]
        even[going] ^= True
        step += 1
    return even


def _one_in(sides: int, count: int, stream: Stream) -> Flags:
    """(count,) coins of probability 1 / sides, from half words; those beyond the last multiple of `sides` are redrawn."""
    share = (1 << 32) // sides
    halves = _halves(count, stream)
    while len(beyond := np.flatnonzero(halves > sides * share - 1)):
        halves[beyond] = _halves(len(beyond), stream)
    return halves < share


def _halves(count: int, stream: Stream) -> NDArray[np.uint32]:
    return stream.words((count + 1) // 2).view("<u4")[:count].copy()


def _top(bits: int) -> np.uint64:
    """The mask of a word's first `bits` bits."""
    return np.uint64((1 << 64) - (1 << (64 - bits)))


def wholes(count: int, stream: Stream) -> Integers:
    """(count,) independent whole numbers k >= 0 of weight exp(-k^2 / 2), exactly, from one uniform number each.

    Let F_k be the probability of at most k. A uniform U in [0, 1), whose bits are drawn one word after the other, gives the
    first k with U < F_k. With the first word W and T_k = floor(2^64 F_k), W < T_k implies U < F_k, and W > T_k implies U > F_k.
    Only W = T_k, of probability 2^-64, implies neither: then the next word is drawn, and compared with as many more bits of
    F_k. So no rounding decides. The bits of F_k are computed with more decimal places than requested, and used only where the
    extra places leave no doubt.
    """
    table = np.array(thresholds(_WORD_BITS), np.uint64)
    words = stream.words(count)
    found = np.searchsorted(table, words, side="right").astype(np.int64)  # thresholds that a word is not below
    for at in np.flatnonzero((found > 0) & (words == table[np.maximum(found - 1, 0)])):
        found[at] = resolved(int(words[at]), lambda: int(stream.words(1)[0]), _WORD_BITS)
    return found


def resolved(first: int, more: Callable[[], int], bits: int) -> int:
    """The k of a U whose first word, of `bits` bits, equals one of the thresholds. more: draws the next word."""
    value, drawn = first, 1
    while True:
        value, drawn = (value << bits) | more(), drawn + 1
        not_below = [k for k, threshold in enumerate(thresholds(bits * drawn)) if value >= threshold]
        if not not_below:
            return 0
        if value > thresholds(bits * drawn)[not_below[-1]]:
            return not_below[-1] + 1


@lru_cache(64)
def thresholds(bits: int, guard: int = _GUARD) -> tuple[int, ...]:
    """floor(2^bits F_k) of k = 0, 1, ..., up to the first that is 2^bits - 1."""
    with localcontext() as context:
        # 2^bits has bits log10(2) < bits / 3 places before the point, one more at most.
        context.prec = bits // 3 + guard
        weights, least = [Decimal(1)], Decimal(10) ** -context.prec
        while weights[-1] > least:
            weights.append((Decimal(-(len(weights) ** 2)) / 2).exp())
        total, below, found = sum(weights), Decimal(0), list[int]()
        doubt = Decimal(10) ** (10 - guard)  # larger than the error of `scaled`
        while not found or found[-1] < (1 << bits) - 1:
            below += weights[len(found)]
            scaled = below / total * (1 << bits)
            whole = int(scaled)
            if not doubt < scaled - whole < 1 - doubt:
                return thresholds(bits, 2 * guard)
            found.append(whole)
    return tuple(found)
