"""The null distribution: the known distribution of a non-member's score.

A canary's direction u is uniform on the unit sphere in d dimensions, and no release depends on the direction of a canary that
did not train. So for fixed unit vectors c_1 .. c_T, whatever the model, the data and the noise are,

    sqrt(d) <u, c>            has (1 + <u, c>) / 2 ~ Beta((d - 1) / 2, (d - 1) / 2): almost N(0, 1)
    sqrt(d) <u, c_t>, all t   are the products of sqrt(d) g / sqrt(|g|^2 + chi^2_{d-r}) with the c_t, g ~ N(0, I_r) in the
                              span of the c_t, r its dimension: a joint law of T numbers that can be sampled

A score that is a function of the second has no closed law and is sampled: if k of N draws are at least as high as a unit's
score, (k + 1) / (N + 1) is a valid p-value for every N, because the unit's own score is one more draw. N is 1,000,000 where
that takes seconds: a rate of 0.1 % is then known to within 3 %.

Where the law is known, false-positive rates need no non-members. Rates too low for a few hundred held-out units to show are
known exactly, and only the members' sampling error enters an AUC. The held-out units can then test the law itself (`refuted`):
this detects a wrong dimension, and units that were declared held out but trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

DRAWS = 1_000_000
_NUMBERS = 20_000_000  # drawn at most, whatever the number of rounds
_FEWEST_DRAWS = 100_000
_AT_ONCE = 50_000
_CERTAIN = 1e-12  # eigenvalues up to this count as zero: the rounds do not span that direction
REFUTED = 1e-3  # the probability that a true law is rejected


@dataclass(frozen=True)
class Null:
    """tails: (units,) the probability that a non-member scores at least as high. rounds: (units, rounds) numbers, N(0, 1)
    in rounds that did not draw the unit; rate: the public probability of being drawn. Both are None where an attack has no such
    numbers. together: whether one number covers all rounds of a unit, as for a single release.
    """

    tails: Floats
    rounds: Floats | None = None
    rate: float | None = None
    together: bool = False


def sphere_tails(scores: Floats, dimension: int) -> Floats:
    """P(sqrt(d) <u, c> >= score), exactly."""
    from scipy.special import betainc

    half = (dimension - 1) / 2
    return np.asarray(betainc(half, half, np.clip((1 - scores / np.sqrt(dimension)) / 2, 0.0, 1.0)))


def drawn_tails(
    scores: Floats, spans: Sequence[Floats], score: Callable[[Floats], Floats], rng: np.random.Generator
) -> Floats:
    """P(score of fresh directions >= score), from draws. spans: (rounds, d) unit vectors, one array for each set of rounds with
    the same coordinates; each set has its own directions. score: takes (draws, all rounds) in that order.
    """
    rounds = sum(len(span) for span in spans)
    count = int(np.clip(_NUMBERS // max(1, rounds), _FEWEST_DRAWS, DRAWS))
    roots = [_root(span) for span in spans]
    drawn = np.concatenate(
        [
            score(np.concatenate([_drawn(root, size, some, rng) for root, size in roots], axis=1))
            for some in (min(_AT_ONCE, count - done) for done in range(0, count, _AT_ONCE))
        ]
    )
    drawn.sort()
    above = count - np.searchsorted(drawn, scores, side="left")
    return np.asarray((above + 1) / (count + 1))


def _root(span: Floats) -> tuple[Floats, int]:
    """(rounds, r) R, where R R^T are the inner products of the unit vectors; and their dimension d."""
    values, vectors = np.linalg.eigh(span @ span.T)
    kept = values > _CERTAIN
    return vectors[:, kept] * np.sqrt(values[kept]), span.shape[1]


def _drawn(root: Floats, dimension: int, count: int, rng: np.random.Generator) -> Floats:
    """(count, rounds) draws of sqrt(d) <u, c_t>."""
    along = rng.standard_normal((count, root.shape[1]))
    across = rng.chisquare(dimension - root.shape[1], count) if dimension > root.shape[1] else np.zeros(count)
    length = np.sqrt(np.square(along).sum(axis=1) + across)
    return np.asarray(np.sqrt(dimension) * (along @ root.T) / length[:, None])


def refuted(held_out: Floats) -> bool:
    """Whether held-out units reject this distribution; a true law is rejected with a probability of at most REFUTED.

    held_out: the tails of held-out units, which are uniform if the law holds. Tested are the mean and variance of their normal
    quantiles, which a wrong location or scale of the scores moves most, and the largest difference of the distribution
    functions (Kolmogorov and Smirnov).
    """
    from scipy.special import ndtri
    from scipy.stats import chi2, kstest, norm

    if not len(held_out):
        return False
    z = -ndtri(np.clip(held_out, 1e-15, 1 - 1e-15))
    wider = float(chi2.sf(np.square(z).sum(), len(z)))
    moved = 2 * float(norm.sf(abs(z.sum()) / np.sqrt(len(z))))
    chances = (2 * min(wider, 1 - wider), moved, float(kstest(held_out, "uniform").pvalue))
    return min(chances) * len(chances) < REFUTED
