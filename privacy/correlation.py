"""Gaussian noise that is correlated over rounds, so that it partly cancels in the models, which are sums of rounds.

Let row t of X be the sum of round t, every contribution clipped to norm C. The server publishes X + C^-1 Z, where the rows of Z
are independent N(0, (z C)^2) and C (the matrix) is lower triangular. Every model is a sum A X of rounds, with A lower
triangular too, and carries the noise A C^-1 Z. With C the square root of A this is far less than A Z: round t cancels a part of
the noise of the rounds before it.

Guarantee. C (X + C^-1 Z) = C X + Z is one Gaussian mechanism for the whole run, and everything published is a function of it,
also where later contributions depend on earlier models (Denisov et al., "Improved Differential Privacy for SGD via Optimal
Private Linear Operators on Adaptive Streams", 2022, theorem 2.1). Let neighbours differ in one member, which takes part in the
rounds of a set S with gaps of at least `gap` and at most `most` of them. Its contributions move C X by at most

    s = max over S of | sum over t in S of column t of C |     (C non-negative),

so the run is a Gaussian mechanism of noise multiplier z / s. C is Toeplitz, its entries do not grow down a column, and then the
largest S is {0, gap, 2 gap, ...} (Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private
Model Training", 2024, theorem 2). The first r rounds alone are the mechanism of the leading r x r block of C.

The square root. A is Toeplitz: 1 / ((1 - x)(1 - b x)) is its generating function under server momentum b, and the generating
function of C is its square root, cut off after `band` coefficients and scaled to a column of norm one. With columns that do not
overlap (band at most gap) s is then the square root of the number of turns, as it is under independent noise (band 1), or
less, if the last round cuts off the last column.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from privacy.entropy import Floats, Stream
from privacy.errors import PlanError
from privacy.mechanisms import Named, perturbed

_FILTERED = 512  # rounds whose coefficients are found by filtering: see `_inverse`


@dataclass(frozen=True)
class Correlation:
    """C, by its first column from the diagonal down: positive, never growing, of norm one."""

    column: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        c = self.column
        falls = all(later <= earlier for earlier, later in itertools.pairwise(c))
        if not (c and falls and 0 < c[-1] < math.inf and abs(math.hypot(*c) - 1) < 1e-9):
            raise PlanError("a column of the correlation must be positive, must not grow, and must have norm one")

    @property
    def band(self) -> int:
        return len(self.column)

    def weights(self, rounds: int) -> Floats:
        """(rounds,) the first column of C^-1: round t publishes the noise sum_j weights[j] Z[t - j]."""
        return _filtered(self.column, rounds)

    def exposures(self, rounds: int, gap: int, most: int) -> tuple[float, ...]:
        """(rounds + 1,) s^2 of the first 0, 1, ... rounds."""
        if gap < 1 or most < 1:
            raise PlanError(f"members have {most} turns at least {gap} rounds apart; both numbers must be at least 1")
        reach = min(self.band, rounds)
        column = np.zeros((-(-rounds // gap), gap))  # (turns, rounds from one turn to the next)
        column.reshape(-1)[:reach] = self.column[:reach]
        until = np.cumsum(column, axis=0)
        together = until.copy()  # the column of every turn so far, at most the last `most`
        together[most:] -= until[:-most]
        return (0.0, *np.cumsum(np.square(together.reshape(-1)[:rounds])).tolist())

    def errors(self, rounds: int, momentum: float = 0.0) -> Floats:
        """(rounds,) the standard deviation of the noise on each model, for Z of standard deviation one."""
        from scipy.signal import fftconvolve  # imported here because the import takes 0.4 s

        model = _filtered([1.0, -1.0 - momentum, momentum], rounds)  # of one over (1 - x)(1 - b x)
        noise = fftconvolve(model, _inverse(self.column, rounds))[:rounds]
        found: Floats = np.sqrt(np.cumsum(np.square(noise)))
        return found


INDEPENDENT = Correlation()


def square_root(band: int, momentum: float = 0.0) -> Correlation:
    """The banded square root of the workload of a server that adds up means, with momentum."""
    if band < 1 or not 0 <= momentum < 1:
        raise PlanError(f"the band is {band} rounds and the momentum {momentum:g}; choose at least 1, and below 1")
    return _cut(_root(band, momentum), band)


def best(rounds: int, gap: int, most: int, momentum: float = 0.0) -> Correlation:
    """The banded square root with the least noise on the final model, at equal privacy, among bands up to the gap (`_spread`)
    and multiples of it.

    With a momentum of at most 0.5: in few rounds the best band is the gap, or nearly. Where a member takes part dozens of
    times, some multiple of the gap is better, although the columns of its rounds overlap: in 1,000 rounds with gaps of 20 by a
    tenth. Averaged over all models, its noise is within a few per cent of the least (`noise`). With a momentum of 0.7 or more
    the best band can be all rounds even where the gap is short, and the average a third above the least.
    """
    gap = min(gap, rounds)
    bands = _spread(gap) | {gap * times for times in _spread(rounds // gap)}
    root = _root(max(bands), momentum)
    return min(
        (_cut(root, band) for band in sorted(bands)), key=lambda made: final_noise(made, rounds, gap, most, momentum)
    )


def final_noise(made: Correlation, rounds: int, gap: int, most: int, momentum: float = 0.0) -> float:
    """The noise on a coordinate of the final model, where the run is a Gaussian mechanism of multiplier 1."""
    return math.sqrt(made.exposures(rounds, gap, most)[-1]) * float(made.errors(rounds, momentum)[-1])


def noise(made: Correlation, rounds: int, gap: int, most: int, momentum: float = 0.0) -> float:
    """The noise on a coordinate, root mean square over all models, where the run is a Gaussian mechanism of multiplier 1."""
    errors = made.errors(rounds, momentum)
    return math.sqrt(made.exposures(rounds, gap, most)[-1] * float(np.mean(np.square(errors))))


def _root(band: int, momentum: float) -> Floats:
    """(band,) the first coefficients of the square root of the workload's generating function."""
    halves = np.cumprod([1.0, *((2 * j - 1) / (2 * j) for j in range(1, band))])  # of (1 - x)^(-1/2)
    return np.convolve(halves, halves * momentum ** np.arange(band))[:band]


def _cut(root: Floats, band: int) -> Correlation:
    column = root[:band]
    return Correlation(tuple((column / np.linalg.norm(column)).tolist()))


def _spread(most: int) -> set[int]:
    """The numbers up to nine, and then up to `most`, each a quarter larger than the previous."""
    large = (round(1.25**power) for power in range(int(math.log(most, 1.25)) + 1))
    return {*range(1, min(9, most) + 1), *large, most}


def _inverse(column: Sequence[float], rounds: int) -> Floats:
    """(rounds,) the coefficients of one over a polynomial: the first ones by `_filtered`, and in long runs the others by
    Newton's steps g <- g (2 - c g), each of which doubles their number.
    """
    from scipy.signal import fftconvolve

    c, found = np.asarray(column), _filtered(column, min(rounds, _FILTERED))
    while (known := len(found)) < rounds:
        size = min(2 * known, rounds)
        product = fftconvolve(c[:size], found)[:size]
        rest = np.zeros(size)
        rest[: len(product)] = -product
        rest[0] += 2.0
        found = fftconvolve(found, rest)[:size]
    return found


def _filtered(polynomial: Sequence[float], rounds: int) -> Floats:
    """(rounds,) the coefficients of one over a polynomial, in rounds times band operations."""
    from scipy.signal import lfilter

    impulse = np.zeros(rounds)
    impulse[:1] = 1.0
    found: Floats = lfilter([1.0], polynomial, impulse)
    return found


class CorrelatedRows:
    """Rows of the noise C^-1 Z, one for each round, where Z_t is the stream of round t from its beginning.

    With y_t the noise of round t, C (C^-1 Z) = Z gives a row from the band - 1 rows before it:

        y_t = (Z_t - sum_(j = 1 ... band - 1) c_j y_(t - j)) / c_0.

    So a round takes the memory and time of `band` rows. A process that resumes a run lacks the earlier rows and makes them
    again from the first one, of the same streams: a row is the same at every call. The rows are as secret as the keys of their
    streams.

    All rows have the same shapes and are drawn in the order of names, so each coordinate's noise cancels its own earlier noise.
    """

    def __init__(self, correlation: Correlation, stream_of: Callable[[int], Stream]) -> None:
        self._column = correlation.column
        self._stream_of = stream_of
        self._past: deque[dict[str, Floats]] = deque(maxlen=correlation.band - 1)  # the latest first
        self._next = 0

    def noised(self, total: Named, std: float, round_: int) -> dict[str, Tensor]:
        """A round's total plus its noise row, ready for release. std: the standard deviation of Z on each coordinate."""
        row = self.row(round_, {name: tuple(tensor.shape) for name, tensor in total.items()})
        stream = self._stream_of(round_)

        def noised(name: str, tensor: Tensor) -> Tensor:
            return perturbed(tensor, std, stream, lambda *_: row[name].copy())

        return {name: noised(name, tensor) for name, tensor in sorted(total.items())}

    def row(self, round_: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Floats]:
        """y of this round; the rows of skipped rounds are made on the way."""
        if round_ < self._next:
            self._past.clear()
            self._next = 0
        made = dict[str, Floats]()
        for number in range(self._next, round_ + 1):
            stream, made = self._stream_of(number), {}
            for name, shape in sorted(shapes.items()):
                row = stream.normal(shape)
                for weight, earlier in zip(self._column[1:], self._past, strict=False):  # fewer rows at the beginning
                    row -= weight * earlier[name]
                row /= self._column[0]
                made[name] = row
            self._past.appendleft(made)
        self._next = round_ + 1
        return made
